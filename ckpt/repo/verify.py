"""Check a repository without an engine: every byte that a commit promises, and what lies beside it.

*Damage* is anything that a committed step promises and the store does not have, byte for byte. *Garbage* is what no
commit refers to: the leftovers of a killed save, harmless until somebody wants the space. The check never stops at the
first finding. Gradient logs: :mod:`ckpt.repo.verify_logs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, MalformedData, NoSuchCheckpoint, StoreError, is_damage
from ckpt.format.codec import decode
from ckpt.format.digest import digest
from ckpt.format.holders import check_holders
from ckpt.format.manifest import CODEC, DERIVED, BlobEntry, ChunkEntry, IndexPart, PackRef
from ckpt.format.pack import MAX_HEADER, parse_header
from ckpt.layout.box import Box, first_overlap
from ckpt.repo.ages import attempt_of
from ckpt.repo.findings import DAMAGE, GARBAGE, Finding
from ckpt.repo.repository import MARKER, Repository, attempt_marker, commit_key, step_prefix
from ckpt.repo.verify_logs import verify_logs
from ckpt.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpt.layout.spec import TensorSpec
    from ckpt.repo.repository import Index

SHOWN = 8
"""Chunks named when a whole pack is bad."""

Checked = dict[tuple[str, int, int, int, str | None], str]
"""What was found, once for all steps: (key, start, length, bytes of the chunk, codec) -> digest, or the problem."""


@dataclass(slots=True)
class Verification:
    """What was checked and found. ``bytes_read``: chunk data as stored; ``tensors``: those of all checked steps.

    ``logs``, ``records``, ``log_bytes``: gradient logs, their records on all ranks, and the bytes of those.
    """

    findings: list[Finding] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    tensors: int = 0
    chunks: int = 0
    bytes_read: int = 0
    garbage_bytes: int = 0
    logs: list[int] = field(default_factory=list)
    records: int = 0
    log_bytes: int = 0

    @property
    def damaged(self) -> bool:
        """Is anything that a commit promises not there?"""
        return any(f.severity == DAMAGE for f in self.findings)


def verify(
    repo: Repository, step: int | None = None, progress: Callable[[int], None] = lambda _nbytes: None
) -> Verification:
    """Check one step, or all steps, the gradient logs behind them, and what lies beside.

    Args:
        repo: the repository.
        step: only this step (gradient logs and garbage are then not looked at).
        progress: called with the number of bytes after each chunk.

    Raises:
        NoSuchCheckpoint: ``step`` is not committed, or the root holds nothing at all.
        StoreError: the root cannot be listed, or the store is busy or refuses this user (:class:`AccessDenied`): that
            is neither damage nor garbage. A file that the store will never give is damage.
    """
    result = Verification()
    try:
        repo.check_marker()
    except CkptError as error:
        _raise_unless_damage(error)
        result.findings.append(Finding(DAMAGE, MARKER, str(error)))
    chosen = repo.steps() if step is None else [step]
    if step is None and not chosen and not repo.started():
        raise NoSuchCheckpoint(f"no checkpoint in {repo.store.url}")
    used: set[str] = {MARKER}
    checked: Checked = {}
    for one in chosen:
        result.steps.append(one)
        index = _read_index(repo, one, result, used)
        if index is not None:
            _check_step(repo, one, index, result, used, checked, progress)
    if step is None:
        found = verify_logs(repo.store, progress)
        result.findings += found.findings
        result.logs, result.records, result.log_bytes = found.logs, found.records, found.nbytes
        result.garbage_bytes += found.garbage
        _find_garbage(repo, result, used)
    return result


def _read_index(repo: Repository, step: int, result: Verification, used: set[str]) -> Index | None:
    """Return the index, or record why there is none. All files of a step whose index is lost count as used."""
    used.add(commit_key(step))
    try:
        index = repo.read_index(step)
    except CkptError as error:
        _raise_unless_damage(error)
        # Other messages begin with the file that is not what was written.
        key = error.key if isinstance(error, StoreError) else str(error).partition(": ")[0]
        result.findings.append(Finding(DAMAGE, key, str(error), step))
    else:
        used.add(index.commit.index.key)
        used.add(attempt_marker(step, index.commit.attempt))
        used.update(ref.key for ref in index.root.parts)
        packs = {pack.key for part in index.parts for pack in part.packs}
        used.update(packs)
        used.update(f"{attempt_of(key)}/attempt.json" for key in packs)
        return index
    used.update(info.key for info in repo.store.walk(step_prefix(step)))
    return None


def _raise_unless_damage(error: CkptError) -> None:
    if not is_damage(error):
        raise error


def _check_step(
    repo: Repository,
    step: int,
    index: Index,
    result: Verification,
    used: set[str],
    checked: Checked,
    progress: Callable[[int], None],
) -> None:
    result.tensors += len(index.specs)
    problems = [*_coverage(index), *_holders(index), *_features(index)]
    result.findings += [Finding(DAMAGE, index.commit.index.key, text, step) for text in problems]
    present: dict[str, str | None] = {}
    for part in index.parts:
        for pack in part.packs:
            if pack.key not in present:
                present[pack.key] = _check_pack(repo, pack)
        lost: dict[str, list[str]] = {}
        for what, entry, codec in _entries(part, index.specs):
            key = part.packs[entry.pack].key
            result.chunks += 1
            if present[key] is not None:
                lost.setdefault(key, []).append(what)
                continue
            problem = _check_bytes(repo, key, entry, codec, checked)
            result.bytes_read += entry.length
            progress(entry.length)
            if problem is not None:
                result.findings.append(Finding(DAMAGE, key, f"{what}: {problem}", step))
        for key, names in lost.items():  # one finding for the file, not one for each of its thousands of chunks
            result.findings.append(Finding(DAMAGE, key, f"{present[key]}: lost with it: {listed(names, SHOWN)}", step))


def _entries(
    part: IndexPart, specs: tuple[TensorSpec, ...]
) -> Iterable[tuple[str, ChunkEntry | BlobEntry, str | None]]:
    """Yield what everything stored is called, its entry, and its codec."""
    for chunk in part.chunks:
        if chunk.pack != DERIVED:
            yield f"{specs[chunk.spec]} chunk {chunk.box}", chunk, part.codec_of(chunk)
    for entry in part.objects:
        for blob in (entry.document, *(b for t in entry.tensors for b in t.blobs)):
            yield f"object {entry.name!r}", blob, None


def _check_pack(repo: Repository, pack: PackRef) -> str | None:
    """Return what is wrong with a pack as a file: presence, size, and its header."""
    key, nbytes = pack.key, pack.nbytes
    try:
        size = repo.store.size(key)
        if size is None:
            return f"pack {key} is not there"
        if size != nbytes:
            return f"pack {key} has {size} bytes, expected {nbytes}"
        length = int.from_bytes(repo.store.get(key, 0, 8), "little")
        head = repo.store.get(key, 0, 8 + min(length, MAX_HEADER))
        parse_header(head, size, f"pack {key}")
        if pack.header and digest(head) != pack.header:
            return f"header of pack {key}: expected {pack.header}, found {digest(head)}"
    except CkptError as error:
        _raise_unless_damage(error)
        return str(error)
    return None


def _check_bytes(
    repo: Repository, key: str, entry: ChunkEntry | BlobEntry, codec: str | None, checked: Checked
) -> str | None:
    place = (key, entry.start, entry.length, entry.nbytes, codec)
    if place not in checked:
        checked[place] = _found(repo, key, entry, codec)
    if checked[place] != entry.digest:
        return f"in pack {key} at {entry.start}: expected {entry.digest}, found {checked[place]}"
    return None


def _found(repo: Repository, key: str, entry: ChunkEntry | BlobEntry, codec: str | None) -> str:
    """Return the digest of what is there, or what is there instead."""
    buffer = memoryview(bytearray(entry.length))
    try:
        got = repo.store.read_into(key, entry.start, buffer)
        if got != entry.length:
            return f"{got} bytes"
        return digest(buffer if codec is None else decode(buffer, codec, entry.nbytes, "encoded"))
    except (StoreError, MalformedData) as error:
        _raise_unless_damage(error)
        return str(error)


def _features(index: Index) -> list[str]:
    """Encoded chunks must be announced: a release that does not know them would take them for the chunks themselves."""
    encoded = sum(bool(chunk.codec) for part in index.parts for chunk in part.chunks)
    if encoded and CODEC not in index.commit.features:
        return [f"{encoded} chunks are encoded, and the commit does not name the feature {CODEC!r}"]
    return []


def _holders(index: Index) -> list[str]:
    if index.root.holders is not None:
        try:
            check_holders(index.root.holders, index.specs, index.root.world, index.commit.index.key)
        except MalformedData as error:
            return [str(error)]
    return []


def _coverage(index: Index) -> list[str]:
    """Return what the index itself lacks: chunks must tile every tensor exactly once."""
    boxes: dict[int, list[Box]] = {}
    for part in index.parts:
        for chunk in part.chunks:
            if not chunk.ranks:
                boxes.setdefault(chunk.spec, []).append(chunk.box)
    problems = []
    for number, spec in enumerate(index.specs):
        mine = boxes.get(number, [])
        pair = first_overlap(mine)
        held, wanted = sum(b.volume for b in mine), Box.whole(spec.shape).volume
        if pair is not None:
            problems.append(f"{spec}: chunks {pair[0]} and {pair[1]} overlap")
        if held != wanted:
            problems.append(f"{spec}: chunks cover {held} of {wanted} elements")
    return problems


def _find_garbage(repo: Repository, result: Verification, used: set[str]) -> None:
    for info in repo.store.walk(""):
        if info.key not in used and (info.key.startswith("steps/") or info.key.rpartition("/")[2].startswith(".tmp-")):
            result.garbage_bytes += info.nbytes
            result.findings.append(Finding(GARBAGE, info.key, f"no commit refers to it ({info.nbytes} bytes)"))
