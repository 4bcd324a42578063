"""Slices of what a log's ranks have logged: every element once, and windows that begin where kernels begin anew."""

from __future__ import annotations

import pytest
import torch

from ckpt.compact import cuts
from ckpt.compact.cuts import bundles_of, lies_known, runs_of, slices_of
from ckpt.gradlog.record import Entry, Part, RankHead


def entry(*parts: tuple[int, Part], size: int) -> Entry:
    return Entry(
        optimizer=0,
        group=0,
        dtype="float32",
        members=tuple(part.fqn for _, part in parts),
        layout="",
        parts=tuple(part for _, part in parts),
        size=size,
        held=sum(part.box.volume for _, part in parts),
        at=tuple(at for at, _ in parts),
    )


FLAT = entry(
    (3, Part("a", (4, 5), (1, 0), (3, 5))),  # 15 elements behind 3 of padding
    (20, Part("b", (40,), (10,), (30,))),
    (60, Part("c", (), (), ())),
    size=70,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "GRAIN", 8)


@pytest.mark.parametrize("most", [8, 16, 17, 40, 1000])
@pytest.mark.parametrize("known", [True, False])
def test_every_element_is_in_one_slice(most: int, known: bool) -> None:
    one = FLAT if known else entry(*((-1, part) for part in FLAT.parts), size=70)
    assert lies_known(one) is known
    tensors = {"a": torch.zeros(4, 5), "b": torch.zeros(40), "c": torch.zeros(())}
    logged = []
    for found in slices_of(2, 5, one, most):
        assert (found.rank, found.entry) == (2, 5)
        assert found.size <= max(8, most)
        if known:
            assert found.start % 8 == 0
            assert found.start + found.size <= 70
            assert found.size % 8 == 0 or found.start + found.size == 70
        else:
            assert found.size == found.stop - found.first
        seen = torch.zeros(found.size)
        for run in runs_of(one, found, 4):
            assert run.box.volume <= 4 or run.box.sizes == ()
            tensors[run.fqn][tuple(slice(a, a + n) for a, n in zip(run.box.offsets, run.box.sizes, strict=True))] += 1
            seen[run.at : run.at + run.box.volume] += 1
            logged.append((run.logged, run.box.volume))
            if known:
                at = {"a": 3, "b": 20 - 15, "c": 60 - 45}[run.fqn] + run.logged
                assert at == found.start + run.at
        assert seen.max() == 1
        assert seen.sum() == found.stop - found.first
    assert tensors["a"][0].eq(0).all()
    assert tensors["a"][1:].eq(1).all()
    assert tensors["b"][:10].eq(0).all()
    assert tensors["b"][10:].eq(1).all()
    assert tensors["c"] == 1
    assert [start for start, _ in logged] == [sum(n for _, n in logged[:i]) for i in range(len(logged))]


def test_windows_without_logged_elements_are_left_out() -> None:
    one = entry((0, Part("a", (1000,), (0,), (4,))), (800, Part("a", (1000,), (800,), (8,))), size=1000)
    assert [(s.first, s.stop, s.start, s.size) for s in slices_of(0, 0, one, 16)] == [(0, 4, 0, 16), (4, 12, 800, 16)]


def test_places_that_cannot_be_are_not_believed() -> None:
    part = Part("a", (8,), (0,), (8,))
    assert not lies_known(entry((60, part), size=64))
    assert not lies_known(entry((0, part), (4, part), size=64))
    assert not lies_known(entry(size=0))
    assert list(slices_of(0, 0, entry(size=5), 8)) == []


def test_bundles_are_of_one_rank_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [RankHead(format=1, rank=rank, world=2, entries=(FLAT, FLAT), kernels=(), software={}) for rank in range(2)]
    found = list(bundles_of(heads, 80))
    assert [one.number for one in found] == [0, 1, 2, 3]
    assert [one.rank for one in found] == [0, 0, 1, 1]
    assert len(list(bundles_of(heads, 200))) == 2
    monkeypatch.setattr(cuts, "MOST_SLICES", 1)
    assert len(list(bundles_of(heads, 200))) == 4
