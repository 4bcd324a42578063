from __future__ import annotations

import json

import numpy as np
import pytest

from ckpt.analysis.domains import Domains
from ckpt.analysis.heat import layer_of
from ckpt.analysis.holdings import Holdings, RankSets, RoleColumn, TensorRows
from ckpt.analysis.paper import paper_share
from ckpt.analysis.report import analyze
from ckpt.errors import ConfigError
from ckpt.layout.spec import BUFFER, MASTER, PARAM
from tests.unit.analysis.jobs import ADAM, data_parallel, replica_groups


def one_tensor(world: int, columns, holders, derived=True) -> Holdings:
    sets = RankSets()
    numbers = np.array([[sets.number(ranks) for ranks in row] for row in holders], np.int64)
    volume = np.full(len(holders), 10, np.int64)
    rows = TensorRows("layers.0.w", (10 * len(holders),), columns, derived, volume, numbers)
    return Holdings(world, sets, (rows,))


def test_zero1_must_be_written():
    report = analyze(data_parallel(8, zero=1), Domains.by_host(8, 2))
    trained, step = report.classes
    assert trained.verdict == "parameter everywhere, optimizer slice once: must be written"
    assert (trained.tolerance, trained.must_write, trained.groups, trained.tensors) == (0, True, 8, 2)
    assert (trained.elements, trained.bytes, trained.example) == (480, 480 * 12, "blocks.0.w")
    assert (step.kind, step.verdict) == ("scalar", "every copy elsewhere: survives any 3 hosts")
    assert [row.bytes for row in report.must_write] == [5760, 5760, 5760, 5768]
    assert (report.total.bytes_derivable, report.total.bytes_unique) == (960, 5768)
    assert {role.role: role.redundant_share for role in report.roles} == {
        "exp_avg": 0, "exp_avg_sq": 0, MASTER: 0, PARAM: 0.875, "step": 0.875,
    }  # fmt: skip


def test_plain_data_parallel_needs_no_write():
    report = analyze(data_parallel(8, zero=0), Domains.by_host(8, 2))
    assert [one.verdict for one in report.classes] == ["every copy elsewhere: survives any 3 hosts"] * 2
    assert [row.bytes for row in report.must_write] == [0, 0, 0, 5768]


@pytest.mark.parametrize(
    ("holders", "k", "verdict"),
    [
        ([[(0, 1)] * 5], 1, "parameter 2 times on 1 host, optimizer state 2 times on 1 host: must be written"),
        ([[(0, 2)] * 5], 1, "every copy elsewhere: survives any 1 host"),
        ([[(0, 2)] * 5], 2,
         "parameter 2 times, optimizer state 2 times: survives any 1 host, must be written against 2"),
        ([[(0, 2)] * 4 + [(0,)]], 1, "parameter 2 times, optimizer state (step) once: must be written"),
        ([[(0, 2), (0, 2), (0,), (0, 2), (0, 2)]], 1,
         "parameter 2 times, optimizer state (master) once: must be written"),
        ([[(0, 2)] * 3 + [(1,), (0, 2)]], 1, "parameter once, optimizer state 2 times: survives any 1 host"),
        ([[(0, 2), (0, 2), (), (0, 2), (0, 2)]], 1,
         "parameter 2 times, optimizer state (master) nowhere: cannot be rebuilt"),
    ],
)  # fmt: skip
def test_verdicts(holders, k, verdict):
    report = analyze(one_tensor(4, ADAM, holders), Domains.by_host(4, 2), k=k)
    assert [one.verdict for one in report.classes if one.kind == "trained"] == [verdict]


def test_a_buffer_and_a_frozen_parameter():
    buffer = analyze(one_tensor(2, (RoleColumn(BUFFER, "int64"),), [[(0,)]], derived=False), Domains.by_rank(2))
    assert [(c.kind, c.verdict) for c in buffer.classes] == [("buffer", "buffer once: must be written")]
    assert (buffer.parameters, buffer.elements) == (0, 10)
    frozen = analyze(replica_groups(2, 2), Domains.by_host(4, 2))
    assert [(c.kind, c.verdict) for c in frozen.classes] == [
        ("parameter", "parameter 2 times on 1 host: must be written")
    ]


def test_adacheck_counts():
    """Its published numbers: 25 % for ZeRO-1 under mixed-precision Adam, 100 % for plain data parallelism."""
    assert paper_share(data_parallel(8, zero=1), "param") == 0.25
    assert paper_share(data_parallel(8, zero=1), "optimizer") == 0.125
    assert paper_share(data_parallel(8, zero=0), "param") == 1.0
    assert paper_share(data_parallel(8, zero=3), "optimizer") == 0.0
    assert paper_share(data_parallel(1, zero=0), "param") == 0.0
    assert paper_share(Holdings(2, RankSets(), ()), "param") == 0.0


def test_a_named_loss():
    loss = analyze(data_parallel(8, zero=1), Domains.by_host(8, 2), lost="host:1,rank:7").loss
    assert (loss.domains, loss.ranks, loss.tensors_gone) == (("1",), "2-3,7", 2)
    assert (loss.elements, loss.bytes) == (2 * 90, 2 * 90 * 12)
    assert loss.tensors[0].roles_gone == {"exp_avg": 90, "exp_avg_sq": 90, MASTER: 90}
    (source,) = loss.tensors[0].rebuild_from
    assert (source.elements, source.ranks) == (
        150,
        {"exp_avg": "0-1,4-6", "exp_avg_sq": "0-1,4-6", MASTER: "0-1,4-6", "step": "0"},
    )


