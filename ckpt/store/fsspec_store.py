"""Every other place that fsspec has a file system for: ``gs://``, ``az://``, ``hdfs://``, ``sftp://``, ``memory://``, …

What they have in common is less than a checkpoint needs: no conditional write, no writing out of order, listings from
caches, errors taken for "not there". What is done about each stands in docs/stores.md.
"""

from __future__ import annotations

import io
import os
import shutil
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ckpt.errors import AccessDenied, ConfigError, ObjectExists, ObjectNotFound, StoreError
from ckpt.store.base import Buffer, ObjectInfo, check_key
from ckpt.store.claims import put_if_absent
from ckpt.store.fsspec_create import StoreDoor, create_option
from ckpt.store.fsspec_errors import mapped
from ckpt.store.fsspec_info import modified_of
from ckpt.store.fsspec_url import parse
from ckpt.store.spool import SpoolWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.store.blocks import Blocks

OBJECTS = {"memory", "gs", "gcs", "s3", "s3a", "az", "abfs", "abfss", "oss", "oci", "ocilake", "hf"}
"""Protocols of object stores: no folders, and an upload is invisible until it is whole."""

_SAFE_RMDIR = {"local", "file", "sftp", "ssh", "ftp", "smb"}
"""Of hdfs it is not: there ``rmdir`` removes all that is below, also what another writer has just put there."""

_NONCE = "ckpt-put"
_TEMP = ".tmp-"
_SLICE = 1 << 20
_AT_ONCE = 64 << 20
_MEMORY = threading.RLock()
"""All of fsspec's ``memory://``: its files are shared objects with one position, its create is a check and a write."""


def _reset_after_fork() -> None:
    global _MEMORY  # a thread of the parent may have held it
    _MEMORY = threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)


