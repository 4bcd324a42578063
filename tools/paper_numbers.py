"""AdaCheck's published redundancy beside ours: the table of docs/analyze.md.

``tools/setup && .venv/bin/python tools/paper_numbers.py``. The paper (FAST'26) counts parameters, gradients and
optimizer states; what is redundant has a copy on another rank. Its numbers are known to us through its abstract and
through notes on it, which name models and kinds of parallelism but not every degree: the last column says what was left
open.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from ckpt.analysis.paper import paper_share
from ckpt.describe.closed import holdings
from ckpt.describe.presets import PRESETS, preset

KINDS = (
    ("mixed-precision Adam, ZeRO-1", {"engine": "megatron", "zero": 1}, "25 %"),
    ("plain data parallelism", {"engine": "megatron", "zero": 0}, "up to 100 %"),
    ("ZeRO-3", {"engine": "fsdp2", "zero": 3}, "none"),
    ("MiCS, HSDP: shards of 8, copies between hosts", {"engine": "fsdp2", "zero": 3, "shard": 8}, "high"),
)
"""Kinds of layout that the notes speak of in general, here with Yi-34B on 128 ranks without model parallelism."""


def main() -> None:
    """Print the table."""
    table = Table(title="Redundant share of parameters, gradients and optimizer states", title_justify="left")
    for column in ("layout", "the paper", "ours", "left open by its notes, and our choice"):
        table.add_column(column, justify="right" if column in ("the paper", "ours") else "left")
    for name, chosen, said in KINDS:
        changed = {"tp": 1, "pp": 1, "dp": 128, "stages": (), **chosen}
        share = paper_share(holdings(preset("yi-34b", **changed)), "optimizer" if chosen["zero"] > 1 else "param")
        table.add_row(name, said, f"{share:.1%}", "the model does not matter")
    for name, known in PRESETS.items():
        description = preset(name)
        share = paper_share(holdings(description), "param")
        said = f"{known.paper:g} %" if known.paper is not None else "in 25–100 %"
        if name == "llama3-405b":
            said = "not named"
        p = description.parallel
        degrees = " x ".join(f"{axis} {n}" for axis in ("dp", "tp", "pp", "ep", "cp") if (n := getattr(p, axis)) > 1)
        table.add_row(f"{name}: {p.kind}, ZeRO-{p.zero}, {degrees}", said, f"{share:.1%}", known.open)
    Console(width=140 if sys.stdout.isatty() else 160, highlight=False).print(table)


if __name__ == "__main__":
    main()
