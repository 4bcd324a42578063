"""Writing a checkpoint as files of another format: claim the place, write each file whole, the one that counts last.

A mark at the place (:mod:`ckpt.convert.mark`) names the conversion, so that a run after one that was killed keeps what
is finished, and another conversion does not begin there. Whoever loads the checkpoint finds it by its last file, and
never reads the mark.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from ckpt.convert.assemble import Assembler
from ckpt.convert.file_bands import MOST, WIDE, Lane, merged, width_of, write_band
from ckpt.convert.mark import MARK, Mark, mark_at
from ckpt.convert.meter import Meter
from ckpt.convert.options import Written
from ckpt.convert.ours.committing import TEMP, name_from, source_digest
from ckpt.convert.ours.plan import shares
from ckpt.convert.overflow import rows_of
from ckpt.errors import ConfigError
from ckpt.store.base import HasOrphans, check_key
from ckpt.store.blocks import Blocks
from ckpt.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckpt.convert.opened import Opened
    from ckpt.convert.options import WriteOptions
    from ckpt.convert.torchfile.write import Feed
    from ckpt.layout.spec import Shard, TensorSpec
    from ckpt.store.base import Buffer, Store

    Make = Callable[[], "WritableFile"]

_TEMPORARY = re.compile(rf"{re.escape(TEMP)}[0-9a-f]{{16}}-(.+)")
"""How stores call a file that is being written: the name that it will have, behind a number."""
_SHOWN = 4


class WritableFile(Protocol):
    """A file that is to be written."""

    @property
    def nbytes(self) -> int:
        """Of the whole file, exactly."""

    @property
    def identity(self) -> bytes:
        """Equal for files that will be filled alike."""

    @property
    def wants(self) -> list[Shard]:
        """What of the source goes into it, in the order of the file."""

    def write(self, write: Callable[[Buffer], None], feed: Feed) -> None:
        """Hand the file's bytes to ``write``, front to back; ``feed`` returns the bytes of wants."""


def write_files(
    opened: Opened,
    store: Store,
    options: WriteOptions,
    files: Sequence[tuple[str, Make]],
    last: Mapping[str, bytes],
    *,
    side_by_side: bool = False,
    parameters: Sequence[TensorSpec] = (),
) -> Written:
    """Write files, and then ``last``. Nothing is written if the place is not free, or the options ask for a dry run.

    Args:
        opened: the source.
        store: root of the target: empty, or left by an earlier run of this conversion.
        options: see :class:`~ckpt.convert.options.WriteOptions`; several workers are threads.
        files: key, and what makes the file; it is made more than once, and not kept.
        last: small files by key, which are there only when all others are; replaced if they exist.
        side_by_side: neighbouring files want parts of the same tensors (:mod:`ckpt.convert.file_bands`).
        parameters: those that whoever loads the files rounds from their masters if no file has them.

    Raises:
        ConfigError: there is something else at the place.
        StoreError: the source cannot be read or the target not be written. What is finished stays.
        IntegrityError, FormatError: the source is damaged.
    """
    sizes, widths, wanted, mark = _survey(
        opened, files, last, wide=WIDE // max(1, options.workers) if hasattr(store, "root") else 0
    )
    total = sum(sizes.values()) + sum(map(len, last.values()))
    known = _look(store, mark, resume=options.resume)
    memory, room = shares(options)
    present = {key for key, nbytes in sizes.items() if known and store.size(key) == nbytes}
    bands = _bands([one for one in files if one[0] not in present], widths if side_by_side else {})
    workers = max(1, min(options.workers, len(bands)))
    assemblers = [Assembler(opened, memory=memory, cast=True) for _ in range(workers)]
    for one in assemblers:
        one.overflow.rounded.update({spec.fqn: spec for spec in parameters if spec.key not in wanted})
    if options.dry_run:
        wants = ([make().wants for _, make in band] for band in bands)
        read = sum(assemblers[0].estimate(want for _, want in merged(one)) for one in wants)
    else:
        ours = [MARK, *last, *(key for key, _ in files)] if known else [MARK]
        _claim(store, mark, files, present, ours)
        meter = Meter(total, options.progress)
        meter.add(sum(sizes[key] for key in present))
        _write_all(store, bands, assemblers, room, meter)
        for key, data in last.items():
            store.put(key, data, overwrite=True)
            meter.add(len(data))
        read = sum(assembler.bytes_read for assembler in assemblers)
    there = sum(sizes[key] for key in present)
    return Written(
        format="",
        where=store.url,
        step=opened.step if options.step is None else options.step,
        bytes_read=read,
        bytes_written=total - there,
        bytes_present=there,
        files=(*(key for key, _ in files), *last),
        memory=workers * (min(memory, assemblers[0].held) + room),
        overflowed=tuple(rows_of(assembler.overflow.found for assembler in assemblers)),
    )