class FsspecStore:
    """See :class:`~ckpt.store.base.Store`.

    Args:
        url: ``protocol://…``, one protocol, taken literally (no ``%xx``).
        options: what the file system's class takes (credentials, endpoints).

    Raises:
        ConfigError: no URL, an unknown protocol, a package that is not installed, an option that it does not take.
        StoreError: the file system could not be reached.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.protocol, self._text, self.url = parse(url)
        if options.get("asynchronous"):
            raise ConfigError(f"root {self.url!r}: asynchronous=True, this store is called from ordinary functions")
        self._options = options
        self._connect()

    @property
    def address(self) -> str | None:
        """URL by which another process opens it; None if that is not enough."""
        return None if self._options or self._memory else self._text

    def _connect(self) -> None:
        """Make a file system of our own: shared ones share connections, which not every protocol can stand."""
        with mapped("", self.url, "open"):
            try:
                fsspec.get_filesystem_class(self.protocol)
            except ImportError as error:
                raise ConfigError(f"root {self.url!r}: a package is not installed: {error}") from error
            except ValueError as error:
                raise ConfigError(f"root {self.url!r}: fsspec knows no protocol {self.protocol!r}") from error
            try:
                self._fs, root = fsspec.url_to_fs(self._text, skip_instance_cache=True, **self._options)
            except ImportError as error:
                raise ConfigError(f"root {self.url!r}: a package is not installed: {error}") from error
            except (TypeError, ValueError) as error:
                raise ConfigError(f"root {self.url!r}: {type(error).__name__}: {error}") from error
        self._pid = os.getpid()
        self._root = root.rstrip("/")
        self._memory = isinstance(self._fs, MemoryFileSystem)
        self._flat = self.protocol in OBJECTS or type(self._fs).mv is fsspec.AbstractFileSystem.mv
        self._bucket = self._root.split("/")[0] if self.protocol in OBJECTS and not self._memory else ""
        if self.protocol in OBJECTS and not self._memory and not self._bucket:
            raise ConfigError(f"root {self.url!r} names no bucket")

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    @contextmanager
    def _calling(self, key: str, doing: str) -> Iterator[Any]:
        """Yield the file system for one call, with errors mapped and nothing remembered of earlier listings."""
        with mapped(key, self.url, doing):
            if self._pid != os.getpid() and not self._memory:
                self._connect()  # after a fork: event loops and sockets are the parent's
            if self._memory:
                with _MEMORY:
                    yield self._fs
            else:
                self._fs.invalidate_cache()
                yield self._fs

    # --------------------------------------------------------------------------------------------------------- write

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`. Without ``overwrite``: by the server, or by claims (ADR 0006)."""
        path, value = self._path(key), bytes(data)
        if overwrite:
            self._replace(key, path, value)
        elif not self._create(key, path, value):
            put_if_absent(StoreDoor(self, key, value))

    def _create(self, key: str, path: str, value: bytes) -> bool:
        """Store ``value`` if the key is absent, where the file system itself can; return whether it can."""
        with self._calling(key, "create") as fs:
            try:
                if self._memory:
                    fs.pipe_file(path, value, mode="create")  # atomic under the lock
                    return True
                if isinstance(fs, LocalFileSystem):
                    with self._temporary(fs, path, io.BytesIO(value)) as temp:
                        fs.link(temp, path)
                        fs.rm_file(temp)
                    return True
                option = create_option(fs, self.protocol)
                if option is not None:
                    self._create_once(fs, path, value, option)
                return option is not None
            except FileExistsError as error:
                if self._info(fs, path) is None:  # it is the parent that exists, as an object
                    raise StoreError(
                        f"create {key!r} in {self.url}: an object has the name of a folder", key
                    ) from error
                raise ObjectExists(f"{key!r} exists already in {self.url}", key) from error

    def _create_once(self, fs: Any, path: str, value: bytes, option: dict[str, object]) -> None:
        """Create by the server. gcsfs repeats a request whose answer was lost, and finds its own object there."""
        if self.protocol not in ("gs", "gcs"):
            fs.pipe_file(path, value, **option)
            return
        nonce = os.urandom(16).hex()
        try:
            fs.pipe_file(path, value, metadata={_NONCE: nonce}, **option)
        except FileExistsError:
            fs.invalidate_cache()
            found = self._info(fs, path)
            if found is None or (found.get("metadata") or {}).get(_NONCE) != nonce:
                raise

    def _replace(self, key: str, path: str, value: bytes) -> None:
        with self._calling(key, "write") as fs:
            if self._flat:
                fs.pipe_file(path, value)
            else:
                with self._temporary(fs, path, io.BytesIO(value)) as temp:
                    fs.mv(temp, path)

    @contextmanager
    def _temporary(self, fs: Any, path: str, source: Any) -> Iterator[str]:
        """Yield the name of a new file with the bytes of ``source`` beside ``path``; removed if the body fails."""
        parent, _, name = path.rpartition("/")
        fs.makedirs(parent, exist_ok=True)
        temp = f"{parent}/{_TEMP}{os.urandom(8).hex()}-{name}"[: len(parent) + 256]
        try:
            with fs.open(temp, "wb") as out:
                shutil.copyfileobj(source, out, _SLICE)
            yield temp
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                fs.rm_file(temp)
            raise

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> SpoolWriter:
        """See :class:`~ckpt.store.base.Store`. The bytes wait on the local disk until ``finish``."""
        path = self._path(key)
        return SpoolWriter(key, head, lambda spool: self._upload(key, path, spool))

    def _upload(self, key: str, path: str, spool: str) -> None:
        with self._calling(key, "upload") as fs:
            if self._memory:
                with open(spool, "rb") as source:
                    fs.pipe_file(path, source.read())
            elif not self._flat:
                with open(spool, "rb") as source, self._temporary(fs, path, source) as temp:
                    self._check_whole(fs, key, temp, os.stat(spool).st_size)
                    fs.mv(temp, path)
            else:
                self._send(fs, path, spool)
                self._check_whole(fs, key, path, os.stat(spool).st_size)

    def _send(self, fs: Any, path: str, spool: str) -> None:
        """Upload as the backend likes best. A broken upload must not be closed: closing is what publishes it."""
        if type(fs).put_file is not fsspec.AbstractFileSystem.put_file or hasattr(type(fs), "_put_file"):
            fs.put_file(spool, path)
            return
        out = fs.open(path, "wb")
        try:
            with open(spool, "rb") as source:
                shutil.copyfileobj(source, out, _SLICE)
        except BaseException:
            with suppress(Exception):
                out.discard()
            out.closed = True
            raise
        out.close()

    def _check_whole(self, fs: Any, key: str, path: str, expected: int) -> None:
        fs.invalidate_cache()
        found = self._info(fs, path)
        if found is None or found["size"] != expected:
            what = "nothing" if found is None else f"{found['size']} bytes"
            raise StoreError(f"upload {key!r} in {self.url}: {expected} bytes were sent, found {what}", key)

    def delete(self, key: str) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        with self._calling(key, "delete") as fs, suppress(FileNotFoundError):
            fs.rm_file(self._path(key))

    def remove_folder(self, prefix: str) -> None:
        """See :class:`~ckpt.store.base.HasFolders`. Where ``rmdir`` is known to spare a full one."""
        if self.protocol not in _SAFE_RMDIR or self.children(prefix):
            return
        with self._calling(prefix, "remove") as fs:
            try:
                fs.rmdir(self._path(prefix))
            except FileNotFoundError:
                return
            except OSError:
                if not self.children(prefix):
                    raise

    # ---------------------------------------------------------------------------------------------------------- read

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        path = self._path(key)
        with self._calling(key, "read") as fs:
            stop = None if nbytes is None else start + nbytes
            # Backends treat an empty range each in its own way, and allocate as much as they are asked for; and a FIFO
            # on a local file system would be waited for.
            if nbytes == 0 or (nbytes or 0) > _AT_ONCE or isinstance(fs, LocalFileSystem):
                size = self._size(fs, key, path)
                stop = size if stop is None else min(stop, size)
                if start >= stop:
                    return b""
            return self._range(fs, key, path, start, stop)

    def _range(self, fs: Any, key: str, path: str, start: int, stop: int | None) -> bytes:
        if start == 0 and stop is None:
            return bytes(fs.cat_file(path))
        try:
            data = bytes(fs.cat_file(path, start=start, end=stop))
        except (FileNotFoundError, PermissionError):
            raise
        except Exception:
            if start < self._size(fs, key, path):
                raise
            return b""  # a range past the end, which HTTP calls an error
        if stop is not None and len(data) > stop - start:  # a server without ranges sends the front of the object
            raise StoreError(f"read {key!r} in {self.url}: {len(data)} bytes came, expected {stop - start}", key)
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`. Holds at most a part of it (64 MiB) in memory beside ``buffer``."""
        view, done = buffer.cast("B"), 0
        while True:
            want = min(len(view) - done, _AT_ONCE)
            data = self.get(key, start + done, want)
            view[done : done + len(data)] = data
            done += len(data)
            if len(data) < want or done == len(view):
                return done

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        with self._calling(key, "stat") as fs:
            info = self._info(fs, self._path(key))
            if info is None:
                self._check_bucket(fs)
                return None
            if info["type"] == "directory":
                return None if self._flat else 0  # of an object store, a prefix; else something that has this name
            if info["size"] is None:
                raise StoreError(f"stat {key!r} in {self.url}: the file system does not tell sizes", key)
            return int(info["size"])

    def _info(self, fs: Any, path: str) -> dict[str, Any] | None:
        """Never ``fs.exists``: it takes every error for "no"."""
        try:
            return dict(fs.info(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _size(self, fs: Any, key: str, path: str) -> int:
        info = self._info(fs, path)
        if info is None:
            raise ObjectNotFound(f"read {key!r} in {self.url}: no such object", key)
        if info["type"] not in ("file", "link") or info["size"] is None:
            raise StoreError(f"read {key!r} in {self.url}: a {info['type']} is there, expected a file", key)
        return int(info["size"])

    # ---------------------------------------------------------------------------------------------------------- list

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`~ckpt.store.base.Store`. Folder by folder: ``fs.find`` and ``fs.walk`` leave out what fails."""
        folders = [prefix]
        while folders:
            folder = folders.pop()
            for name, info in self._entries(folder):
                key = f"{folder}/{name}" if folder else name
                if info["type"] == "directory":
                    folders.append(key)
                else:
                    yield ObjectInfo(key, int(info["size"] or 0), modified_of(info))

    def children(self, prefix: str) -> list[str]:
        """See :class:`~ckpt.store.base.Store`."""
        return list(dict.fromkeys(name for name, _ in self._entries(prefix)))

    def _entries(self, prefix: str) -> list[tuple[str, dict[str, Any]]]:
        """Return what lies directly below ``prefix``; nothing if it is not there, but then there must be a bucket."""
        path = self._path(prefix) if prefix else self._root
        with self._calling(prefix, "list") as fs:
            try:
                listed = fs.ls(path, detail=True)
            except FileNotFoundError:
                self._check_bucket(fs)
                return []
            rows = [(info["name"].rstrip("/"), info) for info in listed]
            itself = [info for name, info in rows if name == path]
            if itself and not self._flat and itself[0]["type"] != "directory":
                raise StoreError(f"list {prefix!r} in {self.url}: a file is there, expected a folder", prefix)
            return [(name.rpartition("/")[2], info) for name, info in rows if name != path]

    def _check_bucket(self, fs: Any) -> None:
        """Nothing in a bucket that does not exist would be "no checkpoints". Asked once."""
        if not self._bucket:
            return
        try:
            with mapped("", self.url, "list"):
                fs.info(self._bucket)
        except AccessDenied:
            pass  # objects may be listed without the right to look at the bucket
        except ObjectNotFound as error:
            raise StoreError(f"{self.url}: no bucket {self._bucket!r}") from error
        self._bucket = ""
