from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import ConfigError, MissingState
from ckpt.layout.spec import PARAM
from ckpt.runtime.extras import collect, owned_items
from ckpt.runtime.rng import capture_rng, restore_rng
from ckpt.store.memory import MemoryStore
from tests.property.fake import FakeEngine, Model, comms, cut, each, engines, load_all, numbered, run_ranks, save_all


@pytest.fixture(autouse=True)
def own_generators():
    before = capture_rng()
    yield
    restore_rng(before)


def job(world: int, *, filled: bool = True) -> list[FakeEngine]:
    model = Model({("w", PARAM): numbered("float32", (4,), 1)})
    return engines(model, {("w", PARAM): cut("replicated", (4,), world)}, world, filled=filled)


class Loader:
    """A user's stateful object."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def save(store: MemoryStore, *extras: dict[str, Any]) -> None:
    made = job(len(extras))
    each(run_ranks(comms(len(extras)), lambda r: ckpt.save(made[r], store, extra=extras[r])))


def load(store: MemoryStore, *extras: dict[str, Any], **options: Any) -> list[Any]:
    made = job(len(extras), filled=False)
    return each(run_ranks(comms(len(extras)), lambda r: ckpt.load(made[r], store, extra=extras[r], **options)))


@pytest.mark.parametrize(
    "extras", [({"a": 1, "b": 2}, {"b": 2}), ({"b": 2}, {"a": 1, "b": 2}), ({"z": 0}, {"a": 1}, {"a": 1, "z": 0})]
)
def test_what_only_some_ranks_pass_shifts_no_other_object_to_a_writer_that_is_not(extras):
    """Each rank counted turns over its own objects only: an object that both held was written by neither."""
    store = MemoryStore()
    save(store, *extras)
    everything = {k: v for one in extras for k, v in one.items()}
    for report in load(store, *[{}] * len(extras)):
        assert report.extra == everything


def test_every_object_has_exactly_one_owner_among_its_holders():
    sets = [{"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 9}, {"c": 3}, {}]
    items = [collect({"engine": [1]}, one) for one in sets]
    everyone = [{f"{i.kind}:{i.name}": i.identity for i in own} for own in items]
    owners: dict[tuple[str, str], list[int]] = {}
    for rank, own in enumerate(items):
        for item, ranks in owned_items(own, everyone, rank):
            assert rank in ranks
            owners.setdefault((item.name, item.identity), []).append(rank)
    assert all(len(ranks) == 1 for ranks in owners.values())
    assert set(owners) == {(i.name, i.identity) for own in items for i in own}


def test_per_rank_state_comes_back_to_its_rank_and_is_never_merged():
    store = MemoryStore()
    save(store, *({"loader": Loader({"seen": r, "order": np.arange(r)}), "name": "run"} for r in range(3)))
    loaders = [Loader() for _ in range(3)]
    reports = load(store, *({"loader": one} for one in loaders))
    assert [one.state["seen"] for one in loaders] == [0, 1, 2]
    assert [len(one.state["order"]) for one in loaders] == [0, 1, 2]
    assert all(report.extra == {"name": "run"} and not report.notes for report in reports)


def test_another_number_of_ranks_is_noted_for_state_that_differed():
    store = MemoryStore()
    save(store, *({"loader": Loader(r), "same": Loader("s")} for r in range(2)))
    loaders = [Loader() for _ in range(3)]
    reports = load(store, *({"loader": one, "same": Loader()} for one in loaders))
    assert [one.state for one in loaders] == [0, 1, 0]
    for report in reports:
        assert len([n for n in report.notes if "extra 'loader' differed" in n]) == 1
        assert not any("'same'" in n for n in report.notes)


def test_new_ranks_get_generators_of_their_own():
    """All threads here share the process's generators, so what is asked is what each rank is told."""
    store = MemoryStore()
    save(store, {}, {})
    reports = load(store, {}, {}, {}, {})
    new = [[n for n in r.notes if "seeded anew" in n] for r in reports]
    assert [len(n) for n in new] == [0, 0, 1, 1]


def test_missing_and_unexpected_extras():
    store = MemoryStore()
    save(store, {"loader": Loader(1), "value": 5})
    with pytest.raises(MissingState) as caught:
        load(store, {"other": Loader(), "value": None})
    assert (caught.value.missing, caught.value.unexpected) == (("extra 'other'",), ("extra 'loader'",))
    report = load(store, {"other": Loader()}, strict=False)[0]
    assert (report.missing, report.unexpected) == (("extra 'other'",), ("extra 'loader'",))
    assert report.extra == {"value": 5, "loader": 1}


@pytest.mark.parametrize(
    "extra", [{"": 1}, {1: 2}, {None: 1}, {"\udcff": 1}, {"a\ud800": Loader(1)}], ids=lambda e: ascii(list(e))
)
def test_a_name_that_is_none_is_refused(extra):
    with pytest.raises(ConfigError, match="extra: name"):
        save(MemoryStore(), extra)


@pytest.mark.parametrize("extra", [[("a", 1)], "loader", 5, Loader(1)], ids=lambda e: type(e).__name__)
def test_what_is_no_mapping_of_names_is_refused_and_nothing_is_touched(extra):
    store = MemoryStore()
    text = f"extra is a {type(extra).__name__}, expected a mapping of names to objects and values"
    with pytest.raises(ConfigError, match=text):
        save(store, extra)
    assert store.objects == {}
    save(store, {"a": 1})
    made = job(1, filled=False)
    with pytest.raises(ConfigError, match=text):
        ckpt.load(made[0], store, extra=extra)
    assert made[0].differences(), "nothing was placed"


def test_mappings_of_any_class_come_back_as_plain_dicts():
    store = MemoryStore()
    save(store, OrderedDict(a=OrderedDict(b=Counter("xx"))))
    (report,) = load(store, {})
    assert report.extra == {"a": {"b": {"x": 2}}}
    assert type(report.extra["a"]) is type(report.extra["a"]["b"]) is dict


def test_a_value_that_cannot_be_stored_is_named_and_nothing_is_left():
    store = MemoryStore()
    with pytest.raises(ConfigError, match=r"extra\['loader'\]\.state_dict\(\)\['f'\]\[0\]: .*function"):
        save(store, {"loader": Loader({"f": [lambda: 0]})})
    assert ckpt.steps(store) == []


def test_large_and_equal_tensors_in_objects(monkeypatch):
    monkeypatch.setattr("ckpt.runtime.extras.CHUNK_BYTES", 100)
    state = {
        "big": torch.arange(99.0),
        "same": torch.arange(99.0),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(3),
    }
    store = MemoryStore()
    save(store, {"loader": Loader(state)})
    loader = Loader()
    load(store, {"loader": loader})
    for name, value in state.items():
        assert torch.equal(loader.state[name], value)
    stored = sum(len(v) for k, v in store.objects.items() if k.endswith(".safetensors"))
    assert stored < 99 * 4 + 40_000, "equal tensors are stored once"


def test_engine_objects_reach_every_rank():
    model = Model({("w", PARAM): numbered("float32", (4,), 1)}, objects={"scaler": {"scale": 2.0**16, "good": 3}})
    store = MemoryStore()
    layout = {("w", PARAM): cut("flat", (4,), 2)}
    save_all(engines(model, layout, 2, filled=True), store)
    made = engines(model, {("w", PARAM): cut("flat", (4,), 3)}, 3, filled=False)
    load_all(made, store)
    assert [one.finished for one in made] == [{"scaler": {"scale": 2.0**16, "good": 3}}] * 3
