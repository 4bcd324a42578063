"""Rank functions of test_convert_deepspeed_in.py: live engines saved by DeepSpeed and by ``ckpt``, and loaded again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ckpt
from ckpt.convert.deepspeed.read import open_deepspeed
from ckpt.convert.options import ReadOptions
from ckpt.layout.rules import Rules
from ckpt.store.open import open_store
from tests.e2e.parallel_cases import content, differences
from tests.harness import parallel_engines
from tests.harness.conversions import convert, whole
from tests.harness.models import make_engine, train

CLIENT = {"epoch": 3, "seen": [1, 2], "note": "by the user"}


class _Gpt:
    """An engine of :mod:`tests.harness.models` with the methods of :class:`parallel_engines.Engine`."""

    def __init__(self, layout: dict[str, Any], seed: int) -> None:
        self.engine = self.saved = make_engine(seed=seed, **{k: v for k, v in layout.items() if k != "kind"})

    def train(self, steps: int, start: int = 0) -> list[float]:
        return train(self.engine, steps, start)


def build(layout: dict[str, Any], seed: int = 0) -> Any:
    """Return an engine of any kind."""
    return _Gpt(layout, seed) if layout["kind"] == "gpt" else parallel_engines.build(layout, seed)


def write(rank: int, world: int, root: str, layouts: dict[str, dict[str, Any]], steps: int = 2) -> None:
    """Train each engine and leave it twice: ``<root>/<name>/ds``, by DeepSpeed, and ``<root>/<name>/ckpt``, by us."""
    for name, layout in layouts.items():
        job = build(layout)
        job.train(steps)
        job.engine.save_checkpoint(f"{root}/{name}/ds", client_state=CLIENT)
        ckpt.save(job.saved, f"{root}/{name}/ckpt")
        dist.barrier()
        job.engine.destroy()


def universal(rank: int, world: int, root: str, names: list[str]) -> None:
    """Convert what :func:`write` left to universal checkpoints, by DeepSpeed's own program."""
    from deepspeed.checkpoint.ds_to_universal import main

    for name in names:
        tag = (Path(root) / name / "ds" / "latest").read_text()
        main(
            argparse.Namespace(
                input_folder=f"{root}/{name}/ds/{tag}",
                output_folder=f"{root}/{name}/universal/{tag}_universal",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


def go_on(rank: int, world: int, root: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Save with DeepSpeed, train on; import, load into a fresh engine of other weights, and train that on."""
    found = {}
    for name, layout in layouts.items():
        rules = layout.pop("import_rules", {})
        first = build(layout)
        first.train(2)
        first.engine.save_checkpoint(f"{root}/{name}/ds", client_state=CLIENT)
        before = content(first)
        losses = first.train(2, start=2)
        if rank == 0:
            source = open_store(f"{root}/{name}/ds")
            opened = open_deepspeed(source, source.url, options=ReadOptions(rules=Rules.of(rules)))
            target = open_store(f"{root}/{name}/ckpt")
            convert(opened, whole(opened.specs, opened.world), target)
        dist.barrier()
        second = build(layout, seed=7)
        loaded = ckpt.load(second.saved, f"{root}/{name}/ckpt", extra={"epoch": 0})
        found[name] = {
            "strays": [*loaded.missing, *loaded.unexpected],
            "notes": list(loaded.notes),
            "extra": loaded.extra["epoch"],
            "state": differences(before, content(second)),
            "losses": [losses, second.train(2, start=2)],
            "final": differences(content(first), content(second)),
        }
        first.engine.destroy()
        second.engine.destroy()
    return found
