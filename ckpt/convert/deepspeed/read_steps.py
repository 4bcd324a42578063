"""The optimizer's count of steps beside the engine's, in other checkpoints of the same job.

An optimizer that was started anew is behind its engine by the same number of steps ever after. Files of two steps in
one folder differ too, but not by what the folders beside it differ by.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_files import Files, tags_of
from ckpt.convert.deepspeed.read_zero import base_of, optimizer_of
from ckpt.convert.torchfile.names import Stored
from ckpt.convert.torchfile.stored import load_stored
from ckpt.errors import CkptError

if TYPE_CHECKING:
    from ckpt.store.base import Store

MOST = 4
"""Checkpoints that are looked at: of each two files."""


def number_of(store: Store, step: Any) -> Any:
    """Return a count of steps as a number, whether it is one or a tensor of one element."""
    return load_stored(store, step).item() if isinstance(step, Stored) else step


def taken_by(model: dict[str, Any]) -> int:
    """Return how many steps an engine's optimizer has taken, by the engine's own count in a file of the model."""
    taken: int = model["global_steps"] - (model.get("skipped_steps") or 0)
    return taken


def differs_alike(files: Files, tag: str, more: float) -> str:
    """Return the folder of another checkpoint whose optimizer counts ``more`` steps than its engine; empty if none."""
    others = [other for other in reversed(tags_of(files.store)) if other not in ("", tag)]
    return next((other for other in others[:MOST] if _more(files, other) == more), "")


def _more(files: Files, tag: str) -> Any:
    try:
        one = Files.of(files.store, tag, tag, replace(files.options, seen=None))
        taken = taken_by(one.read(one.model[0, 0]))
        key = one.optim[0, 0]
        states, _ = base_of(optimizer_of(one.read(key), key))
        return number_of(files.store, states[0]["step"]) - taken
    except (CkptError, LookupError, TypeError, ValueError, AttributeError, RuntimeError):
        return None  # it says nothing; whether it is whole is asked of whoever opens it
