"""File systems of fsspec: one in memory, one of real folders, and bare ones that can do no more than they must."""

from __future__ import annotations

import itertools

import fsspec
import pytest

from ckpt.store.fsspec_store import FsspecStore
from tests.conformance.bare_fs import BareObjects, BareTree
from tests.conformance.store_suite import StoreSuite

NUMBERS = itertools.count()


class TestMemory(StoreSuite):
    keeps_in_memory = True

    def make(self):
        return FsspecStore(f"memory://suite/{next(NUMBERS)}")

    def again(self, store):
        return FsspecStore(store.url)

    def raw(self, store, key):
        found = fsspec.filesystem("memory").store.get(f"{store.url.removeprefix('memory:/')}/{key}")
        return found and found.getvalue()


class TestLocalFileSystem(StoreSuite):
    def make(self):
        return FsspecStore(f"local://{self.place}")

    def again(self, store):
        return FsspecStore(store.url)

    def raw(self, store, key):
        path = self.place / key
        return path.read_bytes() if path.exists() else None


class TestBareObjects(StoreSuite):
    """An object store without conditional writes, and with listings that it remembers."""

    keeps_in_memory = True

    @pytest.fixture(autouse=True)
    def registered(self):
        fsspec.register_implementation("bareobjects", BareObjects, clobber=True)
        BareObjects.objects.clear()

    def make(self):
        return FsspecStore("bareobjects://bucket/run")

    def again(self, store):
        return FsspecStore(store.url)

    def raw(self, store, key):
        return BareObjects.objects.get(f"bucket/run/{key}")


class TestBareTree(TestBareObjects):
    """Folders and rename, but neither links nor exclusive creation: what a file server gives."""

    @pytest.fixture(autouse=True)
    def registered(self):
        fsspec.register_implementation("baretree", BareTree, clobber=True)
        BareTree.objects.clear()
        BareTree.folders.clear()

    def make(self):
        return FsspecStore("baretree://host/run")

    def raw(self, store, key):
        return BareTree.objects.get(f"host/run/{key}")
