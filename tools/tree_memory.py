"""What a command and all processes below it hold in memory, looked at from outside while it runs."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLE_SECONDS = 0.02


class Tree:
    """Samples the memory of a process and of all below it, until it is stopped.

    ``peak``: the most that they had together at one time; ``marks``: the sum of each one's own highest; both in bytes.
    ``processes``: how many there were. What each had at its highest says the kernel, which misses nothing.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak = 0
        self._highest: dict[int, int] = {}
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Tree:
        self._sampler.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._sampler.join()

    @property
    def marks(self) -> int:
        return sum(self._highest.values())

    @property
    def processes(self) -> int:
        return len(self._highest)

    def _sample(self) -> None:
        while True:
            last = self._stop.is_set()  # one look comes after the end: what came since the one before would be missed
            now = 0
            for pid in below(self._pid):
                sizes = memory(pid)
                now += sizes.get("VmRSS", 0)
                if "VmHWM" in sizes:
                    self._highest[pid] = max(self._highest.get(pid, 0), sizes["VmHWM"])
            self.peak = max(self.peak, now, *self._highest.values())
            if last:
                return
            self._stop.wait(SAMPLE_SECONDS)


def below(pid: int) -> Iterator[int]:
    """Yield a process and all below it. Asked of the kernel by process: to look at all of /proc would be work."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from below(int(child))


def memory(pid: int) -> dict[str, int]:
    """Return the sizes of ``/proc/<pid>/status`` in bytes; empty once it is gone."""
    with suppress(OSError):
        lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {line[0][:-1]: int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}
    return {}
