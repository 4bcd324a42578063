"""Find and remove what no commit refers to: killed saves and copies, replaced attempts, temporary files, open uploads.

Gradient logs too, where no checkpoint leads to them or their steps were given up (:mod:`ckpt.repo.gc_logs`).

Safe beside running saves and copies, and safe to be killed: what a commit needs is never in question, because all
commits are read first, and again before anything is deleted. If one of them cannot be read, nothing is deleted at all:
it might refer to anything.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.errors import CkptError, NoSuchCheckpoint, RepositoryError, is_damage
from ckpt.format.manifest import MAX_COMMIT, decode_commit, specs_of
from ckpt.format.parts import decode_part
from ckpt.repo.ages import age_of, attempt_of
from ckpt.repo.gc_logs import UnneededLogs
from ckpt.repo.lineage import HEAD, log_key, log_numbers
from ckpt.repo.lineage import ROOT as LOGS
from ckpt.repo.repository import MARKER, Repository, attempt_marker, commit_key, step_prefix
from ckpt.store.base import HasFolders, HasOrphans

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ckpt.store.base import ObjectInfo, Orphan, Store

ATTEMPT, LEFTOVER, TEMPORARY, UPLOAD, FOREIGN = "attempt", "leftover", "temporary", "upload", "foreign"
"""Kinds of garbage: a whole attempt; files of an attempt of which a commit needs others; a file in the making; an
upload that was never completed; a file of a name that no release writes, which is never removed. Kinds of gradient logs
are those of :mod:`ckpt.repo.log_needs`.
"""
TEMP = ".tmp-"
OLDER_THAN = 3600.0
"""Seconds. A save or copy that gives no sign of life for so long has failed by its own rules."""


@dataclass(slots=True)
class Garbage:
    """Objects that no commit refers to. ``key``: the object, or the folder of an attempt. ``age_s``: seconds since its
    last sign of life, None if nobody knows. ``kept``: why it stays; empty for what is removed (dry run: would be).
    """

    kind: str
    key: str
    files: int
    nbytes: int
    age_s: float | None
    kept: str = ""


@dataclass(slots=True)
class GcReport:
    """What a collection found. ``dry_run``: nothing was removed."""

    dry_run: bool
    steps: list[int] = field(default_factory=list)
    """committed, whose objects stay"""
    found: list[Garbage] = field(default_factory=list)

    @property
    def removed(self) -> list[Garbage]:
        """What was removed, or would be."""
        return [one for one in self.found if not one.kept]

    @property
    def kept(self) -> list[Garbage]:
        """What no commit refers to and stays all the same, for now."""
        return [one for one in self.found if one.kept]

    @property
    def nbytes(self) -> int:
        """Bytes that were removed, or would be."""
        return sum(one.nbytes for one in self.removed)


def collect(
    store: Store, older_than_s: float = OLDER_THAN, dry_run: bool = False, ended: Collection[str] = ()
) -> GcReport:
    """Remove garbage from a repository.

    Args:
        store: the repository's root.
        older_than_s: leave alone what showed a sign of life within these seconds: it may be a save or a copy at work.
            0 takes everything, also what nobody knows the age of: only for a root that nothing else writes to.
        dry_run: find, and remove nothing.
        ended: folders of attempts that are known to be nobody's any more, whatever their age.

    Raises:
        NoSuchCheckpoint: there is no repository here.
        RepositoryError: commits or indexes cannot be read, all of them listed; nothing was deleted.
        StoreError: the store refused or failed; garbage that is left is found by the next collection.
    """
    return _Collection(store, older_than_s, dry_run, ended).run()


class References:
    """The keys of all that committed steps need. Only grows: a step that is replaced meanwhile keeps its objects."""

    def __init__(self, repo: Repository) -> None:
        self.repo = repo
        self.keys: set[str] = {MARKER}
        self.attempts: set[str] = set()
        """folders of which something is needed"""
        self.commits: dict[int, bytes] = {}

    def refresh(self) -> None:
        """Read every commit that is new or another one than before.

        Raises:
            RepositoryError: some cannot be read.
        """
        problems = []
        for step in self._committed():
            try:
                data = self.repo.store.get(commit_key(step), 0, MAX_COMMIT + 1)
                if self.commits.get(step) != data:
                    self._add(step, data)
            except CkptError as error:
                if not is_damage(error):
                    raise
                problems.append(f"step {step}: {error}")
            else:
                self.commits[step] = data
        if problems:
            raise RepositoryError(
                "\n  - ".join(
                    [
                        f"nothing is deleted from {self.repo.store.url}: {len(problems)} committed step(s) cannot be "
                        f"read and might refer to anything; save them again with overwrite=True, or remove them",
                        *problems,
                    ]
                )
            )

    def _committed(self) -> list[int]:
        """Return committed steps, and those with a commit that leads nowhere (a link to a disk that is not mounted)."""
        steps = set(self.repo.steps())
        name = commit_key(0).rpartition("/")[2]
        rest = [s for s in self.repo.started() if s not in steps and name in self.repo.store.children(step_prefix(s))]
        return sorted([*steps, *rest])

    def _add(self, step: int, data: bytes) -> None:
        key = commit_key(step)
        body = decode_commit(data, key)
        root = self.repo.read_root(body)
        specs = specs_of(root, body.index.key)
        found = {key, body.index.key, attempt_marker(step, body.attempt), *(ref.key for ref in root.parts)}
        for ref in root.parts:
            part = decode_part(self.repo.read_pinned(ref, body.index.key), specs, ref.key)
            found.update(pack.key for pack in part.packs)
        folders = {folder for folder in map(attempt_of, found) if folder is not None}
        self.keys |= found | {f"{folder}/attempt.json" for folder in folders}
        self.attempts |= folders


class _Collection:
    """One run of :func:`collect`."""

    def __init__(self, store: Store, older_than_s: float, dry_run: bool, ended: Collection[str] = ()) -> None:
        self.store, self.older_than, self.report = store, older_than_s, GcReport(dry_run)
        self.ended = ended
        self.repo = Repository(store)
        self.references = References(self.repo)

    def run(self) -> GcReport:
        self.repo.check_marker()
        if self.store.size(MARKER) is None and not self.repo.started() and not self.store.children(LOGS):
            raise NoSuchCheckpoint(f"no repository in {self.store.url}")
        # Listed before the commits are read: whatever is committed in between is then seen as needed.
        listed = list(self.store.walk(""))
        self.references.refresh()
        self.report.steps = sorted(self.references.commits)
        logs = UnneededLogs(self.store, [info for info in listed if info.key.startswith(f"{LOGS}/")])
        attempts, single = self._unreferenced(listed)
        self._attempts(attempts)
        for kind, info in single:
            self._single(kind, info)
        self._logs(logs)
        self._uploads()
        if not self.report.dry_run:
            self._folders()
        return self.report

    def _unreferenced(
        self, listed: Iterable[ObjectInfo]
    ) -> tuple[dict[str, list[ObjectInfo]], list[tuple[str, ObjectInfo]]]:
        """Return garbage by attempt, and the rest, each with its kind."""
        attempts: dict[str, list[ObjectInfo]] = {}
        single = []
        for info in sorted(listed, key=lambda info: info.key):
            folder, name = attempt_of(info.key), info.key.rpartition("/")[2]
            is_temporary = name.startswith(TEMP) and (info.key == name or info.key.startswith(f"{LOGS}/"))
            if info.key in self.references.keys or not (info.key.startswith("steps/") or is_temporary):
                continue
            if name.startswith(TEMP) and (folder is None or folder in self.references.attempts):
                single.append((TEMPORARY, info))
            elif folder is not None:
                attempts.setdefault(folder, []).append(info)
            elif name != commit_key(0).rpartition("/")[2]:
                single.append((FOREIGN, info))
        return attempts, single

    # -- attempts ------------------------------------------------------------------------------------------------------

    def _attempts(self, attempts: dict[str, list[ObjectInfo]]) -> None:
        found = []
        for folder, infos in attempts.items():
            kind = LEFTOVER if folder in self.references.attempts else ATTEMPT
            age = age_of(self.store, folder, infos)
            kept = "" if folder in self.ended else self._young(age)
            one = Garbage(kind, folder, len(infos), sum(info.nbytes for info in infos), age, kept)
            found.append((one, infos))
        at_work = any(one.kept and one.kind == ATTEMPT for one, _ in found)
        for one, infos in found:
            # A save refers to the newest commit that it found at its start. If that was replaced since then, only the
            # save itself knows that it still needs the packs.
            if at_work and not one.kept and any(info.key.endswith("/index/root.json.zst") for info in infos):
                one.kept = "a save that is at work may refer to it: what is younger than asked for is there"
            if not one.kept and not self.report.dry_run:
                self._remove_attempt(one, infos)
            self.report.found.append(one)

    def _young(self, age: float | None) -> str:
        if self.older_than <= 0:
            return ""
        if age is None:
            return "its age is not known"
        return "may be at work: younger than asked for" if age < self.older_than else ""

    def _remove_attempt(self, one: Garbage, infos: list[ObjectInfo]) -> None:
        """Remove an attempt's garbage unless somebody began to need it since it was found."""
        self.references.refresh()
        one.kept = "" if one.key in self.ended else self._young(age_of(self.store, one.key, infos))
        if any(info.key in self.references.keys for info in infos):
            one.kept = "was committed meanwhile"
        if not one.kept:
            for info in sorted(infos, key=_order):
                self.store.delete(info.key)

    # -- gradient logs ------------------------------------------------------------------------------------------------

    def _logs(self, logs: UnneededLogs) -> None:
        for one in logs.found:
            kept = one.kept or self._young(one.age_s)
            if not kept and not self.report.dry_run:
                kept = logs.remove(one)
            nbytes = sum(info.nbytes for info in one.infos)
            self.report.found.append(Garbage(one.kind, one.key, len(one.infos), nbytes, one.age_s, kept))

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _single(self, kind: str, info: ObjectInfo) -> None:
        age = None if info.modified is None else time.time() - info.modified
        kept = "no name that ckpt gives" if kind == FOREIGN else self._young(age)
        self.report.found.append(Garbage(kind, info.key, 1, info.nbytes, age, kept))
        if not kept and not self.report.dry_run:
            self.store.delete(info.key)

    def _uploads(self) -> None:
        if not isinstance(self.store, HasOrphans):
            return
        for orphan in self.store.orphans("", 0):
            age = self._age_of_upload(orphan)
            kept = self._young(age)
            self.report.found.append(Garbage(UPLOAD, orphan.key, 1, orphan.nbytes, age, kept))
            if not kept and not self.report.dry_run:
                self.store.abort(orphan)

    def _age_of_upload(self, orphan: Orphan) -> float | None:
        """An upload is dated by its start, and may take long: its attempt's last sign of life counts too."""
        folder = attempt_of(orphan.key)
        if folder is None or folder in self.references.attempts:
            return orphan.age_s
        other = age_of(self.store, folder, self.store.walk(folder))
        return orphan.age_s if other is None else min(orphan.age_s, other)

    def _folders(self) -> None:
        """Remove the empty folders of attempts and steps, where a store has such, an earlier collection's too."""
        if not isinstance(self.store, HasFolders):
            return
        for step in self.repo.started():
            for name in self.store.children(step_prefix(step)):
                folder = attempt_of(f"{step_prefix(step)}/{name}/")
                if folder is not None and not self._young(age_of(self.store, folder, ())):
                    for below in (f"{folder}/packs", f"{folder}/index", folder):
                        self.store.remove_folder(below)
            self.store.remove_folder(step_prefix(step))
        for number in log_numbers(self.store)[:-1]:  # the last one may be about to be begun
            folder = log_key(number)
            if self.store.size(f"{folder}/{HEAD}") is None:
                for rank in self.store.children(folder):
                    self.store.remove_folder(f"{folder}/{rank}")
                self.store.remove_folder(folder)


def _order(info: ObjectInfo) -> tuple[int, str]:
    """The index root goes first, so that nothing names what is gone already, and the attempt's date last."""
    kind = re.search(r"/(index/root|index/|attempt\.json$)", info.key)
    return ({"index/root": 0, "index/": 1, "attempt.json": 3}[kind[1]] if kind else 2, info.key)
