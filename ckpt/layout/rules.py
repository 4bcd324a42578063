"""Rules: what a framework does not record of a model's layout, said by its user. Pure, no torch.

Tensor parallelism leaves a plain tensor behind, and nothing on it says which slice of what it is. A rules file says it,
by regular expressions on names, together with names that are local to a pipeline stage and weights that are tied across
stages. docs/rules.md is the reference.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.errors import ConfigError, LayoutError
from ckpt.layout.structs import gather
from ckpt.layout.tiling import Runs, Tiling, fused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of several matrices that are fused along a dimension. ``heads``: it is cut between these only."""

    size: int
    heads: int | None = None


class TensorRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How tensor parallelism cuts the tensors whose whole name ``match`` (a regular expression) matches.

    ``dim``: the dimension that is cut; None: all ranks hold the whole tensor. ``fused``: global sizes along ``dim`` of
    the matrices that lie one behind the other there, each cut by itself (QKV, gate and up). ``stride``: the same for
    that many matrices of equal size (Megatron's ``partition_stride``). ``heads``: the dimension is cut between heads
    only; with fewer heads than ranks, neighbours hold the same head (GQA). ``size``: the dimension without padding
    (vocabulary).
    """

    match: str
    dim: int | None = None
    fused: tuple[int | Part, ...] = ()
    stride: int = 1
    heads: int | None = None
    size: int | None = None


class NameRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names that ``match`` as a whole become ``name``, where ``{1}`` is the first group and ``{1+4}`` adds to it."""

    match: str
    name: str


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the user says. The first rule that matches counts; rules for tensors see the global names.

    ``tied``: name -> name of the same tensor that is listed, for ties that no single rank can see.
    """

    tensors: tuple[TensorRule, ...] = ()
    names: tuple[NameRule, ...] = ()
    tied: dict[str, str] = {}

    @classmethod
    def of(cls, plain: Mapping[str, Any] | Rules) -> Rules:
        """Return rules from plain data (a parsed file).

        Raises:
            ConfigError: with every unknown key, wrong type, invalid regular expression and number.
        """
        if isinstance(plain, Rules):
            return plain
        rules, problems = cls.gather(plain)
        if problems:
            raise ConfigError(f"rules: {'; '.join(problems)}")
        return rules

    @classmethod
    def gather(cls, plain: object) -> tuple[Rules, list[str]]:
        """Return the rules that are sound in plain data, and what is wrong with the others."""
        sound, problems = gather(plain, cls)
        for field in ("tensors", "names"):
            wrong = {id(rule): [*_invalid(rule)] for rule in sound.get(field, ())}
            problems += [problem for said in wrong.values() for problem in said]
            sound[field] = tuple(rule for rule in sound.get(field, ()) if not wrong[id(rule)])
        return cls(**sound), problems

    def rename(self, name: str) -> str:
        """Return the global name of a tensor."""
        for rule in self.names:
            found = re.fullmatch(rule.match, name)
            if found:
                return _filled(found, rule, name)
        return name

    def rule_for(self, fqn: str) -> TensorRule | None:
        """Return the first rule that matches a global name."""
        return next((rule for rule in self.tensors if re.fullmatch(rule.match, fqn)), None)

    def unused(self, fqns: Iterable[str], local_names: Iterable[str]) -> set[str]:
        """Return the patterns that match none of these names, and both ends of ties that are not there."""
        known, local = set(fqns), set(local_names)
        idle = {f"tensors: {r.match}" for r in self.tensors if not any(re.fullmatch(r.match, n) for n in known)}
        idle |= {f"names: {r.match}" for r in self.names if not any(re.fullmatch(r.match, n) for n in local)}
        idle |= {f"tied: {name}" for name in self.tied if name not in known}
        return idle | {f"tied to: {name}" for name in self.tied.values() if name not in known}


_NUMBERED = re.compile(r"\{(\d+)([+-]\d+)?\}")
_MAX_PATTERN = 1000


def _filled(found: re.Match[str], rule: NameRule, name: str) -> str:
    def value(part: re.Match[str]) -> str:
        text, shift = found[int(part[1])] or "", part[2]
        if shift is None:
            return text
        if not text.isdigit():
            raise ConfigError(f"rules: {rule.name!r} adds to group {part[1]} of {name!r}, which is {text!r}, no number")
        return str(int(text) + int(shift))

    return _NUMBERED.sub(value, rule.name)


def _invalid(rule: TensorRule | NameRule) -> Iterator[str]:
    try:
        groups = re.compile(rule.match).groups if len(rule.match) <= _MAX_PATTERN else -1
    except re.error as error:
        yield f"'{rule.match}' is no regular expression: {error}"
        return
    if groups < 0:
        yield f"a pattern of {len(rule.match)} characters, at most {_MAX_PATTERN}"
    if isinstance(rule, NameRule):
        wanted = [int(m[1]) for m in _NUMBERED.finditer(rule.name)]
        if max(wanted, default=0) > groups:
            yield f"'{rule.match}' has {groups} group(s), '{rule.name}' uses {max(wanted)}"
        return
    numbers = {"stride": rule.stride, "heads": rule.heads, "size": rule.size}
    yield from (
        f"'{rule.match}': {k} is {v}, expected at least 1" for k, v in numbers.items() if v is not None and v < 1
    )
    parts = [p if isinstance(p, Part) else Part(p) for p in rule.fused]
    if any(p.size < 1 or (p.heads is not None and p.heads < 1) for p in parts):
        yield f"'{rule.match}': fused parts must have at least one row and one head"
    if sum((bool(rule.fused), rule.stride > 1, rule.heads is not None, rule.size is not None)) > 1:
        yield f"'{rule.match}': expected one of fused, stride, heads and size"
    if rule.dim is None and (rule.fused or rule.stride > 1 or rule.heads or rule.size):
        yield f"'{rule.match}': fused, stride, heads and size need dim"


def tiling_of(rule: TensorRule, local: tuple[int, ...], rank: int, degree: int) -> Tiling:
    """Return which part of the global tensor a local tensor of this shape is.

    Args:
        rule: how it was cut.
        local: shape of what this rank holds.
        rank: its number among the tensor-parallel ranks.
        degree: how many they are.

    Raises:
        LayoutError: shape and rule do not fit together; says what was expected.
    """
    if rule.dim is None:
        return Tiling.whole(local)
    dim = rule.dim + len(local) if rule.dim < 0 else rule.dim
    if not 0 <= dim < len(local):
        raise LayoutError(f"rule '{rule.match}' cuts dimension {rule.dim}, the tensor has shape {list(local)}")
    runs, size = _runs(rule, local[dim], rank, degree)
    shape = (*local[:dim], size, *local[dim + 1 :])
    return Tiling.of_runs(shape, {dim: runs}, local)


def _runs(rule: TensorRule, held: int, rank: int, degree: int) -> tuple[Runs, int]:
    if rule.size is not None:  # equal parts of the padded size; the last ones hold fewer rows, or none
        first = min(rank * held, rule.size)
        if degree * held < rule.size:
            raise LayoutError(f"rule '{rule.match}': {degree} x {held} rows, expected at least the size {rule.size}")
        count = min(held, rule.size - first)
        return (((first, count),) if count else ()), rule.size
    parts = [(p.size, p.heads or degree) if isinstance(p, Part) else (p, degree) for p in rule.fused]
    if not parts:
        distinct = min(degree, rule.heads or degree)
        if held % rule.stride:
            raise LayoutError(f"rule '{rule.match}': {held} rows cannot hold {rule.stride} equal parts")
        parts = [(held // rule.stride * distinct, rule.heads or degree)] * rule.stride
    runs = fused(parts, degree, rank)
    total = sum(count for _, count in runs)
    if total != held:
        raise LayoutError(f"rule '{rule.match}': expected {total} rows on each of {degree} ranks, found {held}")
    return runs, sum(size for size, _ in parts)
