"""A model as a list of shapes: the short file for everything that is not on Hugging Face. Pure.

docs/shapes.md is the reference. Lines in a row that have ``{layer}`` are repeated together, layer by layer, as modules
are, and inside of them those that have ``{expert}``.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.describe.model import KINDS, MAX_TENSORS, Described, ModelSpec, Split, Tied, kind_of, refuse
from ckpt.describe.read import Fields
from ckpt.errors import ConfigError
from ckpt.layout.rules import Rules, TensorRule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LAYER, EXPERT = "{layer}", "{expert}"
EXAMPLE = "a mapping of names, like {embed.weight: {shape: [64, 8]}}"


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    shape: tuple[int, ...]
    kind: str | None = None
    tp: dict[str, Any] | None = None
    dtype: str | None = None
    stage: str | None = None
    trainable: bool = True


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tensors: dict[str, Any]
    name: str = "model"
    layers: int = 0
    experts: int = 0
    tied: dict[str, str] = {}
    rules: dict[str, Any] = {}
    parallel: dict[str, Any] = {}


def model_of_shapes(plain: Mapping[str, Any], where: str = "file of shapes") -> ModelSpec:
    """Return the model that a parsed file of shapes describes; ``where``: what errors call it.

    Raises:
        ConfigError: all problems at once; a wrong type or an unknown key outside of tensors is told alone.
    """
    if not isinstance(plain.get("tensors"), dict):
        found = type(plain.get("tensors")).__name__
        raise ConfigError(f"{where}: tensors: expected {EXAMPLE}, found a {found} (docs/shapes.md)")
    try:
        file = msgspec.convert(plain, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error} (docs/shapes.md)") from error
    lines = _lines(file.tensors, where)
    fields = Fields(plain)
    layers, experts = fields.integer("layers", 0, least=0), fields.integer("experts", 0, least=0)
    try:
        rules = Rules.of(file.rules)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    problems = fields.problems
    for name in lines:
        if (LAYER in name and not layers) or (EXPERT in name and not experts):
            problems.append(f"{name!r} is repeated, but the file does not say how often (layers, experts)")
    total = sum((layers if LAYER in n else 1) * (experts if EXPERT in n else 1) for n in lines)
    if total > MAX_TENSORS:
        problems.append(f"the file describes {total} tensors, at most {MAX_TENSORS}")
    if problems:
        refuse(where, problems)
    tensors = tuple(_tensors(file, lines, rules, problems))
    tied = {**file.tied, **rules.tied}
    before = {t.fqn for t in tensors if t.place == "first"}
    places = {alias: "last" if layers or target not in before else "first" for alias, target in tied.items()}
    model = ModelSpec(file.name, tensors, tuple(Tied(a, t, places[a]) for a, t in tied.items()))
    idle = rules.unused([t.fqn for t in tensors] + list(tied), [])
    problems += [f"rules: {pattern!r} matches nothing" for pattern in sorted(idle)]
    if problems:
        refuse(where, problems)
    model.check()
    return model


def _lines(tensors: Mapping[str, Any], where: str) -> dict[str, _Line]:
    found, problems = dict[str, _Line](), list[str]()
    for name, line in tensors.items():
        try:
            found[name] = msgspec.convert(line, _Line)
        except msgspec.ValidationError as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        refuse(f"{where}: tensors: expected {EXAMPLE}, docs/shapes.md", problems)
    return found


def _tensors(file: _File, described: Mapping[str, _Line], rules: Rules, problems: list[str]) -> Iterator[Described]:
    place = "first"
    for in_layers, block in groupby(described.items(), key=lambda item: LAYER in item[0]):
        lines = list(block)
        if not in_layers:
            yield from _block(file, lines, rules, problems, layer=None, place=place)
            continue
        place = "last"
        for layer in range(file.layers):
            yield from _block(file, lines, rules, problems, layer=layer, place=place)


def _block(
    file: _File, lines: Sequence[tuple[str, _Line]], rules: Rules, problems: list[str], *, layer: int | None, place: str
) -> Iterator[Described]:
    for of_experts, block in groupby(lines, key=lambda item: EXPERT in item[0]):
        once = list(block)
        for expert in range(file.experts) if of_experts else (None,):
            for name, line in once:
                fqn = name.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
                where = {"layer": layer, "expert": expert, "place": line.stage or place}
                yield _tensor(fqn, line, rules, problems, **where)


def _tensor(fqn: str, line: _Line, rules: Rules, problems: list[str], **where: Any) -> Described:
    kind = line.kind or ("expert" if where.get("expert") is not None else kind_of(line.shape))
    if kind not in KINDS:
        problems.append(f"{fqn!r}: kind {kind!r}, expected one of {', '.join(KINDS)}")
    split = None
    try:
        split = _split(fqn, line, rules)
    except ConfigError as error:
        problems.append(f"{fqn!r}: {error}")
    trainable = line.trainable and kind != "buffer"
    return Described(fqn, line.shape, kind, split=split, dtype=line.dtype, trainable=trainable, **where)


def _split(fqn: str, line: _Line, rules: Rules) -> Split | None:
    if line.kind == "buffer":
        return None
    rule: TensorRule | None = rules.rule_for(fqn)
    if line.tp is not None:
        rule = Rules.of({"tensors": [{**line.tp, "match": re.escape(fqn)}]}).tensors[0]
    return Split.of_rule(rule, line.shape) if rule is not None else None
