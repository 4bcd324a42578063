"""Holdings of textbook layouts, in closed form."""

from __future__ import annotations

import numpy as np

from ckpt.analysis.holdings import Holdings, RankSets, RoleColumn, TensorRows
from ckpt.layout.spec import MASTER, PARAM

ADAM = (
    RoleColumn("exp_avg", "float32"),
    RoleColumn("exp_avg_sq", "float32"),
    RoleColumn(MASTER, "float32"),
    RoleColumn(PARAM, "bfloat16"),
    RoleColumn("step", "float32", scalar=True),
)


def data_parallel(world: int, *, zero: int, tensors: int = 2, numel: int = 240) -> Holdings:
    """Mixed-precision Adam. ZeRO-0: all on all ranks; 1: optimizer sliced; 3: the param too. ``step`` is everywhere."""
    sets = RankSets()
    everyone = sets.number(range(world))
    made = []
    for i in range(tensors):
        slices = [(everyone, numel)]
        if zero:
            slices = [(sets.number((rank,)), numel // world) for rank in range(world)]
        rows = [[own, own, own, own if zero == 3 else everyone, everyone] for own, _ in slices]
        volume = np.array([volume for _, volume in slices], np.int64)
        made.append(TensorRows(f"blocks.{i}.w", (numel,), ADAM, True, volume, np.array(rows, np.int64)))
    return Holdings(world, sets, tuple(made))


def replica_groups(groups: int, copies: int, numel: int = 8) -> Holdings:
    """A slice of one frozen parameter for each group of neighbouring ranks."""
    sets = RankSets()
    holders = [[sets.number(range(g * copies, (g + 1) * copies))] for g in range(groups)]
    volume = np.full(groups, numel, np.int64)
    columns = (RoleColumn(PARAM, "float32"),)
    rows = TensorRows("w", (groups * numel,), columns, False, volume, np.array(holders, np.int64))
    return Holdings(groups * copies, sets, (rows,))
