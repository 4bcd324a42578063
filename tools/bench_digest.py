"""How fast each candidate digests chunks that come from memory: the measurement behind docs/adr/0002-digest.md.

``tools/setup && .venv/bin/python tools/bench_digest.py``
"""

from __future__ import annotations

import argparse
import hashlib
import os
import zlib

import numpy as np
import xxhash
from measure import fastest_rate, machine
from rich.console import Console
from rich.table import Table

BUFFER = 256 << 20
"""Bytes that are gone through in turn, far more than any cache holds."""

CANDIDATES = {
    "xxh3-128": (128, "accidents", xxhash.xxh3_128_digest),
    "xxh3-64": (64, "accidents", xxhash.xxh3_64_digest),
    "xxh64": (64, "accidents", xxhash.xxh64_digest),
    "crc32 (zlib)": (32, "accidents", zlib.crc32),
    "sha256": (256, "adversaries", lambda data: hashlib.sha256(data).digest()),
    "blake2b-128": (128, "adversaries", lambda data: hashlib.blake2b(data, digest_size=16).digest()),
}
"""Name -> bits, what it protects against, function."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, default=4 << 20, help="bytes a call (default 4 MiB)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each candidate")
    options = parser.parse_args()
    source = np.random.default_rng(0).integers(0, 256, BUFFER, dtype=np.uint8)
    view, target = memoryview(source), np.empty_like(source)
    starts = range(0, BUFFER, options.chunk)
    rows = {"(memcpy, for scale)": ("", "", fastest_rate(lambda: np.copyto(target, source), BUFFER, options.seconds))}
    for name, (bits, against, function) in CANDIDATES.items():

        def work(function=function) -> None:
            for at in starts:
                function(view[at : at + options.chunk])

        rows[name] = (str(bits), against, fastest_rate(work, BUFFER, options.seconds))
    about = machine()
    table = Table(title=f"one core of {about['cores']} ({about['cpu']}), load average {os.getloadavg()[0]:.1f}")
    for column in ("", "bits", "protects against", "GB/s, best", "GB/s, median", "s per 10 GB (best)"):
        table.add_column(column, justify="left" if column in ("", "protects against") else "right")
    for name, (bits, against, (best, middle)) in rows.items():
        table.add_row(name, bits, against, f"{best:.1f}", f"{middle:.1f}", f"{10 / best:.1f}")
    Console(width=110, highlight=False).print(table)


if __name__ == "__main__":
    main()
