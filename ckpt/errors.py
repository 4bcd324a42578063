"""Every exception that ``ckpt`` raises on purpose.

::

    CkptError(Exception)                        exit code 1
    ├─ ConfigError                              2   an argument or the engine's moment is wrong; raised before any work
    ├─ LayoutError                              4   problems: tuple[str, ...], all of them at once
    │    └─ UnsupportedLayout                       the adapter cannot express this engine state; names the tensor
    ├─ PlanError                                5
    │    ├─ MissingState                            missing / unexpected / dtype: what target and checkpoint disagree on
    │    └─ BudgetTooSmall                          one item exceeds the memory budget
    ├─ StoreError                               6   key; transient: may the same call succeed later?
    │    ├─ ObjectNotFound      ├─ ObjectExists
    │    ├─ AccessDenied        ├─ StoreFull
    │    └─ StoreUnavailable                        transient
    ├─ FormatError                              12  bytes on disk that are not what the format says
    │    ├─ UnsupportedVersion  ├─ UnsupportedFeature  └─ MalformedData
    ├─ IntegrityError                           3   well-formed bytes that are not the ones that were written
    │    ├─ DigestMismatch      ├─ MissingChunk      └─ ReplicaDivergence
    ├─ RepositoryError                          7
    │    ├─ NoSuchCheckpoint (10)   ├─ CheckpointExists   └─ SplitRoot (ranks see different directories)
    ├─ SaveInFlight                             1   on_busy="refuse": the asynchronous save before is not durable yet
    ├─ SaveCancelled                            1   handle.cancel(), or training could not wait for the snapshot
    ├─ ReplayError                              8   gradient log: gap, wrong base, optimizer mismatch
    └─ RankFailure                              9   step, failures: {rank: "Type: message"}; the same on every rank

Messages say what failed, on which full identity (fqn, role, box, rank, step, key): expected X, found Y; then at most
one sentence on what to do. :func:`to_wire` / :func:`from_wire` carry an error to other ranks without pickle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class CkptError(Exception):
    """Base of all errors of this library. ``except CkptError`` catches every one of them."""

    exit_code: ClassVar[int] = 1


class ConfigError(CkptError, ValueError):
    """An argument is wrong, or the engine is not at a moment at which it can be saved. Nothing was touched."""

    exit_code = 2


class LayoutError(CkptError):
    """The shards that the ranks declare do not form a whole. ``problems`` lists everything that is wrong."""

    exit_code = 4

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message if not problems else "\n  - ".join([message, *problems]))
        self.problems = problems


class UnsupportedLayout(LayoutError):
    """An adapter cannot express this engine's state, so it refuses instead of saving half of it."""


class PlanError(CkptError):
    """No plan satisfies the request."""

    exit_code = 5


class MissingState(PlanError):
    """Checkpoint and engine do not hold the same state (strict load).

    ``missing``: wanted by the engine, absent from the checkpoint. ``unexpected``: the reverse. ``dtypes``: held by
    both under different dtypes, which are never cast in silence.
    """

    def __init__(
        self,
        message: str,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        dtypes: tuple[str, ...] = (),
    ) -> None:
        lines = [message]
        for title, names in (("missing", missing), ("unexpected", unexpected), ("dtype differs", dtypes)):
            lines += [f"{title}: {name}" for name in names]
        super().__init__("\n  - ".join(lines))
        self.missing, self.unexpected, self.dtypes = missing, unexpected, dtypes


class BudgetTooSmall(PlanError):
    """One indivisible item is larger than the memory budget."""


class StoreError(CkptError):
    """A store refused or failed an operation on ``key``. ``transient``: the same call may succeed later."""

    exit_code = 6
    transient: bool = False

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ObjectNotFound(StoreError, FileNotFoundError):
    """No object under this key."""


class ObjectExists(StoreError, FileExistsError):
    """A create-if-absent put found an object under this key."""


class AccessDenied(StoreError, PermissionError):
    """The store refused for want of a right (read-only file system, missing permission)."""


class StoreFull(StoreError):
    """No space or quota left."""


class StoreUnavailable(StoreError):
    """The store did not answer, or answered that it is busy."""

    transient = True


class FormatError(CkptError):
    """Bytes that do not follow docs/format.md."""

    exit_code = 12


class UnsupportedVersion(FormatError):
    """Written in a format version that this release does not read."""


class UnsupportedFeature(FormatError):
    """Written with a feature that this release does not know."""


class MalformedData(FormatError):
    """Truncated, oversized, or not parseable: the message says which file and what was expected."""


class IntegrityError(CkptError):
    """Well-formed bytes that are not the bytes that were written."""

    exit_code = 3


class DigestMismatch(IntegrityError):
    """The digest of what was read differs from the one in the index."""


