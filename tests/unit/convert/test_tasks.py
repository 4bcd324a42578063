"""Tasks: every chunk in just one pack of its owner, neighbouring ranks together, no band larger than it may be."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from ckpt.convert.ours.tasks import REACH, Cast, Content, tasks_of
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import PARAM, TensorSpec
from ckpt.plan.save_plan import build_save_plan
from tests.harness.conversions import described, whole
from tests.harness.descriptions import NET
from tests.harness.descriptions import described as job

if TYPE_CHECKING:
    from ckpt.layout.box import Box

PLAN = build_save_plan(ShardGraph.build(described(job(NET, zero=3, dp=5)).layouts))


@pytest.mark.parametrize(("ranks", "wide"), [(1, 0), (2, 0), (8, 0), (1, 2), (2, 5)])
@pytest.mark.parametrize("band_bytes", [1, 4 << 10, 1 << 30])
def test_everything_is_in_its_owners_packs_once(ranks, wide, band_bytes):
    tasks = tasks_of(PLAN, lambda _: False, ranks=ranks, wide=wide, band_bytes=band_bytes)
    ranks = max(ranks, wide)  # they own little of each tensor
    placed: dict[tuple[int, Box], int] = {}
    for task in tasks:
        owners = [pack.rank for pack in task.packs]
        assert len({rank // ranks for rank in owners}) == 1
        for one in task.contents:
            placed[one.spec, one.box] = owners[one.pack]
        keys = [-PLAN_SPECS[one.spec].itemsize for one in task.contents]
        assert keys == sorted(keys), "falling item size, so that all is aligned"
        assert task.nbytes <= max(band_bytes, -(-TOTAL // 256)) or len(task.contents) == 1
    wanted = {
        (PLAN.spec_ids[chunk.spec], chunk.box): PLAN.owners[i]
        for i, chunk in enumerate(PLAN.chunks)
        if i not in PLAN.proofs
    }
    assert placed == wanted
    packs = [pack for task in tasks for pack in task.packs]
    assert len(set(packs)) == len(packs)
    assert len({pack.key for pack in packs} | {pack.journal for pack in packs}) == 2 * len(packs)
    assert [len(t.packs) for t in tasks if band_bytes == 1 << 30] in ([], [1] * 5, [2, 2, 1], [5])


PLAN_SPECS = {number: spec for spec, number in PLAN.spec_ids.items()}
TOTAL = sum(chunk.nbytes for i, chunk in enumerate(PLAN.chunks) if i not in PLAN.proofs)


def test_a_small_checkpoint_has_tasks_for_several_workers():
    specs = [TensorSpec(f"{n}", PARAM, "float32", (1 << 20,)) for n in range(300)]
    plan = build_save_plan(ShardGraph.build(whole(specs, 4).layouts))
    sizes = [task.nbytes for task in tasks_of(plan, lambda _: False)]
    assert sum(sizes) == 300 * (4 << 20)
    assert len(sizes) == 19
    assert max(sizes) == 64 << 20


def test_as_many_ranks_are_put_together_as_own_a_stretch_of_a_tensor():
    specs = [TensorSpec("large", PARAM, "float32", (1 << 30,))]
    plan = build_save_plan(ShardGraph.build(whole(specs, 20).layouts))
    assert {chunk.nbytes for chunk in plan.chunks} == {4 << 20}
    assert {len(task.packs) for task in tasks_of(plan, lambda _: False, ranks=2, wide=64)} == {REACH // (4 << 20)}
    assert {len(task.packs) for task in tasks_of(plan, lambda _: False, ranks=2, wide=3)} == {3, 2}


def test_few_ranks_have_as_many_tasks_whether_many_packs_may_be_open_or_not():
    specs = [TensorSpec(f"{n}", PARAM, "float32", (1 << 18,)) for n in range(300)]
    plan = build_save_plan(ShardGraph.build(whole(specs, 4).layouts))
    assert tasks_of(plan, lambda _: False, wide=64) == tasks_of(plan, lambda _: False)


def test_casts_go_with_their_masters():
    tasks = tasks_of(PLAN, lambda chunk: chunk.spec.fqn == "embed.weight")
    casts = [cast for task in tasks for one in task.contents for cast in one.casts]
    assert len(casts) == len(PLAN.proofs)
    wanted = [one for task in tasks for _, one in task.wanted()]
    compared = [one for one in wanted if isinstance(one, Cast)]
    assert {PLAN_SPECS[one.spec].fqn for one in compared} == {"embed.weight"}
    for before, one in itertools.pairwise(wanted):
        if isinstance(one, Cast):
            assert isinstance(before, Content)
            assert before.box.contains(one.box)


def test_a_part_of_a_task_has_only_its_packs():
    (task,) = tasks_of(PLAN, lambda _: False)
    part = task.only([1, 3])
    assert [pack.rank for pack in part.packs] == [1, 3]
    assert [one.pack for one in part.contents] == [
        {1: 0, 3: 1}[one.pack] for one in task.contents if one.pack in (1, 3)
    ]
