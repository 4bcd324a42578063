"""The dict that serves as a model of a store."""

from __future__ import annotations

from ckpt.store.memory import MemoryStore
from tests.conformance.store_suite import StoreSuite


class TestMemory(StoreSuite):
    keeps_in_memory = True

    def make(self):
        return MemoryStore()

    def again(self, store):
        return store

    def raw(self, store, key):
        return store.objects.get(key)