def test_the_heat_map_of_a_small_job_has_a_column_for_each_rank():
    heat = analyze(data_parallel(4, zero=1), Domains.by_host(4, 2)).heat
    assert heat.layers == ("blocks.0", "blocks.1")
    held = [("exp_avg", 1, 1), ("exp_avg_sq", 1, 1), (MASTER, 1, 1), (PARAM, 4, 2), ("step", 4, 2)]
    assert [[(one.role, one.copies, one.domains) for one in roles] for roles in heat.held] == [held]
    assert [(c.ranks, c.count, c.domains) for c in heat.columns] == [
        ("0", 1, "0"), ("1", 1, "0"), ("2", 1, "1"), ("3", 1, "1"),
    ]  # fmt: skip
    # Each rank loses its slice with itself; 60 elements of 12 bytes, the whole param of 240 x 2, and the step.
    assert [list(_plain(cell)) for cell in heat.columns[0].cells] == [[i, 1, 1, 0, 1204, 1204] for i in range(2)]


def _plain(cell):
    return (cell.layer, cell.copies, cell.domains, cell.held, cell.least_bytes, cell.most_bytes)


def test_a_large_job_puts_ranks_that_hold_alike_into_one_column():
    heat = analyze(replica_groups(300, 2), Domains.by_host(600, 4)).heat
    (column,) = heat.columns
    assert (column.ranks, column.count) == ("0-599", 600)
    assert [_plain(cell) for cell in column.cells] == [(0, 2, 1, 0, 32, 32)]


def test_a_large_job_of_which_no_two_ranks_are_alike_has_neighbours_in_a_column():
    world = 1200
    rows = [[tuple(range(r, min(world, r + 1 + r % 7)))] for r in range(world)]
    sets = RankSets()
    columns = (RoleColumn(PARAM, "float32"),)
    tensors = tuple(
        TensorRows(f"l.{i}", (1,), columns, False, np.array([1]), np.array([[sets.number(row[0])]]))
        for i, row in enumerate(rows)
    )
    heat = analyze(Holdings(world, sets, tensors), Domains.by_rank(world)).heat
    assert len(heat.columns) == 512
    assert sum(column.count for column in heat.columns) == world


def test_layers_are_in_the_order_of_the_model():
    assert [layer_of(n) for n in ("a.b.3.c.4", "head.weight", "7.w", "w")] == ["a.b.3", "head", "7", "w"]
    assert [layer_of(n) for n in ("a.norm.weight", "a.b.c.d.bias", "a.w")] == ["a.norm", "a.b", "a"]
    sets = RankSets()
    own = np.array([[sets.number((0,))]])
    before, behind = ["a.wte.w", "z.embed_tokens.w"], ["a.norm.w", "final", "a.lm_head.w", "embed_out.w"]
    names = sorted(["l.10.w", "l.2.w", "l.2.b", *before, *behind])
    column = (RoleColumn(PARAM, "float32"),)
    tensors = tuple(TensorRows(n, (1,), column, False, np.array([1]), own) for n in names)
    assert analyze(Holdings(1, sets, tensors), Domains.by_rank(1)).heat.layers == (
        "a.wte", "z.embed_tokens", "l.2", "l.10", "a.norm", "final", "a.lm_head", "embed_out",
    )  # fmt: skip


def test_json_is_plain_sorted_and_stable():
    data = analyze(data_parallel(8, zero=1), Domains.by_host(8, 2), lost="host:0").to_json()
    assert data == analyze(data_parallel(8, zero=1), Domains.by_host(8, 2), lost="host:0").to_json()
    decoded = json.loads(data)
    assert list(decoded) == sorted(decoded)
    assert decoded["survival"][1]["bytes"]["expected_share"] == 0.750346741


def test_bad_arguments():
    with pytest.raises(ConfigError, match="one for each of 8 ranks"):
        analyze(data_parallel(8, zero=1), Domains.by_rank(4))
    with pytest.raises(ConfigError, match="at least 1, found 0"):
        analyze(data_parallel(8, zero=1), Domains.by_rank(8), k=0)
    with pytest.raises(ConfigError, match="k: 5 hosts to be lost at once, the job has 4 hosts"):
        analyze(data_parallel(8, zero=1), Domains.by_host(8, 2), k=5)
    with pytest.raises(ConfigError, match="host:9"):
        analyze(data_parallel(8, zero=1), Domains.by_host(8, 2), lost="host:9")


def test_the_short_form_says_what_is_held_what_survives_and_what_is_lost() -> None:
    text = str(analyze(data_parallel(4, zero=1), Domains.by_rank(4), lost="rank:0"))
    assert text.splitlines() == [
        "4 ranks: 2 tensors, 480 parameters; 9.63 kB held, 5.77 kB unique, 960 B derivable, 30.1% redundant",
        "  5.76 kB (trained, like 'blocks.0.w'): parameter everywhere, optimizer slice once: must be written",
        "  8 B (scalar, like 'blocks.0.w'): every copy elsewhere: survives any 3 ranks",
        "  1 rank lost: at least 75.0% of the state is still held, 75.0% expected",
        "  2 ranks lost: at least 50.1% of the state is still held, 50.1% expected",
        "  3 ranks lost: at least 25.1% of the state is still held, 25.1% expected",
        "  the loss of rank 0: 2 tensors, 120 elements (1.44 kB) cannot be rebuilt",
    ]