def _survey(
    opened: Opened, files: Sequence[tuple[str, Make]], last: Mapping[str, bytes], *, wide: int
) -> tuple[dict[str, int], dict[str, int], set[tuple[str, str]], Mark]:
    """Return of each file its size and how many like it to write side by side, which tensors go into any of them, and
    the conversion's mark: its name follows from everything that is written.
    """
    sizes: dict[str, int] = {}
    widths: dict[str, int] = {}
    wanted: set[tuple[str, str]] = set()
    content = []
    for key, make in files:
        check_key(key)
        file = make()
        sizes[key], widths[key] = file.nbytes, width_of(file.wants, file.nbytes, wide=wide)
        wanted.update(want.spec.key for want in file.wants)
        content.append((key, file.nbytes, file.identity))
    source = source_digest(opened)
    name = name_from(source, (content, sorted(last.items())))
    return sizes, widths, wanted, Mark(name, opened.where, source.hex(), tuple(sorted(last) or [files[-1][0]]))


def _bands(files: Sequence[tuple[str, Make]], widths: Mapping[str, int]) -> list[list[tuple[str, Make]]]:
    bands: list[list[tuple[str, Make]]] = []
    for one in files:
        if bands and len(bands[-1]) < min(widths.get(key, 1) for key, _ in [*bands[-1], one]):
            bands[-1].append(one)
        else:
            bands.append([one])
    return bands


def _look(store: Store, mark: Mark, *, resume: bool) -> bool:
    """Is the place that of an earlier run of this conversion? Else it must be empty."""
    names = [one for one in store.children("") if not one.startswith(TEMP)]
    if not names:
        return False
    if MARK not in names:
        raise ConfigError(f"{store.url} is not empty ({listed(sorted(names), _SHOWN)}): choose another place")
    there = mark_at(store)
    if not resume or there.conversion != mark.conversion:
        what = ", ".join(filter(None, (MARK, there.unlike(mark) if resume else "")))
        raise ConfigError(f"{store.url} holds another conversion, begun or done ({what}): choose another place")
    return True


def _claim(store: Store, mark: Mark, files: Sequence[tuple[str, Make]], present: set[str], ours: Sequence[str]) -> None:
    store.put(MARK, mark.encoded(), overwrite=True)
    _tidy_root(store, {key for key in ours if "/" not in key})
    folders = {key.rpartition("/")[0] for key, _ in files if key not in present}
    for folder in sorted(folders - {""}):
        for info in list(store.walk(folder)):
            if info.key.rpartition("/")[2].startswith(TEMP):  # of a run that was killed
                store.delete(info.key)
        if isinstance(store, HasOrphans):
            for orphan in store.orphans(folder):
                store.abort(orphan)


def _tidy_root(store: Store, names: set[str]) -> None:
    """Remove what killed runs left of these files. The root may have files of others, who call theirs otherwise."""
    for one in store.children(""):
        if (found := _TEMPORARY.fullmatch(one)) and found[1] in names:
            store.delete(one)
    if isinstance(store, HasOrphans):
        for orphan in store.orphans():
            if orphan.key in names:
                store.abort(orphan)


def _write_all(
    store: Store,
    bands: Sequence[Sequence[tuple[str, Make]]],
    assemblers: Sequence[Assembler],
    room: int,
    meter: Meter,
) -> None:
    waiting = iter(bands)
    lock, failed = threading.Lock(), threading.Event()

    def work(assembler: Assembler) -> None:
        blocks = Blocks(room)
        while not failed.is_set():
            with lock:
                following = next(waiting, None)
            if following is None:
                return
            try:
                _write(store, [(key, make()) for key, make in following], assembler, blocks, meter)
            except BaseException:
                failed.set()  # the others end with the file that they are at
                raise

    if len(assemblers) == 1:
        work(assemblers[0])
        return
    with ThreadPoolExecutor(len(assemblers), "ckpt-write") as pool:
        running = [pool.submit(work, assembler) for assembler in assemblers]
    for one in running:
        one.result()


def _write(
    store: Store, files: Sequence[tuple[str, WritableFile]], assembler: Assembler, blocks: Blocks, meter: Meter
) -> None:
    if len(files) > 1:
        wants = [file.wants for _, file in files]
        # More files than there are blocks would wait for each other; those on a disk are written without.
        shared = blocks if len(files) <= MOST else None
        lanes = [Lane(store, key, file.nbytes, shared, file.write, meter.add) for key, file in files]
        write_band(wants, lanes, assembler)
        return
    ((key, file),) = files

    def write(data: Buffer) -> None:
        writer.write(data)
        meter.add(memoryview(data).nbytes)

    def feed(wants: Sequence[Shard]) -> Iterator[memoryview]:
        return (piece.data for piece in assembler.pieces(wants))

    with store.writer(key, size=file.nbytes, blocks=blocks) as writer:
        file.write(write, feed)
        writer.finish()
