"""Rank functions of test_adapter_doc.py: the adapter is the one that the document prints."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import ckpt

ROWS = {"users": 7, "items": 2}


def _whole(name: str) -> np.ndarray:
    return np.arange(ROWS[name] * 3, dtype=np.float32).reshape(-1, 3) + 100 * len(name)


def _part(name: str, rank: int, world: int) -> np.ndarray:
    size = -(-ROWS[name] // world)
    return _whole(name)[rank * size : (rank + 1) * size].copy()


def from_document(rank: int, world: int, *, folder: str, blocks: list[str], load: bool) -> Any:
    """Run the blocks in a folder; return what is wrong behind them."""
    os.chdir(folder)
    tables = {name: _part(name, rank, world) for name in ROWS}
    expected = {name: own.copy() for name, own in tables.items()}
    names: dict[str, Any] = {"ckpt": ckpt, "tables": tables, "rows": ROWS}
    exec(blocks[0], names)
    saving, loading = (line for line in blocks[1].splitlines() if line.startswith("ckpt."))
    exec(blocks[1].splitlines()[0], names)
    engine = names["engine"]
    if not load:
        engine.updates = 5
        exec(saving, names)
        return []
    for own in tables.values():
        own.fill(-1)
    exec(loading, names)
    wrong = [name for name, own in tables.items() if not np.array_equal(own, expected[name])]
    return wrong + ([] if engine.updates == 5 else ["updates"])
