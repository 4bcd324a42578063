"""The layers of a ``PipelineModule``, each of which has a file of its own in DeepSpeed's checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.errors import UnsupportedLayout

if TYPE_CHECKING:
    from ckpt.convert.deepspeed.write_slice import Slice
    from ckpt.convert.opened import Opened
    from ckpt.convert.target import Target

_TIED = re.compile(r"tied_modules\.[^.]+\.")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the layers of a ``PipelineModule`` are numbered: as their tensors' names begin. ``tied``: what the names of
    tied layers begin with, and the number of the layer that owns them, where one of both is not in the other's names.
    """

    numbers: frozenset[int]
    tied: tuple[str, int] | None

    @classmethod
    def of(cls, opened: Opened, target: Target) -> Pipeline | None:
        """Return it; None if the target is no pipeline.

        Raises:
            UnsupportedLayout: the names do not show which layer is which.
        """
        names = [t.fqn for t in target.description.model.tensors]
        shared = sorted({m[0] for m in map(_TIED.match, names) if m})
        if target.parallel.pp == 1 and not _is_pipeline(opened) and not shared:
            return None
        other = [name for name in names if not name.partition(".")[0].isdecimal() and not _TIED.match(name)]
        if other:
            raise UnsupportedLayout(
                f"{opened.where}: pp {target.parallel.pp}: DeepSpeed's pipelines call a tensor by the number of its "
                f"layer (3.weight), and here is {other[0]!r}"
            )
        _check_shared(opened, target)
        numbers = {int(name.partition(".")[0]) for name in names if not _TIED.match(name)}
        free = sorted(set(range(max(numbers, default=0) + 1)) - numbers)
        if len(shared) > 1 or (shared and not free):
            raise UnsupportedLayout(f"{opened.where}: nothing says which layers of the pipeline {shared} are")
        return cls(frozenset(numbers), (shared[0], free[0]) if shared else None)

    def prefix(self, layer: int) -> str:
        """Return what the names of a layer's tensors begin with."""
        return self.tied[0] if self.tied and self.tied[1] == layer else f"{layer}."

    def layers_of(self, held: Slice) -> list[int]:
        """Return the layers whose files a slice writes. One without tensors has an empty file, of the first stage."""
        numbers = {m.fqn.partition(".")[0] for m in (*held.params, *held.buffers) if m.numel}
        own = {int(number) for number in numbers if number.isdecimal()}
        if held.stage == 0:
            own |= set(range(max(self.numbers, default=0))) - self.numbers
        return sorted(own)


def _is_pipeline(opened: Opened) -> bool:
    """Was the source saved by an engine of a ``PipelineModule``? One with a single stage says it itself."""
    setups = (one.tree for one in opened.objects if one.name == "setup" and isinstance(one.tree, dict))
    return opened.degrees.get("pp", 1) > 1 or any(setup.get("pipeline") for setup in setups)


def _check_shared(opened: Opened, target: Target) -> None:
    """Check that no layer which the source's stages share goes by its number.

    Raises:
        UnsupportedLayout: one does: its key is in no file, and DeepSpeed would miss it on the other stages.
    """
    pp = opened.degrees.get("pp", 1)
    stages: dict[str, set[int]] = {}
    for one in opened.objects:
        if one.name == "optimizer" and isinstance(one.tree, dict) and pp > 1:
            held = {rank * pp // opened.world for rank in one.ranks}
            for group in one.tree.get("groups", ()):
                for fqn in group["params"]:
                    stages.setdefault(fqn, set()).update(held)
    layers = {int(n) for fqn, held in stages.items() if len(held) > 1 and (n := fqn.partition(".")[0]).isdecimal()}
    if layers and target.parallel.pp > 1:
        first = min(layers)
        raise UnsupportedLayout(
            f"{opened.where}: stages share layer {first}, and nothing says what it is called there: DeepSpeed would "
            f"miss it on the last stage. Name it in --rules, KEY as in its TiedLayerSpec: "
            f"names: [{{match: '{first}\\.(.*)', name: 'tied_modules.KEY.{{1}}'}}]"
        )
