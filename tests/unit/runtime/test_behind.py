"""The thread that saves, the hook in front of optimizer steps, and the end of the interpreter."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import pytest
import torch

from ckpt.errors import RankFailure, StoreFull, to_wire
from ckpt.runtime import behind
from ckpt.runtime.handle import SaveHandle
from tests.harness.gates import Gate

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def own_flight() -> Iterator[None]:
    with mock.patch("ckpt.runtime.behind._last", behind._Flight()):
        yield


class Save:
    """A save that is staged when one gate opens and durable when the other does."""

    def __init__(self, patience: float = 60.0) -> None:
        self.handle = SaveHandle(3)
        self.stage, self.finish = Gate(), Gate()
        behind.launch(self.handle, self._run, patience)

    def _run(self) -> Any:
        self.stage.pass_through()
        self.handle.advance(1)
        self.handle.staged.reach(None)
        self.finish.pass_through()
        self.handle.committing()
        return "report"

    def end(self) -> None:
        self.stage.open()
        self.finish.open()
        self.handle.durable.settled(60)


def optimizer(kind: Any = torch.optim.SGD) -> Any:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return kind([p], lr=0.5)


def weight(one: Any) -> float:
    return float(one.param_groups[0]["params"][0][0].detach())


def step_while(save: Save, one: Any, do: Any) -> bool:
    """Step while another thread does something as soon as the step is asked for; was it staged when it was done?"""
    asked, seen = threading.Event(), []
    one.register_step_pre_hook(lambda *_: seen.append(save.handle.staged.done()))  # behind ours
    helper = threading.Thread(target=lambda: (asked.wait(60), do()))
    helper.start()
    asked.set()
    one.step()
    helper.join(60)
    return bool(seen[0])


def test_a_step_waits_for_what_is_not_staged_and_no_longer():
    one = optimizer()  # made before the hook was
    save = Save()
    assert not save.handle.staged.done()
    assert step_while(save, one, save.stage.open)
    assert weight(one) == 0.5
    assert not save.handle.durable.done()
    save.finish.open()
    assert save.handle.durable.wait(60) == "report"


def test_no_step_is_taken_before_it_is_staged():
    one, save = optimizer(), Save()
    stepping = threading.Thread(target=one.step)
    waits = threading.Event()
    settled = save.handle.staged.settled
    with mock.patch.object(save.handle.staged, "settled", lambda *a: (waits.set(), settled(*a))[1]):
        stepping.start()
        assert waits.wait(60)
        assert weight(one) == 1.0
        save.stage.open()
        stepping.join(60)
    assert weight(one) == 0.5
    save.end()


class Inherited(torch.optim.SGD):
    """An optimizer of the user's own, by inheritance."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Bare(torch.optim.Optimizer):
    """An optimizer of the user's own, from nothing."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.5)


class Wrapper:
    """What mixed-precision libraries do: an optimizer that is no torch optimizer and steps one."""

    def __init__(self, params: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(params, lr=lr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self) -> None:
        self.inner.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, Inherited, Bare, Wrapper])
def test_optimizers_of_every_kind_wait(kind: Any):
    one, save = optimizer(kind), Save()
    assert step_while(save, one, save.stage.open)
    assert weight(one) < 1
    save.end()


def test_the_first_of_several_optimizers_waits_whichever_it_is():
    generator, discriminator = optimizer(), optimizer()
    save = Save()
    assert step_while(save, discriminator, save.stage.open)
    generator.step()
    assert weight(generator) == weight(discriminator) == 0.5
    save.end()


def test_a_step_behind_a_scaler_and_a_scheduler_waits():
    one, save = optimizer(), Save()
    scheduler = torch.optim.lr_scheduler.ConstantLR(one, factor=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    seen: list[bool] = []
    one.register_step_pre_hook(lambda *_: seen.append(save.handle.staged.done()))
    asked = threading.Event()
    save.stage.open_when(asked)
    asked.set()
    scaler.step(one)
    scheduler.step()
    assert seen == [True]
    save.end()


def test_a_cancelled_save_lets_the_step_go():
    one, save = optimizer(), Save()
    assert not step_while(save, one, save.handle.cancel)
    save.end()
    assert isinstance(save.handle.durable.peek(), Exception)


def test_a_save_that_does_not_move_is_given_up_by_the_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(behind, "LOOK_SECONDS", 0.01)
    one, save = optimizer(), Save(patience=0.05)
    one.step()
    assert weight(one) == 0.5
    save.end()
    with pytest.raises(Exception, match="no progress for 0 s while an optimizer step was waiting"):
        save.handle.durable.wait()


def test_a_save_that_moves_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(behind, "LOOK_SECONDS", 0.01)
    one, handle, ticks = optimizer(), SaveHandle(1), 30

    def run() -> Any:
        for _ in range(ticks):
            handle.advance(1)
            looked.wait(60)  # until the step has looked again
            looked.clear()
        handle.staged.reach(None)
        return "report"

    looked = threading.Event()
    settled = handle.staged.settled
    with mock.patch.object(handle.staged, "settled", lambda *a: (looked.set(), settled(*a))[1]):
        behind.launch(handle, run, patience=1.0)
        one.step()
    assert handle.durable.wait(60) == "report"


def test_a_failure_is_logged_and_the_step_goes_on(caplog: pytest.LogCaptureFixture):
    one, handle = optimizer(), SaveHandle(3)

    def run() -> Any:
        raise StoreFull("no space left", "k")

    with caplog.at_level(logging.ERROR, "ckpt"):
        behind.launch(handle, run, 60.0)
        one.step()
        behind.wait_for_last()
        for thread in threading.enumerate():
            if thread.name == "ckpt save of step 3":
                thread.join(60)
    assert caplog.messages == ["the asynchronous save of step 3 failed, training goes on: no space left"]
    assert weight(one) == 0.5
    with pytest.raises(StoreFull):
        handle.durable.wait()


def test_a_call_that_waits_long_for_the_save_before_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(behind, "TELL_SECONDS", 0.01)
    save = Save()
    save.stage.open()
    save.finish.await_visitor()
    with mock.patch.object(behind.log, "warning", side_effect=lambda *_: save.finish.open()) as said:
        behind.wait_for_last()
    assert save.handle.durable.done()
    assert "the asynchronous save before, which is not durable yet" in said.call_args.args[0]


def test_the_thread_has_a_name_and_keeps_no_gradients():
    seen: list[Any] = []
    handle = SaveHandle(12)
    behind.launch(handle, lambda: seen.append((threading.current_thread().name, torch.is_grad_enabled())), 60.0)
    handle.durable.wait(60)
    assert seen == [("ckpt save of step 12", False)]
    assert torch.is_grad_enabled()


def test_without_a_thread_the_save_has_failed():
    handle = SaveHandle(3)
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        behind.launch(handle, lambda: pytest.fail("ran"), 60.0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        handle.durable.wait(0)


def test_what_nobody_has_heard_is_told_once():
    handle = SaveHandle(3)

    def run() -> Any:
        raise RankFailure("write", {1: "StoreFull: x"})

    assert behind.unheard() == b""
    behind.launch(handle, run, 60.0)
    behind.wait_for_last()
    wire = behind.unheard()
    with pytest.raises(RankFailure) as caught:
        behind.raise_unheard([b"", wire])
    assert caught.value is handle.durable.peek()  # the rank's own, with its cause
    assert behind.in_flight() is None
    behind.raise_unheard([behind.unheard()])


def test_what_somebody_has_heard_is_told_only_if_another_rank_has_not():
    handle = SaveHandle(3)

    def run() -> Any:
        raise RankFailure("write", {1: "StoreFull: x"})

    behind.launch(handle, run, 60.0)
    assert handle.staged.exception(60) is not None
    assert behind.unheard() == b""
    other = msgspec.json.encode(to_wire(RankFailure("write", {1: "StoreFull: x"})))
    with pytest.raises(RankFailure, match="StoreFull"):
        behind.raise_unheard([other])


# ------------------------------------------------------------------------------------------ the interpreter's end

SCRIPT = """
import sys, threading, torch, ckpt
from concurrent.futures import ThreadPoolExecutor
from ckpt.store.local import LocalStore
from tests.harness.gates import Gated

