"""What else the machine did meanwhile, what this process and its children hold in memory, and what they read."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from measure import Peak

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel end this process with the one that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Return all processes below one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def cpu_seconds(pid: int) -> float:
    """Return user and system time of one process, 0 if it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


def busy_seconds() -> float:
    """Return the time that all cores together have worked since the machine started."""
    fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS  # without idle and waiting for I/O


class Others:
    """CPU that processes outside of this job used in a ``with`` block, in cores (``cores``)."""

    cores = 0.0

    def __init__(self, job: int) -> None:
        self._job = job  # the process that all of the job's processes are below

    def _snapshot(self) -> tuple[float, float, dict[int, float]]:
        own = {pid: cpu_seconds(pid) for pid in (self._job, *children_of(self._job))}
        return time.monotonic(), busy_seconds(), own

    def __enter__(self) -> Others:
        self._before = self._snapshot()
        return self

    def __exit__(self, *exc: object) -> None:
        start, busy, own = self._before
        end, busy_then, own_then = self._snapshot()
        mine = sum(seconds - own.get(pid, 0.0) for pid, seconds in own_then.items())
        self.cores = max(0.0, (busy_then - busy - mine) / max(end - start, 1e-9))


class TreePeak:
    """Memory added at the highest point of a ``with`` block, in bytes (``added``): this process's, and its children's.

    The process's own is the kernel's high-water mark; what children have for themselves is sampled.
    """

    added = 0

    def __enter__(self) -> TreePeak:
        self._own = Peak()
        self._stop = threading.Event()
        self._before = self._children()
        self._seen = self._before
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._own.__enter__()
        self._sampler.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._sampler.join()
        self._own.__exit__(*exc)
        self.added = self._own.added + max(0, self._seen - self._before)

    def _sample(self) -> None:
        while not self._stop.wait(0.1):
            self._seen = max(self._seen, self._children())

    @staticmethod
    def _children() -> int:
        total = 0
        for pid in children_of(os.getpid()):
            with suppress(OSError, IndexError):
                resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
                total += (resident - shared) * PAGE
        return total


def bytes_read() -> int:
    """Return the bytes that this process has got from calls of ``read`` and the like since it started.

    Of files and pipes: what arrives on sockets by ``recv`` is not in it, nor what is read through a memory mapping.
    """
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise KeyError("rchar")


def available_memory() -> int:
    """Return the bytes that the kernel can still give to processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KeyError("MemAvailable")
