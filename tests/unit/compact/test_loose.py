"""Tensors that no optimizer steps: the last value of each rank, and where ranks differ what a save would keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt.compact.loose import Loose
from ckpt.compact.source import Source
from ckpt.convert.opened import Builder
from ckpt.errors import MalformedData
from ckpt.format.digest import digest
from ckpt.format.frames import frame_of
from ckpt.gradlog.record import Entry, Part, RankHead, Record, encode_record
from ckpt.gradlog.record import Loose as Said
from ckpt.gradlog.replaying.recover import Stretch
from ckpt.layout.box import Box
from ckpt.layout.spec import TensorSpec
from ckpt.repo.log_files import segment_key
from ckpt.store.memory import MemoryStore

MEAN, WEIGHT = TensorSpec("mean", "buffer", "float32", (4,)), TensorSpec("weight", "param", "float32", (2,))
Changed = dict[TensorSpec, list[float]]


def source_of(*ranks: list[Changed], **said: Any) -> Source:
    """Return what is compacted, of ranks whose records say that these tensors have changed, step after step."""
    store = MemoryStore()
    for rank, steps in enumerate(ranks):
        frames = []
        for step, changed in enumerate(steps, 1):
            loose, tensors = [], {}
            for spec, values in changed.items():
                row = {"name": spec.fqn, "fqn": spec.fqn, "role": spec.role, "dtype": spec.dtype, "shape": spec.shape}
                loose.append(Said(**{**row, "offsets": (0,), "sizes": spec.shape, **said}))
                tensors[spec.fqn] = torch.tensor(values, dtype=torch.float32)
            record = Record(
                format=1, step=step, rank=rank, calls=(), options=(), objects=(), loose=tuple(loose), digest=""
            )
            frames += frame_of(step, encode_record(record, tensors))
        store.put(segment_key("log/000001", rank, 1), b"".join(map(bytes, frames)))
    builder = Builder("ckpt", "base", store)
    for spec in (MEAN, WEIGHT):
        builder.add_value(builder.spec(spec.fqn, spec.role, spec.dtype, spec.shape), bytes(spec.nbytes))
    opened = builder.build()
    part = Part("weight", (2,), (0,), (2,))
    entry = Entry(optimizer=0, group=0, dtype="float32", members=("weight",), layout="", parts=(part,))
    heads = [
        RankHead(format=1, rank=r, world=len(ranks), entries=(entry,), kernels=(), software={})
        for r in range(len(ranks))
    ]
    stretch = Stretch(1, 1, len(ranks[0]), len(ranks))
    return Source(store, opened, opened.catalog(), (stretch,), {1: heads}, {})


def data(*values: float) -> bytes:
    return torch.tensor(values, dtype=torch.float32).numpy().tobytes()


def test_the_last_value_counts() -> None:
    loose = Loose(source_of([{MEAN: [1, 1, 1, 1]}, {MEAN: [2, 2, 2, 2]}, {}], [{}, {MEAN: [2, 2, 2, 2]}, {}]))
    (one,) = loose.copies()
    assert (one.spec, one.box, one.data, one.owner, one.ranks) == (MEAN, Box((0,), (4,)), data(2, 2, 2, 2), 0, ())
    assert loose.divergences == []


def test_ranks_that_differ_keep_their_own() -> None:
    values = [[1.0] * 4, [2.0] * 4, [2.0] * 4]
    loose = Loose(source_of(*([{MEAN: one}] for one in values)))
    found = [(one.data, one.owner, one.ranks) for one in loose.copies()]
    assert found == [(data(*values[1]), 1, ()), (data(*values[0]), 0, (0,))]
    (told,) = loose.divergences
    assert (told.fqn, told.kept) == ("mean", digest(data(*values[1])))
    assert told.copies == {digest(data(*values[1])): (1, 2), digest(data(*values[0])): (0,)}


def test_what_others_step_is_not_loose() -> None:
    assert list(Loose(source_of([{WEIGHT: [1, 2]}], [{}])).copies()) == []


@pytest.mark.parametrize(
    "said",
    [
        {"fqn": "other"},
        {"role": "param"},
        {"dtype": "int32"},
        {"shape": (8,)},
        {"offsets": (2,)},
        {"offsets": (-1,)},
        {"offsets": (0, 0)},
        {"sizes": (3,)},
    ],
)
def test_what_the_base_does_not_hold_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(MalformedData):
        Loose(source_of([{MEAN: [1, 1, 1, 1]}], **said))
