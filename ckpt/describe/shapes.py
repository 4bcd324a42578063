"""A model as a list of shapes: the short file for everything that is not on Hugging Face. Pure.

::

    name: tiny                       # all keys but tensors may be left out
    layers: 12                       # {layer} in a name: once for each of 0 … 11
    experts: 4                       # {expert}: once for each of 0 … 3
    tensors:                         # in module order
      embed.weight:                 {shape: [61, 24], kind: embedding, tp: {dim: 0, size: 61}}
      blocks.{layer}.qkv.weight:    {shape: [72, 24], tp: {dim: 0, fused: [{size: 24, heads: 4}, 24, 24]}}
      blocks.{layer}.mask:          {shape: [12], kind: buffer, dtype: int64}
      blocks.{layer}.mlp.{expert}.w: {shape: [48, 24], tp: {dim: 1}}
      norm.weight:                  {shape: [24], stage: last}
    tied: {head.weight: embed.weight}
    rules: {tensors: [{match: '.*norm.*', dim: null}]}      # of a rules file, for tensors without tp
    parallel: {engine: deepspeed, zero: 1, dp: 4, tp: 2}    # fields of Parallel

``tp`` takes the keys of a rule for tensors (``ckpt.layout.rules``) but ``match``; ``size`` marks a vocabulary. Lines in
a row that have ``{layer}`` are repeated together, layer by layer, as modules are. Tensors without a layer belong to the
first pipeline stage if they stand before the layers, to the last if behind; ``stage`` (first, last, ends, every)
overrides.
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


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    shape: tuple[int, ...]
    kind: str | None = None
    tp: dict[str, Any] | None = None
    dtype: str | None = None
    stage: str | None = None
    trainable: bool = True


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tensors: dict[str, _Line]
    name: str = "model"
    layers: int = 0
    experts: int = 0
    tied: dict[str, str] = {}
    rules: dict[str, Any] = {}
    parallel: dict[str, Any] = {}


def model_of_shapes(plain: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a parsed file of shapes describes.

    Raises:
        ConfigError: all problems at once; a wrong type or an unknown key is told alone.
    """
    try:
        file = msgspec.convert(plain, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"file of shapes: {error}") from error
    fields = Fields(plain)
    layers, experts = fields.integer("layers", 0, least=0), fields.integer("experts", 0, least=0)
    rules = Rules.of(file.rules)
    problems = fields.problems
    for name in file.tensors:
        if (LAYER in name and not layers) or (EXPERT in name and not experts):
            problems.append(f"{name!r} is repeated, but the file does not say how often (layers, experts)")
    total = sum((layers if LAYER in n else 1) * (experts if EXPERT in n else 1) for n in file.tensors)
    if total > MAX_TENSORS:
        problems.append(f"the file describes {total} tensors, at most {MAX_TENSORS}")
    if problems:
        refuse("file of shapes", problems)
    tensors = tuple(_tensors(file, rules, problems))
    tied = {**file.tied, **rules.tied}
    before = {t.fqn for t in tensors if t.place == "first"}
    places = {alias: "last" if layers or target not in before else "first" for alias, target in tied.items()}
    model = ModelSpec(file.name, tensors, tuple(Tied(a, t, places[a]) for a, t in tied.items()))
    idle = rules.unused([t.fqn for t in tensors] + list(tied), [])
    problems += [f"rules: {pattern!r} matches nothing" for pattern in sorted(idle)]
    if problems:
        refuse("file of shapes", problems)
    model.check()
    return model


def _tensors(file: _File, rules: Rules, problems: list[str]) -> Iterator[Described]:
    place = "first"
    for in_layers, block in groupby(file.tensors.items(), key=lambda item: LAYER in item[0]):
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
