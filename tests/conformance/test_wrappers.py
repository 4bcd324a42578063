"""Every wrapper is a store, over memory and over a disk, and so are all of them at once."""

from __future__ import annotations

from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from ckpt.store.wrappers import Limited, Metered, Rate, Retrying
from tests.conformance.store_suite import StoreSuite

FAST = Rate(10**12)


class OverMemory(StoreSuite):
    """``WRAP``: from a store to the wrapped one."""

    keeps_in_memory = True

    def wrap(self, store):
        raise NotImplementedError

    def make(self):
        return self.wrap(MemoryStore())

    def again(self, store):
        while hasattr(store, "inner"):
            store = store.inner
        return self.wrap(store)

    def raw(self, store, key):
        return store.objects.get(key)


class OverLocal(OverMemory):
    keeps_in_memory = False

    def make(self):
        return self.wrap(LocalStore(str(self.place)))

    def again(self, store):
        return self.wrap(LocalStore(store.root))

    def raw(self, store, key):
        path = self.place / key
        return path.read_bytes() if path.exists() else None


class IsRetrying:
    def wrap(self, store):
        return Retrying(store)


class IsLimited:
    def wrap(self, store):
        return Limited(store, FAST)


class IsMetered:
    def wrap(self, store):
        return Metered(store)


class IsAll:
    def wrap(self, store):
        return Limited(Retrying(Metered(Limited(store, FAST))), FAST)


class TestRetryingMemory(IsRetrying, OverMemory): ...


class TestRetryingLocal(IsRetrying, OverLocal): ...


class TestLimitedMemory(IsLimited, OverMemory): ...


class TestLimitedLocal(IsLimited, OverLocal): ...


class TestMeteredMemory(IsMetered, OverMemory): ...


class TestMeteredLocal(IsMetered, OverLocal): ...


class TestAllMemory(IsAll, OverMemory): ...


class TestAllLocal(IsAll, OverLocal): ...


class TestSlowlyLimitedMemory(OverMemory):
    """A rate at which nearly everything takes several slices; nobody waits, for its clock goes on by itself."""

    def wrap(self, store):
        return Limited(store, Rate(400_000, clock=lambda: 0.0, sleep=lambda _: None))
