"""A step of our own, opened: everything that its index says, nothing that it does not."""

from __future__ import annotations

import pytest

from ckpt.convert.ours.read import is_ours, open_ours
from ckpt.errors import CkptError, DigestMismatch, NoSuchCheckpoint
from ckpt.store.memory import MemoryStore
from tests.harness.conversions import again, convert, differences, held_by, whole
from tests.harness.steps import write_step
from tests.property.fake import engines, save_all, small_model, zero1


@pytest.fixture
def store() -> MemoryStore:
    """Steps 3 and 12 of two ranks."""
    made = MemoryStore()
    for step in (3, 12):
        model = small_model(step)
        save_all(engines(model, zero1(model, 2), 2, filled=True, at_step=step), made, extra={"seen": step})
    return made


def test_the_newest_step_or_the_one_asked_for(store):
    assert (open_ours(store, "here").step, open_ours(store, "here", step=3).step) == (12, 3)
    with pytest.raises(NoSuchCheckpoint, match="3, 12"):
        open_ours(store, "here", step=4)


def test_what_it_says(store):
    opened = open_ours(store, "here", step=3)
    model = small_model(3)
    assert {spec.key for spec in opened.specs} == model.tensors.keys()
    assert (opened.format, opened.where, opened.world, opened.engine) == ("ckpt", "here", 2, "fake")
    assert (opened.derived, opened.aliases) == (("scale", "w"), {"head": "emb"})
    trees = {(one.kind, one.name): one for one in opened.objects if one.kind != "rng"}
    assert trees["engine", "scheduler"].tree == {"last": 3, "lr": [0.1]}
    assert (trees["value", "seen"].tree, trees["value", "seen"].ranks) == (3, (0, 1))
    assert sorted(one.ranks for one in opened.objects if one.kind == "rng") in ([(0,), (1,)], [(0, 1)])
    assert differences(held_by(convert(opened, whole(opened.specs))), held_by(store, 3)) == []


def test_what_is_ours(store):
    assert is_ours(store)
    assert not is_ours(MemoryStore())
    other = MemoryStore()
    other.put("global_step3/mp_rank_00_model_states.pt", b"")
    assert not is_ours(other)
    write_step(other, 3)
    assert is_ours(other)


def test_an_index_that_is_not_what_was_written_is_refused(store):
    for name in ("root.json.zst", "part-00001.json.zst", "commit.json"):
        bad = MemoryStore()
        bad.objects.update(store.objects)
        (key,) = (key for key in bad.objects if key.endswith(name) and key.startswith("steps/12"))
        bad.objects[key] = bad.objects[key][:-3] + b"xxx"
        with pytest.raises(CkptError):
            again(bad)
    key = next(key for key in store.objects if key.startswith("steps/12") and "/packs/rank00000" in key)
    store.objects[key] = store.objects[key].replace(b'"lr":[0.1]', b'"lr":[0.2]')
    with pytest.raises(DigestMismatch, match="scheduler"):
        again(store)
