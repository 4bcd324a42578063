"""Who does the tasks of a conversion: this process, or several that it starts.

Workers are processes of their own (``python -m ckpt.convert.ours.worker``), told over their standard input what to do,
one task after the other, each by whoever is free. They know source and target by URL. One that dies ends the
conversion; when this process dies, they end by themselves.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

import msgspec

import ckpt.errors
from ckpt.convert.assemble import Assembler
from ckpt.convert.meter import Meter
from ckpt.convert.opened import Opened, WithInline
from ckpt.convert.ours.packs import PackWriter, Wrote
from ckpt.convert.ours.plan import assembler_of, shares
from ckpt.convert.ours.tasks import Task
from ckpt.convert.torchfile.stored import Gathered, Place
from ckpt.errors import CkptError, ConfigError, from_wire
from ckpt.format.manifest import IndexPart
from ckpt.layout.spec import TensorSpec
from ckpt.store.blocks import Blocks
from ckpt.store.open import address, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from ckpt.convert.ours.plan import Conversion
    from ckpt.store.base import Store

Row = tuple[str, str, str, tuple[int, ...]]
LENGTH = 8
"""Bytes of the length in front of each message."""
MAX_MESSAGE = 1 << 32
GRACE_SECONDS = 10.0
"""How long a worker may take to end when it is told to."""


class Work(msgspec.Struct, kw_only=True):
    """What every worker has to know: all but its tasks. ``source``, ``target``: addresses, never to be shown.
    ``known``: a file of the source and its size, so that a worker sees whether it has opened the same. ``prefix``:
    folder of the attempt.
    """

    source: str
    where: str
    inline: dict[str, bytes]
    gathered: dict[str, Place]
    known: tuple[str, int] | None
    world: int
    specs: list[Row]
    parts: list[IndexPart]
    derived: list[str]
    aliases: dict[str, str]
    target: str
    prefix: str
    wanted: list[Row]
    memory: int
    blocks: int
    cast: bool
    resume: bool

    @classmethod
    def of(cls, made: Conversion, store: Store, prefix: str) -> Work:
        """Return it for a conversion into ``store``.

        Raises:
            ConfigError: no other process can open the source or the target.
        """
        opened, (memory, blocks) = made.opened, shares(made.options)
        inline = opened.store.inline if isinstance(opened.store, WithInline) else {}
        return cls(
            source=address(opened.store),
            where=opened.where,
            inline={key: data for key, data in inline.items() if isinstance(data, bytes)},
            gathered={key: data.row for key, data in inline.items() if isinstance(data, Gathered)},
            known=next(((p.key, p.nbytes) for part in opened.parts for p in part.packs if p.key not in inline), None),
            world=opened.world,
            specs=[(s.fqn, s.role, s.dtype, s.shape) for s in opened.specs],
            parts=list(opened.parts),
            derived=list(opened.derived),
            aliases=dict(opened.aliases),
            target=address(store),
            prefix=prefix,
            wanted=[(s.fqn, s.role, s.dtype, s.shape) for s in made.job.graph.specs],
            memory=memory,
            blocks=blocks,
            cast=made.options.dtype is not None,
            resume=made.options.resume,
        )

    def opened(self) -> Opened:
        """Open the source in a worker.

        Raises:
            ConfigError: what is found at the URL is not what the first process sees.
        """
        store = open_store(self.source)
        if self.known is not None and store.size(self.known[0]) != self.known[1]:
            raise ConfigError(f"a worker finds no {self.known[0]!r} in {store.url}: use one worker for this source")
        gathered = {key: Gathered.of(store, place) for key, place in self.gathered.items()}
        return Opened(
            format="",
            where=self.where,
            store=WithInline(store, {**self.inline, **gathered}),
            step=0,
            world=self.world,
            engine="",
            specs=tuple(TensorSpec(*row) for row in self.specs),
            parts=tuple(self.parts),
            derived=tuple(self.derived),
            aliases=self.aliases,
        )

    def writer(self, opened: Opened, store: Store, moved: Callable[[int], None]) -> PackWriter:
        """Return what does the tasks. ``moved``: called with the number of bytes after each chunk."""
        specs = [TensorSpec(*row) for row in self.wanted]
        assembler = Assembler(opened, memory=self.memory, cast=self.cast)
        return PackWriter(store, self.prefix, specs, assembler, Blocks(self.blocks), moved)


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message between the processes: to a worker ``task``, from it one of the others."""

    task: Task | None = None
    moved: int = 0
    wrote: Wrote | None = None
    error: dict[str, Any] | None = None


