from __future__ import annotations

from ckpt.layout.box import Box
from ckpt.layout.graph import Cell
from ckpt.layout.spec import MASTER, PARAM, TensorSpec
from ckpt.plan.local_plan import RankView, plan_of_rank

W = TensorSpec("w", PARAM, "bfloat16", (1000, 64))
W_MASTER = TensorSpec("w", MASTER, "float32", (1000, 64))
BOTH, ALL = (0, 1), (0, 1, 2, 3)


def rows(spec: TensorSpec, start: int, stop: int, *ranks: int) -> Cell:
    return Cell(spec, Box((start, 0), (stop - start, 64)), ranks)


def view(rank: int, *cells: Cell, derived=("w",), foreign=None) -> RankView:
    by_spec: dict[TensorSpec, list[Cell]] = {}
    for cell in cells:
        by_spec.setdefault(cell.spec, []).append(cell)
    return RankView(rank, by_spec, frozenset(derived), foreign or {})


def nobody(ranks: tuple[int, ...], mine: int) -> list[int]:
    raise AssertionError(f"asked {ranks}")


def test_a_rank_that_shares_nothing_asks_nobody():
    (plan,) = plan_of_rank(view(2, rows(W_MASTER, 0, 500, 2), rows(W, 0, 500, 2)), nobody)
    assert plan.ranks == (2,)
    assert plan.loads == (500 * 64 * 4,)
    assert set(plan.owners) == {2}
    assert list(plan.proofs.values()) == [Box((0, 0), (500, 64))]


def test_a_rank_that_holds_nothing_plans_nothing():
    assert plan_of_rank(view(0, derived=()), nobody) == ()


def test_groups_are_asked_from_small_to_large_and_told_what_is_owned_in_smaller_ones():
    alone, pair, four = (TensorSpec(name, "exp_avg", "float32", (1000, 64)) for name in ("a", "p", "f"))
    asked = []

    def exchange(ranks: tuple[int, ...], mine: int) -> list[int]:
        asked.append((ranks, mine))
        return [mine] * len(ranks)

    cells = rows(four, 0, 1000, *ALL), rows(pair, 0, 1000, *BOTH), rows(alone, 0, 1000, 1), rows(four, 0, 0, 1, 2)
    plans = plan_of_rank(view(1, *cells, derived=()), exchange)
    assert [plan.ranks for plan in plans] == [(1,), BOTH, ALL], "who shares nothing but empty cells has no plan"
    nbytes = 1000 * 64 * 4
    assert [ranks for ranks, _ in asked] == [BOTH, ALL]
    assert [mine for _, mine in asked] == [nbytes, nbytes + plans[1].loads[1]]


def test_who_has_much_already_gets_less():
    spec = TensorSpec("p", "exp_avg", "float32", (1000, 64))
    (plan,) = plan_of_rank(view(0, rows(spec, 0, 1000, *BOTH), derived=()), lambda ranks, mine: [0, 64_000])
    assert sum(plan.loads) == 256_000
    assert abs(plan.loads[0] - plan.loads[1] - 64_000) <= max(chunk.nbytes for chunk in plan.chunks)


def test_a_param_is_cut_along_the_chunks_of_a_master_that_others_hold():
    """Ranks 2 and 3 share that master out in pieces whose size follows from what their group holds in all."""
    cells = rows(W, 0, 1000, *ALL), rows(W_MASTER, 0, 500, *BOTH), rows(W_MASTER, 500, 1000, 2, 3)
    theirs = {(2, 3): 16 * 100 * 64 * 4}  # 2 ranks, 8 pieces each: 100 rows a piece
    plans = plan_of_rank(view(0, *cells, foreign=theirs), lambda ranks, mine: [mine] * len(ranks))
    proved = [(c.box, o) for c, o in zip(plans[-1].chunks, plans[-1].owners, strict=True) if c.box.offsets[0] >= 500]
    assert [box for box, _ in proved] == [Box((start, 0), (100, 64)) for start in range(500, 1000, 100)]
    assert [owner for _, owner in proved] == [2, 3, 2, 3, 2], "the holders of the master take turns"


def test_a_param_that_nobody_can_prove_is_shared_out_like_everything_else():
    cells = rows(W, 0, 1000, *BOTH), rows(W_MASTER, 0, 1000, 2)
    (plan,) = plan_of_rank(view(0, *cells), lambda ranks, mine: [mine] * len(ranks))
    assert plan.proofs == {}
    assert sum(plan.loads) == 128_000
    assert abs(plan.loads[0] - plan.loads[1]) <= max(chunk.nbytes for chunk in plan.chunks)
