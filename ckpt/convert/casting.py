"""From what the tensors of a target are made, where their dtype is another one, in words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE, MASTER, PARAM, Shard
from ckpt.plan.load_plan import build_load_plan
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.layout.spec import TensorSpec
    from ckpt.plan.load_plan import Catalog


def origins(catalog: Catalog, specs: Sequence[TensorSpec]) -> dict[TensorSpec, TensorSpec]:
    """Return what of the source each tensor of the target is read from. Reads nothing.

    A parameter of which the source stores no bytes, because it is the rounding of its master, is read from that.
    """
    nothing = [Shard(spec, Box((0,) * len(spec.shape), (0,) * len(spec.shape))) for spec in specs]
    found = build_load_plan(catalog, nothing, (), own_copies_of=None).sources
    return {specs[t]: _stored(catalog, source) for t, source in found.items()}


def _stored(catalog: Catalog, source: TensorSpec) -> TensorSpec:
    if source.role != PARAM or source.fqn not in catalog.derived or catalog.stored(source, None):
        return source
    return catalog.find(source.fqn, MASTER) or source


def cast_lines(catalog: Catalog, made: dict[TensorSpec, TensorSpec]) -> list[str]:
    """Return a line for each kind of tensor whose dtype the source does not have in this role.

    Args:
        catalog: of the source.
        made: see :func:`origins`.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    for spec, source in made.items():
        own = catalog.find(spec.fqn, spec.role) or source
        if own.dtype != spec.dtype:
            found[spec.role, spec.dtype, _how(spec, source)] += 1
    return [f"{role} of {count(n, 'tensor')} in {dtype}: {how}" for (role, dtype, how), n in sorted(found.items())]


def _how(spec: TensorSpec, source: TensorSpec) -> str:
    if source.dtype == spec.dtype:
        return f"as the source's {source.role}"
    verb = "rounded" if ITEMSIZE[spec.dtype] <= ITEMSIZE[source.dtype] else "widened"
    return f"{verb} from its {source.role} in {source.dtype}"
