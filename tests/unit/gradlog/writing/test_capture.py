from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpt
from ckpt.errors import ReplayError
from ckpt.gradlog.writing.capture import Taken, sum_of_squares
from ckpt.gradlog.writing.lossless import Kept
from tests.harness.logged_jobs import changed_record, loaded, logged, with_objects
from tests.unit.gradlog.test_checkpointer import Loop, equal

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("kind", "option", "value", "state"),
    [
        (torch.optim.AdamW, "amsgrad", True, "max_exp_avg_sq"),
        (torch.optim.RMSprop, "centered", True, "grad_avg"),
        (torch.optim.RMSprop, "momentum", 0.5, "momentum_buffer"),
    ],
)
def test_an_option_that_needs_new_state_ends_the_log_by_name(
    kind: Any, option: str, value: Any, state: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(optimizer=kind)
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper:
        loop.train(2, 0, keeper)
        loop.optimizer.param_groups[0][option] = value
        for p, one in loop.optimizer.state.items():  # torch's own step does not make it any more
            one[state] = torch.zeros_like(p)
        loop.train(1, 2, keeper)
        assert f"option '{option}' of optimizer group 0 was switched on ({option}={value!r})" in caplog.text
        assert keeper.last_full == 3
        loop.train(2, 3, keeper)
    again = Loop(seed=9, optimizer=kind, **{option: value})
    report = ckpt.load(again.engine, tmp_path)
    assert (report.step, report.base, report.exact) == (5, 3, True)
    assert equal(again.state(), loop.state())


def test_momentum_that_sgd_begins_by_itself_is_replayed(tmp_path: Path) -> None:
    loop = Loop(optimizer=torch.optim.SGD)
    with ckpt.Checkpointer(loop.engine, tmp_path, full_every=100) as keeper:
        loop.train(2, 0, keeper)
        loop.optimizer.param_groups[0]["momentum"] = 0.9
        loop.train(3, 2, keeper)
    again = Loop(seed=9, optimizer=torch.optim.SGD)
    report = ckpt.load(again.engine, tmp_path)
    assert (report.step, report.base, report.exact) == (5, 0, True)
    assert equal(again.state(), loop.state())


def test_a_log_that_needs_state_which_nothing_has_made_is_a_clear_error() -> None:
    store = with_objects({})
    logged(store, 2, full_every=1)
    logged(store, 2)

    def on(record: Any) -> Any:
        calls = [call.__replace__(options=tuple(_with_amsgrad(one) for one in call.options)) for call in record.calls]
        return record.__replace__(calls=tuple(calls))

    key = "log/000002/rank00000/000000000003.log"
    store.put(key, changed_record(store.get(key), on), overwrite=True)
    with pytest.raises(ReplayError, match=r"step 3: AdamW fails: .*no 'max_exp_avg_sq'.*an option that needs it"):
        loaded(store)


def _with_amsgrad(one: Any) -> Any:
    return one.__replace__(document=json.dumps({**json.loads(one.document), "amsgrad": True}))


@pytest.mark.parametrize(("half", "scale"), [(2.0**100, 2.0**-104), (1e30, 3e-33), (2.0**-100, 1.0), (1.0, 1e-25)])
def test_the_norm_is_that_of_the_gradient_whatever_the_multiplier(half: float, scale: float) -> None:
    data = torch.full((100_000,), half).bfloat16()
    kept = Taken((0,), "float32", Kept(data, scale))
    expected = 100_000 * (float(data[0]) * scale) ** 2
    assert sum_of_squares([kept, kept]) == pytest.approx(2 * expected, rel=1e-6)
    assert sum_of_squares([Taken((0,), "float32", Kept(data[:0], None))]) == 0


def test_an_empty_parameter_is_stepped_exactly_when_the_job_stepped_it(tmp_path: Path) -> None:
    def job(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        model.none, model.other = torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.zeros(0))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = job(0)
    with ckpt.Checkpointer((model, optimizer), tmp_path, full_every=100) as keeper:
        for step in range(4):
            optimizer.zero_grad()
            (model(torch.ones(2, 3)).sum() + model.none.sum() + (model.other.sum() if step % 2 else 0)).backward()
            if step == 3:  # of what is there, nothing has elements
                model.weight.grad = model.bias.grad = None
            optimizer.step()
            keeper.step()
        assert keeper._log is not None
        keeper._log.give_up("first")
        keeper._log.give_up("second")
        assert keeper._log.broken == "first"
    again, other = job(7)
    assert ckpt.load((again, other), tmp_path).step == 4
    counts = [[float(one.state[p]["step"]) for p in m.parameters()] for m, one in ((model, optimizer), (again, other))]
    assert counts[0] == counts[1]
    assert sorted(counts[0]) == [2.0, 3.0, 3.0, 4.0]