class MissingChunk(IntegrityError):
    """The index names bytes that the store does not have (pack absent or shorter than recorded)."""


class ReplicaDivergence(IntegrityError):
    """Ranks declare to hold the same piece and their digests differ (``on_divergence="error"``)."""


class RepositoryError(CkptError):
    """The repository as a whole cannot do what was asked."""

    exit_code = 7


class NoSuchCheckpoint(RepositoryError):
    """The root holds no checkpoint, or not the step that was asked for."""

    exit_code = 10


class CheckpointExists(RepositoryError):
    """The step is committed already (``overwrite=True`` replaces it)."""


class SplitRoot(RepositoryError):
    """Ranks that were given the same root see different directories (node-local disks?)."""


class SaveInFlight(CkptError):
    """An asynchronous save was asked for while the one before is not durable yet (``on_busy="refuse"``)."""


class SaveCancelled(CkptError):
    """An asynchronous save was ended before its commit: nothing of it exists."""


class ReplayError(CkptError):
    """The gradient log cannot be replayed onto this base."""

    exit_code = 8


class RankFailure(CkptError):
    """A step of a collective operation failed on some ranks; every rank raises this same error.

    ``step``: the name of the step. ``failures``: rank -> ``"Type: message"`` of its cause (or ``"did not arrive"``).
    """

    exit_code = 9

    def __init__(self, step: str, failures: dict[int, str]) -> None:
        shown = [f"rank {rank}: {failures[rank]}" for rank in sorted(failures)]
        if len(shown) > 8:  # a job of thousands must not print thousands of equal lines
            shown = [*shown[:8], f"… and {len(failures) - 8} more ranks"]
        super().__init__("\n  - ".join([f"step {step!r} failed on {len(failures)} rank(s)", *shown]))
        self.step = step
        self.failures = failures

    def caused_by(self, *classes: type[CkptError], but: tuple[type[CkptError], ...] = ()) -> bool:
        """Is every rank's cause an error of one of these classes, and of none of ``but``?"""
        tree = _tree(CkptError)
        causes = [tree.get(text.partition(":")[0]) for text in self.failures.values()]
        return all(cause is not None and issubclass(cause, classes) and not issubclass(cause, but) for cause in causes)


def with_all_problems(error: LayoutError, wires: Iterable[Mapping[str, Any]]) -> LayoutError:
    """Return one error for all ranks where each found problems of its own.

    Args:
        error: this rank's.
        wires: every rank's as :func:`to_wire`, in rank order, of the class of ``error``.
    """
    problems = tuple(dict.fromkeys(line for wire in wires for line in wire["attributes"]["problems"]))
    if problems == tuple(error.problems):
        return error
    return type(error)(str(error).partition("\n  - ")[0], problems)


def _tree(root: type[CkptError]) -> dict[str, type[CkptError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def is_damage(error: CkptError) -> bool:
    """Does ``error``, met while a checkpoint was read, mean that it is damaged, rather than out of reach for now?

    A store that refuses for good (a directory in place of a file, an unreadable sector) is damage; one that is busy, or
    that another user could read, is not. Of a :class:`RankFailure` every rank's cause must be damage.
    """
    damage, other = (FormatError, IntegrityError, StoreError), (AccessDenied, ObjectExists, StoreFull, StoreUnavailable)
    if isinstance(error, RankFailure):
        return error.caused_by(*damage, but=other)
    return isinstance(error, damage) and not isinstance(error, other) and not getattr(error, "transient", False)


def to_wire(error: BaseException) -> dict[str, object]:
    """Return ``error`` as plain data: class name, message, and the attributes that its class documents."""
    attributes = {k: v for k, v in vars(error).items() if not k.startswith("_")} if isinstance(error, CkptError) else {}
    if isinstance(error, RankFailure):
        attributes = {"step": error.step, "failures": {str(k): v for k, v in error.failures.items()}}
    # A file name that is not UTF-8 is lone surrogates in Python: they must not make the report itself fail.
    message = str(error).encode("utf-8", "backslashreplace").decode()
    return {"type": type(error).__name__, "message": message or type(error).__name__, "attributes": attributes}


def from_wire(data: dict[str, object]) -> CkptError:
    """Rebuild an error of this tree from :func:`to_wire`; a foreign type becomes ``CkptError("Type: message")``."""
    name, message = str(data["type"]), str(data["message"])
    attributes = data.get("attributes")
    plain = attributes if isinstance(attributes, dict) else {}
    if name == "RankFailure":
        return RankFailure(str(plain["step"]), {int(k): str(v) for k, v in plain["failures"].items()})
    cls = _tree(CkptError).get(name)
    if cls is None:
        return CkptError(f"{name}: {message}")
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    for key, value in plain.items():
        setattr(error, key, tuple(value) if isinstance(value, list) else value)
    return error
