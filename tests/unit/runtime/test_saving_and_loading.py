"""The two calls on the fake engine: what they refuse, and what is left when they do."""

from __future__ import annotations

import logging
import os
import threading

import pytest
import torch

import ckpt
from ckpt.errors import AccessDenied, StoreUnavailable
from ckpt.layout.box import Box
from ckpt.layout.spec import PARAM
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.runtime.agree import cached_plan
from ckpt.runtime.revive import MAX_NOTES, Notes, notes_of_all
from ckpt.runtime.rng import capture_rng, restore_rng
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.property.fake import (
    FakeEngine,
    Model,
    comms,
    cut,
    engines,
    load_all,
    numbered,
    run_ranks,
    save_all,
    small_model,
    zero1,
)


@pytest.fixture(autouse=True)
def own_generators():
    before = capture_rng()
    yield
    restore_rng(before)


def job(world: int, step: int = 1, *, filled: bool = True) -> list[FakeEngine]:
    model = small_model(step)
    return engines(model, zero1(model, world), world, filled=filled, at_step=step)


def all_raise(results: list[object], kind: type[BaseException], text: str) -> None:
    for rank, result in enumerate(results):
        assert type(result) is kind, (rank, result)
        assert text in str(result)


def test_rank_0_alone_is_told_and_training_can_go_on():
    made, jobs, store = job(2), comms(2), MemoryStore()
    alone = run_ranks(jobs[:1], lambda r: ckpt.save(made[r], store, timeout=0.2))
    all_raise(alone, ckpt.RankFailure, "rank 1: did not call ckpt.save within 0.2 s")
    assert store.objects == {}
    done = run_ranks(jobs, lambda r: ckpt.save(made[r], store))
    assert [one.step for one in done] == [1, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (({"step": 1}, {"step": 2}), "ranks disagree on the step: 1 on rank(s) 0; 2 on rank(s) 1"),
        (({"overwrite": True}, {}), "ranks disagree on the options"),
        (({}, {"on_divergence": "error"}), "ranks disagree on the options"),
    ],
)
def test_ranks_that_ask_for_different_things_are_told_who_asks_for_what(options, text):
    made, store = job(2), MemoryStore()
    all_raise(run_ranks(comms(2), lambda r: ckpt.save(made[r], store, **options[r])), ckpt.ConfigError, text)
    assert store.objects == {}


def test_save_meets_load():
    made, store = job(2), MemoryStore()
    calls = (ckpt.save, ckpt.load)
    results = run_ranks(comms(2), lambda r: calls[r](made[r], store, timeout=5))
    all_raise(
        results, ckpt.ConfigError, "ranks disagree on the call: 'ckpt.save' on rank(s) 0; 'ckpt.load' on rank(s) 1"
    )


def test_two_roots_are_told_apart_by_name_or_by_content(tmp_path, monkeypatch):
    made = job(2)
    results = run_ranks(comms(2), lambda r: ckpt.save(made[r], tmp_path / str(r)))
    all_raise(results, ckpt.ConfigError, "ranks disagree on the root")
    stores = (MemoryStore(), MemoryStore())  # one name, two places: node-local disks
    monkeypatch.setattr("ckpt.runtime.attempt.VISIBLE_SECONDS", 0.1)
    results = run_ranks(comms(2), lambda r: ckpt.save(made[r], stores[r]))
    for result in results:
        assert isinstance(result, ckpt.RankFailure)
        assert "SplitRoot: rank 1 does not see" in result.failures[1]
    assert set(stores[0].objects) == {"ckpt.json"}
    assert stores[1].objects == {}


def test_a_layout_that_is_no_whole_is_refused_with_every_problem_on_every_rank():
    model = Model({("a", PARAM): numbered("float32", (4,), 1), ("b", PARAM): numbered("float32", (4,), 2)})
    layout = {("a", PARAM): [[Box((0,), (2,))], []], ("b", PARAM): [[], [Box((1,), (3,))]]}
    store = MemoryStore()
    made = engines(model, layout, 2, filled=True)
    results = run_ranks(comms(2), lambda r: ckpt.save(made[r], store))
    for result in results:
        assert isinstance(result, ckpt.LayoutError)
        assert len(result.problems) == 2
    assert store.objects == {}


