from __future__ import annotations

import inspect
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import AccessDenied, ConfigError, ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from ckpt.store.base import HasFolders, HasOrphans, Store
from ckpt.store.blocks import Blocks
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from ckpt.store.wrappers import Limited, Metered, Rate, Retrying, Tally, limited


class Clock:
    """Time that passes only where somebody waits; may be shared by threads."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.pauses.append(seconds)
            self.now += seconds


class Faulty(MemoryStore):
    """Raises what ``faults`` holds for an operation, first to last; ``after``: only once the operation is done."""

    def __init__(self, **faults: list[Exception | None]) -> None:
        super().__init__()
        self.faults, self.after, self.calls, self.inside = faults, False, [], False

    def _fail(self, name: str) -> None:
        self.calls.append(name)
        fault = self.faults[name].pop(0) if self.faults.get(name) else None
        if fault is not None:
            raise fault

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("put", "writer", "get", "read_into", "size", "walk", "children", "delete"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            if self.inside:  # one method of MemoryStore calls another
                return found(*args, **options)
            self.inside = True
            try:
                if not self.after:
                    self._fail(name)
                result = found(*args, **options)
                if self.after:
                    self._fail(name)
                return result
            finally:
                self.inside = False

        return call


def busy(text: str = "SlowDown") -> StoreUnavailable:
    return StoreUnavailable(text, "k")


def retrying(store: Store, **options: Any) -> tuple[Retrying, Clock]:
    clock = Clock()
    return Retrying(store, clock=clock, sleep=clock.sleep, **options), clock


CALLS: dict[str, Any] = {
    "put": lambda s: s.put("k", b"new", overwrite=True),
    "get": lambda s: s.get("k"),
    "read_into": lambda s: s.read_into("k", 0, memoryview(bytearray(3))),
    "size": lambda s: s.size("k"),
    "walk": lambda s: [info.key for info in s.walk("")],
    "children": lambda s: s.children(""),
    "delete": lambda s: s.delete("other"),
    "writer": lambda s: s.writer("w").__enter__().finish(),
}


# ------------------------------------------------------------------------------------------------------------- Retrying


@pytest.mark.parametrize("name", CALLS)
def test_what_is_transient_is_tried_again_with_the_same_result(name):
    store = Faulty(**{name: [busy(), busy(), busy()]})
    store.objects["k"] = b"old"
    plain = MemoryStore()
    plain.objects = dict(store.objects)
    expected = CALLS[name](plain)
    wrapped, clock = retrying(store)
    assert CALLS[name](wrapped) == expected
    assert store.calls == [name] * 4
    assert len(clock.pauses) == 3


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("fault", [StoreError("bad sector", "k"), AccessDenied("no", "k"), ObjectNotFound("gone", "k")])
def test_what_is_not_transient_is_raised_at_once(name, fault):
    wrapped, clock = retrying(Faulty(**{name: [fault]}))
    with pytest.raises(StoreError) as caught:
        CALLS[name](wrapped)
    assert caught.value is fault
    assert clock.pauses == []


def test_pauses_are_random_below_a_bound_that_doubles():
    wrapped, clock = retrying(Faulty(get=[busy() for _ in range(300)]), attempts=301, base_s=0.5, budget_s=1e9)
    with pytest.raises(ObjectNotFound):
        wrapped.get("k")
    assert len(clock.pauses) == 300
    bounds = [min(30.0, 0.5 * 2.0 ** min(n, 60)) for n in range(300)]
    assert all(0 <= pause <= bound for pause, bound in zip(clock.pauses, bounds, strict=True))
    parts = [pause / bound for pause, bound in zip(clock.pauses, bounds, strict=True)]
    assert min(parts) < 0.1, "full jitter: near zero as well"
    assert max(parts) > 0.9


def test_the_users_random_generator_is_not_moved():
    before = random.getstate()
    retrying(Faulty(delete=[busy(), busy()]))[0].delete("k")
    assert random.getstate() == before


def test_attempts_are_counted_and_the_last_error_tells():
    store = Faulty(size=[busy(f"busy {n}") for n in range(9)])
    wrapped, clock = retrying(store, attempts=3)
    with pytest.raises(StoreUnavailable, match=r"^busy 2 \(attempt 3, after [0-9.]+ s: given up\)$") as caught:
        wrapped.size("k")
    assert caught.value.key == "k"
    assert caught.value.transient
    assert len(store.calls) == 3
    assert len(clock.pauses) == 2


def test_no_attempt_begins_after_the_budget():
    store = Faulty(size=[busy() for _ in range(1000)])
    wrapped, clock = retrying(store, attempts=1000, budget_s=20, base_s=1)
    with pytest.raises(StoreUnavailable, match="given up"):
        wrapped.size("k")
    assert clock.now - 100 <= 20
    assert 2 <= len(store.calls) < 1000


def test_the_budget_is_for_each_call():
    store = Faulty(size=[busy(), None] * 50)
    wrapped, clock = retrying(store, attempts=2, budget_s=1, base_s=1)
    for _ in range(50):
        assert wrapped.size("k") is None
    assert len(clock.pauses) == 50


def test_a_create_whose_answer_was_lost_has_succeeded():
    store = Faulty(put=[busy("500 after success"), None])
    store.after = True
    wrapped, _ = retrying(store)
    wrapped.put("k", memoryview(b"mine"))
    assert store.objects == {"k": b"mine"}


@pytest.mark.parametrize("theirs", [b"them", b"a longer one", b""])
def test_a_create_that_lost_the_race_while_it_was_failing_is_refused(theirs):
    store = Faulty(put=[busy()])
    store.objects["k"] = theirs
    with pytest.raises(ObjectExists):
        retrying(store)[0].put("k", b"mine")
    assert store.objects == {"k": theirs}


def test_a_create_of_what_is_there_is_refused_even_if_the_bytes_are_equal():
    store = Faulty()
    store.objects["k"] = b"mine"
    with pytest.raises(ObjectExists):
        retrying(store)[0].put("k", b"mine")
    assert store.calls == ["put"], "and nothing is read for it"


def test_a_transient_error_while_the_bytes_are_compared_is_no_answer():
    store = Faulty(put=[busy()], size=[busy()], get=[busy()])
    store.objects["k"] = b"mine"
    retrying(store)[0].put("k", b"mine")
    assert store.calls.count("put") == 4
    store = Faulty(put=[busy()], get=[AccessDenied("may write, may not read", "k")])
    store.objects["k"] = b"mine"
    with pytest.raises(AccessDenied):
        retrying(store)[0].put("k", b"mine")


def test_a_stream_is_not_repeated():
    class Writer:
        calls = 0

        def write(self, data: Any) -> None:
            self.calls += 1
            raise busy()

        finish = write

        def __enter__(self) -> Writer:
            return self

        def __exit__(self, *exc: object) -> None: ...

    writer = Writer()
    store = MemoryStore()
    store.writer = lambda *args, **options: writer  # type: ignore[method-assign, assignment]
    wrapped, clock = retrying(store)
    with pytest.raises(StoreUnavailable, match=r"^SlowDown$"), wrapped.writer("k") as out:
        out.write(b"x")
    assert (writer.calls, clock.pauses) == (1, [])


def test_a_listing_that_breaks_off_begins_anew_and_names_nothing_twice():
    class Half(MemoryStore):
        broken = 2

        def walk(self, prefix: str) -> Any:
            for n, info in enumerate(super().walk(prefix)):
                if n == 2 and self.broken:
                    self.broken -= 1
                    raise busy()
                yield info

    store = Half()
    for key in "abcd":
        store.put(key, b"")
    assert [info.key for info in retrying(store)[0].walk("")] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "options",
    [{"attempts": 0}, {"attempts": 1.5}, {"attempts": True}, {"budget_s": 0}, {"budget_s": -1}, {"base_s": "1"},
     {"base_s": float("nan")}, {"budget_s": None}],
    ids=str,
)  # fmt: skip
def test_retrying_refuses_wrong_numbers(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Retrying(MemoryStore(), **options)


# -------------------------------------------------------------------------------------------------------------- Limited


def limit(bytes_per_s: float, store: Store | None = None) -> tuple[Limited, Clock, Metered]:
    clock, meter = Clock(), Metered(store or MemoryStore())
    return Limited(meter, Rate(bytes_per_s, clock, clock.sleep)), clock, meter


def write(store: Store, nbytes: int) -> None:
    with store.writer("w", head=nbytes // 2) as out:
        out.write(bytes(nbytes - nbytes // 2))
        out.finish(bytes(nbytes // 2))


MOVES: dict[str, Any] = {
    "put": lambda s: s.put("new", bytes(10_000)),
    "overwrite": lambda s: s.put("k", bytes(10_000), overwrite=True),
    "get": lambda s: s.get("k"),
    "range": lambda s: s.get("k", 0, 10_000),
    "read_into": lambda s: s.read_into("k", 0, memoryview(bytearray(10_000))),
    "writer": lambda s: write(s, 10_000),
}


@pytest.mark.parametrize("rate", [10, 999.5, 2000, 10_000, 10**9])
@pytest.mark.parametrize("name", MOVES)
def test_all_that_moves_bytes_takes_its_time(name, rate):
    store, clock, _ = limit(rate)
    store.inner.inner.put("k", bytes(10_000))
    for _ in range(3):
        MOVES[name](store)
        if name == "put":
            store.delete("new")
    took = clock.now - 100
    assert 30_000 / rate - 0.25 <= took + 1e-6
    assert took <= 30_000 / rate + 1e-6


@pytest.mark.parametrize("rate", [100, 4096, 10**6])
def test_no_second_has_more_than_its_bytes_and_the_burst_after_a_rest(rate):
    clock, moved = Clock(), []

    class Noting(MemoryStore):
        def read_into(self, key: str, start: int, buffer: memoryview) -> int:
            moved.append((clock.now, len(buffer)))
            return len(buffer)

    store = Limited(Noting(), Rate(rate, clock, clock.sleep))
    for _ in range(4):
        clock.now += 50  # a rest saves nothing up beyond the burst
        store.read_into("k", 0, memoryview(bytearray(5 * rate)))
    for begin, _ in moved:
        assert sum(n for at, n in moved if begin <= at < begin + 1) <= 1.26 * rate
        assert sum(n for at, n in moved if begin <= at < begin + 0.01) <= 0.3 * rate, "smooth, not second by second"


def test_one_limit_for_all_threads_and_writers_and_each_gets_on():
    store, clock, _ = limit(100_000)
    ends: dict[int, float] = {}

    def one(number: int) -> None:
        with store.writer(f"w{number}") as out:
            for _ in range(10):
                out.write(bytes(10_000))
            out.finish()
        ends[number] = clock.now

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 8
    # The clock is everybody's: a pause that several wait through counts several times, hence no upper bound.
    assert clock.now - 100 >= 8 * 100_000 / 100_000 - 0.25


def test_those_who_wait_are_served_in_turn():
    """A large transfer is many slices, so a small one that comes later waits for one slice, not for all of them."""
    waits: list[tuple[str, float]] = []
    rate = Rate(1000, clock=lambda: 0.0, sleep=lambda seconds: step(seconds))
    plan = iter(["small"])

    def step(seconds: float) -> None:
        waits.append((who[-1], seconds))
        if next(plan, None):  # the large one sleeps for the first time: now the small one comes
            who.append("small")
            rate.take(10)
            who.pop()

    who = ["large"]
    rate.take(5000)
    small = next(seconds for name, seconds in waits if name == "small")
    assert small <= 0.25
    assert max(seconds for _, seconds in waits) == pytest.approx(5 - 0.125, abs=0.15)


def test_what_did_not_come_is_not_paid_for():
    store, clock, _ = limit(1000)
    store.inner.inner.put("k", bytes(10))
    for _ in range(100):
        assert store.get("k", 5, 900) == bytes(5)
        assert store.read_into("k", 5, memoryview(bytearray(100))) == 5
        assert store.get("k", 50, 900) == b""
        with pytest.raises(ObjectNotFound):
            store.get("no", 0, 900)
    assert clock.now - 100 < 100 * 2.9, "at most the waiting for what might have come"
    began = clock.now
    store.get("k")
    assert clock.now - began < 1, "no debt is left"


@pytest.mark.parametrize("nbytes", [0, 1, 124, 125, 126, 1000, 1001, 5000])
def test_slices_make_the_same_bytes(nbytes):
    store, _, meter = limit(1000)
    data = bytes(n * 7 % 251 for n in range(nbytes))
    with store.writer("k") as out:
        out.write(data)
        out.finish()
    assert meter.inner.objects["k"] == data
    assert store.get("k") == store.get("k", 0, 10**15) == data
    assert store.get("k", 3) == data[3:]
    assert store.get("k", 3, 2000) == data[3:2003]
    buffer = memoryview(bytearray(nbytes + 9))
    assert store.read_into("k", 0, buffer) == nbytes
    assert bytes(buffer[:nbytes]) == data


def test_a_read_of_less_than_a_second_is_one_request_and_never_asks_for_the_size():
    store, _, meter = limit(10_000)
    store.put("k", bytes(9000))
    store.get("k", 100, 8000)
    assert meter.snapshot()["get"].calls == 1
    assert meter.snapshot()["size"].calls == 0


def test_an_object_that_grows_between_the_look_and_the_read_is_read_whole_and_paid_for():
    class Growing(MemoryStore):
        def size(self, key: str) -> int | None:
            found = super().size(key)
            self.objects[key] = bytes(900)
            return found

    store, clock, _ = limit(1000, Growing())
    store.inner.inner.objects["k"] = b"1"
    assert len(store.get("k")) == 900
    store.put("next", bytes(100))
    assert clock.now - 100 == pytest.approx(0.9, abs=0.2)


def test_a_small_object_under_a_large_bound_costs_its_own_bytes():
    store, clock, meter = limit(1000)
    store.inner.inner.put("k", bytes(40))
    for _ in range(100):
        assert len(store.get("k", 0, 900)) == 40
    assert clock.now - 100 == pytest.approx(4, abs=0.3)
    assert meter.snapshot()["size"].calls == 0


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "10", True, [1], 0.0], ids=repr)
def test_a_limit_must_be_a_positive_number(value):
    for make in (lambda: Limited(MemoryStore(), value), lambda: Rate(value), lambda: limited(MemoryStore(), value)):
        with pytest.raises(ConfigError, match="expected a positive number"):
            make()


def test_with_blocks_bytes_wait_for_their_time_behind_the_caller():
    go, written = threading.Event(), []

    def sleep(seconds: float) -> None:
        written.append(seconds)
        assert go.wait(30)

    store = Limited(MemoryStore(), Rate(1000, lambda: 0.0, sleep))
    data = bytes(range(256)) * 16
    with store.writer("k", head=3, blocks=Blocks(1 << 20, 4096)) as out:
        for _ in range(20):
            out.write(data)  # the rate lets nothing pass: this returns all the same
        go.set()
        out.finish(b"abc")
    assert store.inner.objects["k"] == b"abc" + data * 20
    assert written


def test_stores_of_a_process_with_one_limit_share_it():
    one, other = limited(MemoryStore(), 123456), limited(MemoryStore(), 123456)
    assert isinstance(one, Limited)
    assert isinstance(other, Limited)
    assert one.rate is other.rate
    plain = MemoryStore()
    assert limited(plain, None) is plain


# -------------------------------------------------------------------------------------------------------------- Metered


def test_every_operation_is_counted_with_its_bytes_and_errors():
    store = Metered(MemoryStore())
    store.put("k", bytes(10))
    store.put("k", memoryview(bytes(12)), overwrite=True)
    with pytest.raises(ObjectExists):
        store.put("k", bytes(1000))
    with store.writer("w", head=3) as out:
        out.write(bytes(5))
        out.write(bytes(6))
        out.finish(b"abc")
    store.get("k")
    store.get("k", 10, 100)
    with pytest.raises(ObjectNotFound):
        store.get("no")
    store.read_into("w", 4, memoryview(bytearray(100)))
    store.size("k")
    assert [info.key for info in store.walk("")] == ["k", "w"]
    store.children("")
    store.delete("k")
    found = {name: (t.calls, t.errors, t.nbytes) for name, t in store.snapshot().items()}
    assert found == {
        "put": (3, 1, 22), "writer": (1, 0, 0), "write": (2, 0, 11), "finish": (1, 0, 3), "get": (3, 1, 14),
        "read_into": (1, 0, 10), "size": (1, 0, 0), "walk": (1, 0, 0), "children": (1, 0, 0), "delete": (1, 0, 0),
    }  # fmt: skip
    assert (store.bytes_read, store.bytes_written) == (24, 36)
    assert all(t.seconds > 0 for t in store.snapshot().values())
    store.reset()
    assert set(store.snapshot().values()) == {Tally()}


def test_a_snapshot_is_not_changed_by_later_calls():
    store = Metered(MemoryStore())
    before = store.snapshot()
    store.put("k", b"1")
    assert before["put"] == Tally()
    assert store.snapshot()["put"].calls == 1


def test_an_error_in_a_listing_is_counted_wherever_it_comes():
    store = Metered(Faulty(walk=[busy(), None]))
    with pytest.raises(StoreUnavailable):
        list(store.walk(""))
    assert list(store.walk("")) == []
    tally = store.snapshot()["walk"]
    assert (tally.calls, tally.errors) == (2, 1)


def test_threads_lose_no_count():
    store = Metered(MemoryStore())
    store.put("k", bytes(3))

    def one() -> None:
        for _ in range(500):
            store.get("k")

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.snapshot()["get"].calls == 4000
    assert store.bytes_read == 12_000


def test_every_byte_is_read_once_is_something_that_can_be_proved(tmp_path):
    store = Metered(LocalStore(str(tmp_path)))
    store.put("k", bytes(1000))
    for start in range(0, 1000, 300):
        store.read_into("k", start, memoryview(bytearray(300)))
    assert store.bytes_read == 1000


# -------------------------------------------------------------------------------------------------------------- all


WRAPS: dict[str, Any] = {"retrying": Retrying, "metered": Metered, "limited": lambda s: Limited(s, 1e12)}


@pytest.mark.parametrize("outer", WRAPS)
@pytest.mark.parametrize("inner", WRAPS)
def test_what_only_some_stores_can_do_is_found_through_any_wrappers(tmp_path, inner, outer):
    able = MemoryStore()
    able.orphans, able.abort = lambda: ["upload 1"], lambda upload: f"aborted {upload}"  # type: ignore[attr-defined]
    store = WRAPS[outer](WRAPS[inner](able))
    assert isinstance(store, Store)
    assert isinstance(store, HasOrphans)
    assert not isinstance(store, HasFolders)
    # What isinstance() looks at from Python 3.12 on: it does not ask __getattr__.
    assert inspect.getattr_static(store, "orphans", None) is not None
    assert store.orphans() == ["upload 1"]
    assert store.abort("upload 1") == "aborted upload 1"
    local = WRAPS[outer](WRAPS[inner](LocalStore(str(tmp_path))))
    assert local.root == local.url == str(tmp_path)
    assert not isinstance(local, HasOrphans)
    for missing in ("no_such_thing", "_private", "__no__"):
        with pytest.raises(AttributeError, match=missing):
            getattr(local, missing)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_writer_forwards_what_the_one_below_can_do(wrap):
    store = MemoryStore()
    real = store.writer
    store.writer = lambda *args, **options: SimpleNamespace(  # type: ignore[method-assign, assignment]
        **{n: getattr(real("w"), n) for n in ("write", "finish")}, upload_id="u1"
    )
    assert wrap(store).writer("w").upload_id == "u1"


def test_where_a_wrapper_stands_says_what_it_sees():
    store = Faulty(put=[busy(), busy()])
    below, clock = Metered(store), Clock()
    above = Metered(Retrying(below, clock=clock, sleep=clock.sleep))
    above.put("k", b"1234")
    assert above.snapshot()["put"].calls == 1
    assert (below.snapshot()["put"].calls, below.snapshot()["put"].errors) == (3, 2)
    assert above.bytes_written == below.bytes_written == 4
