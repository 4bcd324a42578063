"""What a compaction starts from: a checkpoint, the logs that lead on from it, and what their ranks have logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.convert.opened import Opened
from ckpt.convert.ours.read import open_ours
from ckpt.errors import MalformedData, ReplayError
from ckpt.gradlog.record import RankHead
from ckpt.gradlog.replaying.reading import read_rank_head, run_of
from ckpt.gradlog.replaying.recover import Stretch
from ckpt.gradlog.supported import ELEMENTWISE
from ckpt.layout.spec import BUFFER, MASTER, PARAM, TensorSpec
from ckpt.plan.load_plan import Catalog
from ckpt.runtime.extras import ENGINE
from ckpt.store.base import Store

GRAD = "grad"


@dataclass(frozen=True, slots=True)
class Source:
    """``opened``: the base. ``heads``: number of a log -> what each of its ranks says. ``states``: name -> role -> what
    optimizers kept.
    """

    store: Store
    opened: Opened
    catalog: Catalog
    stretches: tuple[Stretch, ...]
    heads: Mapping[int, Sequence[RankHead]]
    states: Mapping[str, Mapping[str, TensorSpec]]

    @property
    def last(self) -> Sequence[RankHead]:
        """What the ranks of the last log say: who logs what in the end."""
        return self.heads[self.stretches[-1].number]

    @property
    def world(self) -> int:
        """Ranks of the last log, which will be those of the new base."""
        return self.stretches[-1].world

    @property
    def step(self) -> int:
        """Of the new base."""
        return self.stretches[-1].last

    def key_spec(self, fqn: str) -> TensorSpec:
        """Return what of a parameter its optimizer steps: the master, or the parameter itself.

        Raises:
            ReplayError: the base has no such parameter.
        """
        spec = self.catalog.specs.get((fqn, MASTER)) or self.catalog.specs.get((fqn, PARAM))
        if spec is None:
            raise ReplayError(f"the log steps {fqn!r}, which {self.opened.where} does not hold")
        return spec

    def state_specs(self, fqn: str) -> Mapping[str, TensorSpec]:
        """Return role -> spec of what the optimizer kept of a parameter; empty before its first step."""
        return self.states.get(fqn, {})

    def groups(self, rank: int) -> Any:
        """Return the object ``optimizer`` of a rank of the base, modulo the base's world; None if it has none."""
        wanted = rank % self.opened.world
        found = [one for one in self.opened.objects if one.kind == ENGINE and one.name == "optimizer"]
        return next((one.tree for one in found if wanted in one.ranks), None)


def is_scalar(spec: TensorSpec, key: TensorSpec) -> bool:
    """Is this one value for a whole parameter, whatever shape the parameter has?"""
    return spec.shape == () and (key.shape != () or spec.role == "step")


def open_base(store: Store, base: int, stretches: Sequence[Stretch]) -> Source:
    """Return the checkpoint of step ``base`` and the logs of ``stretches``, checked against each other.

    Raises:
        ReplayError: an optimizer cannot be replayed, or is another one than in the log before; the base has other
            tensors.
        MissingChunk, MalformedData: a head is missing, or is not what this release reads.
    """
    opened = open_ours(store, f"step {base} of {store.url}", step=base)
    heads = {one.number: _heads(store, one) for one in stretches}
    states: dict[str, dict[str, TensorSpec]] = {}
    for spec in opened.specs:
        if spec.role not in (PARAM, MASTER, BUFFER, GRAD):
            states.setdefault(spec.fqn, {})[spec.role] = spec
    found = Source(store, opened, opened.catalog(), tuple(stretches), heads, states)
    _check(found)
    return found


def _heads(store: Store, stretch: Stretch) -> list[RankHead]:
    run = run_of(store, stretch.number)
    heads = [read_rank_head(store, stretch.number, rank, run) for rank in range(stretch.world)]
    if any(head.world != stretch.world for head in heads):
        raise MalformedData(f"log {stretch.number}: its ranks speak of different numbers of ranks")
    for head in heads:
        for entry in head.entries:
            where = f"log {stretch.number}, rank {head.rank}: {', '.join(entry.members[:1])}"
            if not 0 <= entry.optimizer < len(head.kernels):
                raise MalformedData(f"{where}: of optimizer {entry.optimizer}, there are {len(head.kernels)}")
            for part in entry.parts:
                same = len(part.shape) == len(part.offsets) == len(part.sizes)
                sound = same and min((*part.offsets, *part.sizes, 0)) >= 0
                if not sound or not part.box.within(part.shape):
                    raise MalformedData(f"{where}: a part {part.offsets}+{part.sizes} of shape {part.shape}")
    return heads


def _check(source: Source) -> None:
    """See that the logs step what the base holds, with optimizers that can be repeated, and with the same ones."""
    made_by: dict[str, str] = {}
    for stretch in source.stretches:
        for head in source.heads[stretch.number]:
            for entry in head.entries:
                name = str(head.kernels[entry.optimizer].get("class"))
                if name not in ELEMENTWISE:
                    raise ReplayError(f"log {stretch.number} was made by {name}, whose steps cannot be repeated")
                for part in entry.parts:
                    if made_by.setdefault(part.fqn, name) != name:
                        raise ReplayError(
                            f"{part.fqn!r} was stepped by {made_by[part.fqn]}, and by {name} in log {stretch.number}"
                        )
    for head in source.last:
        for entry in head.entries:
            for part in entry.parts:
                spec = source.key_spec(part.fqn)
                if (spec.dtype, spec.shape) != (entry.dtype, part.shape):
                    raise ReplayError(
                        f"{part.fqn!r}: the log steps {entry.dtype}{list(part.shape)}, {source.opened.where} has "
                        f"{spec.dtype}{list(spec.shape)}"
                    )
