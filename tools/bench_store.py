"""How fast a local directory takes and gives bytes, raw and by ``LocalStore``: see docs/adr/0007-local-io.md.

``tools/setup && .venv/bin/python tools/bench_store.py --dir DIRECTORY``

Every way runs once in each round, in an order that is shuffled anew, by processes that live throughout: caches, the
neighbours and free memory of a machine change while one looks. A write ends with fsync of file and directory; before
a read the file is dropped from the page cache (``cold``) or has just been read (``warm``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import random
import resource
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from measure import MB, filesystem, fsync, machine
from rich.console import Console
from rich.table import Table

from ckpt.store.blocks import Blocks
from ckpt.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

CALL = 4 << 20
"""Bytes of one write, the size of a chunk."""
SPAN = 8 << 20
"""Bytes of one read."""
ODD = 64
"""Where an array of PyTorch or NumPy starts in its page: not where direct I/O wants it."""


class Process:
    """One process's share: ``nbytes`` of memory that is in use, and a file of its own in ``folder``."""

    def __init__(self, folder: Path, number: int, nbytes: int) -> None:
        self.path, self.nbytes = folder / f"file{number}", nbytes
        size = nbytes // CALL * CALL + 2 * CALL
        self.memory = Blocks(2 * size, size).take()
        pattern = np.random.default_rng(number).integers(0, 256, CALL, dtype=np.uint8)
        for at in range(0, len(self.memory), CALL):
            part = self.memory[at : at + CALL]
            np.copyto(part, pattern[: len(part)])
        self.pool = Blocks(64 << 20)
        self.span = Blocks(2 * SPAN + 8192, SPAN + 4096).take()
        self.store = LocalStore(str(folder))

    def view(self, start: int) -> memoryview:
        """Return the share's bytes, from this place in a page."""
        return memoryview(self.memory)[start : start + self.nbytes]


# -- writing -----------------------------------------------------------------------------------------------------------


