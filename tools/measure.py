"""What the benchmarks measure with: peak memory of this process, cold files, sizes, and the machine they ran on."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MB = 1e6


def status(field: str) -> int:
    """Return a size of ``/proc/self/status`` in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Peak:
    """Resident memory added at the highest point of a ``with`` block, in bytes (``added``).

    The kernel keeps the high-water mark itself and resets it on request, so nothing is missed between two samples and
    nothing is slowed down by sampling. Free heap is handed back first: a block that reuses it would look too cheap.
    """

    added = 0

    def __enter__(self) -> Peak:
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
        self._sampler: threading.Thread | None = None
        self._stop = threading.Event()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # some containers refuse; sample then
            self._seen = 0
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        self._before = status("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._sampler:
            self._stop.set()
            self._sampler.join()
            self.added = max(0, self._seen - self._before)
        else:
            self.added = max(0, status("VmHWM") - self._before)

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self._seen = max(self._seen, status("VmRSS"))


def files_below(folder: Path) -> list[Path]:
    """Return every file below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size_below(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in files_below(folder))


def fsync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_cold(folder: Path) -> None:
    """Drop the files below a folder from this machine's page cache. Dirty pages cannot be dropped: synced first."""
    for path in files_below(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(folder: Path) -> float:
    """Return which share of sampled places in the files can be read without the disk (RWF_NOWAIT); nan if unknown."""
    hits = total = 0
    for path in files_below(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            for at in range(0, path.stat().st_size, 32 << 20):
                total += 1
                with suppress(BlockingIOError):
                    hits += os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
        except OSError:  # not every file system can tell
            return float("nan")
        finally:
            os.close(fd)
    return hits / total if total else float("nan")


@contextmanager
def timed(into: dict[str, float], name: str) -> Iterator[None]:
    """Write the seconds of a block into ``into[name]``."""
    start = time.perf_counter()
    yield
    into[name] = time.perf_counter() - start


def fastest_rate(work: Callable[[], object], nbytes: int, seconds: float) -> tuple[float, float]:
    """Return (best, median) rate in GB/s of a function that processes ``nbytes``, repeated for some seconds."""
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        work()
        rates.append(nbytes / (time.perf_counter() - start) / 1e9)
    return max(rates), median(rates)


def machine() -> dict[str, object]:
    """Return what a reader needs to know of the machine; nothing that names it."""
    model = "unknown"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
    }


def filesystem(path: Path) -> str:
    """Return the type of the file system that holds ``path``."""
    best, kind = "", "unknown"
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, where, found, *_ = line.split()
            inside = path.resolve().is_relative_to(where)
            if inside and len(where) >= len(best):
                best, kind = where, found
    return kind
