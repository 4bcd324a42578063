"""The optimizer of a DeepSpeed job without ZeRO: its state is numbered, and no file says which number is which name.

It is found out. The parameters of a group come in the order of the module, in practice always, so that shapes leave few
ways to deal them out; 16-bit jobs also keep the masters, which round to the parameters. No file says what was frozen:
wherever there are more parameters than the optimizer steps, any of them may be. Only if exactly one way is left the
state is taken; else it is left out, and a note says of which parameters it cannot be told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.deepspeed.read_files import numel_of
from ckpt.convert.deepspeed.read_optim import sample
from ckpt.convert.torchfile.names import Stored
from ckpt.errors import MalformedData

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpt.store.base import Store

_SAMPLE = 1024
"""Elements that are compared at the beginning, in the middle and at the end of a tensor."""
NAMES = "ckpt_reshard_names"
"""What files written by a conversion say beside the groups: the names of each one's members; DeepSpeed skips it."""
MAX_STATES = 20_000
"""Ways to deal out so far, above which it is given up: shapes that say nothing."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parameter of the module. ``value``: where it stands; None: in no file."""

    local: str
    shape: Shape
    value: Stored | None
    expert: int | None = None


@dataclass(slots=True)
class Item:
    """What the optimizer steps as one tensor. ``shape``: None if no state tells it. ``master``: where there is one."""

    shape: Shape | None
    master: Stored | None
    state: dict[str, Any]


@dataclass(slots=True)
class Group:
    """A parameter group. ``items``: its tensors; ``flat``: or all of them one behind the other (one item then)."""

    items: list[Item]
    flat: bool
    options: dict[str, Any]
    names: list[str] = field(default_factory=list)
    """of its members, where torch was given them"""

    @property
    def end(self) -> int:
        """Position behind the last parameter."""
        held = self.items[0].master if self.flat else None
        return held.volume if held is not None else len(self.items)


@dataclass(frozen=True, slots=True)
class Taken:
    """``candidate`` is at position ``at`` of group ``group``: number of its item, or element of its flat tensor.

    ``shared``: an earlier stage of the pipeline has it too, and its copy counts.
    """

    group: int
    at: int
    candidate: Candidate
    shared: bool = False


_Steps = dict[tuple[int, ...], list[tuple[tuple[int, ...], Taken | None]]]
"""For one parameter: position in each group -> the positions behind it, and what it was taken for (None: frozen)."""


def groups_of(optimizer: dict[str, Any], where: str) -> tuple[list[Group], str]:
    """Return the groups of a saved optimizer, and the class of DeepSpeed's wrapper, empty if there is none.

    Raises:
        MalformedData: it is none.
    """
    wrapper, masters = "", None
    inner = optimizer.get("optimizer_state_dict", optimizer)
    for name, kind in (("fp32_groups", "FP16_UnfusedOptimizer"), ("fp32_groups_flat", "FP16_Optimizer")):
        if isinstance(optimizer.get(name), list | tuple):
            wrapper, masters = kind, list(optimizer[name])
    listed = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(listed, list) or (masters is not None and len(masters) != len(listed)):
        raise MalformedData(f"{where}: the optimizer's state has no param_groups, or not as many as it has masters")
    states, said = inner.get("state") or {}, _said(inner.get(NAMES))
    found = []
    for g, group in enumerate(listed):
        numbers, names = list(group.get("params", ())), said[g] if g < len(said) else group.get("param_names") or []
        own = [None] * len(numbers) if masters is None else masters[g]
        own = [own] if isinstance(own, Stored) else list(own)
        if len(own) != len(numbers):
            raise MalformedData(f"{where}: group {g} has {len(numbers)} parameters and {len(own)} masters")
        items = [_item(states.get(n) or {}, master) for n, master in zip(numbers, own, strict=True)]
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        found.append(Group(items, wrapper == "FP16_Optimizer", options, [str(name) for name in names]))
    _count_together(found)
    return found, wrapper


