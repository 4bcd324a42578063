"""From a parameter of a tensor-parallel layer to the part of the global tensor that it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckpt.engine.base import Context
from ckpt.errors import LayoutError, UnsupportedLayout
from ckpt.layout.mesh import UNEXPLAINED, idle_problems, problems_of_rank
from ckpt.layout.rules import TensorRule, tiling_of
from ckpt.layout.tiling import Tiling

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class Tiler:
    """Collects what cannot be expressed, so that a job learns all of it at once; call :meth:`check` at the end.

    ``rank``: this rank's number in its tensor-parallel group, ``degree``: how many ranks that has. ``unnamed``: the job
    has several ranks, and nobody names such a group. ``seen``, ``locals_seen``: names of what this rank holds, global
    (ties not followed) and its own; the adapter adds them. ``explained``: something says how a tensor is cut.
    """

    context: Context
    rank: int = 0
    degree: int = 1
    unnamed: bool = False
    problems: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    locals_seen: set[str] = field(default_factory=set)
    assumed: set[str] = field(default_factory=set)
    explained: bool = False

    def tiling(self, fqn: str, local: tuple[int, ...], tensor: Any) -> Tiling:
        """Return which part of the global tensor ``fqn`` a local tensor of this shape is.

        The user's rules count first, then Megatron's attributes on the parameter (``tensor_model_parallel`` or the
        older ``model_parallel``, ``partition_dim``, ``partition_stride``). A tensor that neither of them names is held
        whole by every rank; but if the user has given rules, one that no rule explains is an error, because a rule
        with a typing error would turn a slice into a whole tensor.
        """
        self.check_named(fqn, tensor)
        said = self.context.rules.rule_for(fqn)
        if said is not None and said.dim is None and self.degree > 1:
            self.assumed.add(fqn)  # a word too few in a rule makes a slice a whole tensor
        rule = said or self._by_attributes(fqn, tensor)
        if rule is None:
            if self.degree > 1 and self.context.rules.tensors:
                self.problems.append(f"tensor {fqn!r}: no rule explains it (a whole one needs a rule without dim)")
            if self.degree > 1:
                self.assumed.add(fqn)
            return Tiling.whole(local)
        try:
            return tiling_of(rule, local, self.rank, self.degree)
        except LayoutError as error:
            self.problems.append(f"tensor {fqn!r}: {error}")
            return Tiling.whole(local)

    def check_named(self, fqn: str, tensor: Any) -> None:
        """Note a problem if a tensor is said to be cut but nobody says with whom: every slice would count as whole."""
        rule = self.context.rules.rule_for(fqn)
        if self.unnamed and (_marked(tensor) if rule is None else rule.dim is not None):
            why = "it is marked as tensor parallel" if rule is None else f"rule '{rule.match}' cuts it"
            self.problems.append(
                f'tensor {fqn!r}: {why}, but nobody says with whom: expected groups={{"tp": …}} with the ranks of its '
                f"group (with this rank alone if it is whole)"
            )

    def _by_attributes(self, fqn: str, tensor: Any) -> TensorRule | None:
        marked = _marked(tensor)
        if self.degree == 1 or marked is None:
            return None
        if not marked:
            return TensorRule(match=fqn)
        self.explained = True
        dim, stride = getattr(tensor, "partition_dim", -1), getattr(tensor, "partition_stride", 1)
        if type(dim) is not int or dim < 0 or type(stride) is not int or stride < 1:
            self.problems.append(
                f"tensor {fqn!r}: it is marked as tensor parallel, but neither partition_dim nor a rule says along "
                f"which dimension it is cut (partition_dim {dim!r}, partition_stride {stride!r})"
            )
            return None
        return TensorRule(match=fqn, dim=dim, stride=stride)

    def unused(self) -> set[str]:
        """Return the user's rules that have fitted nothing so far.

        And :data:`ckpt.layout.mesh.UNEXPLAINED`, which only all ranks together can tell from a stage of whole tensors.
        """
        explained = self.degree == 1 or self.explained or bool(self.context.rules.tensors)
        return self.context.rules.unused(self.seen, self.locals_seen) | (set() if explained else {UNEXPLAINED})

    def hidden_problems(self, groups: Mapping[str, tuple[int, ...]], *, apart: bool) -> list[str]:
        """Return what only the layouts of all ranks would show, of which a rank that refuses declares none.

        Args:
            groups: axis -> the ranks of this rank's group along it.
            apart: ranks hold different modules, so that a rule which is idle here may fit elsewhere.
        """
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return [
            *(f"axis {a!r}: the group {list(g)} lacks this rank ({rank})" for a, g in groups.items() if rank not in g),
            *problems_of_rank(rank, groups, world),
            *idle_problems(() if apart else self.unused()),
        ]

    def check(self, what: str, groups: Mapping[str, tuple[int, ...]] | None = None, *, apart: bool = False) -> None:
        """Raise :class:`UnsupportedLayout` with every problem, if there is any; see :meth:`hidden_problems`."""
        if self.problems:
            hidden = [one for one in self.hidden_problems(groups or {}, apart=apart) if one not in self.problems]
            raise UnsupportedLayout(f"{what} cannot be saved or loaded", (*self.problems, *hidden))


def _marked(tensor: Any) -> Any:
    """Return what Megatron's attribute says: cut (true), whole (false), or None where there is none."""
    return getattr(tensor, "tensor_model_parallel", getattr(tensor, "model_parallel", None))
