from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpt
from ckpt.errors import ReplayError
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
