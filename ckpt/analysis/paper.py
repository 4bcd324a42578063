"""Redundancy counted as AdaCheck (FAST'26) counts it, to be printed beside that paper's numbers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from ckpt.analysis.blocks import SetTable, blocks_of
from ckpt.layout.spec import BUFFER, MASTER, PARAM

if TYPE_CHECKING:
    from ckpt.analysis.blocks import Block
    from ckpt.analysis.holdings import Holdings


def paper_share(holdings: Holdings, gradient_holders: Literal["param", "optimizer"]) -> float:
    """Return the share of the model states (parameters, gradients, optimizer states) that another rank holds as well.

    Every byte of state counts once, however many ranks hold it: that is the count in which ZeRO-1 under mixed-precision
    Adam has 2 + 2 of 16 bytes, 25 %. A gradient of the param's dtype is added to each trained parameter. Buffers and
    scalars are not model states. A master counts as optimizer state, whether or not a param could be cast from it.

    Args:
        holdings: who holds what.
        gradient_holders: where gradients are held: ``"param"``, like the param (DDP, ZeRO-0 and -1), or
            ``"optimizer"``, like the optimizer's state (ZeRO-2 and -3).
    """
    sizes = SetTable(holdings.sets).size
    redundant = total = 0
    for block in blocks_of(holdings):
        if not block.has_parameters:
            continue
        for c, dtype_bytes in _states(block, gradient_holders):
            held_bytes = block.elements * dtype_bytes
            total += int(held_bytes.sum())
            redundant += int(np.where(sizes[block.holders[:, c]] > 1, held_bytes, 0).sum())
    return redundant / total if total else 0.0


def _states(block: Block, gradient_holders: str) -> list[tuple[int, int]]:
    """Return (column that tells the holders, bytes per element) of each model state."""
    roles = [column.role for column in block.columns]
    states = [(c, block.itemsize(c)) for c, role in enumerate(roles) if role != BUFFER]
    if block.kind == "trained":
        param = roles.index(PARAM) if PARAM in roles else roles.index(MASTER)
        kept = [c for c, column in enumerate(block.columns) if column.role != PARAM and not column.scalar]
        by_optimizer = gradient_holders == "optimizer" and kept
        holder = (roles.index(MASTER) if MASTER in roles else kept[0]) if by_optimizer else param
        states.append((holder, block.columns[param].itemsize))
    return states