how, root = sys.argv[1:]
ending = threading.Event()

def at_exit():
    ending.wait()
    with ThreadPoolExecutor(2) as pool:  # as stores do for their I/O
        assert list(pool.map(abs, [-1, 2])) == [1, 2]
    if how == "full":
        raise ckpt.StoreError("no space left on the device")

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3)).sum().backward()
optimizer.step()
handle = ckpt.async_save((model, optimizer), Gated(LocalStore(root), finish=at_exit), step=1)
threading._register_atexit(ending.set)
if how == "error":
    raise ValueError("the training has a bug")
if how == "code":
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("how", "code", "steps"), [("end", 0, [1]), ("full", 0, []), ("error", 1, [1]), ("code", 3, [1])]
)
def test_at_the_end_of_the_interpreter_it_is_finished_or_reported(
    how: str, code: int, steps: list[int], tmp_path: Path
):
    import ckpt

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, str(tmp_path)],
        cwd=REPO, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ckpt.steps(tmp_path) == steps, done.stderr
    assert "the interpreter ends while step 1 is being saved: finishing it" in done.stderr
    assert ("the asynchronous save of step 1 failed" in done.stderr) == (how == "full")
    assert ("no space left on the device" in done.stderr) == (how == "full")
    assert "terminate called" not in done.stderr
    assert ("Traceback" in done.stderr) == (how == "error")


LATE = """
import atexit, sys, torch, ckpt

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[2] == "again":
    ckpt.async_save((model, optimizer), sys.argv[1], step=0).durable.wait(60)
atexit.register(lambda: ckpt.async_save((model, optimizer), sys.argv[1], step=1))
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no thread can be started then: the save says so")
@pytest.mark.parametrize(("how", "steps"), [("first", [1]), ("again", [0, 1])])
def test_what_is_asked_for_at_the_end_of_the_interpreter_is_not_lost(how: str, steps: list[int], tmp_path: Path):
    import ckpt

    done = subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path), how],
        cwd=REPO, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert ckpt.steps(tmp_path) == steps


FORKED = """
import multiprocessing, sys, torch, ckpt
from ckpt.store.local import LocalStore
from tests.harness.gates import Gate, Gated, staging_behind

def make():
    model = torch.nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

torch.set_num_threads(1)
gate = Gate()
with staging_behind(gate):
    handle = ckpt.async_save(make(), LocalStore(sys.argv[1]), step=1)
    gate.await_visitor()
    worker = multiprocessing.get_context("fork").Process(target=lambda: make()[1].step())
    worker.start()
    worker.join(60)
    code = worker.exitcode
    worker.kill()
    gate.open()
    handle.durable.wait(60)
sys.exit(0 if code == 0 else f"the child has not ended well: {code}")
"""


def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path: Path):
    """Neither in an optimizer step nor at its end: the thread that saves is not there."""
    import ckpt

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)],
        cwd=REPO, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert ckpt.steps(tmp_path) == [1]
