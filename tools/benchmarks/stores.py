"""Where checkpoints go: memory (tmpfs), a disk, an S3 server; and what a benchmark must know of the files there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from measure import cached_share, files_below, fsync, make_cold, size_below

from benchmarks.system import available_memory

BUCKET = "bench"
SPARE = 2 << 30
"""Bytes of memory that checkpoints in memory leave alone: the systems stage in it."""


class FileStore:
    """Checkpoints in folders below ``root``."""

    def __init__(self, name: str, root: str) -> None:
        self.name, self.root = name, Path(root)

    def place(self, *parts: str) -> str:
        """Return the place of one checkpoint; the folder above it exists."""
        folder = self.root.joinpath(*(part.replace(" ", "-") for part in parts))
        folder.parent.mkdir(parents=True, exist_ok=True)
        return str(folder)

    def size(self, place: str) -> int:
        """Return the bytes of all files of a place."""
        return size_below(Path(place))

    def sync(self, place: str, rank: int, world: int) -> None:
        """Bring this rank's part of a place's files to the disk, and the folders' entries."""
        files = files_below(Path(place))
        folders = sorted({path.parent for path in files} | {Path(place).parent})
        for path in (files + folders)[rank::world]:
            fsync(path)

    def make_cold(self, place: str) -> float:
        """Drop a place's files from the page cache. Returns the share of them that is still in it."""
        make_cold(Path(place))
        return cached_share(Path(place))

    def remove(self, place: str) -> None:
        """Delete a place."""
        shutil.rmtree(place, ignore_errors=True)

    def free(self) -> int:
        """Return the bytes that still fit; into memory, without starving everything else."""
        free = shutil.disk_usage(self.root).free
        return min(free, available_memory() - SPARE) if self.name == "tmpfs" else free

    def settle(self) -> None:
        """Wait until nothing is left to write, so that nobody pays for what another left behind."""
        os.sync()


class S3Store:
    """Checkpoints below a prefix of a bucket; endpoint and credentials stand in the environment."""

    def __init__(self, name: str, root: str) -> None:
        import boto3

        self.name, self.root = name, root
        self._client: Any = boto3.client("s3")

    def place(self, *parts: str) -> str:
        return "/".join((self.root, *(part.replace(" ", "-") for part in parts)))

    def _keys(self, place: str) -> list[tuple[str, int]]:
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix + "/")
        return [(one["Key"], one["Size"]) for page in pages for one in page.get("Contents", ())]

    def size(self, place: str) -> int:
        return sum(size for _, size in self._keys(place))

    def sync(self, place: str, rank: int, world: int) -> None:
        """Nothing: an object is there or is not."""

    def make_cold(self, place: str) -> float:
        """Nothing that a client could do."""
        return float("nan")

    def remove(self, place: str) -> None:
        bucket = place.removeprefix("s3://").partition("/")[0]
        for key, _ in self._keys(place):
            self._client.delete_object(Bucket=bucket, Key=key)

    def free(self) -> int:
        return 1 << 62

    def settle(self) -> None:
        """Nothing."""


def open_store(name: str, root: str) -> FileStore | S3Store:
    """Return the store of a root as the launcher wrote it."""
    return (S3Store if root.startswith("s3://") else FileStore)(name, root)
