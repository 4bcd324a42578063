"""Move checkpoints between stores: what is missing is copied once, checked on the way, and committed last.

Order at the destination, which is that of a save: marker, attempt, packs, index parts, index root, commit. So a copy
that is stopped anywhere leaves every committed step whole, and beside it only objects that the next copy finds and
keeps. Gradient logs come behind the commits that they lead on from. docs/format.md has the crash table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.errors import CheckpointExists, CkptError, ConfigError, MalformedData, MissingChunk, ObjectNotFound, is_damage
from ckpt.format.manifest import DERIVED, MAX_COMMIT, CommitBody, FileRef, PackRef, decode_commit, specs_of
from ckpt.format.parts import decode_part
from ckpt.repo.log_copying import copy_logs, survey_logs
from ckpt.repo.moving import Mover
from ckpt.repo.repository import Repository, commit_key
from ckpt.repo.transfer import Held
from ckpt.store.limited import Limited, Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt.format.manifest import IndexPart
    from ckpt.layout.spec import TensorSpec
    from ckpt.store.base import Store

    Progress = Callable[[int, int], None]

THREADS = 4
"""Packs that are copied at once."""


@dataclass(slots=True)
class CopyReport:
    """What a copy did. Steps ascend; bytes and objects are those of packs and indexes.

    ``steps``: committed at the destination now. ``present``: committed there before, the same. ``*_present``: whole at
    the destination before this copy, so not copied. ``logs``: numbers of the gradient logs that are there now.
    """

    steps: list[int] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    packs_copied: int = 0
    packs_present: int = 0
    bytes_copied: int = 0
    bytes_present: int = 0
    logs: list[int] = field(default_factory=list)
    log_files_copied: int = 0
    log_files_present: int = 0
    log_bytes_copied: int = 0
    log_bytes_present: int = 0


def copy_steps(
    src: Store,
    dst: Store,
    steps: Sequence[int] | None = None,
    *,
    overwrite: bool = False,
    verify: bool = True,
    threads: int = THREADS,
    io_limit: float | None = None,
    progress: Progress = lambda _done, _total: None,
    logs: bool = True,
) -> CopyReport:
    """Copy committed steps with all that they refer to, packs of earlier steps too. Can be repeated until it succeeds.

    The gradient logs behind them go along, so that the copy of the newest step leads to the same last step.

    Args:
        src: where they are; only read.
        dst: where they shall be; becomes a repository. Both are used by several threads at once.
        steps: which (default: the newest).
        overwrite: replace a step of another content at the destination; otherwise that is an error.
        verify: read what the destination has already, and copy it again where a digest differs. False trusts sizes.
        threads: packs that are copied at once. Each holds about 8 MiB, beside what the store's writer holds.
        io_limit: bytes per second that are read from the source at most, and as many at the destination.
        progress: called with bytes done and bytes in all after each piece, by one thread at a time.
        logs: False: checkpoints alone.

    Raises:
        NoSuchCheckpoint: the source has not one of the steps; nothing was written.
        CheckpointExists: the destination has a step with other content, or another log of the same number; nothing was
            written.
        IntegrityError, FormatError: the source is damaged; the message names tensor and pack. The step is not
            committed. Damage within a log: the steps are.
        StoreError: a store refused or failed.
        ConfigError: an argument is wrong, or both stores are one.
    """
    if src is dst:
        raise ConfigError(f"source and destination are the same store, {src.url}")
    if threads < 1:
        raise ConfigError(f"threads={threads}, expected a positive number")
    if io_limit is not None:  # a rate for each side: reading and writing are seldom the same link
        src, dst = Limited(src, Rate(io_limit)), Limited(dst, Rate(io_limit))
    chosen = _survey(src, dst, steps, overwrite)
    behind = survey_logs(src, dst, [step.body.step for step in chosen]) if logs else []
    report = CopyReport()
    total = sum(one.nbytes for one in {ref.key: ref for step in chosen for ref in step.refs()}.values())
    total += sum(file.nbytes for log in behind for file in log.files)
    with Mover(src, dst, report, total, threads, progress, verify=verify) as mover:
        for step in chosen:
            _copy(step, mover, overwrite)
        copy_logs(src, dst, behind, report, verify=verify, threads=threads, moved=mover.meter.advance)
    return report


@dataclass(slots=True)
class _Step:
    """A step to be copied. ``data``: its commit, to the byte, so that one attempt is copied whatever happens meanwhile.

    ``there``: the destination has this commit already.
    """

    source: Repository
    data: bytes
    body: CommitBody
    there: bool
    parts: tuple[FileRef, ...] = ()
    packs: dict[str, PackRef] = field(default_factory=dict)

    def read_parts(self) -> Iterator[tuple[IndexPart, tuple[TensorSpec, ...]]]:
        """Yield the index part by part, each checked against the commit."""
        owner = self.body.index.key
        root = self.source.read_root(self.body)
        specs = specs_of(root, owner)
        self.parts = root.parts
        for ref in root.parts:
            yield decode_part(self.source.read_pinned(ref, owner), specs, ref.key), specs

    def refs(self) -> list[FileRef | PackRef]:
        """Return all that the step needs, its commit left out."""
        return [*self.packs.values(), *self.parts, self.body.index]


def _survey(src: Store, dst: Store, steps: Sequence[int] | None, overwrite: bool) -> list[_Step]:
    """Find out what can be found out before anything is written: does the source have it all, is the place free?"""
    source, target = Repository(src), Repository(dst)
    target.check_marker()
    numbers = _chosen(source, steps)
    chosen = [_commits(source, dst, step, overwrite) for step in numbers]
    for step in chosen:
        for part, _ in step.read_parts():
            for pack in part.packs:
                if step.packs.setdefault(pack.key, pack).nbytes != pack.nbytes:
                    raise MalformedData(f"{step.body.index.key}: names pack {pack.key} with two sizes")
        for pack in step.packs.values():
            found = src.size(pack.key)
            if found != pack.nbytes:
                what = "is not there" if found is None else f"has {found} bytes, expected {pack.nbytes}"
                raise MissingChunk(f"step {step.body.step} in {src.url}: pack {pack.key} {what}{_lost(step, pack.key)}")
    return chosen


def _chosen(source: Repository, steps: Sequence[int] | None) -> list[int]:
    if steps is None:
        return [source.pick(None)]
    source.check_marker()
    there = set(source.steps())
    return [step if step in there else source.pick(step) for step in sorted(set(steps))]  # pick says what there is


def _commits(source: Repository, dst: Store, step: int, overwrite: bool) -> _Step:
    key = commit_key(step)
    data = source.store.get(key, 0, MAX_COMMIT + 1)
    body = decode_commit(data, key)
    if body.step != step:
        raise MalformedData(f"{key}: says step {body.step}, expected {step}")
    there = _commit_at(dst, step)
    if there is not None and there != data and not overwrite:
        raise CheckpointExists(
            f"step {step} is committed already in {dst.url} and is not the one of {source.store.url}; "
            f"--overwrite (overwrite=True) replaces it"
        )
    return _Step(source, data, body, there == data)


def _commit_at(store: Store, step: int) -> bytes | None:
    try:
        return store.get(commit_key(step), 0, MAX_COMMIT + 1)
    except ObjectNotFound:
        return None


def _lost(step: _Step, key: str) -> str:
    """Say what a pack that is gone held: a name is worth more than a key."""
    for held in _held(step).get(key, ()):
        return f"; lost with it: {held} and all else in it"
    return ""


def _held(step: _Step) -> dict[str, list[Held]]:
    """Return what the step needs of each pack."""
    found: dict[str, list[Held]] = {key: [] for key in step.packs}
    for part, specs in step.read_parts():
        for chunk in part.chunks:
            if chunk.pack != DERIVED:
                found[part.packs[chunk.pack].key].append(Held(chunk, specs[chunk.spec], part.codec_of(chunk)))
        for entry in part.objects:
            for blob in (entry.document, *(blob for tensor in entry.tensors for blob in tensor.blobs)):
                found[part.packs[blob.pack].key].append(Held(blob, entry.name))
    return found


def _copy(step: _Step, mover: Mover, overwrite: bool) -> None:
    """Bring all objects of a step, then its commit."""
    number, target = step.body.step, Repository(mover.dst)
    target.initialise()
    if not step.there:
        own = step.body.index.key.rpartition("/index/")[0]
        mover.begin({own, *(key.rpartition("/packs/")[0] for key in step.packs)})
    wanted = _held(step)
    mover.packs([(pack, wanted[key]) for key, pack in step.packs.items()], lambda key: _claims(target, key, number))
    for ref in (*step.parts, step.body.index):
        mover.index_file(ref, step.source.read_pinned(ref, commit_key(number)), lambda key: _pins(target, key))
    if step.there:
        mover.report.present.append(number)
        return
    mover.check_all_there(step.refs())
    try:
        mover.dst.put(commit_key(number), step.data, overwrite=overwrite)
    except FileExistsError as error:  # ObjectExists: of a rival, or of this very call, whose answer was lost
        if _commit_at(mover.dst, number) != step.data:
            raise CheckpointExists(
                f"step {number} was committed in {mover.dst.url} by somebody else meanwhile"
            ) from error
    mover.report.steps.append(number)


def _claims(target: Repository, key: str, step: int) -> Iterator[tuple[int, PackRef, list[Held]]]:
    """Yield (step, pack, chunks) of the destination's committed steps that need an object under this key."""
    for number in target.steps():
        try:
            body = target.read_commit(number)
            one = _Step(target, b"", body, there=True)
            for part, _ in one.read_parts():
                one.packs.update((pack.key, pack) for pack in part.packs)
            if key in one.packs:
                yield number, one.packs[key], _held(one)[key]
        except CkptError as error:  # what is lost there already cannot be harmed
            if not is_damage(error):
                raise


def _pins(target: Repository, key: str) -> Iterator[tuple[int, str]]:
    """Yield (step, digest) of the destination's committed steps whose index has a file under this key."""
    for number in target.steps():
        try:
            body = target.read_commit(number)
            refs = (body.index, *target.read_root(body).parts)
        except CkptError as error:
            if not is_damage(error):
                raise
            continue
        yield from ((number, ref.digest) for ref in refs if ref.key == key)
