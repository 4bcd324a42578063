from __future__ import annotations

import pytest

from ckpt.analysis.domains import Domains
from ckpt.analysis.holdings import NOBODY, RankSets, holdings_of
from ckpt.analysis.losing import lose
from ckpt.analysis.report import analyze
from ckpt.errors import ConfigError
from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import MASTER, PARAM, RankLayout, Shard, TensorSpec


def graph_of(*ranks: list[tuple[TensorSpec, Box]], derived: tuple[str, ...] = ()) -> ShardGraph:
    layouts = [RankLayout(r, tuple(Shard(spec, box) for spec, box in own), (), derived) for r, own in enumerate(ranks)]
    graph = ShardGraph.build(layouts)
    graph.check()
    return graph


def test_rank_sets():
    sets = RankSets()
    assert [sets.number(s) for s in ((0, 1), (), (2,), (0, 1))] == [0, NOBODY, 1, 0]
    assert (sets[NOBODY], sets[1], len(sets)) == ((), (2,), 2)


def test_rows_are_the_roles_intersected():
    """A param in halves and a master in thirds: four kinds of elements."""
    param, master = (TensorSpec("w", role, "float32", (6,)) for role in (PARAM, MASTER))
    thirds = [boxes_of_range((6,), 2 * r, 2 * r + 2)[0] for r in range(3)]
    low, high = Box((0,), (3,)), Box((3,), (3,))
    graph = graph_of([(param, low), (master, thirds[0])], [(param, high), (master, thirds[1])], [(master, thirds[2])])
    (rows,) = holdings_of(graph).tensors
    sets = holdings_of(graph).sets
    found = {tuple(sets[n] for n in row): int(v) for row, v in zip(rows.holders.tolist(), rows.volume, strict=True)}
    assert [c.role for c in rows.columns] == [MASTER, PARAM]
    assert found == {((0,), (0,)): 2, ((1,), (0,)): 1, ((1,), (1,)): 1, ((2,), (1,)): 2}


def test_a_tensor_without_elements_keeps_its_scalars():
    param = TensorSpec("w", PARAM, "float32", (0, 3))
    step = TensorSpec("w", "step", "float32", ())
    graph = graph_of([(param, Box.whole((0, 3))), (step, Box((), ()))], [(param, Box.whole((0, 3)))])
    (rows,) = holdings_of(graph).tensors
    assert (rows.volume.tolist(), rows.numel) == ([0], 0)
    assert [holdings_of(graph).sets[n] for n in rows.holders[0]] == [(0, 1), (0,)]
    report = analyze(holdings_of(graph), Domains.by_rank(2), lost="rank:0")
    assert (report.tensors, report.parameters, report.total.bytes_unique) == (1, 0, 4)
    assert [(one.kind, one.bytes) for one in report.classes] == [("scalar", 4)]
    assert [(one.bytes, one.roles_gone) for one in report.loss.tensors] == [(4, {"step": 1})]
    assert lose(holdings_of(graph), Domains.by_rank(2), [1]).tensors == ()


def test_a_job_that_holds_nothing():
    report = analyze(holdings_of(graph_of([], [])), Domains.by_rank(2), lost=[0])
    assert (report.total.bytes_held, report.total.redundant_share, report.classes) == (0, 0.0, ())
    assert all(row.bytes.worst_share == row.nothing_lost == 1 for row in report.survival)


def test_a_factored_moment_is_a_tensor_of_its_own():
    """Adafactor's row statistics: not a scalar, and not to be counted once per element."""
    param, rows = TensorSpec("w", PARAM, "float32", (4, 3)), TensorSpec("w", "exp_avg_row", "float32", (4,))
    whole = (param, Box.whole((4, 3)))
    graph = graph_of([whole, (rows, Box((0,), (2,)))], [whole, (rows, Box((2,), (2,)))])
    report = analyze(holdings_of(graph), Domains.by_rank(2), lost=[1])
    assert (report.tensors, report.total.bytes_unique) == (1, 48 + 16)
    assert {(c.kind, c.elements, c.bytes, c.tolerance) for c in report.classes} == {
        ("parameter", 12, 48, 1),
        ("state", 4, 16, 0),
    }
    assert [(one.bytes, one.roles_gone) for one in report.loss.tensors] == [(0, {}), (8, {"exp_avg_row": 2})]


def test_a_loss_of_unknown_ranks_is_refused():
    with pytest.raises(ConfigError, match="2-3"):
        lose(holdings_of(graph_of([], [])), Domains.by_rank(2), [0, 2, 3])
