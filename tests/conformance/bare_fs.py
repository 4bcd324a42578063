"""File systems for the tests that give fsspec only what it asks for, with the habits that real ones have."""

from __future__ import annotations

import io
import threading
from typing import Any, ClassVar

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

LOCK = threading.Lock()


def infos(fs: AbstractFileSystem, names: list[str]) -> list[dict[str, Any]]:
    """What ``names`` are, without those that are gone meanwhile."""
    found = []
    for name in names:
        try:
            found.append(fs.info(name))
        except FileNotFoundError:
            continue
    return found


class BareObjects(AbstractFileSystem):
    """Objects in a dict. Listings are remembered, a range past the end is an error, an upload is seen when whole."""

    protocol = "bareobjects"
    objects: ClassVar[dict[str, bytes]] = {}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in list(self.objects)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            with LOCK:
                names = [name for name in self.objects if name.startswith(f"{path}/")]
            below = sorted({f"{path}/{name[len(path) + 1 :].split('/')[0]}" for name in names})
            self.dircache[path] = infos(self, below)
        found = self.dircache[path]
        if not found:
            raise FileNotFoundError(path)
        return list(found) if detail else [info["name"] for info in found]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return ObjectFile(self, path, mode, block_size=1 << 20, cache_type="none")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        data = self.objects[path]
        if start is not None and start >= len(data):
            raise OSError("416 Requested range not satisfiable")
        return data[start:end]

    def rm_file(self, path: str) -> None:
        with LOCK:
            if self.objects.pop(self._strip_protocol(path), None) is None:
                raise FileNotFoundError(path)


class ObjectFile(AbstractBufferedFile):
    """An upload in parts, as the object stores of fsspec do it: closing the file publishes it."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.buffer.seek(0)
        self.parts.append(self.buffer.read())
        if final:
            with LOCK:
                self.fs.objects[self.path] = b"".join(self.parts)
        return True

    def discard(self) -> None:
        self.parts = []


class BareTree(AbstractFileSystem):
    """Folders and files: a file is seen while it grows, and ``rename`` replaces."""

    protocol = "baretree"
    objects: ClassVar[dict[str, bytes]] = {}
    folders: ClassVar[set[str]] = set()

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if path in self.folders:
            return {"name": path, "size": None, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if self.info(path)["type"] == "file":
            return [self.info(path)]
        with LOCK:
            names = [name for name in [*self.objects, *self.folders] if name.rpartition("/")[0] == path]
        found = infos(self, names)
        return found if detail else [info["name"] for info in found]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._strip_protocol(path)
        with LOCK:
            while path:
                self.folders.add(path)
                path = path.rpartition("/")[0]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.objects[path]) if path in self.objects else self.info(path)
        if path.rpartition("/")[0] not in self.folders:
            raise FileNotFoundError(path)
        return TreeFile(self, path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        with LOCK:
            self.objects[self._strip_protocol(path2)] = self.objects.pop(self._strip_protocol(path1))

    def rm_file(self, path: str) -> None:
        with LOCK:
            if self.objects.pop(self._strip_protocol(path), None) is None:
                raise FileNotFoundError(path)


class TreeFile(io.RawIOBase):
    """A file that everybody sees from the first byte."""

    def __init__(self, fs: BareTree, path: str) -> None:
        self.fs, self.path = fs, path
        fs.objects[path] = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.fs.objects[self.path] += bytes(data)
        return len(data)
