"""Heads that several tensor-parallel ranks would hold, where only keys and values may be shared. Pure.

Ranks that hold the same key head serve different query heads. If they held the same query heads, each would add what
its neighbour adds to the sum of all ranks behind the output matrix: the model would count those heads twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt.describe.model import Described, ModelSpec
    from ckpt.describe.parallel import Parallel

UNEVEN = ("ddp", "fsdp2", "zero_redundancy_optimizer")
"""Engines with which a dimension without heads is cut unevenly, until some ranks hold nothing of it."""


def shared_heads(model: ModelSpec, parallel: Parallel, known: Mapping[str, Described]) -> Iterator[str]:
    """Yield the tensors that neighbours would hold alike and must not.

    A rule does not say whether it is for queries or for keys. What tells them apart: queries have as many heads as the
    input of an output matrix, or as what a model that is ``known`` has most; and in a fused matrix not all parts are
    keys and values, unless it has just two, which are alike.
    """
    queries = _queries(model, known)
    for t in model.tensors:
        if t.split is None or t.split.balanced:
            continue
        if not t.split.parts and (t.split.vocabulary or parallel.kind in UNEVEN):
            continue
        size = t.shape[t.split.dim]
        parts = t.split.parts or ((size, size),)
        units = [n for _, n in parts]
        if any(n >= parallel.tp or parallel.tp % n for n in units):  # not shared, or an error of its own
            few = [n for n in units if queries is not None and queries <= n < parallel.tp and parallel.tp % n == 0]
        elif _may_be_keys(t, queries):
            few = []
        else:
            few = units
        if few:
            heads = f"{max(few)} heads" if t.split.parts and max(few) < size else f"size {max(few)}"
            yield (
                f"{t.fqn!r} {list(t.shape)}: tp {parallel.tp} is more than its {heads}; neighbouring ranks would hold "
                "the same, and only heads of keys and values may be shared"
            )


def shared_keys(model: ModelSpec, parallel: Parallel) -> str:
    """Return a line about the heads of keys and values that neighbours hold alike; empty if there are none."""
    few = [
        units
        for t in model.tensors
        if t.split is not None and not t.split.balanced
        for units in {n for _, n in t.split.parts if n < parallel.tp}
    ]
    if not few:
        return ""
    heads = " or ".join(map(str, sorted(set(few))))
    return f"tp {parallel.tp} is more than the {heads} heads of keys and values: neighbouring ranks hold the same ones"


def _queries(model: ModelSpec, known: Mapping[str, Described]) -> int | None:
    """Return how many heads queries have, as far as it can be told."""
    found = [t.split.parts[0][1] for t in model.tensors if t.split is not None and _is_output(t)]
    for t in model.tensors:
        same = known.get(t.fqn)
        if same is not None and same.shape == t.shape and same.split is not None:
            found += [n for _, n in same.split.parts]
    return max(found, default=None)


def _is_output(t: Described) -> bool:
    """Is its input cut between heads, as that of a matrix behind the attention is?"""
    return t.split is not None and len(t.split.parts) == 1 and t.split.dim == len(t.shape) - 1 > 0


def _may_be_keys(t: Described, queries: int | None) -> bool:
    if t.split is None or not t.split.parts or _is_output(t):
        return False
    (size, units), *others = t.split.parts
    pair = others == [(size, units)] and units < size
    return (pair or not others) and (queries is None or units < queries)