def send(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message."""
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(LENGTH, "little") + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """Read a message; None at the end of the pipe, or in the middle of one that does not come."""
    head = pipe.read(LENGTH)
    nbytes = int.from_bytes(head, "little")
    if len(head) < LENGTH or nbytes > MAX_MESSAGE:
        return None
    data = pipe.read(nbytes)
    return data if len(data) == nbytes else None


def run_tasks(made: Conversion, store: Store, prefix: str) -> list[Wrote]:
    """Do all tasks of a conversion and return what each has written.

    Args:
        made: the conversion.
        store: of the target.
        prefix: folder of the attempt.

    Raises:
        ConfigError: several workers are asked for, and no other process can open the source or the target.
        CkptError: the first that failed; all others are stopped.
    """
    ways, tasks = made.options, made.tasks
    meter = Meter(made.nbytes, ways.progress)
    if ways.workers > 1 and len(tasks) > 1:
        return _Crew(Work.of(made, store, prefix), tasks, min(ways.workers, len(tasks)), meter).run()
    specs, blocks = made.job.graph.specs, Blocks(shares(ways)[1])
    writer = PackWriter(store, prefix, specs, assembler_of(made.opened, ways), blocks, meter.add)
    if not hasattr(store, "root"):  # writers to buckets hold memory of their own, beside the blocks, until they finish
        return [writer.run(task, resume=ways.resume) for task in tasks]
    ends: list[Future[Wrote]] = []
    with ThreadPoolExecutor(1, "ckpt-finish") as pool:  # while a disk makes one task durable the next one is read
        for task in tasks:
            ends.append(pool.submit(writer.begin(task, resume=ways.resume)))
            if len(ends) > 1:
                ends[-2].result()
    return [end.result() for end in ends]


class _Crew:
    """Worker processes, each with a thread here that talks to it; what they say is handled in the caller's thread."""

    def __init__(self, work: Work, tasks: Sequence[Task], count: int, meter: Meter) -> None:
        self.work, self.tasks, self.count, self.meter = work, tasks, count, meter
        self._todo = deque(sorted(tasks, key=lambda task: -task.nbytes))
        self._heard: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> list[Wrote]:
        wrote: list[Wrote] = []
        threads = []
        try:
            for number in range(self.count):
                process = _start()
                self._processes.append(process)
                threads.append(threading.Thread(target=self._listen, args=(number, process), daemon=True))
                threads[-1].start()
                send(_pipe(process.stdin), self.work)
                self._next(process)
            while len(wrote) < len(self.tasks):
                number, message = self._heard.get()
                if message is None:
                    raise CkptError(f"worker {number} has ended ({_how(self._processes[number])})")
                if message.error is not None:
                    raise from_wire(message.error)
                self.meter.add(message.moved)
                if message.wrote is not None:
                    wrote.append(message.wrote)
                    self._next(self._processes[number])
        finally:
            self._end(gently=len(wrote) == len(self.tasks))
            for thread in threads:
                with suppress(RuntimeError):  # Ctrl-C has come before it began
                    thread.join()
            for process in self._processes:
                _pipe(process.stdout).close()
        return wrote

    def _next(self, process: subprocess.Popen[bytes]) -> None:
        if self._todo:
            with suppress(BrokenPipeError):  # that it is gone is heard from its other pipe
                send(_pipe(process.stdin), Message(task=self._todo.popleft()))

    def _listen(self, number: int, process: subprocess.Popen[bytes]) -> None:
        while (data := receive(_pipe(process.stdout))) is not None:
            self._heard.put((number, msgspec.msgpack.decode(data, type=Message)))
        self._heard.put((number, None))

    def _end(self, *, gently: bool) -> None:
        for process in self._processes:
            if gently:
                _close(process)
            else:
                process.terminate()  # it takes away what it has begun
        for process in self._processes:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close(process)


def _start() -> subprocess.Popen[bytes]:
    # The worker must find the package where this process has found it.
    home = os.path.dirname(os.path.dirname(os.path.abspath(ckpt.errors.__file__)))
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "ckpt.convert.ours.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
    )


def _close(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        _pipe(process.stdin).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise CkptError("a worker has no pipe")
    return pipe


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return "it says nothing more"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
