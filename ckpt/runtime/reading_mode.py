"""Does each rank read for itself, or each chunk once for all? ADR 0009 has the measurements."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpt.errors import BudgetTooSmall, ConfigError
from ckpt.format.digest import raw_digest
from ckpt.plan.read_plan import SPAN_BYTES, decode_runs, encode_runs

if TYPE_CHECKING:
    from ckpt.plan.read_plan import Runs
    from ckpt.runtime.comm import Comm

ONCE, EACH, AUTO = "once", "each", "auto"
SMALLEST_BUDGET = 16 << 20
HANDED_BYTES = 5 << 20
"""Most bytes of a unit that is handed on, unless one chunk has more: a chunk of full size and small ones beside it."""
LOCAL_TYPES = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "ramfs", "overlay", "vfat", "exfat",
})  # fmt: skip
"""File systems of one host. What is on them is in the page cache of that host, or on a disk of its own."""


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


def choose(read: str, world: int, url: str) -> str:
    """Return ``once`` or ``each``.

    ``auto``: each rank reads for itself where that costs the storage nothing: from a file system of its own host, whose
    other ranks find the bytes in the page cache, or which is a disk with a copy of its own. Else, once.
    """
    if read != AUTO or world == 1:
        return EACH if world == 1 else read
    if not url.startswith("/"):
        return EACH if url.startswith("memory") else ONCE  # memory of this process: a test's
    return EACH if file_system_of(url) in LOCAL_TYPES else ONCE


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
    names = comm.gather("needs", lambda: raw_digest(mine))
    first = names.index(names[comm.rank]) == comm.rank
    sent = comm.gather("needs", lambda: mine if first else b"")
    decoded = {name: decode_runs(sent[names.index(name)]) for name in dict.fromkeys(names)}
    return [decoded[name] for name in names]
