"""Who logs which elements of which gradient: each once, by one of those that hold it, evenly spread.

The gradient of what a job's optimizers step is laid out like the stepped tensors themselves. So the plan of a save
says who logs what, and there is no second copy of its logic: under ZeRO-3 each rank its own partition, under data
parallelism each rank a share of what all hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ckpt.engine.base import Stepped, dtype_name
from ckpt.errors import ConfigError
from ckpt.format.digest import digest
from ckpt.gradlog.record import Entry, Part
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import RankLayout, Shard, TensorSpec
from ckpt.plan.save_plan import build_save_plan
from ckpt.plan.wire import decode_layouts, encode_layout
from ckpt.repo.log_directory import Logged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt.layout.box import Box
    from ckpt.plan.save_plan import SavePlan
    from ckpt.runtime.comm import Comm

GRAD = "grad"


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a tensor's row-major memory, in the order in which they are logged."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return them from a tensor's memory, 1-D; a view if they are contiguous."""
        if len(self.sizes) == 1 and self.strides == (1,):
            return flat.narrow(0, self.offset, self.sizes[0])
        return flat.as_strided(self.sizes, self.strides, self.offset).reshape(-1)


@dataclass(frozen=True, slots=True)
class Own:
    """One stepped tensor and what this rank logs of its gradient."""

    stepped: Stepped
    entry: Entry
    runs: tuple[Run, ...]
    held: tuple[Run, ...]
    """all that this rank holds of it, padding left out"""

    def take(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logged elements of a tensor that lies like the key, row-major and 1-D."""
        for run in self.runs:
            yield run.of(flat)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory of a tensor: of a ``DTensor`` its local part; without autograd."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory of a tensor row by row, 1-D; a view if it lies so."""
    return local_of(tensor).reshape(-1)


def places_of(stepped: Stepped) -> list[tuple[str, tuple[int, ...], Box, torch.Tensor]]:
    """Return (fqn, global shape, box, view) of a stepped tensor, as if it lay row by row, in the order of its memory.

    The views are on the meta device: they have offset and strides, and no bytes.
    """
    blank = torch.empty(local_of(stepped.key).shape, dtype=stepped.key.dtype, device="meta")
    return sorted(stepped.places(blank), key=lambda one: one[3].storage_offset())


def layout_digest(stepped: Stepped) -> str:
    """Return what two stepped tensors have in common that hold the same boxes in the same places."""
    said = [f"{fqn}{box}@{view.storage_offset()}" for fqn, _, box, view in places_of(stepped)]
    return digest("\n".join([f"{stepped.group} {stepped.key.dtype} {stepped.key.numel()}", *said]).encode())


class Shared(NamedTuple):
    """What is logged: ``own`` by this rank; ``peers``: the other ranks that log something of what this one steps;
    ``logged``: all of it, by whom.
    """

    own: list[Own]
    peers: tuple[int, ...]
    logged: Callable[[], Iterator[Logged]]


def share(comm: Comm, stepped: Sequence[Stepped]) -> Shared:
    """Agree with all ranks on who logs what. Collective, inside of an operation.

    Raises:
        LayoutError: what the ranks step does not form whole tensors; the same error on every rank.
        ConfigError: a tensor of an optimizer has another dtype on another rank.
    """
    places = [places_of(one) for one in stepped]

    def layout() -> bytes:
        shards = tuple(
            Shard(TensorSpec(fqn, GRAD, dtype_name(view.dtype), shape), box)
            for one in places
            for fqn, shape, box, view in one
        )
        return encode_layout(RankLayout(comm.rank, shards))

    graph = ShardGraph.build(decode_layouts(comm.gather("gradients", layout)))
    graph.check()
    return share_of(comm.rank, stepped, build_save_plan(graph))


def share_of(rank: int, stepped: Sequence[Stepped], plan: SavePlan) -> Shared:
    """Return what follows for one rank from a plan of all ranks' gradients."""
    places = [places_of(one) for one in stepped]
    mine: dict[str, list[Box]] = {}
    held = plan.held(rank)
    for i in held:
        if plan.owners[i] == rank:
            mine.setdefault(plan.chunks[i].spec.fqn, []).append(plan.chunks[i].box)

    def logged() -> Iterator[Logged]:
        for chunk, owner in zip(plan.chunks, plan.owners, strict=True):
            yield Logged(chunk.spec.fqn, chunk.spec.shape, chunk.box, owner)

    optimizers = {id(one): i for i, one in enumerate(dict.fromkeys(s.optimizer for s in stepped))}
    own = [_own(one, optimizers[id(one.optimizer)], found, mine) for one, found in zip(stepped, places, strict=True)]
    return Shared(own, tuple(sorted({plan.owners[i] for i in held} - {rank})), logged)


def _own(
    stepped: Stepped,
    optimizer: int,
    places: list[tuple[str, tuple[int, ...], Box, torch.Tensor]],
    mine: dict[str, list[Box]],
) -> Own:
    found: list[tuple[int, Part, Run]] = []
    for fqn, shape, box, view in places:
        for chunk in mine.get(fqn, ()):
            common = chunk.intersect(box)
            if common is not None and common.volume:
                run = _run_of(view[common.relative_to(box)])
                found.append((run.offset, Part(fqn, shape, common.offsets, common.sizes), run))
    found.sort(key=lambda one: one[0])
    entry = Entry(
        optimizer=optimizer,
        group=stepped.group,
        dtype=dtype_name(stepped.key.dtype),
        members=stepped.members,
        layout=layout_digest(stepped),
        parts=tuple(part for _, part, _ in found),
        size=local_of(stepped.key).numel(),
        held=sum(box.volume for _, _, box, _ in places),
        at=tuple(run.offset if run.strides == (1,) else -1 for _, _, run in found),
    )
    return Own(stepped, entry, _merged([run for _, _, run in found]), held_runs(stepped))


def held_runs(stepped: Stepped) -> tuple[Run, ...]:
    """Return what of a stepped tensor's memory is state, and no padding."""
    return _merged([_run_of(view) for _, _, _, view in places_of(stepped) if view.numel()])


def _run_of(view: torch.Tensor) -> Run:
    at = int(view.storage_offset())
    return Run(at, (view.numel(),), (1,)) if view.is_contiguous() else Run(at, tuple(view.shape), view.stride())


def _merged(runs: list[Run]) -> tuple[Run, ...]:
    """Return runs of which no two lie one right behind the other."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        plain = run.strides == (1,) and last is not None and last.strides == (1,)
        if plain and last is not None and last.offset + last.sizes[0] == run.offset:
            merged[-1] = Run(last.offset, (last.sizes[0] + run.sizes[0],), (1,))
        else:
            merged.append(run)
    return tuple(merged)


def check_gradient(stepped: Stepped, grad: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, row by row, 1-D.

    Raises:
        ConfigError: it is sparse, or of another shape than what it belongs to.
    """
    if grad.layout is not torch.strided:
        raise ConfigError(f"gradient of {stepped.members[0]!r} has layout {grad.layout}: only dense ones are logged")
    local = local_of(grad)
    if local.shape != local_of(stepped.key).shape:
        raise ConfigError(
            f"gradient of {stepped.members[0]!r} has shape {list(local.shape)}, expected "
            f"{list(local_of(stepped.key).shape)}"
        )
    return local.reshape(-1)
