"""What all wrappers share: a store that does nothing but hand every call to another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.base import Buffer, ObjectInfo, ObjectWriter, Store
    from ckpt.store.blocks import Blocks

_ABILITIES = ("remove_folder", "orphans", "abort", "appender")
"""Methods of the optional protocols in :mod:`ckpt.store.base`."""


class Forward:
    """See :class:`~ckpt.store.base.Store`. ``inner``: the store below.

    What only some stores can do (``root`` of a local one, ``orphans`` of an object store) is found here too if the
    store below has it, and goes to it as it is.
    """

    def __init__(self, store: Store) -> None:
        self.inner = store
        self.url = store.url
        for name in _ABILITIES:  # as attributes of the instance: isinstance() of a protocol does not ask __getattr__
            if hasattr(store, name):
                setattr(self, name, getattr(store, name))

    def __getattr__(self, name: str) -> Any:
        # Called for what the class does not have. Not for private names: copy and pickle ask for them before __init__.
        if name.startswith("_") or name == "inner":
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.inner, name)

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        self.inner.put(key, data, overwrite=overwrite)

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> ObjectWriter:
        """See :class:`~ckpt.store.base.Store`."""
        return self.inner.writer(key, head=head, size=size, blocks=blocks)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        return self.inner.get(key, start, nbytes)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`."""
        return self.inner.read_into(key, start, buffer)

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        return self.inner.size(key)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`~ckpt.store.base.Store`."""
        return self.inner.walk(prefix)

    def children(self, prefix: str) -> list[str]:
        """See :class:`~ckpt.store.base.Store`."""
        return self.inner.children(prefix)

    def delete(self, key: str) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        self.inner.delete(key)


class ForwardWriter:
    """See :class:`~ckpt.store.base.ObjectWriter`."""

    def __init__(self, writer: ObjectWriter) -> None:
        self.inner = writer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner":
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.inner, name)

    def write(self, data: Buffer) -> None:
        """See :class:`~ckpt.store.base.ObjectWriter`."""
        self.inner.write(data)

    def finish(self, head: Buffer = b"") -> None:
        """See :class:`~ckpt.store.base.ObjectWriter`."""
        self.inner.finish(head)

    def __enter__(self) -> ObjectWriter:
        self.inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.inner.__exit__(*exc)
