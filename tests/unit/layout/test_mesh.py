from __future__ import annotations

import pytest

from ckpt.errors import LayoutError
from ckpt.layout.box import Box
from ckpt.layout.graph import ShardGraph
from ckpt.layout.mesh import UNEXPLAINED, mesh_problems, problems_of_claims, problems_of_rank
from ckpt.layout.spec import RankLayout, Shard, TensorSpec


def grid(dp: int, tp: int, pp: int = 1) -> list[dict[str, tuple[int, ...]]]:
    """Rank = (pp * dp + d) * tp + t."""
    found = []
    for rank in range(dp * tp * pp):
        t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
        found.append(
            {
                "tp": tuple((p * dp + d) * tp + i for i in range(tp)),
                "dp": tuple((p * dp + i) * tp + t for i in range(dp)),
                "pp": tuple((i * dp + d) * tp + t for i in range(pp)),
            }
        )
    return found


def layouts(groups) -> list[RankLayout]:
    return [RankLayout(r, groups=tuple(sorted(one.items()))) for r, one in enumerate(groups)]


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 2)])
def test_a_grid_is_whole(shape) -> None:
    assert mesh_problems(layouts(grid(*shape))) == []


def test_no_groups_no_claims() -> None:
    assert mesh_problems([RankLayout(0), RankLayout(1)]) == []


def test_every_kind_of_problem_is_listed_at_once() -> None:
    groups = grid(2, 2)
    groups[0]["tp"] = (0, 2)  # the others say (0, 1) and (2, 3)
    groups[3]["dp"] = (1, 9)
    del groups[2]["pp"]
    text = "\n".join(mesh_problems(layouts(groups)))
    assert "axis 'tp': rank(s) 1 name the group (0, 1), of which rank(s) 0 name another" in text
    assert "axis 'dp': the group(s) of rank(s) 3 lack their own rank or leave the world" in text
    assert "axis 'pp': rank(s) 2 name no group, the others do" in text
    assert "share both the dp and the tp group" in text


def test_groups_that_do_not_multiply_to_the_world() -> None:
    groups = [{"tp": (r,), "dp": (r,)} for r in range(2)]
    assert mesh_problems(layouts(groups)) == [
        "rank 0: its groups have dp 1 x tp 1 = 1 ranks, the world has 2 (name every axis of several ranks)"
    ]


def test_what_one_rank_can_tell_of_its_groups_alone() -> None:
    assert problems_of_rank(3, {"tp": (3,), "dp": (1, 3)}, 4) == [
        "rank 3: its groups have dp 2 x tp 1 = 2 ranks, the world has 4 (name every axis of several ranks)"
    ]
    assert problems_of_rank(0, {"tp": (0, 1), "dp": (0, 1)}, 4) == [
        "ranks 0 and 1 share both the dp and the tp group: the axes do not cross"
    ]
    assert problems_of_rank(0, {"tp": (0, 1), "dp": (0, 2)}, 4) == []


def test_a_rule_is_idle_only_if_it_is_on_every_rank() -> None:
    claims = [RankLayout(0, unused=("a", "b")), RankLayout(1, unused=("b", "c"))]
    assert problems_of_claims(claims) == ["rule 'b' fits nothing on any rank"]
    swapped = [RankLayout(r, groups=(("tp", (0, 1) if r else (1, 0)),)) for r in range(2)]
    assert problems_of_claims(swapped) == ["axis 'tp': ranks 0, 1 name their group in different orders"]


def test_groups_of_different_sizes() -> None:
    groups = [{"tp": (0, 1)}, {"tp": (0, 1)}, {"tp": (2,)}]
    assert mesh_problems(layouts(groups)) == ["axis 'tp': groups of different sizes: 1, 2"]


def test_a_group_has_one_order() -> None:
    groups = [{"tp": (0, 1)}, {"tp": (1, 0)}]
    assert mesh_problems(layouts(groups)) == ["axis 'tp': ranks 0, 1 name their group in different orders"]


def test_the_graph_lists_mesh_rules_and_shards_in_one_error() -> None:
    spec = TensorSpec("w", "param", "float32", (4,))
    ranks = [
        RankLayout(0, (Shard(spec, Box((0,), (1,))),), groups=(("tp", (0,)),), unused=("tensors: typo",)),
        RankLayout(1, (Shard(spec, Box((2,), (2,))),), groups=(("tp", (0, 1)),), unused=("tensors: typo", "names: x")),
    ]
    with pytest.raises(LayoutError) as caught:
        ShardGraph.build(ranks).check()
    text = "\n".join(caught.value.problems)
    assert "1 element(s) held by no rank" in text
    assert "axis 'tp'" in text
    assert "rule 'tensors: typo' fits nothing on any rank" in text
    assert "names: x" not in text  # it fits on rank 0


def test_axes_that_cross_twice_are_found_where_only_one_rank_says_so() -> None:
    groups = grid(2, 2, 2)
    groups[5]["pp"] = (5, 7)  # 7 is in its dp group, too; 1 and 7 say otherwise
    assert "ranks 5 and 7 share both the pp and the dp group: the axes do not cross" in mesh_problems(layouts(groups))


class Counted(tuple):
    """A group that counts how often it is gone through."""

    looks = 0

    def __iter__(self):
        type(self).looks += 1
        return super().__iter__()

    def __hash__(self):
        type(self).looks += 1
        return super().__hash__()

    def __eq__(self, other):
        type(self).looks += 1
        return super().__eq__(other)


@pytest.mark.parametrize("world", [4, 64])
def test_a_group_is_gone_through_as_often_whatever_the_number_of_its_ranks(world) -> None:
    """Else the cost of one data-parallel group of all ranks would be the world squared."""
    Counted.looks = 0
    group = Counted(range(world))
    assert mesh_problems(layouts([{"dp": group, "tp": (rank,)} for rank in range(world)])) == []
    assert 0 < Counted.looks < 20


def test_data_parallel_groups_alone_have_to_be_the_world() -> None:
    whole = [{"dp": (0, 1)}] * 2
    assert mesh_problems(layouts(whole)) == []
    half = [{"dp": (0, 1)}] * 2 + [{"dp": (2, 3)}] * 2  # slices that nobody has named would count as replicas
    hint = "(name every axis of several ranks)"
    assert mesh_problems(layouts(half)) == [f"rank 0: its groups have dp 2 = 2 ranks, the world has 4 {hint}"]
    stages = [{**one, "pp": (r % 2, r % 2 + 2)} for r, one in enumerate(half)]
    assert mesh_problems(layouts(stages)) == []
    assert mesh_problems(layouts([{"tp": (0, 1)}] * 2 + [{"tp": (2, 3)}] * 2)) == []


def test_only_ranks_with_experts_name_their_groups() -> None:
    stage = [{"pp": (r % 2, r % 2 + 2), "dp": (r // 2 * 2, r // 2 * 2 + 1)} for r in range(4)]
    groups = [one | ({"ep ep_size_2": (2, 3)} if r > 1 else {}) for r, one in enumerate(stage)]
    assert mesh_problems(layouts(groups)) == []
    groups[3]["ep ep_size_2"] = (3,)
    assert any(
        "name the group (2, 3), of which rank(s) 3 name another" in one for one in mesh_problems(layouts(groups))
    )


def test_cuts_that_nobody_explains_are_no_rule() -> None:
    claims = [RankLayout(r, unused=(UNEXPLAINED,)) for r in range(2)]
    assert problems_of_claims(claims) == [UNEXPLAINED]
    assert problems_of_claims([*claims, RankLayout(2)]) == []
