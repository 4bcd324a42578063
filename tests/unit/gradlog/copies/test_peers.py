"""Copies of records in the memory of other hosts: who keeps whose, how they get there, and where a load finds them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConfigError, StoreFull
from ckpt.format.frames import HEADER, frame_of
from ckpt.gradlog.copies import bringing, peers
from ckpt.gradlog.copies.bringing import Copies, Wanted
from ckpt.gradlog.copies.lines import address_here
from ckpt.gradlog.copies.memory import VARIABLE, HostMemory
from ckpt.gradlog.copies.peers import Peers, checked_peers, partners_of
from ckpt.store.local import LocalStore
from tests.property.fake import comms, each, run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ckpt.format.digest import Buffer

RUN = "0123456789abcdef" * 2
URL = "s3://bucket/run"
_local = threading.local()


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=24), st.integers(0, 6))
def test_each_rank_has_a_partner_on_each_of_the_hosts_behind_its_own(hosts: list[str], copies: int) -> None:
    found = partners_of(hosts, copies)
    count = min(copies, len(set(hosts)) - 1)
    for rank, partners in enumerate(found):
        theirs = [hosts[one] for one in partners]
        assert len(set(theirs)) == len(theirs) == count
        assert hosts[rank] not in theirs
    load = Counter(one for partners in found for one in partners)
    for distance in range(count):  # ranks of one host are spread evenly over those of another
        for host in set(hosts):
            kept = Counter(p[distance] for r, p in enumerate(found) if hosts[r] == host)
            assert max(kept.values()) - min(kept.values()) <= 1
    assert sum(load.values()) == count * len(hosts)


def test_a_large_job_is_quick_to_pair() -> None:
    hosts = [f"host{rank // 8}" for rank in range(8192)]
    found = partners_of(hosts, 1)
    assert Counter(one for partners in found for one in partners) == dict.fromkeys(range(8192), 1)


@pytest.mark.parametrize(("asked", "memory"), [(-1, None), (1.5, None), (True, None), ("1", None), (1, 0), (1, "1GB")])
def test_what_is_no_number_is_refused(asked: object, memory: object) -> None:
    with pytest.raises(ConfigError, match="peer"):
        checked_peers(asked, memory)


def test_a_named_network_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert address_here() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(OSError, match=r"."):
        address_here()


@contextmanager
def on_hosts(hosts: Sequence[str]) -> Iterator[None]:
    """Let each thread of :func:`run_ranks` be on a host of its own."""

    def name() -> str:
        return hosts[_local.rank]

    with ExitStack() as stack:
        for module in ("memory", "peers"):
            stack.enter_context(mock.patch(f"ckpt.gradlog.copies.{module}.host_name", name))
        yield


def job(hosts: Sequence[str], work: Any) -> list[Any]:
    """Run ``work(comm)`` on each rank."""
    jobs = comms(len(hosts))

    def one(rank: int) -> Any:
        _local.rank = rank
        return work(jobs[rank])

    with on_hosts(hosts):
        return each(run_ranks(jobs, one))


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "memory"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return tmp_path / "memory"


def frame(rank: int, step: int, nbytes: int = 3000) -> list[Buffer]:
    return frame_of(step, [bytes([rank]) * nbytes, bytes([step % 251]) * 5])


def wait_for(one: Peers, received: int) -> None:
    with one._changed:
        while one.received < received:
            assert one._changed.wait(20), (one.received, received)


def keep_and_die(hosts: Sequence[str], steps: range, nbytes: int = 3000, copies: int = 1) -> list[tuple[int, int]]:
    """Each rank logs some steps, and ends by an error once all copies are where they should be."""

    def work(comm: Any) -> tuple[int, int]:
        with comm.joint("peers"):
            one = Peers(comm, URL, copies, None)
        for step in steps:
            one.copy(RUN, step, frame(comm.rank, step, nbytes))
        expected = len(one._sources) * len(steps) * sum(map(len, map(bytes, frame(0, 0, nbytes))))
        with comm.joint("end"):
            comm.run("end", lambda: wait_for(one, expected))
        one.close(failed=True)
        return one.sent, one.received

    return job(hosts, work)


def found_on(hosts: Sequence[str]) -> dict[str, dict[tuple[str, int], list[int]]]:
    held = {}
    for rank, host in enumerate(hosts):
        _local.rank = rank
        with on_hosts(hosts):
            memory = HostMemory.there(URL)
        held[host] = {} if memory is None else {key: steps for key, steps in memory.held().items() if steps}
    return held


@pytest.mark.parametrize("nbytes", [10, 3000])
def test_records_are_in_two_hosts_memory_and_stay_when_a_job_fails(nbytes: int, monkeypatch) -> None:
    monkeypatch.setattr(peers, "PIECE", 1000)  # several messages each
    hosts = ["a", "a", "b", "b", "c"]
    for sent, _ in keep_and_die(hosts, range(1, 5), nbytes):
        assert sent >= 4 * (HEADER + nbytes + 5)
    steps = [1, 2, 3, 4]
    assert found_on(hosts) == {
        "a": {(RUN, 0): steps, (RUN, 1): steps, (RUN, 4): steps},
        "b": {(RUN, 2): steps, (RUN, 3): steps, (RUN, 0): steps, (RUN, 1): steps},
        "c": {(RUN, 4): steps, (RUN, 2): steps, (RUN, 3): steps},
    }


def test_copies_of_a_job_that_ends_well_are_gone(base: Path) -> None:
    def work(comm: Any) -> str | None:
        with comm.joint("peers"):
            one = Peers(comm, URL, 1, None)
        for step in range(1, 4):
            one.copy(RUN, step, frame(comm.rank, step))
        one.trim(1)
        one.close(failed=False)
        return one.broken

    assert job(["a", "b", "c"], work) == ["ended"] * 3
    assert [files for _, _, files in os.walk(base) if files] == []


def test_one_host_keeps_its_own_copies_and_says_that_there_is_no_other(caplog: pytest.LogCaptureFixture) -> None:
    assert keep_and_die(["a", "a"], range(1, 3)) == [(0, 0), (0, 0)]
    assert found_on(["a"]) == {"a": {(RUN, 0): [1, 2], (RUN, 1): [1, 2]}}
    assert "the ranks are on 1 host(s)" in caplog.text


def test_who_does_not_know_the_word_brings_nothing() -> None:
    from multiprocessing import AuthenticationError
    from multiprocessing.connection import Client

    def work(comm: Any) -> str | None:
        with comm.joint("peers"):
            one = Peers(comm, URL, 1, None)
        assert one._lines is not None
        address = one._lines._addresses[1 - comm.rank]
        with pytest.raises(AuthenticationError):
            Client(address, authkey=b"guess")
        silent = Client(address)  # somebody who looks which ports are open, and says nothing
        one.copy(RUN, 1, frame(comm.rank, 1))
        wait_for(one, 1)
        one.close(failed=False)
        silent.close()
        return one.broken

    assert job(["a", "b"], work) == ["ended", "ended"]


def load(hosts: Sequence[str], wanted: Any) -> list[tuple[int, list[str]]]:
    """Bring what ranks want; return for each rank what came, and what is not in its host's memory then."""

    def work(comm: Any) -> tuple[int, list[str]]:
        with comm.joint("load"):
            copies = Copies(comm, URL)
            wishes = wanted(comm.rank)
            came = copies.bring(wishes)
            comm.run("end", lambda: None)
        lacking = []
        for wish in wishes:
            for first, last in wish.ranks:
                for rank in range(first, last + 1):
                    for step in range(wish.first, wish.last + 1):
                        place = copies.near.memory and copies.near.memory.place(wish.run, rank, step)
                        expected = b"".join(map(bytes, frame(rank, step)))
                        if not place or copies.near.memory.store.get(place.key) != expected:
                            lacking.append(f"rank {rank}, step {step}")
        return came, lacking

    return job(hosts, work)


