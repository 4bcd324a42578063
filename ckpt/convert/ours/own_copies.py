"""Copies of ranks whose replicas differed when the source was saved: kept where the target has the same ranks.

A load by as many ranks as saved gives each rank its own copy back (statistics of a BatchNorm, of which each rank has
its own); a conversion for as many ranks keeps them for that. For another number of ranks there is everybody's copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.format.manifest import DERIVED
from ckpt.layout.box import Box
from ckpt.layout.spec import Shard, TensorSpec
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.convert.opened import Opened


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """The copy of exactly ``ranks`` of a box of a tensor; the first of them owns it."""

    spec: TensorSpec
    box: Box
    ranks: tuple[int, ...]

    @property
    def shard(self) -> Shard:
        """What is asked of the source, for any of the ranks."""
        return Shard(self.spec, self.box)


def own_copies(opened: Opened, specs: Sequence[TensorSpec], world: int) -> tuple[dict[int, list[OwnCopy]], list[str]]:
    """Return the copies to be kept by the rank that owns each, and a line for each tensor of which some are lost.

    Args:
        opened: the source.
        specs: of the target.
        world: ranks of the target.
    """
    wanted = {spec.key: spec for spec in specs}
    kept: dict[int, list[OwnCopy]] = {}
    lost: dict[str, None] = {}
    for chunk in (chunk for part in opened.parts for chunk in part.chunks if chunk.ranks and chunk.pack != DERIVED):
        source = opened.specs[chunk.spec]
        target = wanted.get(source.key)
        if target is None:
            continue
        if world == opened.world and target.shape == source.shape:
            kept.setdefault(min(chunk.ranks), []).append(OwnCopy(target, chunk.box, chunk.ranks))
        else:
            lost[f"{source.fqn!r} ({source.role})"] = None
    if not lost:
        return kept, []
    names = some(list(lost))
    return kept, [f"copies of ranks that had others than the rest, of {names}: everybody's is written"]
