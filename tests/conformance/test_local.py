"""The local file system."""

from __future__ import annotations

from ckpt.store.local import LocalStore
from tests.conformance.store_suite import StoreSuite


class TestLocal(StoreSuite):
    def make(self):
        return LocalStore(str(self.place))

    def again(self, store):
        return LocalStore(store.root)

    def raw(self, store, key):
        path = self.place / key
        return path.read_bytes() if path.exists() else None
