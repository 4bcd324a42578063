"""However large the model, a process holds no more than it was given."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import torch

import ckpt

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = 64 << 20
PEAK = f"""
import re, sys
from ckpt.compact.job import Options, compact
from ckpt.store.open import open_store
done = compact(open_store(sys.argv[1]), Options(memory={MEMORY}))
assert done.exact is True, done
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def peak(root: Path, width: int) -> int:
    """Return the most bytes that a process held that compacted two steps of a model of ``2 * width ** 2`` elements."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.Checkpointer((model, optimizer), root, full_every=100) as keeper:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            keeper.step()
    said = subprocess.run([sys.executable, "-c", PEAK, root], capture_output=True, text=True, check=True, timeout=120)
    return int(said.stdout) << 10


def test_a_large_model_takes_no_more_than_a_small_one(tmp_path: Path) -> None:
    # What is stepped, its state and its gradient are 112 MiB of the large one.
    assert peak(tmp_path / "large", 1920) - peak(tmp_path / "small", 8) < MEMORY
