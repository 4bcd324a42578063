"""Does each rank read for itself, or each chunk once for all? ADR 0009 has the measurements."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt.errors import BudgetTooSmall, ConfigError
from ckpt.format.digest import SIZE, raw_digest
from ckpt.plan.read_plan import SPAN_BYTES, decode_runs, encode_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.plan.read_plan import Runs
    from ckpt.runtime.comm import Comm

ONCE, EACH, AUTO, PER_HOST = "once", "each", "auto", "once per host"
SMALLEST_BUDGET = 16 << 20
HANDED_BYTES = 5 << 20
"""Most bytes of a unit that is handed on, unless one chunk has more: a chunk of full size and small ones beside it."""
SHORT_BYTES = 400
"""Needs of at most so many bytes go to all ranks at once."""
MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})
DISK_TYPES = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "overlay", "vfat", "exfat",
})  # fmt: skip
"""File systems of one host. If several hosts see the same root on one of these, each has a copy of its own."""


def checked_read(read: object) -> str:
    """Return the argument ``read`` of a load.

    Raises:
        ConfigError: not one of the three words.
    """
    if read not in (ONCE, EACH, AUTO):
        raise ConfigError(f"read={str(read)[:80]!r}: expected 'auto', 'once' or 'each'")
    return str(read)


def checked_budget(budget: object) -> int:
    """Return the argument ``budget``.

    Raises:
        ConfigError: no number of bytes.
        BudgetTooSmall: too small for chunks of ordinary size to overlap.
    """
    if type(budget) is not int:
        raise ConfigError(f"budget={str(budget)[:80]!r}: expected a number of bytes")
    if budget < SMALLEST_BUDGET:
        raise BudgetTooSmall(f"a memory budget of {budget} bytes, at least {SMALLEST_BUDGET} are needed")
    return budget


def span_for(read: str, budget: int) -> int:
    """Return how many bytes a rank reads at once: two must be on their way in, and two from other ranks.

    What is handed on comes in smaller units: each hop of a chain waits for a whole one.
    """
    return min(SPAN_BYTES if read == EACH else HANDED_BYTES, budget // 4 >> 20 << 20)


def choose(read: str, hosts: Sequence[str], url: str) -> str:
    """Return how the ranks on ``hosts`` (a name each) read from a store: ``once``, ``once per host`` or ``each``.

    ``auto``: a store behind a network, once. A disk of the ranks' own hosts, once for each host: cold bytes are read
    past the page cache, so that of two ranks that read the same each would ask the disk. Memory, or ranks that share
    neither disk nor host, each for itself: nothing is gained by handing on.
    """
    if len(hosts) == 1:
        return EACH
    if read != AUTO:
        return read
    if not url.startswith("/"):
        return EACH if url.startswith("memory") else ONCE  # memory of this process: a test's
    kind = file_system_of(url)
    if kind in MEMORY_TYPES or (kind in DISK_TYPES and len(set(hosts)) == len(hosts)):
        return EACH
    return PER_HOST if kind in DISK_TYPES and len(set(hosts)) > 1 else ONCE


def file_system_of(path: str, table: str | None = None) -> str:
    """Return the type of the file system that ``path`` is on, or would be; "" if that cannot be known.

    ``table``: in place of ``/proc/self/mountinfo``.
    """
    if table is None:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
                table = file.read()
        except OSError:
            return ""
    best, found = "", ""
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        below = path == point or path.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best):  # of several mounts on one place the last is seen
            best, found = point, after.split()[0]
    return found


def exchange_needs(comm: Comm, runs: Runs) -> list[Runs]:
    """Return what each rank needs; equal needs travel once. Collective."""
    mine = encode_runs(runs)
    # Short ones go at once: two meetings for a few bytes less would be no bargain.
    told = comm.gather("needs", lambda: raw_digest(mine) + (mine if len(mine) <= SHORT_BYTES else b""))
    names, sent = [one[:SIZE] for one in told], [one[SIZE:] for one in told]
    if not all(sent):
        first = names.index(names[comm.rank]) == comm.rank
        sent = comm.gather("needs", lambda: mine if first else b"")
    decoded = {name: decode_runs(sent[names.index(name)]) for name in dict.fromkeys(names)}
    return [decoded[name] for name in names]
