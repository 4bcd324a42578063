"""A checkpoint repository over a store: steps, commits, indexes. docs/format.md has the layout and the invariants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import (
    CheckpointExists,
    ConfigError,
    DigestMismatch,
    MalformedData,
    MissingChunk,
    NoSuchCheckpoint,
    ObjectExists,
    ObjectNotFound,
    UnsupportedVersion,
)
from ckpt.format.digest import digest
from ckpt.format.manifest import (
    MAX_COMMIT,
    VERSION,
    CommitBody,
    FileRef,
    IndexPart,
    IndexRoot,
    decode_commit,
    decode_root,
    encode_commit,
    encode_index,
    specs_of,
)
from ckpt.format.parts import decode_part
from ckpt.layout.spec import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt.store.base import Store

MARKER = "ckpt.json"


@dataclass(frozen=True, slots=True)
class Index:
    """The whole index of one checkpoint, verified against its commit."""

    commit: CommitBody
    root: IndexRoot
    specs: tuple[TensorSpec, ...]
    parts: tuple[IndexPart, ...]


def step_prefix(step: int) -> str:
    """Return the folder of a step: its commit and all attempts to save it."""
    return f"steps/{step}"


def attempt_prefix(step: int, attempt: str) -> str:
    """Return the folder of one attempt to save ``step``."""
    return f"{step_prefix(step)}/{attempt}"


def attempt_marker(step: int, attempt: str) -> str:
    """Return the key of the file that rank 0 writes first, for the others to see."""
    return f"{attempt_prefix(step, attempt)}/attempt.json"


def commit_key(step: int) -> str:
    """Return the key of THE commit point of a step."""
    return f"{step_prefix(step)}/commit.json"


def checked_step(step: object) -> int:
    """Return ``step`` if it can number a checkpoint, else raise :class:`ConfigError`."""
    if type(step) is not int or not 0 <= step < 10**18:
        raise ConfigError(f"step {step!r} is not an integer from 0 on")
    return step


class Repository:
    """Reads and writes the metadata of one root. Holds no cache: every call asks the store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def initialise(self) -> None:
        """Create the root's marker if there is none; check it if there is. Safe to race."""
        data = b'{"format": %d, "what": "ckpt repository, see docs/format.md"}\n' % VERSION
        if self.store.size(MARKER) is None:
            try:
                self.store.put(MARKER, data)
            except ObjectExists:
                pass
            else:
                return
        self.check_marker()

    def check_marker(self) -> None:
        """Raise if the root's marker is unreadable or of another format version. No marker: nothing to check."""
        try:
            data = self.store.get(MARKER, 0, MAX_COMMIT)
        except ObjectNotFound:
            return
        try:
            version = msgspec.json.decode(data)["format"]
        except (msgspec.DecodeError, KeyError, TypeError, RecursionError) as error:
            raise MalformedData(f"{MARKER} in {self.store.url}: not a repository marker ({error!r})") from error
        if version != VERSION:
            raise UnsupportedVersion(f"{self.store.url} has format {version!r}, this release reads {VERSION}")

    def steps(self) -> list[int]:
        """Return the committed steps in ascending *numeric* order. An unreadable root raises, it is never "none"."""
        return [step for step in self.started() if self.has(step)]

    def has(self, step: int) -> bool:
        """Is this step committed?"""
        return self.store.size(commit_key(step)) is not None

    def newest(self, *, but: int | None = None) -> int | None:
        """Return the newest committed step that is not ``but``; asks the store for no older one."""
        return next((step for step in reversed(self.started()) if step != but and self.has(step)), None)

    def started(self) -> list[int]:
        """Return every step that has a folder, committed or not."""
        names = self.store.children("steps")
        return sorted(int(n) for n in names if n.isascii() and n.isdigit() and str(int(n)) == n and len(n) <= 18)

    def pick(self, step: int | None) -> int:
        """Return ``step`` if it is committed, or the newest committed step if None.

        Raises:
            NoSuchCheckpoint: the root is empty or the step is not there; says what is.
        """
        self.check_marker()
        steps = self.steps()
        if step is None:
            if steps:
                return steps[-1]
            begun = self.started()
            more = f" ({len(begun)} step(s) were begun and never committed)" if begun else ""
            raise NoSuchCheckpoint(f"no checkpoint in {self.store.url}{more}")
        if step not in steps:
            has = f"it has {', '.join(map(str, steps[-8:]))}" if steps else "it is empty"
            raise NoSuchCheckpoint(f"no checkpoint of step {step} in {self.store.url}; {has}")
        return step

    def read_commit(self, step: int) -> CommitBody:
        """Return the commit of a step.

        Raises:
            NoSuchCheckpoint: not committed.
            FormatError, IntegrityError: the file is not what was written.
        """
        key = commit_key(step)
        try:
            data = self.store.get(key, 0, MAX_COMMIT + 1)
        except ObjectNotFound as error:
            raise NoSuchCheckpoint(f"no checkpoint of step {step} in {self.store.url}") from error
        body = decode_commit(data, key)
        if body.step != step:
            raise MalformedData(f"{key}: says step {body.step}, expected {step}")
        return body

    def read_pinned(self, ref: FileRef, owner: str) -> bytes:
        """Return the bytes of an index file after checking size and digest; ``owner`` is the file that names it."""
        try:
            data = self.store.get(ref.key, 0, ref.nbytes + 1)
        except ObjectNotFound as error:
            raise MissingChunk(f"{ref.key}: named by {owner}, not there") from error
        if len(data) != ref.nbytes:
            found = self.store.size(ref.key)
            raise DigestMismatch(f"{ref.key}: expected {ref.nbytes} bytes (named by {owner}), found {found}")
        if digest(data) != ref.digest:
            raise DigestMismatch(f"{ref.key}: expected digest {ref.digest} (named by {owner}), found {digest(data)}")
        return data

    def read_root(self, commit: CommitBody) -> IndexRoot:
        """Return the index root that a commit names."""
        where = commit.index.key
        root = decode_root(self.read_pinned(commit.index, commit_key(commit.step)), where)
        if (root.step, root.attempt) != (commit.step, commit.attempt):
            raise MalformedData(
                f"{where}: belongs to step {root.step} attempt {root.attempt}, "
                f"the commit is step {commit.step} attempt {commit.attempt}"
            )
        return root

    def read_index(self, step: int, only_ranks: Iterable[int] | None = None) -> Index:
        """Return the index of a step: all parts, or only those of some ranks (what one rank needs to reuse chunks)."""
        commit = self.read_commit(step)
        root = self.read_root(commit)
        specs = specs_of(root, commit.index.key)
        chosen = range(len(root.parts)) if only_ranks is None else [r for r in only_ranks if r < len(root.parts)]
        refs = [root.parts[i] for i in chosen]
        parts = tuple(decode_part(self.read_pinned(ref, commit.index.key), specs, ref.key) for ref in refs)
        return Index(commit, root, specs, parts)

    def write_index(self, key: str, content: IndexPart | IndexRoot, *, overwrite: bool = False) -> FileRef:
        """Store one index file durably and return its reference."""
        data = encode_index(content)
        self.store.put(key, data, overwrite=overwrite)
        return FileRef(key=key, digest=digest(data), nbytes=len(data))

    def commit(self, body: CommitBody, *, overwrite: bool = False) -> int:
        """Publish a step: the one instant at which it begins to exist. Returns the commit's size in bytes.

        Raises:
            CheckpointExists: somebody committed this step already.
        """
        data, key = encode_commit(body), commit_key(body.step)
        try:
            self.store.put(key, data, overwrite=overwrite)
        except ObjectExists as error:
            # A retried put can meet its own first try: it is ours if it carries our attempt.
            if self.read_commit(body.step).attempt == body.attempt:
                return len(data)
            raise CheckpointExists(f"step {body.step} is committed already in {self.store.url}") from error
        return len(data)
