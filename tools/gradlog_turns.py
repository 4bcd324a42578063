"""Ways to be able to go back to every step, taken in turn by one job: a gradient log, full saves, DCP, raw bytes.

A turn is one step that does not count and ``BLOCK`` that do, until all that they saved is durable. All ways meet the
same noise, and what one of them leaves behind is over before the next one begins.
"""

from __future__ import annotations

import os
import queue
import shutil
import statistics
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import ckpt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench_gradlog import Bench

BLOCK = 10


class Way:
    """Does nothing."""

    def begin(self) -> None:
        """Get ready for a turn."""

    def step(self) -> None:
        """Do what has to be done behind a training step."""

    def settle(self) -> None:
        """Wait until all of it is durable."""

    def end(self) -> None:
        """Clean up behind a turn."""


class Log(Way):
    """A gradient log."""

    def __init__(self, bench: Bench, root: str, **options: Any) -> None:
        self._bench, self._root, self._options = bench, root, options

    def begin(self) -> None:
        self.keeper = self._bench.keeper(self._root, **self._options)

    def step(self) -> None:
        self.keeper.step()

    def settle(self) -> None:
        self.keeper.flush()

    def end(self) -> None:
        self.keeper.close()
        _remove(self._root)


class Full(Way):
    """A full save behind each step."""

    def __init__(self, bench: Bench, root: str) -> None:
        self._bench, self._root, self._count = bench, root, 0

    def step(self) -> None:
        self._count += 1
        self._handle = ckpt.async_save(self._bench.job.engine, self._root, step=self._count)

    def settle(self) -> None:
        self._handle.durable.wait(600)

    def end(self) -> None:
        _remove(self._root)


class Dcp(Way):
    """torch's own checkpoints behind each step."""

    def __init__(self, bench: Bench, root: str) -> None:
        self._bench, self._root, self._count = bench, root, 0
        self._group = dist.new_group(backend="gloo")
        self._future: Any = None

    def step(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.settle()  # it keeps one in flight
        self._count += 1
        writer = dcp.FileSystemWriter(f"{self._root}/{self._count}")
        self._future = dcp.async_save(self._bench.job.state(), storage_writer=writer, process_group=self._group)

    def settle(self) -> None:
        if self._future is not None:
            self._future.result()

    def end(self) -> None:
        self._future = None
        _remove(self._root)


class Raw(Way):
    """A thread that appends as many bytes as a log's record has to a file, and syncs: nothing else."""

    def __init__(self, root: str, nbytes: int, sync: bool) -> None:
        self._path, self._data, self._sync = f"{root}/{dist.get_rank()}", os.urandom(nbytes), sync
        self._left: queue.Queue[bool] = queue.Queue()

    def begin(self) -> None:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def step(self) -> None:
        self._left.put(True)

    def settle(self) -> None:
        self._left.join()

    def end(self) -> None:
        self._left.put(False)
        self._thread.join()
        self._left = queue.Queue()
        os.close(self._fd)
        _remove(os.path.dirname(self._path))

    def _work(self) -> None:
        while self._left.get():
            os.writev(self._fd, [self._data])
            if self._sync:
                os.fdatasync(self._fd)
            self._left.task_done()


def in_turn(bench: Bench, ways: Mapping[str, Way], each: Callable[[str], None] = lambda name: None) -> dict[str, float]:
    """Return the seconds that a step takes with each way: the slowest rank's median over all turns.

    ``each`` is called with a way's name when its steps begin to count, and with an empty one when they no longer do.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(max(1, bench.options.steps // (len(ways) * BLOCK))):
        order = list(ways.items())
        for name, way in order[turn % len(order) :] + order[: turn % len(order)]:
            way.begin()
            bench.job.train_step()
            way.step()
            way.settle()
            dist.barrier()
            each(name)
            began = time.perf_counter()
            for _ in range(BLOCK):
                bench.job.train_step()
                way.step()
            way.settle()
            found[name].append((time.perf_counter() - began) / BLOCK)
            each("")
            dist.barrier()
            way.end()
            dist.barrier()
    return {name: max(bench.all(statistics.median(one))) for name, one in found.items()}


def _remove(folder: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        with suppress(OSError):
            shutil.rmtree(folder)
    dist.barrier()
