"""Experts of DeepSpeed's own MoE layers: who has which, under which names, and in which groups they are stepped.

An expert-parallel rank counts its experts from 0 and has optimizer groups of its own for them (``moe: True``), cut over
the ranks that hold the same experts. The source's groups are put together over its ranks and dealt out anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_model import numbered_expert, prefix_of
from ckpt.convert.deepspeed.write_slice import dealt, gathered
from ckpt.convert.known import expert_sizes
from ckpt.convert.model_of import ParameterGroup, parameter_groups
from ckpt.describe.engines import DEEPSPEED_EXPERT_GROUP
from ckpt.describe.model import refuse
from ckpt.errors import UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.convert.deepspeed.write_slice import Member, Slice
    from ckpt.convert.opened import Loose, Opened
    from ckpt.convert.target import Target

NATIVE = ".deepspeed_moe.experts.deepspeed_experts."
"""How the name of everything of an expert goes on behind the name of its ``deepspeed.moe.layer.MoE``."""
NO_LIMIT = 2**63
expert_place = lru_cache(maxsize=1 << 17)(prefix_of)  # each rank asks for each expert's names


@dataclass(frozen=True, slots=True)
class Experts:
    """``counts``: what stands before the number of an expert -> how many there are, by MoE layer in module order.

    ``groups``: of the optimizer, for each expert-parallel rank; the names are those of the whole model. ``made``: what
    the source does not say.
    """

    ep: int
    counts: Mapping[str, int]
    groups: tuple[tuple[ParameterGroup, ...], ...]
    made: tuple[str, ...] = ()

    @classmethod
    def of(cls, opened: Opened, target: Target, deal: tuple[int, int]) -> Experts | None:
        """Return the experts; None for a model without MoE layers of DeepSpeed.

        Args:
            opened: the source.
            target: its degrees and its tensors.
            deal: data-parallel ranks of the source and of the target, each 0 if its groups are not in the order of
                ``round_robin_gradients``.

        Raises:
            UnsupportedLayout: DeepSpeed has no such layers, or not in this layout, or it is not known in which order
                its optimizer steps them.
            ConfigError: they cannot be dealt out evenly.
        """
        counts = _counts(opened, target)
        if not counts:
            return None
        parallel = target.parallel
        if parallel.zero == 3:
            raise UnsupportedLayout(
                f"{opened.where}: {_named(counts)} with ZeRO-3: DeepSpeed refuses its own MoE layers there; take "
                "ZeRO 0 to 2"
            )
        if parallel.tp > 1:
            raise UnsupportedLayout(
                f"{opened.where}: {_named(counts)} with tp {parallel.tp}: DeepSpeed spreads its experts over "
                "tensor-parallel ranks too, and whether each of these has a part of an expert or a copy "
                "(enable_expert_tensor_parallelism) is not known; take --tp 1"
            )
        uneven = [f"ep {parallel.ep} does not divide {n} experts, {p}*" for p, n in counts.items() if n % parallel.ep]
        if uneven:
            refuse(f"{opened.where} cannot be laid out like this", uneven)
        groups = _Groups(opened, target, counts, *deal)
        made = tuple(_assumed(target, counts))
        return cls(parallel.ep, counts, tuple(groups.of_rank(rank) for rank in range(parallel.ep)), made)

    def has(self, rank: int, fqn: str) -> bool:
        """Has an expert-parallel rank a tensor? What is no expert's all have."""
        prefix, number = expert_place(fqn)
        return prefix not in self.counts or number // (self.counts[prefix] // self.ep) == rank

    def local_name(self, fqn: str) -> str:
        """Return what the expert-parallel rank of an expert calls something of it; empty if it is no expert's."""
        prefix, number = expert_place(fqn)
        return numbered_expert(fqn, number % (self.counts[prefix] // self.ep)) if prefix in self.counts else ""

    def targets(self, target: Target) -> list[Target]:
        """Return the target as each expert-parallel rank has it: with the groups that it steps."""
        return [replace(target, groups=groups) for groups in self.groups]

    def members(self, ranked: Sequence[Slice]) -> dict[tuple[str, int], list[Member]]:
        """Return what each expert has: (what stands before its number, number) -> parameters and buffers.

        Args:
            ranked: one model slice as each expert-parallel rank has it.
        """
        found: dict[tuple[str, int], list[Member]] = {}
        for held in ranked:
            for member in (*held.params, *held.buffers):
                if member.expert:
                    found.setdefault(expert_place(member.fqn), []).append(member)
        return found

    def layers(self, held: Slice) -> dict[str, int]:
        """Return ``counts`` of the MoE layers in a model slice, which numbers them from 0."""
        there = {expert_place(member.fqn)[0] for member in (*held.params, *held.buffers)}
        return {prefix: count for prefix, count in self.counts.items() if prefix in there}


def refuse_experts(opened: Opened, target: Target) -> None:
    """Refuse a model with MoE layers of DeepSpeed, and expert parallelism of any other.

    Raises:
        UnsupportedLayout: it has them; names the first.
    """
    counts = _counts(opened, target)
    if counts:
        raise UnsupportedLayout(
            f"{opened.where}: {_named(counts)}: DeepSpeed looks for experts of its own MoE layers in a universal "
            "checkpoint by their number on each rank, so that those of several ranks are one; take --to deepspeed"
        )


def _counts(opened: Opened, target: Target) -> dict[str, int]:
    """Return how many experts each layer has, layers in the order in which the optimizer's groups begin with them."""
    tensors = target.description.model.tensors
    numbers: dict[str, set[int]] = {}
    for fqn in (t.fqn for t in tensors):
        prefix, number = expert_place(fqn)
        if prefix.endswith(NATIVE):
            numbers.setdefault(prefix, set()).add(number)
    other = [t.fqn for t in tensors if t.expert is not None]
    if other and not numbers and target.parallel.ep > 1:
        raise UnsupportedLayout(
            f"{opened.where}: ep {target.parallel.ep}: DeepSpeed calls its experts …{NATIVE}0…, and here is "
            f"{other[0]!r}"
        )
    gaps = [f"{prefix}{min(set(range(max(n))) - n)}" for prefix, n in numbers.items() if max(n) + 1 != len(n)]
    if gaps:
        raise UnsupportedLayout(f"{opened.where}: experts are missing", tuple(map(repr, gaps)))
    orders = [list(dict.fromkeys(expert_place(fqn)[0] for fqn in group.params)) for group in target.groups]
    longest_first = sorted(orders, key=len, reverse=True)
    said = [prefix for order in longest_first for prefix in order if prefix in numbers]
    return {prefix: len(numbers[prefix]) for prefix in dict.fromkeys([*said, *numbers])}


def _assumed(target: Target, counts: Mapping[str, int]) -> Iterator[str]:
    """Yield what an engine may have otherwise."""
    stepped = {expert_place(fqn)[0] for group in target.groups for fqn in group.params}
    if len(set(counts.values())) > 1 and counts.keys() - stepped:
        yield f"order of {len(counts)} MoE layers: by name where no optimizer's group lists their experts"
    if target.parallel.zero and 1 < target.parallel.ep < target.parallel.data:
        yield (
            "neighbouring ranks have different experts, DeepSpeed's default: an engine with "
            "use_data_before_expert_parallelism cannot load them"
        )


def _named(counts: Mapping[str, int]) -> str:
    return f"experts {next(iter(counts))}*"


class _Groups:
    """The optimizer's groups: of the whole job first, then of each expert-parallel rank."""

    def __init__(
        self, opened: Opened, target: Target, counts: Mapping[str, int], dealt_before: int, dealt_now: int
    ) -> None:
        self.opened, self.target, self.counts = opened, target, counts
        self.ep, self.dealt_now = target.parallel.ep, dealt_now
        self.numel = {t.fqn: t.numel for t in target.description.model.tensors}
        self.limit = DEEPSPEED_EXPERT_GROUP
        optimizers = [one for one in opened.objects if one.name == "optimizer"]
        self.saved_ep = self._saved_ep()
        views = [view for one in optimizers for view in self._views(one, dealt_before)]
        self.groups = self._apart(list(parameter_groups(replace(opened, objects=tuple(views)))))
        self.parts = [self._parts(group.params) for group in self.groups]

    def is_expert(self, fqn: str) -> bool:
        """Is a parameter an expert's?"""
        return expert_place(fqn)[0] in self.counts

    def _all_experts(self, fqns: Sequence[str]) -> bool:
        return bool(fqns) and all(map(self.is_expert, fqns))

    # -------------------------------------------------------------------------------------------------- of the source

    def _saved_ep(self) -> int:
        """Return how many expert-parallel ranks the order of the groups is of: DeepSpeed's label says it, also where
        the groups of several ranks were put together.
        """
        sizes = expert_sizes(self.opened)
        if len(sizes) > 1:
            raise UnsupportedLayout(
                f"{self.opened.where}: experts of several expert-parallel sizes ({', '.join(map(str, sizes))}): one "
                "--ep is all that there is"
            )
        return sizes[0] if sizes else 1

    def _views(self, loose: Loose, dealt_before: int) -> Iterator[Loose]:
        """Yield the groups of a saved rank as each expert-parallel rank that is in them had them."""
        groups = (loose.tree or {}).get("groups", ())
        ranks = {self._rank_of(f, self.saved_ep) for group in groups for f in group["params"] if self.is_expert(f)}
        for rank in sorted(ranks) or [0]:
            yield replace(loose, tree={"groups": self._view(groups, rank, dealt_before)})

    def _view(self, groups: Sequence[Mapping[str, Any]], rank: int, dealt_before: int) -> list[dict[str, Any]]:
        """Return groups with members in the module's order; those are joined that DeepSpeed split for their size."""
        found: list[dict[str, Any]] = []
        last = 0
        for group in groups:
            params = [f for f in group["params"] if not self.is_expert(f) or self._rank_of(f, self.saved_ep) == rank]
            experts = self._all_experts(params)
            if dealt_before:
                params = gathered(params, max(1, dealt_before // (self.saved_ep if experts else 1)))
            size = sum(self.numel.get(fqn, 0) for fqn in params)
            if experts and size > self.limit and len(params) > 1:
                self.limit = NO_LIMIT  # the user has other groups than DeepSpeed makes by default
            if experts and self._was_split(found, group, last + self.numel.get(params[0], 0)):
                found[-1] = {**found[-1], "params": [*found[-1]["params"], *params]}
            else:
                found.append({**group, "params": params})
            last = size
        return found

    def _was_split(self, before: list[dict[str, Any]], group: Mapping[str, Any], size: int) -> bool:
        """Would DeepSpeed have begun a group with this one's first member, because it was too much for the last?"""
        if not before or size <= self.limit or not self._all_experts(before[-1]["params"]):
            return False
        return bool(before[-1]["options"] == group["options"])

    def _apart(self, groups: list[ParameterGroup]) -> list[ParameterGroup]:
        """Return groups in which no experts are beside other parameters: as DeepSpeed's
        ``split_params_into_different_moe_groups_for_optimizer`` makes them, behind all others. Without ZeRO a group of
        a user who does not call it stays as it is.
        """
        if not groups:
            tensors = self.target.description.model.tensors
            groups = [ParameterGroup(tuple(t.fqn for t in tensors if t.trainable and t.kind != "buffer"), {})]
        if self.target.parallel.zero == 0 and not any(group.options.get("moe") for group in groups):
            return groups
        label = {"name": f"ep_size_{self.ep}", "moe": True}
        front: list[ParameterGroup] = []
        behind: list[ParameterGroup] = []
        for group in groups:
            experts = tuple(filter(self.is_expert, group.params))
            others = tuple(fqn for fqn in group.params if not self.is_expert(fqn))
            if others:
                front.append(replace(group, params=others))
            if experts:
                (behind if others else front).append(ParameterGroup(experts, {**group.options, **label}))
        return [*front, *behind]

    # -------------------------------------------------------------------------------------------------- of the target

    def of_rank(self, rank: int) -> tuple[ParameterGroup, ...]:
        """Return the groups of an expert-parallel rank, members in the order of its flat buffers."""
        found = []
        for group, parts in zip(self.groups, self.parts, strict=True):
            experts = self._all_experts(group.params)
            members = self._members(group.params, parts, rank)
            for params in self._split(members) if experts else [members]:
                ranks = self.dealt_now // (self.ep if experts else 1)
                found.append(replace(group, params=tuple(dealt(params, ranks) if ranks else params)))
        return tuple(found)

    def _split(self, params: list[str]) -> Iterator[list[str]]:
        """Yield what DeepSpeed makes of a group of experts: on each stage groups of ``max_group_size`` elements."""
        for tensors in self.target.description.on_stage:
            there = {t.fqn for t in tensors}
            begun: list[str] = []
            size = 0
            for fqn in (fqn for fqn in params if fqn in there):
                if begun and size + self.numel[fqn] > self.limit:
                    yield begun
                    begun, size = [], 0
                begun.append(fqn)
                size += self.numel[fqn]
            if begun:
                yield begun

    def _members(self, fqns: Sequence[str], parts: Mapping[str, Sequence[str]] | None, rank: int) -> list[str]:
        """Return what a rank steps of a group: where the first expert of a layer was, all of the rank's, one by one."""
        if parts is None:
            if self.saved_ep == self.ep and self._all_experts(fqns):
                return [fqn for fqn in fqns if self._rank_of(fqn, self.ep) == rank]
            raise UnsupportedLayout(
                f"{self.opened.where}: {_named(self.counts)}: the optimizer does not step them layer by layer and "
                "expert by expert: in which order an engine with another number of experts a rank does is not known"
            )
        found: list[str] = []
        done: set[str] = set()
        for fqn in fqns:
            prefix, _ = expert_place(fqn)
            if prefix not in self.counts:
                found.append(fqn)
            elif prefix not in done:
                each = self.counts[prefix] // self.ep
                numbers = range(rank * each, (rank + 1) * each)
                found += [numbered_expert(part, number) for number in numbers for part in parts[prefix]]
                done.add(prefix)
        return found

    def _rank_of(self, fqn: str, ep: int) -> int:
        prefix, number = expert_place(fqn)
        return number // max(1, self.counts[prefix] // ep)

    def _parts(self, fqns: Sequence[str]) -> dict[str, list[str]] | None:
        """Return for each layer the parameters of one expert, if all experts have the same, and each of them its own
        layer by layer. None if the group is in another order.
        """
        held: dict[tuple[int, int], list[str]] = {}  # of an expert on the rank that saved it
        numbers: dict[tuple[int, str], list[int]] = {}
        for fqn in filter(self.is_expert, fqns):
            (prefix, number), rank = expert_place(fqn), self._rank_of(fqn, self.saved_ep)
            held.setdefault((rank, number), []).append(numbered_expert(fqn, 0))
            numbers.setdefault((rank, prefix), []).append(number)
        found: dict[str, list[str]] = {}
        for part in held.get((0, 0), ()):
            found.setdefault(expert_place(part)[0], []).append(part)
        for (rank, number), parts in held.items():
            there = [ps for prefix, ps in found.items() if number in numbers.get((rank, prefix), ())]
            if parts != [part for ps in there for part in ps]:
                return None
        whole = sum(map(len, held.values())) == sum(self.counts[prefix] * len(ps) for prefix, ps in found.items())
        return found if whole and all(one == sorted(one) for one in numbers.values()) else None