def write_plain(p: Process, *, ahead: bool = False, preallocate: bool = False) -> None:
    """``write`` and fsync. ``ahead``: ask for write-back after each call. ``preallocate``: the whole file first."""
    fd = os.open(p.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if preallocate:
        os.posix_fallocate(fd, 0, p.nbytes)
    view = p.view(ODD)
    for at in range(0, p.nbytes, CALL):
        rest = view[at : at + CALL]
        while rest:
            rest = rest[os.write(fd, rest) :]
        if ahead:
            os.posix_fadvise(fd, at, CALL, os.POSIX_FADV_DONTNEED)
    _end(p, fd)


def write_direct(p: Process) -> None:
    """O_DIRECT, straight from aligned memory."""
    fd = os.open(p.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    memory = memoryview(p.memory)
    for at in range(0, p.nbytes, CALL):
        os.pwrite(fd, memory[at : at + min(CALL, _up(p.nbytes - at))], at)
    os.ftruncate(fd, p.nbytes)
    _end(p, fd)


def write_blocks(p: Process, threads: int) -> None:
    """O_DIRECT from blocks, into which all bytes are copied; that many threads write."""
    fd = os.open(p.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    full: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
        while (job := full.get()) is not None:
            block, at = job
            os.pwrite(fd, block, at)
            p.pool.give(block)

    writers = [threading.Thread(target=work) for _ in range(threads)]
    for thread in writers:
        thread.start()
    source = p.memory[ODD:]
    for at in range(0, p.nbytes, CALL):
        block, part = p.pool.take(), source[at : min(at + CALL, p.nbytes)]
        np.copyto(block[: len(part)], part)
        full.put((block, at))
    for _ in writers:
        full.put(None)
    for thread in writers:
        thread.join()
    os.ftruncate(fd, p.nbytes)
    _end(p, fd)


def write_store(p: Process, start: int) -> None:
    """Our writer, from memory that lies as the file does (``start`` 0) or not."""
    view = p.view(start)
    with p.store.writer(p.path.name, size=p.nbytes) as out:
        for at in range(0, p.nbytes, CALL):
            out.write(view[at : at + CALL])
        out.finish()


def _up(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _end(p: Process, fd: int) -> None:
    os.fsync(fd)
    os.close(fd)
    fsync(p.path.parent)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_plain(p: Process, flags: int = 0) -> None:
    """``preadv`` into one buffer that is used again and again. ``flags``: of the opening."""
    fd = os.open(p.path, os.O_RDONLY | flags)
    at, buffer = 0, memoryview(p.span)[:SPAN]
    while count := os.preadv(fd, [buffer], at):
        at += count
        if count % 4096:
            break
    os.close(fd)


def read_store(p: Process, start: int, threads: int = 1) -> None:
    """Our reader, into memory that lies as the file does (``start`` 0) or not."""
    spans = iter(range(0, p.nbytes, SPAN))

    def work(buffer: memoryview) -> None:
        for at in spans:
            p.store.read_into(p.path.name, at, buffer[: p.nbytes - at])

    buffers = [memoryview(p.span)[start : start + SPAN]] if threads == 1 else _spans(p, threads)
    others = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers[1:]]
    for thread in others:
        thread.start()
    work(buffers[0])
    for thread in others:
        thread.join()


def _spans(p: Process, threads: int) -> list[memoryview]:
    memory = memoryview(p.memory)
    return [memory[i * SPAN : (i + 1) * SPAN] for i in range(threads)]


WRITES: dict[str, Callable[[Process], None]] = {
    "raw: write + fsync": write_plain,
    "raw, preallocated": partial(write_plain, preallocate=True),
    "raw, write-back started at once": partial(write_plain, ahead=True),
    "raw O_DIRECT, aligned memory": write_direct,
    "copied to blocks, O_DIRECT, 1 thread": partial(write_blocks, threads=1),
    "copied to blocks, O_DIRECT, 2 threads": partial(write_blocks, threads=2),
    "LocalStore, any memory": partial(write_store, start=ODD),
    "LocalStore, aligned memory": partial(write_store, start=0),
}
READS: dict[str, Callable[[Process], None]] = {
    "raw: preadv": read_plain,
    "raw O_DIRECT, aligned memory": partial(read_plain, flags=os.O_DIRECT),
    "LocalStore, any memory": partial(read_store, start=ODD),
    "LocalStore, aligned memory": partial(read_store, start=0),
    "LocalStore, aligned memory, 2 threads": partial(read_store, start=0, threads=2),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def prepare(p: Process, kind: str) -> None:
    """Bring the file into the state that the measurement starts from."""
    if kind == "write":
        p.path.unlink(missing_ok=True)
        return
    if not p.path.exists():
        write_plain(p)
    fd = os.open(p.path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if kind == "warm":
        read_plain(p)


def serve(pipe: Connection, folder: Path, number: int, nbytes: int) -> None:
    """Be one process: do what the pipe says, answer when it began and ended, and the CPU seconds."""
    p = Process(folder, number, nbytes)
    while (order := pipe.recv()) is not None:
        kind, name = order
        prepare(p, kind)
        pipe.send(None)
        pipe.recv()
        before, begin = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        (WRITES if kind == "write" else READS)[name](p)
        end, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        pipe.send((begin, end, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))


def measure(pipes: list[Connection], kind: str, name: str, nbytes: int) -> tuple[float, float]:
    """Return (MB/s of all processes together, CPU seconds per GiB) of one run."""
    for pipe in pipes:
        pipe.send((kind, name))
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send(None)
    runs = [pipe.recv() for pipe in pipes]
    seconds = max(end for _, end, _ in runs) - min(begin for begin, _, _ in runs)
    return nbytes / MB / seconds, sum(cpu for *_, cpu in runs) / nbytes * 2**30


def run_all(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Run every way in every round; return kind -> way -> the runs."""
    share = int(options.mb * MB) // options.procs
    pairs = [mp.Pipe() for _ in range(options.procs)]
    processes = [
        mp.Process(target=serve, args=(there, folder, i, share), daemon=True) for i, (_, there) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    for _, there in pairs:
        there.close()  # so that a process that died is noticed
    pipes = [here for here, _ in pairs]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for kind in ("write", "cold", "warm"):
        ways = WRITES if kind == "write" else READS
        if filesystem(folder) == "tmpfs":
            ways = {name: way for name, way in ways.items() if "O_DIRECT" not in name}
            if kind == "cold":
                continue
        found[kind] = {name: [] for name in ways}
        for _ in range(options.runs):
            for name in random.sample(list(ways), len(ways)):
                found[kind][name].append(measure(pipes, kind, name, share * options.procs))
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return found


def show(kind: str, ways: dict[str, list[tuple[float, float]]], options: argparse.Namespace, about: str) -> Table:
    """Return the table of one kind."""
    raw = median(rate for rate, _ in next(iter(ways.values())))
    table = Table(title=f"{kind}: {options.mb:.0f} MB by {options.procs} processes, {about}")
    for column in ("", "MB/s, median", "min to max", "of raw", "CPU s per GiB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, runs in ways.items():
        rates = [rate for rate, _ in runs]
        row = (f"{median(rates):.0f}", f"{min(rates):.0f} to {max(rates):.0f}", f"{median(rates) / raw:.2f}")
        table.add_row(name, *row, f"{median(cpu for _, cpu in runs):.2f}")
    return table


def main() -> None:
    """Print a table each for writes, cold reads and warm reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dir", type=Path, required=True, help="where to write; a folder of its own is made and removed"
    )
    parser.add_argument("--procs", type=int, default=4, help="processes at once (default 4)")
    parser.add_argument("--mb", type=float, default=1400, help="megabytes of all together (default 1400)")
    parser.add_argument("--runs", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    options = parser.parse_args()
    folder = options.dir.resolve() / f"bench-store-{os.getpid()}"
    folder.mkdir(parents=True)
    before = os.getloadavg()[0]
    try:
        kind_of_disk = filesystem(folder)
        found = run_all(options, folder)
    finally:
        shutil.rmtree(folder)
    about = machine()
    console = Console(width=110, highlight=False)
    for kind, ways in found.items():
        console.print(show(kind, ways, options, f"{kind_of_disk}, {options.runs} rounds"))
    load = f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after"
    console.print(
        f"{about['cores']} cores ({about['cpu']}), {about['memory_gib']} GiB, Linux {about['kernel']}, {load}"
    )
    if options.json:
        told = {"machine": about, "filesystem": kind_of_disk, "mb": options.mb, "procs": options.procs, "runs": found}
        options.json.write_text(json.dumps(told, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
