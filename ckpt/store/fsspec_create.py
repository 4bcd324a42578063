"""How an object is created only if it is absent: what fsspec's backends can do, and how claims are put into a store."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ckpt.errors import ObjectExists
from ckpt.store.claims import CLAIM

if TYPE_CHECKING:
    from ckpt.store.base import Store

CREATE: dict[str, tuple[str, object]] = {
    "gs": ("mode", "create"), "gcs": ("mode", "create"),
    "az": ("overwrite", False), "abfs": ("overwrite", False), "abfss": ("overwrite", False),
}  # fmt: skip
"""The option of ``pipe_file`` that makes the *server* refuse an existing key. fsspec's own ``mode="create"`` only looks
before it writes, so what is not listed here does not count as a conditional write; s3fs is not, because servers that
do not know the condition of S3 ignore it in silence."""


def create_option(fs: Any, protocol: str) -> dict[str, object] | None:
    """Return how ``pipe_file`` is told to create, if the installed version of the backend knows it."""
    if protocol not in CREATE:
        return None
    name, value = CREATE[protocol]
    function = getattr(type(fs), "_pipe_file", None)
    known = function is not None and name in inspect.signature(function).parameters  # older versions ignore it
    return {name: value} if known else None


class StoreDoor:
    """See :class:`~ckpt.store.claims.Door`: a key of a store, of which plain puts, listings and reads are asked."""

    def __init__(self, store: Store, key: str, value: bytes) -> None:
        self.store, self.key, self.url, self.value = store, key, store.url, value
        folder, _, self.name = key.rpartition("/")
        self.folder, self.prefix = folder, f"{folder}/" if folder else ""

    def exists(self) -> bool:
        """See :class:`~ckpt.store.claims.Door`."""
        return self.store.size(self.key) is not None

    def claims(self) -> set[str]:
        """See :class:`~ckpt.store.claims.Door`."""
        tail = f"-{self.name}"
        names = [n for n in self.store.children(self.folder) if n.startswith(CLAIM) and n.endswith(tail)]
        return {name for name in (n[len(CLAIM) : -len(tail)] for n in names) if "-" not in name}

    def _claim_key(self, name: str) -> str:
        return f"{self.prefix}{CLAIM}{name}-{self.name}"

    def claim(self, name: str) -> None:
        """See :class:`~ckpt.store.claims.Door`."""
        self.store.put(self._claim_key(name), name.encode(), overwrite=True)

    def withdraw(self, name: str) -> None:
        """See :class:`~ckpt.store.claims.Door`."""
        self.store.delete(self._claim_key(name))

    def write(self) -> None:
        """See :class:`~ckpt.store.claims.Door`."""
        self.store.put(self.key, self.value, overwrite=True)
        found = self.store.get(self.key)
        if found != self.value:  # a writer that does not know claims, or one that was taken for dead
            raise ObjectExists(f"{self.key!r} in {self.url} is another writer's", self.key)
