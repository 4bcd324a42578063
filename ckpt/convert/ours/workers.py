"""Who does the tasks of a conversion: this process, or several that it starts.

Workers are processes of their own (``python -m ckpt.convert.ours.worker``), told over their standard input what to do,
one task after the other, each by whoever is free. They know source and target by URL. One that dies ends the
conversion; when this process dies, they end by themselves.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from ckpt.convert.assemble import Assembler
from ckpt.convert.crew import Crew, Said
from ckpt.convert.meter import Meter
from ckpt.convert.opened import Opened, WithInline
from ckpt.convert.ours.packs import PackWriter, Wrote
from ckpt.convert.ours.plan import assembler_of, shares
from ckpt.convert.ours.tasks import Task
from ckpt.convert.torchfile.stored import Gathered, Place
from ckpt.errors import ConfigError
from ckpt.format.manifest import IndexPart
from ckpt.layout.spec import TensorSpec
from ckpt.store.blocks import Blocks
from ckpt.store.open import address, open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from ckpt.convert.ours.plan import Conversion
    from ckpt.store.base import Store

Row = tuple[str, str, str, tuple[int, ...]]


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


class Message(Said, kw_only=True, omit_defaults=True):
    """One message between the processes: to a worker ``task``, from it one of the others."""

    task: Task | None = None
    moved: int = 0
    wrote: Wrote | None = None


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
        largest_first = [Message(task=task) for task in sorted(tasks, key=lambda task: -task.nbytes)]
        return Crew(
            "ckpt.convert.ours.worker",
            Work.of(made, store, prefix),
            largest_first,
            min(ways.workers, len(tasks)),
            Message,
            lambda message: message.wrote,
            lambda message: meter.add(message.moved),
        ).run()
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
