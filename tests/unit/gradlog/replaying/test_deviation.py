"""How far a replay is from what was: which values a record tells, and how they are compared in any layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

import ckpt
from ckpt.engine.base import ReplayableAdapter
from ckpt.engine.find import adapter_for
from ckpt.gradlog.replaying import deviation
from ckpt.gradlog.replaying.deviation import NONE, SAMPLES, Deviation, Sampler, deviation_of
from ckpt.gradlog.replaying.opened import Opened
from ckpt.gradlog.replaying.reading import RankReader, read_rank_head
from ckpt.gradlog.share import local_of, share
from ckpt.report import LoadReport
from ckpt.runtime.comm import Comm
from ckpt.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.engine.base import Stepped
    from ckpt.gradlog.record import RankHead, Record


def logged(width: int = 6) -> tuple[MemoryStore, torch.nn.Module, torch.optim.Optimizer]:
    store, model = MemoryStore(), torch.nn.Sequential(torch.nn.Linear(width, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.Checkpointer((model, optimizer), store, full_every=100) as keeper:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            keeper.step()
    return store, model, optimizer


def told(store: MemoryStore) -> list[tuple[RankHead, Record]]:
    return [(read_rank_head(store, 1, 0), RankReader(store, 1, 0, 2).open(2, Opened).record)]


def stepped_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Sequence[Stepped]:
    adapter = adapter_for((model, optimizer))
    assert isinstance(adapter, ReplayableAdapter)
    return adapter.stepped()


def test_a_small_job_tells_all_of_its_values_and_a_large_one_some_of_each() -> None:
    store, model, optimizer = logged()
    (_, record), *_ = told(store)
    values = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    assert sorted(value for _, value in record.samples) == sorted(values.tolist())
    store, model, optimizer = logged(width=1000)
    stepped = stepped_of(model, optimizer)
    sampler = Sampler(share(Comm(None, 0, 1), stepped).own)
    assert len(sampler.take()) == SAMPLES
    places = [at for at, _ in sampler.told(sampler.take())]
    assert places == sorted(set(places))
    assert max(b - a for a, b in pairwise(places)) <= 5023 // SAMPLES + 1
    assert deviation_of(stepped, told(store)) == Deviation(SAMPLES, 0, 0.0)


def test_what_is_off_is_counted_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    store, model, optimizer = logged()
    stepped, said = stepped_of(model, optimizer), told(store)
    (_, record), *_ = said
    count = len(record.samples)
    with torch.no_grad():
        local_of(model[0].weight)[2, 3] *= 1.5
    found = deviation_of(stepped, said)
    assert (found.compared, found.differ) == (count, 1)
    assert found.largest == pytest.approx(0.5, rel=1e-6)
    with torch.no_grad():
        local_of(model[1].bias)[0] = float("nan")
    assert deviation_of(stepped, said)[1:] == (2, float("inf"))
    monkeypatch.setattr(deviation, "MOST_COMPARED", SAMPLES // 2)
    assert deviation_of(stepped, said).compared == -(-count // 2)
    assert deviation_of([], said) == NONE
    assert found.with_others([NONE, Deviation(3, 2, 0.7)]) == Deviation(count + 3, 3, 0.7)


def test_values_that_json_has_no_word_for_are_not_told() -> None:
    _, model, optimizer = logged()
    sampler = Sampler(share(Comm(None, 0, 1), stepped_of(model, optimizer)).own)
    values = sampler.take()
    values[4], values[7] = float("nan"), float("inf")
    assert len(sampler.told(values)) == len(values) - 2
    assert Sampler([]).told(Sampler([]).take()) == ()


def test_a_report_says_what_was_compared_even_if_nothing_differs() -> None:
    said = LoadReport(step=7, root="r", saved_world=2, bytes_read=1, seconds=1.0, base=4, deviation=0.0, compared=512)
    line = "step 4 and 3 steps replayed from the log, "
    elsewhere = f"{line}in another layout: of 512 values that the log remembers, "
    assert f"{elsewhere}none differs" in str(said)
    assert f"{elsewhere}12 differ, by at most 1e-06 of the value" in str(replace(said, differing=12, deviation=1e-6))
    assert f"{line}in another layout: the log remembers no value" in str(replace(said, deviation=None, compared=0))
    assert str(replace(said, exact=True)).endswith(f"{line}bit for bit")
    off = str(replace(said, exact=False, differing=3, deviation=0.1))
    assert f"{line}with a deviation: of 512 values that the log remembers, 3 differ, by at most 0.1" in off
