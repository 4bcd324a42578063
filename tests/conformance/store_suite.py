"""What every store must do. A backend subclasses :class:`StoreSuite` and says how to look behind the store's back."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from ckpt.errors import ConfigError, ObjectExists, ObjectNotFound
from ckpt.store.base import ObjectInfo, ObjectWriter, Store
from ckpt.store.blocks import BLOCK_BYTES, Blocks

MIB = 1 << 20
PIECE = bytes(range(251)) * 4001
"""A written piece (about 1 MB) of a length that divides no block, part or page."""


def body_of(nbytes: int) -> bytes:
    """Bytes that differ from block to block, so that one in another's place is found."""
    return b"".join(bytes([n % 256]) * 1000 + PIECE for n in range(nbytes // len(PIECE) + 1))[:nbytes]


class StoreSuite:
    """``make``: a store on an empty place; ``again``: another client of the same place; ``raw``: bytes under a key,
    read without the store (None: nothing there). ``keeps_in_memory``: the store itself is this process's memory.
    """

    keeps_in_memory = False

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

    @pytest.mark.parametrize("data", [b"", b"x", b"equal bytes"])
    def test_put_of_an_existing_key_is_refused_also_with_equal_bytes(self, store, data):
        store.put("k", data)
        for again in (data, bytes(bytearray(data))):
            with pytest.raises(ObjectExists, match="'k'"):
                store.put("k", again)
            with pytest.raises(ObjectExists, match="'k'"):
                self.again(store).put("k", again)
        assert self.raw(store, "k") == data

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
        assert len(winners) == 1, outcomes
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

    # ------------------------------------------------------------------------- a head that comes last, shared memory

    @pytest.mark.parametrize("nbytes", [0, 1, 100_001], ids=lambda n: f"body {n}")
    @pytest.mark.parametrize("head", [b"", b"h", bytes(range(256)) * 40], ids=lambda h: f"head {len(h)}")
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_a_head_that_is_brought_last_comes_first(self, store, head, nbytes, kind):
        body = body_of(nbytes)
        with store.writer("p/x", head=len(head), size=len(head) + nbytes) as out:
            out.write(body[:37])
            out.write(body[37:])
            out.finish(kind(head))
        assert self.raw(store, "p/x") == head + body
        assert store.get("p/x", max(0, len(head) - 1), 3) == (head + body)[max(0, len(head) - 1) :][:3]
        assert store.size("p/x") == len(head) + nbytes
        assert list(store.walk("")) == [ObjectInfo("p/x", len(head) + nbytes)], "and leaves nothing else behind"

    @pytest.mark.parametrize(("expected", "given"), [(0, 1), (8, 0), (8, 7), (8, 9), (9000, 8000)])
    @pytest.mark.parametrize("nbytes", [5, 2 * BLOCK_BYTES + 5], ids=["small", "large"])
    def test_a_head_of_another_length_is_refused_and_nothing_is_published(self, store, expected, given, nbytes):
        blocks = Blocks(4 * BLOCK_BYTES)

        def write() -> None:
            with store.writer("p/x", head=expected, blocks=blocks) as out:
                out.write(bytes(nbytes))
                out.finish(b"h" * given)

        with pytest.raises(ConfigError, match=rf"head of {given} bytes for 'p/x', expected {expected}"):
            write()
        assert self.raw(store, "p/x") is None
        assert store.size("p/x") is None
        assert list(store.walk("")) == []
        assert blocks.in_use == 0

    @pytest.mark.parametrize("head", [0, 4096 + 13, BLOCK_BYTES + 1], ids=["no head", "head", "head over a block"])
    @pytest.mark.parametrize("size", [0, 1, -1, 64 * MIB], ids=["unknown", "too small", "right", "too large"])
    def test_a_body_of_many_blocks_whatever_size_was_expected(self, store, head, size):
        first, body = b"h" * head, body_of(5 * BLOCK_BYTES + 777)
        blocks = Blocks(4 * BLOCK_BYTES)
        hint = len(first) + len(body) if size == -1 else size
        with store.writer("p/x", head=head, size=hint, blocks=blocks) as out:
            for start in range(0, len(body), len(PIECE)):
                out.write(memoryview(body)[start : start + len(PIECE)])
            out.finish(first)
        stored = self.raw(store, "p/x")
        assert stored is not None
        assert len(stored) == len(first) + len(body)
        assert stored == first + body
        assert blocks.in_use == 0, "every block is given back"

    @pytest.mark.parametrize("nbytes", [100, 64 * MIB], ids=["a little too large", "far too large"])
    def test_a_small_object_that_was_expected_to_be_larger(self, store, nbytes):
        with store.writer("p/x", head=2, size=nbytes) as out:
            out.write(b"body")
            out.finish(b"hd")
        assert self.raw(store, "p/x") == b"hdbody"
        assert store.size("p/x") == 6

    def test_what_was_written_is_not_the_memory_of_the_caller(self, store):
        buffer, expected = bytearray(len(PIECE)), b""
        with store.writer("p/x", head=3) as out:
            for n in range(9):
                buffer[:] = bytes([n]) * len(buffer)
                out.write(buffer)
                expected += buffer
            buffer[:] = b"\xff" * len(buffer)
            out.finish(b"abc")
        assert self.raw(store, "p/x") == b"abc" + expected

    def test_writers_share_few_blocks_without_waiting_for_each_other_for_ever(self, store):
        blocks = Blocks(4 * BLOCK_BYTES)
        bodies = {f"p/{n}": body_of(2 * BLOCK_BYTES + 12345 * n) for n in range(4)}
        errors: list[BaseException] = []

        def one(key: str) -> None:
            try:
                with self.again(store).writer(key, head=5, blocks=blocks) as out:
                    for start in range(0, len(bodies[key]), len(PIECE)):
                        out.write(bodies[key][start : start + len(PIECE)])
                    out.finish(b"12345")
            except BaseException as error:  # an assertion in a thread is not seen
                errors.append(error)

        threads = [threading.Thread(target=one, args=(key,), daemon=True) for key in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), f"writers wait for ever, {blocks.in_use} bytes in use"
        assert errors == []
        assert blocks.in_use == 0
        for key, body in bodies.items():
            assert self.raw(store, key) == b"12345" + body

    @pytest.mark.parametrize("head", [0, 100])
    def test_an_aborted_writer_gives_its_blocks_back(self, store, head):
        blocks = Blocks(4 * BLOCK_BYTES)

        def write() -> None:
            with store.writer("p/x", head=head, blocks=blocks) as out:
                for _ in range(3):
                    out.write(bytes(BLOCK_BYTES - 1))
                raise RuntimeError("the device is gone")

        with pytest.raises(RuntimeError, match="the device is gone"):
            write()
        assert blocks.in_use == 0
        assert list(store.walk("")) == []

    @pytest.mark.parametrize("head", [0, 100])
    def test_a_writer_holds_no_memory_but_its_blocks(self, store, head):
        if self.keeps_in_memory:
            pytest.skip("the store is memory")
        blocks, piece = Blocks(4 * BLOCK_BYTES), bytes(MIB)
        with self.again(store).writer("warm", head=head, blocks=blocks) as out:  # imports, clients, thread pools
            out.write(piece)
            out.finish(bytes(head))
        tracemalloc.start()
        try:
            with store.writer("p/x", head=head, blocks=blocks) as out:
                for _ in range(40):
                    out.write(piece)
                out.finish(bytes(head))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Blocks are mapped memory, which is not traced; a stored body of 40 MiB in Python's own memory would be.
        assert peak < 8 * MIB, f"{peak} bytes beside the blocks"
        assert store.size("p/x") == 40 * MIB + head
