"""The model that an opened checkpoint holds: its tensors in the order of its optimizer, layers, experts, ties. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt.convert.naming import expert_of, layer_of, natural, place_of, stack_of
from ckpt.describe.model import Described, ModelSpec, Split, Tied, kind_of
from ckpt.errors import ConfigError
from ckpt.layout.spec import BUFFER, MASTER, PARAM, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.convert.opened import Opened
    from ckpt.convert.safetensors.config import Beside
    from ckpt.layout.rules import Rules

Roles = dict[str, TensorSpec]
"""role -> spec, of one tensor"""
PLACES = {"first": 0, "ends": 0, "every": 0, "last": 2}


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group of the optimizer. ``params``: listed names, in the order in which a flat optimizer has them.
    ``options``: lr, weight decay and the rest, as they were saved.
    """

    params: tuple[str, ...]
    options: Mapping[str, Any]


def roles_of(opened: Opened) -> dict[str, Roles]:
    """Return name -> role -> spec; tied names are left out."""
    found: dict[str, Roles] = defaultdict(dict)
    for spec in opened.specs:
        found[spec.fqn][spec.role] = spec
    return dict(found)


def shape_of(roles: Roles) -> tuple[int, ...]:
    """Return the shape of a tensor, which an optimizer state of it need not have."""
    return next((roles[role].shape for role in (PARAM, MASTER, BUFFER) if role in roles), min(roles.values()).shape)


def parameter_groups(opened: Opened) -> tuple[ParameterGroup, ...]:
    """Return the optimizer's groups as far as the source tells them; what ranks say of one group is put together.

    Groups of two ranks are the same if their options are and as many with those options came before.
    """
    known = {spec.fqn for spec in opened.specs}
    options: dict[tuple[str, int], Mapping[str, Any]] = {}
    members: dict[tuple[str, int], dict[str, None]] = {}  # dicts as ordered sets
    for loose in sorted((one for one in opened.objects if one.name == "optimizer"), key=lambda one: one.ranks):
        seen: dict[str, int] = defaultdict(int)
        for group in (loose.tree or {}).get("groups", ()):
            words = repr(sorted(group["options"].items()))
            key = (words, seen[words])
            seen[words] += 1
            options.setdefault(key, group["options"])
            names = (opened.aliases.get(fqn, fqn) for fqn in group["params"])
            members.setdefault(key, {}).update((fqn, None) for fqn in names if fqn in known)
    return tuple(ParameterGroup(tuple(params), options[key]) for key, params in members.items())


def model_of(
    opened: Opened,
    rules: Rules | None,
    groups: Sequence[ParameterGroup],
    *,
    cut: Beside | None = None,
    said: Mapping[str, Split | None] | None = None,
) -> tuple[ModelSpec, list[str]]:
    """Return the model, and what is wrong with the rules for it.

    Args:
        opened: the source.
        rules: how tensor parallelism cuts it.
        groups: of its optimizer; their order is the model's.
        cut: what stands in for a rule, which each tensor needs if there is tensor parallelism; None if there is none.
        said: how the source says that it cuts which tensor, where that holds for the target; a rule comes first.
    """
    roles = {fqn: held for fqn, held in roles_of(opened).items() if 0 not in shape_of(held)}
    splits, problems = _splits(roles, rules, cut, said or {}) if cut is not None else ({}, [])
    stack = stack_of(roles)
    stepped = {fqn for fqn, held in roles.items() if held.keys() - {PARAM, BUFFER}}
    number = {fqn: n for n, group in enumerate(groups) for fqn in group.params}
    tensors = [
        Described(
            fqn,
            shape_of(held),
            _kind(fqn, held),
            layer_of(fqn, stack),
            place_of(fqn),
            splits.get(fqn),
            expert_of(fqn),
            trainable=BUFFER not in held and (fqn in stepped or not stepped),
            group=number.get(fqn, len(groups)),
        )
        for fqn, held in roles.items()
    ]
    ordered = _in_order(_placed(tensors, groups), groups)
    return ModelSpec(opened.where, tuple(ordered), _ties(opened, rules, ordered)), problems


def _kind(fqn: str, held: Roles) -> str:
    if BUFFER in held:
        return "buffer"
    return "expert" if expert_of(fqn) is not None else kind_of(shape_of(held))


def _splits(
    roles: Mapping[str, Roles], rules: Rules | None, beside: Beside, said: Mapping[str, Split | None]
) -> tuple[dict[str, Split | None], list[str]]:
    """Return how each tensor is cut, and the tensors of which the rules do not say it or say what cannot be."""
    splits: dict[str, Split | None] = {}
    problems, unexplained = list[str](), list[str]()
    for fqn in sorted(roles, key=natural):
        rule, shape = rules.rule_for(fqn) if rules is not None else None, shape_of(roles[fqn])
        try:
            if rule is not None:
                splits[fqn] = Split.of_rule(rule, shape)
            elif fqn in said:
                splits[fqn] = said[fqn]
            elif fqn in beside.splits and beside.tensors[fqn].shape == shape:
                splits[fqn] = beside.splits[fqn]
            else:
                unexplained.append(fqn)
        except ConfigError as error:
            problems.append(f"{fqn!r}: rule '{rule.match if rule is not None else ''}' is wrong: {error}")
    if unexplained and not splits and not problems:
        return {}, [f"nothing says how tensor parallelism cuts its tensors: {beside.advice}"]
    if unexplained and beside.problem:
        problems.append(beside.problem)
    return splits, [*problems, *(f"{fqn!r}: no rule says how tensor parallelism cuts it" for fqn in unexplained)]


def _placed(tensors: list[Described], groups: Sequence[ParameterGroup]) -> list[Described]:
    """Return the tensors, those outside of the layers on the stage that the optimizer's order says.

    What a group lists before its first layer comes first, what it lists behind its last layer comes last.
    """
    layer = {t.fqn: t.layer for t in tensors}
    said: dict[str, str] = {}
    for group in groups:
        inside = [n for n, fqn in enumerate(group.params) if layer.get(fqn) is not None]
        for n, fqn in enumerate(group.params):
            if inside and not inside[0] < n < inside[-1]:
                said[fqn] = "first" if n < inside[0] else "last"
    return [t if t.place == "ends" else replace(t, place=said.get(t.fqn, t.place)) for t in tensors]


def _in_order(tensors: list[Described], groups: Sequence[ParameterGroup]) -> list[Described]:
    """Return the tensors as modules would come, the members of each group in the order of the group."""

    def key(t: Described) -> tuple[object, ...]:
        return (1, t.layer) if t.layer is not None else (PLACES[t.place], 0)

    ordered = sorted(tensors, key=lambda t: (key(t), natural(t.fqn)))
    by_name = {t.fqn: t for t in tensors}
    waiting = [iter([by_name[fqn] for fqn in group.params if fqn in by_name]) for group in groups]
    return [next(waiting[t.group]) if t.group < len(groups) else t for t in ordered]


def _ties(opened: Opened, rules: Rules | None, tensors: Sequence[Described]) -> tuple[Tied, ...]:
    places = {t.fqn: t.place if t.layer is None else "layer" for t in tensors}
    said = {**(rules.tied if rules else {}), **opened.aliases}
    return tuple(
        Tied(alias, target, "first" if places[target] == place_of(alias) == "first" else "last")
        for alias, target in sorted(said.items())
        if target in places and alias not in places
    )
