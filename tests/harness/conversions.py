"""Checkpoints to convert, small and in memory: every element tells where it belongs; and what a repository holds,
read without any of the code that is under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckpt.convert.opened import Builder, Opened
from ckpt.convert.ours.read import open_ours
from ckpt.convert.ours.write import write_ours
from ckpt.describe.exact import rank_layout
from ckpt.describe.parallel import Parallel
from ckpt.engine.base import torch_dtype
from ckpt.format.codec import decode
from ckpt.format.digest import digest
from ckpt.format.manifest import DERIVED
from ckpt.layout.box import Box
from ckpt.layout.spec import MASTER, PARAM, RankLayout, Shard, TensorSpec
from ckpt.repo.repository import Repository
from ckpt.store.memory import MemoryStore
from tests.property.fake import numbered, weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt.convert.options import WriteOptions, Written
    from ckpt.describe.placement import Description
    from ckpt.store.base import Store

Key = tuple[str, str]
Arrays = dict[Key, np.ndarray]


@dataclass
class LaidOut:
    """A target that is nothing but layouts."""

    layouts: Sequence[RankLayout]
    parallel: Parallel = field(default_factory=Parallel)


def described(description: Description) -> LaidOut:
    """The target of a described job."""
    layouts = [rank_layout(description, rank) for rank in range(description.parallel.ranks)]
    return LaidOut(layouts, description.parallel)


def specs_of(layouts: Iterable[RankLayout]) -> list[TensorSpec]:
    """Every tensor of a job, once."""
    return sorted({shard.spec for layout in layouts for shard in layout.shards})


def values_of(specs: Iterable[TensorSpec], derived: Iterable[str] = ()) -> Arrays:
    """For each tensor its bytes, as ``uint8``: of each element its global index, of derived parameters their casts."""
    found: Arrays = {}
    rebuilt = set(derived)
    every = {spec.key: spec for spec in specs}
    for seed, spec in enumerate(sorted(every.values())):
        if spec.role == PARAM and spec.fqn in rebuilt and (spec.fqn, MASTER) in every:
            continue
        made = weights(spec.shape, seed) if spec.role == MASTER else numbered(spec.dtype, spec.shape, seed)
        found[spec.key] = raw(made)
    for spec in every.values():
        if spec.key not in found:
            master = every[spec.fqn, MASTER]
            found[spec.key] = raw(tensor(found[master.key], master).to(torch_dtype(spec.dtype)))
    return found


def raw(made: torch.Tensor) -> np.ndarray:
    """A tensor's bytes."""
    return made.contiguous().reshape(-1).view(torch.uint8).numpy().copy() if made.numel() else np.empty(0, np.uint8)


def tensor(data: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """Bytes as the tensor that they are."""
    return torch.from_numpy(data.copy()).view(torch_dtype(spec.dtype)).reshape(spec.shape)


def one_file(
    specs: Sequence[TensorSpec], values: Mapping[Key, np.ndarray], *, world: int = 1, derived: Iterable[str] = ()
) -> Opened:
    """A foreign checkpoint: all tensors one behind the other in one file, with an odd gap between them."""
    store = MemoryStore()
    builder = Builder("torch", "one file", store)
    builder.world, builder.step = world, 7
    builder.derived.update(derived)
    data = bytearray(b"head")
    for spec in sorted(specs):
        held = builder.spec(spec.fqn, spec.role, spec.dtype, spec.shape)
        if spec.nbytes:
            builder.add(held, Box.whole(spec.shape), "data", len(data))
        data += values[spec.key].tobytes() + b"..."
    store.put("data", bytes(data))
    return builder.build()


def convert(opened: Opened, target: LaidOut, store: Store | None = None, options: WriteOptions | None = None) -> Store:
    """Write it as ours, by default into memory; return the store."""
    store = MemoryStore() if store is None else store
    written(opened, target, store, options)
    return store


def written(opened: Opened, target: LaidOut, store: Store, options: WriteOptions | None = None) -> Written:
    """Write it as ours; return what that says."""
    return write_ours(opened, store, target, options)  # type: ignore[arg-type]  # it needs the layouts only


def again(store: Store) -> Opened:
    """Open what was written."""
    return open_ours(store, store.url)


def held_by(store: Store, step: int | None = None) -> Arrays:
    """Every tensor of a repository's step, put together chunk by chunk, each checked against its digest."""
    repo = Repository(store)
    index = repo.read_index(repo.pick(step))
    found = {spec.key: np.zeros((*spec.shape, spec.itemsize), np.uint8) for spec in index.specs}
    count = {spec.key: np.zeros(spec.shape, np.int64) for spec in index.specs}
    late = []
    for part in index.parts:
        for chunk in part.chunks:
            spec = index.specs[chunk.spec]
            at = chunk.box.relative_to(Box.whole(spec.shape))
            count[spec.key][at] += 1
            if chunk.pack == DERIVED:
                late.append((spec, chunk, at))
                continue
            data: bytes | memoryview = store.get(part.packs[chunk.pack].key, chunk.start, chunk.length)
            codec = part.codec_of(chunk)
            data = decode(data, codec, chunk.nbytes, "test") if codec else data
            assert digest(data) == chunk.digest
            found[spec.key][at] = np.frombuffer(data, np.uint8).reshape(*chunk.sizes, spec.itemsize)
    specs = {spec.key: spec for spec in index.specs}
    for spec, chunk, at in late:
        master = specs[spec.fqn, MASTER]
        cast = tensor(found[master.key].reshape(-1), master)[at].to(torch_dtype(spec.dtype))
        assert digest(raw(cast).tobytes()) == chunk.digest
        found[spec.key][at] = raw(cast).reshape(*chunk.sizes, spec.itemsize)
    assert all((n == 1).all() for n in count.values())
    return {key: array.reshape(-1) for key, array in found.items()}


def logical_digest(arrays: Arrays) -> str:
    """One digest over all names and bytes."""
    words = [f"{fqn}|{role}|{digest(arrays[fqn, role].tobytes())}" for fqn, role in sorted(arrays)]
    return digest("\n".join(words).encode())


def differences(arrays: Arrays, wanted: Arrays) -> list[str]:
    """Names of what is not the same."""
    names = sorted(arrays.keys() | wanted.keys())
    return [
        f"{fqn} ({role})"
        for fqn, role in names
        if (fqn, role) not in arrays
        or (fqn, role) not in wanted
        or arrays[fqn, role].tobytes() != wanted[fqn, role].tobytes()
    ]


def whole(specs: Iterable[TensorSpec], world: int = 1) -> LaidOut:
    """Every rank holds everything."""
    shards = tuple(Shard(spec, Box.whole(spec.shape)) for spec in specs)
    return LaidOut([RankLayout(rank, shards) for rank in range(world)])