def shapes_by_name(optimizer: Any) -> dict[str, Shape | None]:
    """Return what a stage's optimizer without ZeRO steps, where its file says names: shapes, None if not known."""
    if not isinstance(optimizer, dict):
        return {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    said = isinstance(inner, dict) and inner.get(NAMES)
    found: dict[str, Shape | None] = {}
    for group in groups_of(optimizer, "optimizer")[0] if said else ():
        found |= dict.fromkeys(group.names)
        if not group.flat:
            found |= {name: item.shape for name, item in zip(group.names, group.items, strict=False)}
    return found


def _said(names: Any) -> list[list[str]]:
    """Return the names of each group's members, where a file says them."""
    groups = names if isinstance(names, list) else []
    return [[str(name) for name in group] if isinstance(group, list) else [] for group in groups]


def _item(state: dict[str, Any], master: Stored | None) -> Item:
    if master is not None:
        return Item(master.shape, master, state)
    tensors = [v for v in state.values() if isinstance(v, Stored) and v.shape]
    largest = max(tensors, key=lambda t: (len(t.shape), t.volume), default=None)
    # Factors (Adafactor's) are smaller than the parameter: they tell nothing.
    factors = any("_row" in str(role) or "_col" in str(role) for role in state)
    plain = isinstance(state.get("exp_avg"), Stored) or (not factors and len({t.shape for t in tensors}) == 1)
    return Item(largest.shape if largest is not None and plain else None, None, state)


def _count_together(groups: list[Group]) -> None:
    """Give all tensors of a group the count of the last one, where DeepSpeed's fused optimizers count only there."""
    for group in groups:
        if "bias_correction" in group.options and "amsgrad" not in group.options:
            steps = [item.state["step"] for item in group.items if type(item.state.get("step")) is int]
            for item in group.items:
                if type(item.state.get("step")) is int:
                    item.state = {**item.state, "step": max(steps)}


# -------------------------------------------------------------------------------------------------------- dealing out


def deal(store: Store, groups: Sequence[Group], candidates: Sequence[Candidate]) -> list[Taken] | None:
    """Return which parameter each item is, or None if there is no way or more than one."""
    named = by_name(groups, candidates)
    if named is not None:
        return named
    needed = sum(group.end for group in groups)
    have = sum(numel_of(c.shape) if any(g.flat for g in groups) else 1 for c in candidates)
    spare = have - needed
    if spare < 0:
        return None
    fits = Fits(store, groups)
    layers: list[_Steps] = []
    reached: set[tuple[int, ...]] = {(0,) * len(groups)}
    for candidate in candidates:
        steps: _Steps = {}
        for state in reached:
            ways: list[tuple[tuple[int, ...], Taken | None]] = [(state, None)] if spare else []
            for g, at in enumerate(state):
                after = fits.after(g, at, candidate)
                if after is not None:
                    ways.append(((*state[:g], after, *state[g + 1 :]), Taken(g, at, candidate)))
            steps[state] = ways
        layers.append(steps)
        reached = {after for ways in steps.values() for after, _ in ways}
        if len(reached) > MAX_STATES:
            return None
    end = tuple(group.end for group in groups)
    if end not in reached:
        return None
    return _only_way(layers, end)


def _only_way(layers: list[_Steps], end: tuple[int, ...]) -> list[Taken] | None:
    """Walk back from the end; None if anywhere two ways lead there."""
    found: list[Taken] = []
    at = end
    for steps in reversed(layers):
        ways = [(before, taken) for before, after in steps.items() for state, taken in after if state == at]
        if len(ways) != 1:
            return None
        at, taken = ways[0]
        if taken is not None:
            found.append(taken)
    return found[::-1]


def by_name(groups: Sequence[Group], candidates: Sequence[Candidate]) -> list[Taken] | None:
    """Return which parameter each item is, if the file says it of all; None if not."""
    named = {c.local: c for c in candidates}
    if not groups or any(name not in named for group in groups for name in group.names):
        return None
    found = []
    for g, group in enumerate(groups):
        at = 0
        for name in group.names:
            found.append(Taken(g, at, named[name]))
            at += numel_of(named[name].shape) if group.flat else 1
        if at != group.end or not all(_shaped(group, one) for one in found if one.group == g):
            return None
    return found


def _shaped(group: Group, one: Taken) -> bool:
    return group.flat or group.items[one.at].shape in (None, one.candidate.shape)


class Fits:
    """Answers whether a parameter can be what a group has at a position, and keeps the answers."""

    def __init__(self, store: Store, groups: Sequence[Group]) -> None:
        self._store, self._groups = store, groups
        self._known: dict[tuple[int, int, str, int | None], bool] = {}

    def after(self, g: int, at: int, candidate: Candidate) -> int | None:
        """Return the position behind it in group ``g``, None if it does not fit at ``at``."""
        group, numel = self._groups[g], numel_of(candidate.shape)
        if at >= group.end or (group.flat and at + numel > group.end):
            return None
        key = (g, at, candidate.local, candidate.expert)
        if key not in self._known:
            self._known[key] = self._fits(group, at, candidate, numel)
        if not self._known[key]:
            return None
        return at + numel if group.flat else at + 1

    def _fits(self, group: Group, at: int, candidate: Candidate, numel: int) -> bool:
        item = group.items[0 if group.flat else at]
        if not group.flat and item.shape not in (None, candidate.shape):
            return False
        master, value = item.master, candidate.value
        if master is None or value is None or not value.is_contiguous or not master.is_contiguous:
            return True
        first = at if group.flat else 0
        return all(
            torch.equal(
                sample(self._store, master, first + low, high - low).to(getattr(torch, value.dtype)),
                sample(self._store, value, low, high - low),
            )
            for low, high in places(numel)
        )


def places(numel: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a tensor's elements that are compared."""
    for start in dict.fromkeys((0, max(0, (numel - _SAMPLE) // 2), max(0, numel - _SAMPLE))):
        yield start, min(numel, start + _SAMPLE)
