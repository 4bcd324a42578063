"""The mark at a place where files of another format are written: which conversion it is, and how one sees its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.errors import MalformedData, MissingChunk
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.store.base import Store

MARK = "ckpt-reshard.json"
_MAX_MARK = 1 << 16


@dataclass(frozen=True, slots=True)
class Mark:
    """``conversion``: its name, the same if source and target are. ``where``: the source. ``source``: digest of what it
    held. ``last``: the files that are there only when all are; one that is not known is empty.
    """

    conversion: str
    where: str = ""
    source: str = ""
    last: tuple[str, ...] = ()

    def encoded(self) -> bytes:
        """Return the file."""
        plain = {"conversion": self.conversion, "by": "ckpt-reshard", "from": self.where, "source": self.source}
        return (json.dumps({**plain, "last": self.last}, indent=2) + "\n").encode()

    def unlike(self, now: Mark) -> str:
        """Return in what the conversion that was begun differs from one that is asked for now."""
        if not self.source:
            return ""
        if self.where != now.where:
            return f"of {self.where}"
        return "SRC has changed since" if self.source != now.source else "with another layout or other options"


def mark_at(store: Store) -> Mark:
    """Return the mark that is there.

    Raises:
        MalformedData: it is none.
        StoreError: there is none.
    """
    data = store.get(MARK, 0, _MAX_MARK)
    try:
        found = json.loads(data)
        last = tuple(str(name) for name in found.get("last", ()))
        return Mark(str(found["conversion"]), str(found.get("from", "")), str(found.get("source", "")), last)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedData(f"{MARK} in {store.url}: expected the name of a conversion") from error


def refuse_unfinished(store: Store, names: Sequence[str]) -> None:
    """Say that a place where no checkpoint was found is one of a conversion that has not come to its end.

    Raises:
        MissingChunk: it is.
    """
    if MARK not in names:
        return
    mark = mark_at(store)
    missing = [name for name in mark.last if store.size(name) is None]
    if missing or not mark.last:
        said = f" ({some(missing)} missing)" if missing else ""
        raise MissingChunk(
            f"{store.url} holds a conversion that was not finished{said}: give the same command again to go on"
        )