def own(rank: int) -> list[Wanted]:
    return [Wanted(RUN, [(rank, rank)], 2, 9)]


def test_a_partner_that_does_not_take_copies_holds_up_no_other(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(peers, "MANY", 3)
    monkeypatch.setattr(peers, "CLOSE_SECONDS", 0.3)
    stuck, answer = threading.Event(), Peers._receive

    def receive(one: Peers, line: Any) -> None:
        if one.rank == 1:
            stuck.wait(60)
        answer(one, line)

    monkeypatch.setattr(Peers, "_receive", receive)

    def work(comm: Any) -> tuple[int, bool]:
        with comm.joint("peers"):
            one = Peers(comm, URL, 2, None)
        size = sum(map(len, map(bytes, frame(0, 0, 2_000_000))))
        for step in range(20):
            one.copy(RUN, step, frame(comm.rank, step, 2_000_000))
        with comm.joint("end"):
            comm.run("end", lambda: wait_for(one, 0 if comm.rank == 1 else 2 * 20 * size))
        one.close(failed=False)
        with comm.joint("closed"):
            comm.run("closed", stuck.set)
        return one.received, one.broken is not None

    found = job(["a", "b", "c"], work)
    assert [received > 0 for received, _ in found] == [True, False, True]
    assert "rank 1 takes copies of log records more slowly" in caplog.text
    assert "rank(s) 1 did not end within" in caplog.text


def test_memory_that_takes_nothing_more_is_no_reason_not_to_load(base: Path) -> None:
    hosts = ["a", "b"]
    keep_and_die(hosts, range(2, 10))
    lose(base, hosts, "a")
    real = LocalStore.writer

    def full(store: Any, key: str, **options: Any) -> Any:
        if key.endswith("05.log"):
            raise StoreFull("no inode is left", key)
        return real(store, key, **options)

    with mock.patch.object(LocalStore, "writer", full):
        found = load(["new", "b"], own)
    size = sum(map(len, map(bytes, frame(0, 0))))
    assert found == [(7 * size, ["rank 0, step 5"]), (0, [])]


def lose(base: Path, hosts: Sequence[str], lost: str) -> None:
    import shutil

    _local.rank = hosts.index(lost)
    with on_hosts(hosts):
        memory = HostMemory.there(URL)
    assert memory is not None
    shutil.rmtree(memory.folder)


@pytest.mark.parametrize("round_bytes", [1000, 10_000, 16 << 20])
@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_what_a_host_has_lost_comes_from_the_one_behind(base: Path, lost: str, round_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr(bringing, "ROUND", round_bytes)
    hosts = ["a", "a", "b", "b", "c", "c"]
    keep_and_die(hosts, range(1, 10))
    lose(base, hosts, lost)
    again = ["new" if host == lost else host for host in hosts]
    size = sum(map(len, map(bytes, frame(0, 0))))
    for rank, (came, lacking) in enumerate(load(again, own)):
        assert not lacking, rank
        assert came == (8 * size if hosts[rank] == lost else 0), rank
    assert [came for came, _ in load(again, own)] == [0] * 6, "it is there now"


def test_ranks_that_need_each_others_records_bring_each_once_to_a_host(base: Path) -> None:
    hosts = ["a", "a", "b", "b"]
    keep_and_die(hosts, range(2, 10))
    lose(base, hosts, "b")
    size = sum(map(len, map(bytes, frame(0, 0))))
    found = load(["a", "a", "new", "new"], lambda rank: [Wanted(RUN, [(0, 3)], 2, 9)])
    assert [lacking for _, lacking in found] == [[]] * 4
    assert [came for came, _ in found] == [0, 0, 16 * size, 16 * size]


def test_what_nobody_has_is_left_to_the_store(base: Path) -> None:
    hosts = ["a", "b", "c"]
    keep_and_die(hosts, range(4, 8))
    lose(base, hosts, "a")
    lose(base, hosts, "b")
    found = load(["x", "y", "c"], own)
    assert found[0][1] == [f"rank 0, step {step}" for step in range(2, 10)]
    assert found[1][1] == [f"rank 1, step {step}" for step in (2, 3, 8, 9)]
    assert found[2][1] == [f"rank 2, step {step}" for step in (2, 3, 8, 9)]


def test_what_does_not_fit_is_left_to_the_store_the_oldest_first(base: Path) -> None:
    hosts = ["a", "b"]
    keep_and_die(hosts, range(2, 10))
    lose(base, hosts, "a")
    size = sum(map(len, map(bytes, frame(0, 0))))
    with mock.patch("ckpt.gradlog.copies.bringing.free_bytes", return_value=2 * 3 * size + 5):
        found = load(["new", "b"], own)
    assert found[0] == (3 * size, [f"rank 0, step {step}" for step in range(2, 7)])
    assert found[1] == (0, [])


def test_a_copy_that_disappears_on_the_way_is_not_taken_for_one(base: Path) -> None:
    hosts = ["a", "b"]
    keep_and_die(hosts, range(2, 10))
    lose(base, hosts, "a")
    _local.rank = 1
    with on_hosts(hosts):
        memory = HostMemory.there(URL)
    assert memory is not None
    get = type(memory.store).get

    def gone(store: Any, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if key.endswith("rank00000/000000000005.log") and nbytes != HEADER:
            store.delete(key)
        return get(store, key, start, nbytes)

    with mock.patch.object(type(memory.store), "get", gone):
        found = load(["new", "b"], own)
    assert found[0][1] == ["rank 0, step 5"]


def test_nothing_is_asked_where_no_host_has_anything(base: Path) -> None:
    assert load(["a", "b"], own) == [(0, [f"rank {rank}, step {step}" for step in range(2, 10)]) for rank in range(2)]
    assert not os.path.exists(base)
