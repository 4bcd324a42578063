"""Is a process of this host still alive? A killed neighbour is noticed at once instead of after a timeout."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def _host() -> str:
    """Return what two processes share iff a process number means the same to both: boot and PID namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux, or no /proc: nobody can be looked up
        return ""


def _started(pid: int) -> str | None:
    """Return the start time of a running process (process numbers are reused), or None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def identity() -> str:
    """Return a text by which another process of this host can look this one up."""
    return f"{_host()} {os.getpid()} {_started(os.getpid())}"


def host_of(identity_of_other: str) -> str:
    """Return the host in an :func:`identity`; empty if it could not be known there."""
    return identity_of_other.partition(" ")[0]


def is_dead(identity_of_other: str) -> bool:
    """Is the process that gave this :func:`identity` known to be gone? False if it cannot be known (another host)."""
    host, _, rest = identity_of_other.partition(" ")
    pid, _, started = rest.partition(" ")
    if not host or host != _host() or not pid.isdigit():
        return False
    return _started(int(pid)) != started


def silent(beats: Mapping[int, str], seen: dict[int, tuple[str, float]], now: float, timeout: float) -> list[int]:
    """Return the ranks whose sign of life has not changed for a whole timeout.

    Args:
        beats: of each absent rank, its last sign.
        seen: what was seen when; kept by the caller between calls.
        now: seconds of a monotonic clock.
        timeout: seconds; the first look comes a quarter of it after the caller began to wait.
    """
    lost = []
    for rank, beat in beats.items():
        if seen.setdefault(rank, (beat, now - timeout / 4))[0] != beat:
            seen[rank] = (beat, now)
        elif now - seen[rank][1] >= timeout:
            lost.append(rank)
    return lost
