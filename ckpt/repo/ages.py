"""When an attempt last showed a sign of life, from whatever tells: its name, its marker, the store's own dates."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, is_damage
from ckpt.format.manifest import MAX_COMMIT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt.store.base import ObjectInfo, Store

CREATED, COPIED, ALIVE = "created", "copied", "alive"
"""Fields of an attempt.json, UTC in ISO 8601: when the save began; when a copy was last at work here; when the save was
last at work.
"""

_ATTEMPT = re.compile(r"(steps/(?:0|[1-9]\d{0,17})/[0-9a-z-]{1,64})/.*", re.DOTALL)
_BEGUN = re.compile(r"([0-9a-f]{8,9})-[0-9a-f]+")


def attempt_of(key: str) -> str | None:
    """Return the folder of the attempt that an object belongs to, None if it is in none.

    >>> attempt_of("steps/9/6b0ca303-aeb7a0ce/packs/rank00000-000.safetensors")
    'steps/9/6b0ca303-aeb7a0ce'
    >>> attempt_of("steps/9/commit.json"), attempt_of("steps/09/a/b")
    (None, None)
    """
    found = _ATTEMPT.fullmatch(key)
    return found[1] if found else None


def begun(name: str) -> float | None:
    """Return when an attempt of this name was begun, in seconds since the epoch, None if the name does not tell.

    >>> begun("6b0ca303-aeb7a0ce"), begun("mine")
    (1795990275.0, None)
    """
    found = _BEGUN.fullmatch(name)
    return float(int(found[1], 16)) if found else None


def age_of(store: Store, folder: str, infos: Iterable[ObjectInfo]) -> float | None:
    """Return the seconds since an attempt's last sign of life, None if nothing tells.

    Args:
        store: where it is.
        folder: of the attempt.
        infos: its objects, as they were listed.

    Raises:
        StoreError: the store is busy or refuses this user.
    """
    signs = [begun(folder.rpartition("/")[2]), *_marked(store, folder), *(info.modified for info in infos)]
    known = [sign for sign in signs if sign is not None]
    return time.time() - max(known) if known else None


def _marked(store: Store, folder: str) -> list[float]:
    """Return the times in an attempt's marker. One that is damaged or gone tells nothing."""
    try:
        about = json.loads(store.get(f"{folder}/attempt.json", 0, MAX_COMMIT))
    except CkptError as error:
        if not is_damage(error):
            raise
        return []
    except (ValueError, RecursionError):
        return []
    found = []
    for name in (CREATED, COPIED, ALIVE) if isinstance(about, dict) else ():
        try:
            found.append(datetime.fromisoformat(about[name]).timestamp())
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return found
