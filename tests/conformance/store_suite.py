"""What every store must do. A backend subclasses :class:`StoreSuite` and says how to look behind the store's back."""

from __future__ import annotations

import threading

import pytest

from ckpt.errors import ConfigError, ObjectExists, ObjectNotFound
from ckpt.store.base import ObjectInfo, ObjectWriter, Store


class StoreSuite:
    """``make``: a store on an empty place; ``again``: another client of the same place; ``raw``: bytes under a key,
    read without the store (None: nothing there).
    """

    def make(self) -> Store:
        raise NotImplementedError

    def again(self, store: Store) -> Store:
        raise NotImplementedError

    def raw(self, store: Store, key: str) -> bytes | None:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path) -> Store:
        self.place = tmp_path / "root"
        return self.make()

    def test_it_is_a_store(self, store):
        assert isinstance(store, Store)
        assert store.url

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 17], ids=["empty", "one", "many"])
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_then_get_gives_the_same_bytes(self, store, data, kind):
        store.put("a/b/c.bin", kind(data))
        assert store.get("a/b/c.bin") == data
        assert self.raw(store, "a/b/c.bin") == data
        assert store.size("a/b/c.bin") == len(data)
        assert self.again(store).get("a/b/c.bin") == data

    def test_put_of_an_existing_key_is_refused_and_changes_nothing(self, store):
        store.put("k", b"first")
        with pytest.raises(ObjectExists, match="'k'") as caught:
            store.put("k", b"second")
        assert caught.value.key == "k"
        assert not caught.value.transient
        assert self.raw(store, "k") == b"first"
        assert [info.key for info in store.walk("")] == ["k"], "and leaves nothing else behind"

    def test_put_with_overwrite_replaces(self, store):
        store.put("k", b"a longer first value")
        store.put("k", b"second", overwrite=True)
        store.put("new", b"third", overwrite=True)
        assert (store.get("k"), store.get("new")) == (b"second", b"third")

    def test_exactly_one_of_several_racing_puts_wins(self, store):
        gate = threading.Barrier(8)
        outcomes: list[object] = []

        def one(number: int) -> None:
            mine = self.again(store)
            gate.wait()
            try:
                mine.put("race/commit", b"%d" % number * 1000)
            except ObjectExists as error:
                outcomes.append(error)
            else:
                outcomes.append(number)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [o for o in outcomes if isinstance(o, int)]
        assert len(outcomes) == 8
        assert len(winners) == 1
        assert self.raw(store, "race/commit") == b"%d" % winners[0] * 1000
        assert [info.key for info in store.walk("")] == ["race/commit"]

    def test_ranges(self, store):
        store.put("k", bytes(range(100)))
        assert store.get("k", 10, 5) == bytes(range(10, 15))
        assert store.get("k", 90) == bytes(range(90, 100))
        assert store.get("k", 95, 50) == bytes(range(95, 100)), "past the end: fewer bytes, no error"
        assert store.get("k", 200, 5) == b""
        assert store.get("k", 5, 0) == b""

    def test_read_into_fills_the_buffer_and_says_how_much_there_was(self, store):
        store.put("k", bytes(range(100)))
        buffer = memoryview(bytearray(b"\xff" * 20))
        assert store.read_into("k", 90, buffer) == 10
        assert bytes(buffer) == bytes(range(90, 100)) + b"\xff" * 10
        assert store.read_into("k", 0, buffer) == 20
        assert bytes(buffer) == bytes(range(20))
        assert store.read_into("k", 500, buffer) == 0
        assert store.read_into("k", 0, buffer[:0]) == 0

    def test_what_is_not_there(self, store):
        for call in (lambda: store.get("no/such"), lambda: store.read_into("no/such", 0, memoryview(bytearray(1)))):
            with pytest.raises(ObjectNotFound, match="no/such") as caught:
                call()
            assert caught.value.key == "no/such"
        assert store.size("no/such") is None
        assert list(store.walk("no")) == []
        assert store.children("no") == []
        store.delete("no/such")

    @pytest.mark.parametrize("key", ["", "/abs", "a//b", "a/", "../up", "a/../../up", ".", "a/./b", "a\0b"])
    def test_a_key_that_leaves_the_root_is_refused(self, store, key):
        for call in (lambda: store.put(key, b""), lambda: store.writer(key).finish()):
            with pytest.raises(ConfigError):
                call()
        assert list(store.walk("")) == []

    @pytest.mark.parametrize("key", ["a b/ü/名", "a.b/..c/d..", "q?x=1#f", "-x/--", "UP/up", "%2e%2e/x"])
    def test_keys_are_taken_literally(self, store, key):
        store.put(key, b"1")
        assert store.get(key) == b"1"
        assert [info.key for info in store.walk("")] == [key]
        assert store.children("") == [key.split("/")[0]]

    def test_walk_and_children(self, store):
        for key in ("steps/1/a", "steps/1/b/c", "steps/10/a", "stepsister", "top"):
            store.put(key, key.encode())
        assert sorted(store.walk("steps/1"), key=str) == [ObjectInfo("steps/1/a", 9), ObjectInfo("steps/1/b/c", 11)]
        assert {info.key for info in store.walk("")} == {
            "steps/1/a", "steps/1/b/c", "steps/10/a", "stepsister", "top",
        }  # fmt: skip
        assert sorted(store.children("steps")) == ["1", "10"]
        assert sorted(store.children("")) == ["steps", "stepsister", "top"]
        assert sorted(store.children("steps/1")) == ["a", "b"]

    def test_delete(self, store):
        store.put("a/k", b"1")
        store.put("a/other", b"2")
        store.delete("a/k")
        store.delete("a/k")
        assert store.size("a/k") is None
        assert self.raw(store, "a/k") is None
        assert store.get("a/other") == b"2"
        store.put("a/k", b"again")
        assert store.get("a/k") == b"again"

    def test_a_writer_publishes_all_of_it_at_finish(self, store):
        with store.writer("p/x") as out:
            assert isinstance(out, ObjectWriter)
            for part in (b"one ", bytearray(b"two "), memoryview(b"three"), b""):
                out.write(part)
            assert self.raw(store, "p/x") is None, "nothing under the name before finish"
            assert store.size("p/x") is None
            out.finish()
        assert self.raw(store, "p/x") == b"one two three"

    def test_a_writer_of_nothing_makes_an_empty_object(self, store):
        with store.writer("p/x") as out:
            out.finish()
        assert store.get("p/x") == b""

    @pytest.mark.parametrize("fail", [True, False], ids=["error", "no finish"])
    def test_an_aborted_writer_leaves_nothing(self, store, fail):
        def write() -> None:
            with store.writer("p/x") as out:
                out.write(b"half")
                if fail:
                    raise RuntimeError("the device is gone")

        if fail:
            with pytest.raises(RuntimeError, match="the device is gone"):
                write()
        else:
            write()
        assert list(store.walk("")) == []
        assert store.size("p/x") is None

    def test_a_returned_value_is_not_the_stored_memory(self, store):
        data = bytearray(b"before")
        store.put("k", data)
        data[:] = b"after!"
        assert store.get("k") == b"before"
