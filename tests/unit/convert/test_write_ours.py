"""A checkpoint as a step of our own: what it holds, what it costs, where it may be written, what a second run does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ckpt.convert.opened import Loose
from ckpt.convert.options import WEIGHTS, WriteOptions
from ckpt.convert.ours.read import open_ours
from ckpt.convert.ours.tasks import tasks_of
from ckpt.errors import CheckpointExists, CkptError, ConfigError, DigestMismatch, MissingState, StoreFull
from ckpt.format.manifest import DERIVED
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, MASTER, PARAM, RankLayout, Shard, TensorSpec
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.runtime.rng import capture_rng
from ckpt.store.forward import Forward, ForwardWriter
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.harness.conversions import (
    LaidOut,
    again,
    convert,
    described,
    differences,
    held_by,
    one_file,
    raw,
    specs_of,
    values_of,
    whole,
    written,
)
from tests.harness.descriptions import NET
from tests.harness.descriptions import described as job
from tests.harness.steps import write_step
from tests.property.fake import each, engines, load_all, save_all, small_model, zero1


@pytest.fixture(scope="module")
def net():
    """(values, a step of ours of twelve ranks, a target of five)."""
    one, other = described(job(NET, zero=1, dp=2, tp=2, pp=3)), described(job(NET, zero=3, dp=5))
    specs = specs_of(one.layouts)
    derived = {fqn for layout in one.layouts for fqn in layout.derived}
    values = values_of(specs, derived)
    return values, convert(one_file(specs, values, world=12, derived=derived), one), other


@pytest.fixture
def small_bands(monkeypatch):
    """Many packs, however little there is."""
    monkeypatch.setitem(tasks_of.__kwdefaults__, "band_bytes", 4 << 10)


class Full(Forward):
    """A disk with room for so many bytes of packs."""

    def __init__(self, room: int) -> None:
        super().__init__(MemoryStore())
        self.room = room

    def writer(self, key, *, head=0, size=0, blocks=None):
        return _Filling(super().writer(key, head=head, size=size, blocks=blocks), self)


class _Filling(ForwardWriter):
    def __init__(self, writer, store) -> None:
        super().__init__(writer)
        self.store = store

    def write(self, data) -> None:
        self.store.room -= len(memoryview(data).cast("B"))
        if self.store.room < 0:
            raise StoreFull("write: no space left")
        super().write(data)


# ---------------------------------------------------------------------------------------------------------- what it is


def test_it_is_what_the_target_job_would_have_saved(net):
    values, source, target = net
    store = MemoryStore()
    before = dict(source.objects)
    done = written(again(source), target, store)
    assert differences(held_by(store), values) == []
    assert verify(Repository(store)).findings == []
    assert source.objects == before
    commit = Repository(store).read_commit(7)
    assert (commit.world, commit.totals["bytes_written"]) == (5, commit.totals["bytes_unique"])
    assert open_ours(store, "dst").degrees == {"dp": 5, "tp": 1, "pp": 1, "ep": 1, "zero": 3}
    assert done.bytes_written == sum(map(len, store.objects.values())) - sum(
        len(store.objects[key]) for key in store.objects if key.endswith(("attempt.json", "ckpt.json"))
    )
    assert sorted(done.files) == sorted(store.objects)
    assert (done.lost, done.made, done.bytes_present) == ((), (), 0)


def test_each_rank_owns_what_it_alone_holds_and_it_lies_in_one_piece(net):
    _, source, target = net
    index = Repository(convert(again(source), target)).read_index(7)
    for layout, part in zip(target.layouts, index.parts, strict=True):
        assert layout.rank == part.rank
        held = {(shard.spec.key, shard.box) for shard in layout.shards}
        own = [c for c in part.chunks if c.pack != DERIVED and len(index.specs[c.spec].shape)]
        alone = [c for c in own if (index.specs[c.spec].key, c.box) in held and index.specs[c.spec].role != BUFFER]
        assert len(alone) > 20
        order = [(c.pack, c.start) for c in alone]
        assert order == sorted(order)
        assert sum(c.nbytes for c in alone) == alone[-1].start + alone[-1].nbytes - alone[0].start
        assert len(part.packs) == 1


def test_a_real_load_finds_everything():
    model = small_model(3)
    store, there = MemoryStore(), MemoryStore()
    save_all(engines(model, zero1(model, 3), 3, filled=True, at_step=3), store, extra={"seen": 12})
    opened = again(store)
    layouts = [
        RankLayout(r, tuple(Shard(model.spec(k), box) for k, ranks in zero1(model, 2).items() for box in ranks[r]),
                   tuple(model.aliases.items()), tuple(sorted(model.derived)))
        for r in range(2)
    ]  # fmt: skip
    done = written(opened, LaidOut(layouts), there)
    made = engines(model, zero1(model, 2), 2, filled=False)
    reports = load_all(made, there)
    assert [line for engine in made for line in engine.differences()] == []
    assert made[0].finished == {"scheduler": {"last": 3, "lr": [0.1]}}
    assert [report.extra for report in reports] == [{"seen": 12}] * 2
    assert done.lost == ("generators of rank(s) 2: the target has no such ranks",)
    other = engines(model, zero1(model, 5), 5, filled=False)  # and in any other layout, as always
    each(load_all(other, there))
    assert [line for engine in other for line in engine.differences()] == []


@pytest.mark.parametrize("world", [1, 3])
def test_a_parameter_that_is_not_the_cast_of_its_master_stays_as_it_is(world):
    specs = [TensorSpec("w", MASTER, "float32", (60, 400)), TensorSpec("w", PARAM, "bfloat16", (60, 400))]
    values = values_of(specs, {"w"})
    values["w", PARAM][17] ^= 1
    target = LaidOut([replace(layout, derived=("w",)) for layout in whole(specs, world).layouts])
    first = convert(one_file(specs, values, derived={"w"}), target)
    second = convert(again(first), whole(specs))  # nobody derives it any more
    for store in (first, second, convert(again(first), target)):
        assert differences(held_by(store), values) == []
    chunks = [c for p in Repository(first).read_index(7).parts for c in p.chunks if c.spec == 1]
    assert {c.pack == DERIVED for c in chunks} == ({False} if world == 1 else {True, False})


def test_a_master_alone_gives_the_parameter_without_storing_it():
    specs = [TensorSpec("w", MASTER, "float32", (6, 4)), TensorSpec("w", PARAM, "bfloat16", (6, 4))]
    values = values_of(specs, {"w"})
    opened = one_file(specs[:1], values, derived={"w"})
    target = LaidOut([replace(layout, derived=("w",)) for layout in whole(specs).layouts])
    store = convert(opened, target)
    assert differences(held_by(store), values) == []
    assert Repository(store).read_commit(7).totals["bytes_written"] == specs[0].nbytes


def test_weights_alone_in_another_dtype(net):
    values, source, _ = net
    opened = replace(again(source), objects=(Loose("optimizer", "engine", tuple(range(12)), {}),))
    params = [s for s in opened.specs if s.role in (PARAM, BUFFER)]
    wanted = [replace(s, dtype="float16") if s.role == PARAM else s for s in params]
    store = MemoryStore()
    done = written(opened, whole(wanted), store, WriteOptions(roles=WEIGHTS, dtype="float16"))
    held = held_by(store)
    assert held.keys() == {s.key for s in params}
    for spec in params:
        if spec.role == PARAM:
            master = torch.from_numpy(values[spec.fqn, MASTER].copy()).view(torch.float32)  # rounded once, not twice
            assert held[spec.key].tobytes() == raw(master.to(torch.float16)).tobytes()
    assert "engine state 'optimizer'" in done.lost
    assert any("exp_avg of" in line for line in done.lost)
    assert any(line.endswith("in float16: rounded from its master in float32") for line in done.made)
    with pytest.raises(MissingState, match="bfloat16"):
        convert(again(source), whole(wanted))


def test_tensors_without_elements_and_without_dimensions():
    specs = [TensorSpec("none", BUFFER, "float32", (0, 3)), TensorSpec("one", BUFFER, "int64", ())]
    values = values_of(specs)
    assert differences(held_by(convert(one_file(specs, values), whole(specs, 3))), values) == []
    target = LaidOut([RankLayout(0), *whole(specs, 2).layouts[1:]])  # a rank that holds nothing
    assert differences(held_by(convert(one_file(specs, values), target)), values) == []


def test_ties_are_kept():
    spec = TensorSpec("emb", PARAM, "float32", (3, 2))
    opened = replace(one_file([spec], values_of([spec])), aliases={"head": "emb", "gone": "lost"})
    store = convert(opened, whole([spec]))
    assert Repository(store).read_index(7).root.aliases == {"head": "emb"}


def test_copies_of_ranks_that_differ_stay_with_as_many_ranks_and_are_told_to_be_lost_with_others():
    model = small_model(1)
    jobs = engines(model, zero1(model, 2), 2, filled=True)
    for shard in jobs[1].shards:
        if shard.spec.role == BUFFER and shard.spec.nbytes:
            shard.tensor.fill_(5.0)
    store = MemoryStore()
    save_all(jobs, store)
    specs = again(store).specs
    same = MemoryStore()
    done = written(again(store), whole(specs, 2), same)
    own = [c for p in Repository(same).read_index(1).parts for c in p.chunks if c.ranks]
    assert [c.ranks for c in own] == [(1,)]
    assert done.lost == ()
    assert verify(Repository(same)).findings == []
    made = engines(model, zero1(model, 2), 2, filled=False)
    load_all(made, same)
    assert [bool((s.tensor == 5.0).all()) for e in made for s in e.shards if s.spec.key == ("mean", BUFFER)] == [
        False,
        True,
    ]
    done = written(again(store), whole(specs, 3), MemoryStore())
    assert "'mean' (buffer): everybody's is written" in done.lost[0]


def test_encoded_chunks_are_read(net):
    store, target = MemoryStore(), MemoryStore()
    write_step(store, 3)
    opened = again(store)
    convert(opened, whole(opened.specs), target)
    assert differences(held_by(target), held_by(store)) == []


def test_generators_come_along(net):
    _, source, target = net
    objects = tuple(Loose("rng", "rng", (rank,), {**capture_rng(), "python": rank}) for rank in range(12))
    done = written(replace(again(source), objects=objects), target, store := MemoryStore())
    assert {one.ranks[0]: one.tree["python"] for one in again(store).objects} == dict(enumerate(range(5)))
    assert done.lost == ("generators of rank(s) 5 to 11: the target has no such ranks",)


# ------------------------------------------------------------------------------------------------------- dry run, bars


def test_a_dry_run_writes_nothing_and_tells_what_a_run_does(net):
    _, source, target = net
    store = MemoryStore()
    told = written(again(source), target, store, WriteOptions(dry_run=True))
    assert store.objects == {}
    done = written(again(source), target, store)
    assert (told.bytes_read, told.lost, told.made) == (done.bytes_read, done.lost, done.made)
    assert told.bytes_written == Repository(store).read_commit(7).totals["bytes_written"]
    assert 0 < told.memory == done.memory <= WriteOptions().memory
    with pytest.raises(CheckpointExists):
        written(again(source), whole(again(source).specs), store, WriteOptions(dry_run=True))


def test_progress_comes_to_its_end(net, small_bands):
    _, source, target = net
    seen: list[tuple[int, int]] = []
    store = Full(30_000)
    with pytest.raises(StoreFull):
        written(again(source), target, store)
    store.room = 1 << 30
    written(again(source), target, store, WriteOptions(progress=lambda *now: seen.append(now)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == Repository(store).read_commit(7).totals["bytes_unique"]


# --------------------------------------------------------------------------------------------------------------- places


def test_a_place_that_is_not_empty_is_refused_and_left_alone(net, tmp_path):
    _, source, target = net
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model.pt").write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match=r"x is not empty.*model\.pt"):
        written(again(source), target, LocalStore(str(tmp_path / "x")))
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["model.pt"]
    there = MemoryStore()
    write_step(there, 7)
    before = dict(there.objects)
    with pytest.raises(CheckpointExists, match="step 7 is committed already in memory"):
        written(again(source), target, there)
    assert there.objects == before
    with pytest.raises(ConfigError, match="not empty"):
        written(again(source), target, there, WriteOptions(step=8, resume=False))
    written(again(source), target, there, WriteOptions(step=8))  # beside it there is room
    assert Repository(there).steps() == [7, 8]
    assert {key: there.objects[key] for key in before} == before


def test_an_unfinished_conversion_of_something_else_is_refused(net):
    _, source, target = net
    store = Full(1000)
    with pytest.raises(StoreFull):
        written(again(source), target, store)
    store.room = 1 << 30
    with pytest.raises(ConfigError, match=r"was begun by somebody else.*ckpt gc"):
        written(again(source), whole(again(source).specs), store)
    written(again(source), target, store)


def test_the_source_is_no_target(net, tmp_path):
    _, source, target = net
    local = LocalStore(str(tmp_path / "a"))
    for key, data in source.objects.items():
        local.put(key, data)
    for place in ("a", "a/steps/inside"):
        with pytest.raises(ConfigError, match="source"):
            written(again(local), target, LocalStore(str(tmp_path / place)), WriteOptions(step=9))
    assert {info.key for info in local.walk("")} == source.objects.keys()


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_a_damaged_source_is_named_and_nothing_is_committed(net, small_bands):
    _, source, target = net
    bad = MemoryStore()
    bad.objects.update(source.objects)
    key = next(key for key in bad.objects if "/packs/rank00003" in key)
    bad.objects[key] = bad.objects[key][:-1] + bytes([bad.objects[key][-1] ^ 1])
    store = MemoryStore()
    with pytest.raises(DigestMismatch, match=key):
        written(again(bad), target, store)
    assert Repository(store).steps() == []
    assert not any("tmp" in key for key in store.objects)


def test_a_full_disk_keeps_what_is_finished_and_the_next_run_goes_on(net, small_bands):
    values, source, target = net
    store = Full(30_000)
    with pytest.raises(StoreFull):
        written(again(source), target, store)
    assert Repository(store).steps() == []
    finished = {key: data for key, data in store.inner.objects.items() if "/packs/" in key}
    assert len(finished) >= 5
    store.room = 1 << 30
    damaged, cut, *kept = sorted(finished)
    store.inner.objects[damaged] = finished[damaged][:-1] + bytes([finished[damaged][-1] ^ 1])
    store.inner.objects[cut] = finished[cut][:-1]
    done = written(again(source), target, store)
    assert differences(held_by(store), values) == []
    assert verify(Repository(store)).findings == []
    assert done.bytes_present == sum(len(finished[key]) for key in kept)
    assert {key: store.inner.objects[key] for key in finished} == finished, "the damaged ones were written again"


def test_a_conversion_that_is_complete_is_found(net):
    _, source, target = net
    store = MemoryStore()
    first = written(again(source), target, store)
    before = dict(store.objects)
    second = written(again(source), target, store)
    assert store.objects == before
    assert (second.bytes_written, second.bytes_read) == (0, 0)
    assert second.bytes_present > 0
    assert second.files == first.files


def test_layouts_that_form_no_whole_are_refused(net):
    _, source, target = net
    with pytest.raises(CkptError, match="held by no rank"):
        written(again(source), LaidOut(target.layouts[:4]), MemoryStore())
    spec = TensorSpec("more", PARAM, "float32", (2,))
    extra = replace(target.layouts[0], shards=(*target.layouts[0].shards, Shard(spec, Box.whole((2,)))))
    with pytest.raises(MissingState, match="more"):
        written(again(source), LaidOut([extra, *target.layouts[1:]]), MemoryStore())