@pytest.mark.parametrize(
    "bad",
    [
        {"step": -1},
        {"step": True},
        {"step": 1.5},
        {"on_divergence": "ignore"},
        {"root": ""},
        {"root": "s3://x"},
        {"root": b"x"},
        {"root": 5},
        {"root": "file:/x"},
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_touched(bad):
    store = MemoryStore()
    with pytest.raises(ckpt.ConfigError):
        save_all(job(2), **{"root": store, **bad})
    assert store.objects == {}


def test_an_engine_of_an_unknown_kind_is_refused():
    with pytest.raises(ckpt.ConfigError, match=r"no adapter for an engine of type builtins\.int"):
        ckpt.save(5, MemoryStore())


def test_an_adapter_that_lacks_methods_is_told_which() -> None:
    class Half:
        kind = "half"

        def step(self) -> int:
            return 0

        describe = describe_for_load = compare = refresh = step

    with pytest.raises(ckpt.ConfigError, match="an adapter of type Half lacks finish, module"):
        ckpt.save(Half(), "nowhere")


def test_live_memory_of_another_shape_than_declared_is_refused():
    """A placeholder of size 0 stood for a partitioned tensor and was saved as it was."""
    made = job(1)
    shard = made[0].shards[0]
    object.__setattr__(shard, "tensor", torch.empty(0, dtype=torch.bfloat16))
    with pytest.raises(ckpt.LayoutError, match=r"'emb' \(param\).*live memory has shape \[0\], expected \[6, 4\]"):
        ckpt.save(made[0], MemoryStore())


def test_a_step_is_not_replaced_unless_asked():
    store = MemoryStore()
    save_all(job(2), store)
    before = dict(store.objects)
    with pytest.raises(ckpt.CheckpointExists, match="step 1 is committed already"):
        save_all(job(2), store)
    assert store.objects == before
    save_all(job(2, 3), store, step=1, overwrite=True)
    target = job(2, 3, filled=False)
    load_all(target, store, step=1)
    assert [line for one in target for line in one.differences()] == []


def test_one_rank_that_cannot_write_fails_all_and_leaves_the_earlier_steps(monkeypatch, tmp_path):
    save_all(job(2), tmp_path)
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    real = LocalStore.writer

    def writer(self: LocalStore, key: str, **how: object) -> object:
        if "rank00001" in key:
            raise OSError(28, "No space left on device")
        return real(self, key, **how)

    made = job(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "writer", writer)
        results = run_ranks(comms(2), lambda r: ckpt.save(made[r], tmp_path))
    for result in results:
        assert isinstance(result, ckpt.RankFailure)
        assert result.failures == {1: "OSError: [Errno 28] No space left on device"}
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == files, "what was written is removed"
    assert ckpt.steps(tmp_path) == [1]
    save_all(made, tmp_path)
    assert ckpt.latest(tmp_path) == 2


def test_a_plan_is_reused_only_if_every_rank_has_it(monkeypatch):
    """A hit decided locally leaves the other ranks alone in an exchange."""
    store = MemoryStore()
    save_all(job(2, 1), store)
    calls: list[int] = []
    real = __import__("ckpt.runtime.agree", fromlist=["x"]).ShardGraph.build
    monkeypatch.setattr("ckpt.runtime.agree.ShardGraph.build", lambda layouts: calls.append(1) or real(layouts))
    save_all(job(2, 2), store)
    assert calls == [], "same layout, same plan"
    from tests.property.fake import _local

    monkeypatch.setattr("ckpt.runtime.save_job.cached_plan", lambda: None if _local.comm.rank else cached_plan())
    save_all(job(2, 3), store)
    assert len(calls) == 2
    monkeypatch.undo()
    model = small_model(4)
    layout = {**zero1(model, 2), ("emb", PARAM): cut("rows", (6, 4), 2)}
    save_all(engines(model, layout, 2, filled=True, at_step=4), store)
    for step in (1, 2, 3, 4):
        target = job(3, step, filled=False)
        load_all(target, store, step=step)
        assert [line for one in target for line in one.differences()] == []


def test_sequences_of_saves_and_loads_in_one_process():
    """Save, load, save and load again: each engine state is what the last load said, files are those of that state."""
    store = MemoryStore()
    made = job(2, 1)
    save_all(made, store, step=1)
    load_all(made, store)
    load_all(made, store)
    report = save_all(made, store, step=2)[0]
    assert (report.bytes_written, report.bytes_reused) == (0, report.bytes_unique)
    load_all(made, store, step=2)
    assert [line for one in made for line in one.differences()] == []


def test_latest_and_steps_of_nothing(tmp_path):
    assert ckpt.latest(tmp_path / "no") is None
    assert ckpt.steps(tmp_path / "no") == []
    with pytest.raises(ckpt.NoSuchCheckpoint):
        ckpt.load(job(1)[0], tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_missing_and_unexpected_tensors():
    store = MemoryStore()
    saved = Model({("a", PARAM): numbered("float32", (4,), 1), ("b", PARAM): numbered("float32", (4,), 2)})
    save_all(engines(saved, {k: cut("flat", (4,), 2) for k in saved.tensors}, 2, filled=True), store)
    wanted = Model({("a", PARAM): numbered("float32", (4,), 1), ("c", PARAM): numbered("float32", (4,), 3)})
    target = engines(wanted, {k: cut("flat", (4,), 3) for k in wanted.tensors}, 3, filled=False)
    with pytest.raises(ckpt.MissingState) as caught:
        load_all(target, store)
    assert [("'c'" in caught.value.missing[0]), len(caught.value.missing)] == [True, 1]
    assert [("'b'" in caught.value.unexpected[0]), len(caught.value.unexpected)] == [True, 1]
    assert len([line for one in target for line in one.differences()]) == 4, (
        "nothing was placed (two ranks hold two each)"
    )
    for report in load_all(target, store, strict=False):
        assert (len(report.missing), len(report.unexpected)) == (1, 1)
    assert all("'c'" in line for one in target for line in one.differences())


def test_a_dtype_is_converted_only_when_asked_0d_too():
    store = MemoryStore()
    saved = Model({("a", PARAM): torch.tensor([1.001, 2.0]), ("t", PARAM): torch.tensor(0.1)})
    save_all(
        engines(saved, {k: cut("replicated", t.shape, 1) for k, t in saved.tensors.items()}, 1, filled=True), store
    )
    low = Model({k: t.bfloat16() for k, t in saved.tensors.items()})
    layout = {k: cut("replicated", t.shape, 2) for k, t in low.tensors.items()}
    target = engines(low, layout, 2, filled=False)
    with pytest.raises(ckpt.MissingState) as caught:
        load_all(target, store)
    assert len(caught.value.dtypes) == 2
    with pytest.raises(ckpt.MissingState):
        load_all(target, store, strict=False)
    for report in load_all(target, store, cast=True):
        assert len(report.casts) == 2
    assert [line for one in target for line in one.differences()] == []


@pytest.mark.parametrize(("value", "fits"), [(7.0, True), (7.5, False)])
def test_a_counter_changes_its_dtype_only_without_loss(value, fits):
    store = MemoryStore()
    saved = Model({("w", "step"): torch.tensor(value)})
    save_all(engines(saved, {("w", "step"): cut("one", (), 1)}, 1, filled=True), store)
    target = engines(
        Model({("w", "step"): torch.tensor(7, dtype=torch.int64)}), {("w", "step"): cut("one", (), 1)}, 1, filled=False
    )
    if fits:
        load_all(target, store)
        assert target[0].differences() == []
    else:
        with pytest.raises(ckpt.CkptError, match=r"7\.5 is not exact"):
            load_all(target, store)


def test_an_engine_that_is_half_loaded_refuses_to_run_and_to_be_saved_until_a_load_succeeds(monkeypatch):
    store = MemoryStore()
    save_all(job(1), store)
    (target,) = job(1, filled=False)
    target.the_module = torch.nn.Linear(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "refresh", lambda self: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            ckpt.load(target, store)
    with pytest.raises(ckpt.ConfigError, match="failed midway"):
        target.the_module(torch.ones(1, 1))
    with pytest.raises(ckpt.ConfigError, match="failed midway"):
        ckpt.save(target, store, step=2)
    ckpt.load(target, store)
    target.the_module(torch.ones(1, 1))
    ckpt.save(target, store, step=2)


def test_an_error_before_the_first_byte_leaves_the_engine_usable():
    store = MemoryStore()
    save_all(job(1), store)
    for key in [k for k in store.objects if k.endswith(".safetensors")]:
        store.objects[key] = store.objects[key][:-1]
    (target,) = job(1)
    target.the_module = torch.nn.Linear(1, 1)
    with pytest.raises(ckpt.IntegrityError):
        ckpt.load(target, store)
    target.the_module(torch.ones(1, 1))
    assert target.differences() == []


def test_a_load_reads_only_what_the_rank_needs():
    """At the same layout each rank reads its own bytes; every rank reading everything once needed 1 TB."""
    shape = (64, 64)
    model = Model({("w", "exp_avg"): numbered("float32", shape, 1)})
    store = MemoryStore()
    save_all(engines(model, {("w", "exp_avg"): cut("flat", shape, 4)}, 4, filled=True), store)
    target = engines(model, {("w", "exp_avg"): cut("flat", shape, 4)}, 4, filled=False)
    for engine, report in zip(target, load_all(target, store), strict=True):
        assert report.bytes_read == sum(s.tensor.numel() * 4 for s in engine.shards)
    assert sum(s.tensor.numel() for e in target for s in e.shards) == 64 * 64


def test_a_save_moves_no_generator_and_leaves_memory_alone(tmp_path):
    import random

    made = job(1)
    before = (random.getstate(), torch.get_rng_state())
    ckpt.save(made[0], tmp_path)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert made[0].differences() == []


@pytest.mark.parametrize(
    ("error", "damage"),
    [
        (ckpt.StoreError("Is a directory", "k"), True),
        (AccessDenied("not yours", "k"), False),
        (StoreUnavailable("503", "k"), False),
    ],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("bad_ranks", [{0, 1}, {1}], ids=["all ranks", "one rank"])
def test_fallback_passes_over_what_the_store_will_never_give_and_nothing_else(monkeypatch, error, damage, bad_ranks):
    """A job that takes an old checkpoint because a server was busy has lost hours in silence."""
    store = MemoryStore()
    for step in (1, 2):
        save_all(job(2, step), store)
    real, rank_of = store.read_into, {}

    def read_into(key: str, *rest: object) -> int:
        if key.startswith("steps/2/") and rank_of[threading.get_ident()] in bad_ranks:
            raise error
        return real(key, *rest)

    monkeypatch.setattr(store, "read_into", read_into)
    target = job(2, 1, filled=False)

    def load(rank: int) -> ckpt.LoadReport:
        rank_of[threading.get_ident()] = rank
        return ckpt.load(target[rank], store, fallback=True)

    results = run_ranks(comms(2), load)
    if damage:
        assert [r.step for r in results] == [1, 1]
        assert all("step 2: " in r.skipped[0] and "Is a directory" in r.skipped[0] for r in results)
        assert [line for one in target for line in one.differences()] == []
    else:
        for result in results:
            assert type(result) is (type(error) if bad_ranks == {0, 1} else ckpt.RankFailure)


def test_ranks_may_name_one_folder_by_different_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    made, roots = job(2), (tmp_path / "real/run", f"file://{tmp_path}/link/run")
    reports = run_ranks(comms(2), lambda r: ckpt.save(made[r], roots[r]))
    assert [r.root for r in reports] == [str(tmp_path / "real/run")] * 2
    target = job(2, filled=False)
    assert [r.step for r in run_ranks(comms(2), lambda r: ckpt.load(target[r], roots[1 - r]))] == [1, 1]


def test_a_root_that_is_not_utf8_saves_and_loads(tmp_path):
    root = os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")
    assert save_all(job(2), root)[0].root == f"{tmp_path}/r\\udcff"
    target = job(2, filled=False)
    load_all(target, root)
    assert [line for one in target for line in one.differences()] == []
    with pytest.raises(ckpt.CheckpointExists, match="udcff"):
        save_all(job(2), root)


def test_a_trouble_with_the_parent_only_costs_bytes(caplog):
    store = MemoryStore()
    save_all(job(2, 1), store)
    part = next(k for k in store.objects if "/index/part-00000" in k)
    store.objects[part] = b"x"
    with caplog.at_level(logging.WARNING, "ckpt"):
        report = save_all(job(2, 2), store)[0]
    assert report.bytes_written == report.bytes_unique
    assert "step 1 cannot be built upon" in caplog.text
    target = job(2, 2, filled=False)
    load_all(target, store)
    assert [line for one in target for line in one.differences()] == []


def test_a_pack_of_the_parent_that_is_gone_or_short_is_not_referenced():
    store = MemoryStore()
    save_all(job(1, 1), store)
    pack = next(k for k in store.objects if k.endswith(".safetensors"))
    for spoil in (store.objects[pack][:-1], None):
        if spoil is None:
            del store.objects[pack]
        else:
            store.objects[pack] = spoil
        save_all(job(1, 1), store, step=2, overwrite=True)
        assert all(p.key.startswith("steps/2/") for part in Repository(store).read_index(2).parts for p in part.packs)


def test_the_default_root_is_the_environments(monkeypatch, tmp_path):
    monkeypatch.setenv("CKPT_ROOT", str(tmp_path / "env"))
    report = ckpt.save(job(1)[0])
    assert report.root == str(tmp_path / "env")
    assert ckpt.latest() == 1
    assert os.listdir(tmp_path) == ["env"]


def _spoil(store: MemoryStore, step: int) -> None:
    """Change the last byte of every pack of a step."""
    for key in [k for k in store.objects if k.startswith(f"steps/{step}/") and "/packs/" in k]:
        store.objects[key] = store.objects[key][:-1] + bytes([store.objects[key][-1] ^ 1])


def test_replacing_a_damaged_step_repairs_it_although_nothing_has_changed():
    """The new attempt took its chunks from the very step that it was to replace."""
    store, made = MemoryStore(), job(2)
    save_all(made, store)
    _spoil(store, 1)
    assert verify(Repository(store)).damaged
    report = save_all(made, store, overwrite=True)[0]
    assert report.bytes_reused == 0
    assert not verify(Repository(store), 1).damaged
    load_all(job(2, filled=False), store)


def test_rotten_bytes_of_the_step_before_are_written_again_and_not_referenced(monkeypatch, caplog):
    """A new process met a damaged parent, referred to its chunks by digest, and reported a durable step."""
    store, made = MemoryStore(), job(2)
    save_all(made, store)
    _spoil(store, 1)
    monkeypatch.setattr("ckpt.runtime.writing._proved", {})  # what a new process knows
    report = save_all(made, store, step=2)[0]
    assert report.bytes_reused > 0, "only what is rotten is written again"
    assert "is damaged at" in caplog.text
    assert not verify(Repository(store), 2).damaged


def test_what_this_process_wrote_is_referenced_without_a_read():
    class Counting(MemoryStore):
        reads = 0

        def read_into(self, key, start, buffer):
            self.reads += 1
            return super().read_into(key, start, buffer)

    store, made = Counting(), job(1)
    save_all(made, store)
    report = save_all(made, store, step=2)[0]
    assert (report.bytes_written, store.reads) == (0, 0)
    assert report.bytes_reused > 0


def test_what_any_ranks_engine_notes_is_logged_once_and_reported_everywhere(caplog):
    store = MemoryStore()
    model = small_model()
    layout = zero1(model, 3)
    save_all(engines(model, layout, 3, filled=True), store)
    made = engines(model, layout, 3, filled=False)
    for rank, one in enumerate(made):
        one.notes = ["of all"] + [f"of rank {rank}"] * (rank > 0)
    with caplog.at_level(logging.WARNING, "ckpt"):
        reports = load_all(made, store)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [f"load of step 1: {note}" for note in ("of all", "of rank 1", "of rank 2")]
    assert [set(report.notes) for report in reports] == [{"of all", "of rank 1", "of rank 2"}] * 3


def test_of_many_notes_every_rank_has_its_own_and_some_of_the_others():
    told = [Notes.of([f"{rank}: {i}" for i in range(MAX_NOTES + rank)] * 2) for rank in range(2)]
    assert [one.more for one in told] == [False, True]
    found = notes_of_all(told)
    assert found[:-1] == [f"0: {i}" for i in range(MAX_NOTES)]
    assert "each rank's report has all of its own" in found[-1]
    assert notes_of_all(told[:1]) == told[0].shown
