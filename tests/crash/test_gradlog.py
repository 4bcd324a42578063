"""Stop a logged job at every single operation on the disk: no step that was called durable is lost, none is wrong."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import ckpt
from ckpt.errors import CkptError
from ckpt.repo.gc import collect
from ckpt.repo.repository import Repository
from ckpt.repo.verify import DAMAGE, verify
from ckpt.store.local import LocalStore
from tests.crash.machine import Crash, Machine
from tests.crash.test_copy import points
from tests.unit.gradlog.test_checkpointer import Loop, equal

if TYPE_CHECKING:
    from pathlib import Path

STEPS, FULL_EVERY = 7, 3


@pytest.fixture(scope="module")
def states() -> list[dict[str, Any]]:
    """The state behind each step of a job that is never stopped."""
    loop, found = Loop(), []
    found.append(loop.state())
    for step in range(STEPS):
        loop.train(1, step)
        found.append(loop.state())
    return found


def run(root: Path, machine: Machine) -> int | None:
    """Train until the machine stops; return the last step that was durable, None if there is no checkpoint yet."""
    durable = None
    loop = Loop()
    with machine.on(), suppress(Crash, CkptError):
        keeper = ckpt.Checkpointer(loop.engine, root, full_every=FULL_EVERY, keep=1)
        try:
            for step in range(STEPS):
                handle = keeper._handle
                if handle is not None:
                    handle.durable.wait(30)
                    durable = max(durable or 0, keeper.last_full)
                if machine.dead:
                    break
                loop.train(1, step, keeper)
                keeper.flush()
                durable = step + 1
        finally:
            with suppress(Crash, CkptError):
                keeper.close()
    return durable


# Threads of the stopped machine end by the crash, as they should.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_a_logged_job_stops_at_every_operation(mode: str, states: list[dict[str, Any]], tmp_path: Path) -> None:
    whole = Machine()
    assert run(tmp_path / "whole", whole) == STEPS
    reached = set()
    for at in points(whole.log, mode)[:: 1 if mode == "torn" else 5]:
        root = tmp_path / f"at{at}"
        durable = run(root, Machine(at, after=mode == "after", torn=mode == "torn"))
        loop = Loop(seed=9)
        if durable is None:
            with suppress(CkptError):
                ckpt.load(loop.engine, root)
            shutil.rmtree(root, ignore_errors=True)
            continue
        report = ckpt.load(loop.engine, root)
        assert report.step >= durable, at
        assert report.exact is not False
        assert report.step == 0 or equal(loop.state(), states[report.step]), at
        store = LocalStore(str(root))
        assert [one for one in verify(Repository(store)).findings if one.severity == DAMAGE] == []
        collect(store, older_than_s=0.0)
        again = Loop(seed=5)
        with ckpt.Checkpointer(again.engine, root, full_every=FULL_EVERY, keep=1) as keeper:
            assert keeper.number == report.step
            again.train(STEPS - keeper.number, keeper.number, keeper)
        assert report.step == 0 or equal(again.state(), states[STEPS])
        reached.add(report.step)
        shutil.rmtree(root)
    assert len(reached) >= 4
