"""DeepSpeed's own record of how tensor parallelism cut a model, as AutoTP writes it beside the weights.

With it whoever reads the checkpoint, we or ``ds_to_universal``, needs no rules; the engine that loads it does not ask.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.convert.target import Target
    from ckpt.describe.model import Described
    from ckpt.describe.placement import Description

VERSION = 0.4
KEY = "universal_checkpoint_info"
UNSAID = (
    "no record of how its tensors are cut, for which DeepSpeed has no words (heads that ranks share, …): whoever reads "
    "DST needs --rules"
)
Widths = list[list[int]]
"""``[part][tensor rank]``: what each rank holds of each of the matrices that lie one behind the other."""


def record_of(target: Target) -> dict[str, Any]:
    """Return :data:`KEY` and the record; nothing if there is no tensor parallelism, or it cannot be said.

    Such are heads that several ranks hold, buffers that are cut, several vocabularies with padding, and experts.
    """
    if target.parallel.tp == 1:
        return {}
    description = target.description
    whole, rows, vocabulary = list[str](), list[str](), list[str]()
    fused, widths = list[dict[str, Any]](), dict[str, Widths]()
    sizes: set[int] = set()
    for t in description.model.tensors:
        pattern = f"^{re.escape(t.fqn)}$"
        if t.split is None:
            whole.append(pattern)
            continue
        dim, held = t.split.dim, _widths(description, t)
        if held is None or t.kind == "buffer" or t.expert is not None:
            return {}
        if sum(local for _, local in description.geometry(t)) > t.shape[dim]:  # padded
            vocabulary.append(pattern)
            sizes.add(t.shape[dim])
        elif len(held) > 1 or dim > 1:
            shape = [tuple(map(sum, held)) if d == dim else n for d, n in enumerate(t.shape)]
            fused.append({"patterns": [pattern], "shape": shape, "partition_dim": dim})
            widths[pattern] = held
        elif dim == 1:
            rows.append(pattern)
    if len(sizes) > 1 or not whole:
        return {}
    found = {
        "universal_checkpoint_version": VERSION,
        "tp_replicated_parameter_patterns": whole,
        "parameter_with_row_parallelism_patterns": rows,
        "vocabulary_parameter_patterns": vocabulary,
        "parameter_with_sub_params": fused,
        "sub_param_shard_widths": widths,
    }
    return {KEY: {**found, **({"original_vocab_size": min(sizes)} if sizes else {})}}


def _widths(description: Description, tensor: Described) -> Widths | None:
    """Return the widths; None unless the ranks hold each part one behind the other, nothing twice."""
    split = tensor.split
    if split is None:
        return None
    geometry = description.geometry(tensor)
    found: Widths = []
    start = 0
    for size, _ in split.parts or ((tensor.shape[split.dim],) * 2,):
        at, held = start, list[int]()
        for runs, _ in geometry:
            own = [(max(first, start), min(first + n, start + size)) for first, n in runs]
            own = [(low, high) for low, high in own if low < high]
            if len(own) > 1 or (own and own[0][0] != at):
                return None
            held.append(own[0][1] - at if own else 0)
            at += held[-1]
        if at != start + size:
            return None
        found.append(held)
        start += size
    return found
