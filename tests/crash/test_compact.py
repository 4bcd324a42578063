"""Stop a compaction at every single operation on the disk: all is still there, and the same command goes on."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from ckpt.compact import cuts
from ckpt.compact.job import compact
from ckpt.gradlog.replaying.recover import find_recovery
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.runtime.comm import Comm
from ckpt.store.local import LocalStore
from tests.crash.machine import Crash, Machine
from tests.crash.test_copy import points
from tests.harness.logged_jobs import logged

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a base at step 2, and a log that leads on to step 4."""
    root = tmp_path_factory.mktemp("job")
    logged(root, STEPS, full_every=2 * STEPS)
    compact(LocalStore(str(root)))
    logged(root, STEPS, full_every=4 * STEPS)
    return root


def end_of(root: Path) -> int:
    """Return how far a load would come."""
    return find_recovery(Comm(None, 0, 1), LocalStore(str(root)), None, lenient=False)[0].step


def chunks(root: Path) -> list[tuple[object, ...]]:
    """Return what the new base holds, wherever it lies."""
    index = Repository(LocalStore(str(root))).read_index(2 * STEPS)
    found = [(index.specs[c.spec], c.box, c.digest) for part in index.parts for c in part.chunks]
    return sorted(found, key=repr)


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_a_compaction_stops_at_every_operation(
    mode: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "MOST_SLICES", 1)  # in several bundles, the first of which need not be done again
    shutil.copytree(trained, tmp_path / "count")
    whole = Machine()
    with whole.on():
        assert compact(LocalStore(str(tmp_path / "count"))).exact is True
    wanted = chunks(tmp_path / "count")
    resumed, committed = 0, []
    for at in points(whole.log, mode)[:: 4 if mode == "before" else 7]:
        root = tmp_path / f"at{at}"
        shutil.copytree(trained, root)
        machine = Machine(at, after=mode == "after", torn=mode == "torn")
        with machine.on(), pytest.raises(Crash):
            compact(LocalStore(str(root)))
        assert end_of(root) == 2 * STEPS
        store = LocalStore(str(root))
        committed.append(Repository(store).has(2 * STEPS))
        done = compact(store)
        resumed += done.resumed
        assert (done.step, done.exact) == (2 * STEPS, None if committed[-1] else True)
        assert chunks(root) == wanted
        assert not list(root.rglob("*.log"))
        # A commit that was being written may have left its temporary file, which `gc` takes.
        assert [one for one in verify(Repository(store)).findings if "/.tmp-" not in one.key] == []
        assert end_of(root) == 2 * STEPS
        shutil.rmtree(root)
    assert committed == sorted(committed), "once committed, always committed"
    assert committed[0] is False
    if mode == "before":
        assert committed[-1] is True
        assert resumed, "what was finished is not computed again"
