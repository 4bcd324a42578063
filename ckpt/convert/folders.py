"""The choice of one checkpoint among several: a training script saves each step in a folder of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt.errors import NoSuchCheckpoint
from ckpt.words import some

if TYPE_CHECKING:
    from ckpt.store.base import Store

_NUMBER = re.compile(r"(\d{1,18})(?!.*\d)")


def folders_with(store: Store, marker: str) -> dict[int, str]:
    """Return step -> folder, of folders below the root that have a number in their name and ``marker`` in them."""
    found: dict[int, str] = {}
    for name in sorted(store.children("")):
        number = _NUMBER.search(name)
        if number and store.size(f"{name}/{marker}") is not None:
            found.setdefault(int(number[1]), name)
    return found


def chosen_folder(store: Store, where: str, marker: str, step: int | None) -> tuple[str, int]:
    """Return what stands before the keys of a checkpoint, and its step as far as a folder's name tells.

    Nothing stands there, and the step is 0, if the root is the checkpoint; else it is the folder of a step.

    Raises:
        NoSuchCheckpoint: no folder of that step, or none at all.
    """
    if store.size(marker) is not None:
        return "", 0
    folders = folders_with(store, marker)
    wanted = max(folders, default=None) if step is None else step
    if wanted is None or wanted not in folders:
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        others = f"; steps there (--step): {some(sorted(folders))}" if folders else ""
        raise NoSuchCheckpoint(f"{what} in {where} ({marker} is looked for){others}")
    return f"{folders[wanted]}/", wanted
