"""In which layout a source was saved, as far as it says: what a user leaves open stays like that in the target."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from ckpt.convert.naming import layer_of, stack_of

if TYPE_CHECKING:
    from ckpt.convert.opened import Opened


def known_layout(opened: Opened) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the degrees and the ZeRO stage of the job that saved a source, and the layers of its pipeline stages.

    A checkpoint of ours has them from what DeepSpeed's adapter keeps of the engine. What a converted one has of that is
    of the job before the conversion: the degrees in its commit come first.
    """
    stages = _stages(opened)
    if opened.degrees:
        return dict(opened.degrees), stages if opened.degrees.get("pp", 1) == len(stages) else ()
    setup = next((one.tree for one in opened.objects if one.name == "setup" and isinstance(one.tree, dict)), {})
    dp, pp = setup.get("data_parallel_world_size", 0), max(1, len(stages))
    if dp < 1 or opened.world % (dp * pp):
        return {}, ()
    degrees = {"dp": dp, "tp": opened.world // (dp * pp), "pp": pp, "zero": int(setup.get("zero_stage", 0))}
    sizes = expert_sizes(opened)
    return {**degrees, **({"ep": sizes[0]} if len(sizes) == 1 and dp % sizes[0] == 0 else {})}, stages


def expert_sizes(opened: Opened) -> list[int]:
    """Return the numbers of expert-parallel ranks that DeepSpeed's labels of expert groups name, ascending."""
    trees = [one.tree for one in opened.objects if one.name == "optimizer" and one.tree]
    options = [group["options"] for tree in trees for group in tree.get("groups", ())]
    said = {re.fullmatch(r"ep_size_([1-9]\d{0,5})", str(one.get("name"))) for one in options if one.get("moe")}
    return sorted({int(one[1]) for one in said if one})


def _stages(opened: Opened) -> tuple[int, ...]:
    """Return the layers of each stage, told by which ranks' optimizers have parameters of which; empty if of one."""
    stack = stack_of({spec.fqn for spec in opened.specs})
    held = set[frozenset[int]]()
    for one in opened.objects:
        if one.name == "optimizer" and one.tree:
            names = (fqn for group in one.tree.get("groups", ()) for fqn in group["params"])
            held.add(frozenset(n for fqn in names if (n := layer_of(fqn, stack)) is not None))
    layers = _apart(held)
    if len(layers) < 2 or not all(layers) or any(max(a) > min(b) for a, b in pairwise(layers)):
        return ()
    firsts = [min(one) for one in layers]
    numbers = (layer_of(spec.fqn, stack) for spec in opened.specs)
    end = 1 + max(n for n in numbers if n is not None)
    return tuple(b - a for a, b in zip([0, *firsts[1:]], [*firsts[1:], end], strict=True))


def _apart(held: set[frozenset[int]]) -> list[set[int]]:
    """Return the layers of each stage, in their order; one that several share is of the first that has it.

    >>> _apart({frozenset({0, 3, 4}), frozenset({0, 1, 2})})
    [{0, 1, 2}, {3, 4}]
    """
    found: list[set[int]] = []
    for layers in sorted(held, key=max) if all(held) else ():
        found.append(set(layers).difference(*found))
    return found
