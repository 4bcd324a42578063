"""What the names in a checkpoint say of its model: which number is a layer's, which an expert's, what comes last. Pure.

No checkpoint format records this, and every framework shows it in its names (``model.layers.7.…``,
``transformer.h.7.…``, ``decoder.layers.7.mlp.experts.local_experts.3.…``, ``7.…`` of a DeepSpeed pipeline).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_EXPERT = re.compile(r"(?:^|\.)(?:local_|deepspeed_)?experts\.(?:local_experts\.|deepspeed_experts\.)?(\d+)(?:\.|$)")
_FIRST = re.compile(r"emb|wte|wpe|tok|posit|patch|stem|rotary|rope")
_LAST = re.compile(
    r"(?:^|\.)(?:lm_head|output_layer|embed_out|unembed|head|classifier|score|output|proj_out"
    r"|norm|norm_f|ln_f|ln_out|ln|final\w*)(?:\.|$)"
)
ENDS = "tied_modules."
"""DeepSpeed's pipelines put what their first and last stage share below it."""


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a key that sorts names as people count: ``layers.9`` before ``layers.10``.

    >>> sorted(["h.10.w", "h.9.w", "h.w"], key=natural)
    ['h.9.w', 'h.10.w', 'h.w']
    """
    return tuple((not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split("."))


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a tensor belongs to.

    >>> expert_of("model.layers.3.mlp.experts.12.up_proj.weight"), expert_of("h.1.mlp.shared_experts.up_proj.weight")
    (12, None)
    """
    found = _EXPERT.search(name)
    return int(found[1]) if found else None


def stack_of(names: Iterable[str]) -> str | None:
    """Return what stands before the number of a layer: the longest numbered stack; None if nothing is numbered.

    A list of modules inside of every layer (heads, experts) is no stack: it is repeated from layer to layer.

    >>> stack_of(["model.layers.0.mlp.experts.0.w", "model.layers.1.mlp.experts.0.w", "model.layers.1.mlp.experts.1.w"])
    'model.layers.'
    >>> stack_of(["0.weight", "1.ln.weight", "2.weight"])
    ''
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    covered: dict[str, int] = defaultdict(int)
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part.isdecimal():
                prefix = "".join(f"{p}." for p in parts[:at])
                numbers[prefix].add(int(part))
                covered[prefix] += 1
    alike: dict[str, int] = defaultdict(int)
    for prefix in numbers:
        alike[_pattern(prefix)] += 1
    found = [p for p in numbers if alike[_pattern(p)] == 1 and not _EXPERT.search(f"{p}0.")]
    return max(found, key=lambda p: (len(numbers[p]), covered[p], p), default=None)


def _pattern(prefix: str) -> str:
    return re.sub(r"(?<![^.])\d+(?=\.)", "#", prefix)


def layer_of(name: str, stack: str | None) -> int | None:
    """Return the number of the layer that a tensor belongs to.

    >>> layer_of("h.7.attn.0.w", "h."), layer_of("wte.weight", "h."), layer_of("h.x", None)
    (7, None, None)
    """
    if stack is None or not name.startswith(stack):
        return None
    number = name[len(stack) :].partition(".")[0]
    return int(number) if number.isdecimal() else None


def place_of(name: str) -> str:
    """Return on which pipeline stage a tensor outside of the layers is, as far as its name says.

    >>> place_of("model.norm.weight"), place_of("model.embed_tokens.weight"), place_of("tied_modules.embed.weight")
    ('last', 'first', 'ends')
    """
    if name.startswith(ENDS):
        return "ends"
    if _FIRST.search(name) and not re.search(r"embed_out|unembed", name):
        return "first"
    return "last" if _LAST.search(name) else "first"
