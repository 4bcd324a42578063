"""A model as a list of shapes: the short file for everything that is not on Hugging Face. Pure.

docs/shapes.md is the reference. Lines in a row that have ``{layer}`` are repeated together, layer by layer, as modules
are, and inside of them those that have ``{expert}``.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.describe.model import MAX_TENSORS, Described, ModelSpec, Split, Tied, kind_of, refuse
from ckpt.describe.parallel import Parallel
from ckpt.describe.read import Fields
from ckpt.errors import ConfigError
from ckpt.layout.rules import Rules, TensorRule
from ckpt.layout.structs import gather

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
        ConfigError: all problems at once, wrong keys of ``parallel`` among them; without a mapping of tensors, or with
            too many of them, those that are known by then.
    """
    if not isinstance(plain.get("tensors"), dict):
        found = type(plain.get("tensors")).__name__
        raise ConfigError(f"{where}: tensors: expected {EXAMPLE}, found a {found} (docs/shapes.md)")
    sound, problems = gather(plain, _File)
    file = _Reader(_File(**sound), plain, problems)
    problems += [f"parallel: {problem}" for problem in gather(file.said.parallel, Parallel)[1]]
    if file.total > MAX_TENSORS:
        refuse(where, [*problems, f"the file describes {file.total} tensors, at most {MAX_TENSORS}"])
    model = file.model()
    problems += [p for p in model.problems() if p.partition(": ")[0] not in file.repeated]
    if problems:
        refuse(f"{where}, see docs/shapes.md", problems)
    return model


class _Reader:
    """Reads on past what is wrong, so that all of it can be told: it goes to ``problems``, once for a repeated line.

    ``repeated``: names, as errors write them, of the second tensor of a line and of those after it.
    """

    def __init__(self, said: _File, plain: Mapping[str, Any], problems: list[str]) -> None:
        self.said, self.problems = said, problems
        self.repeated: set[str] = set()
        self._unknown: set[str] = set()
        self._lines = dict(self._read_lines())
        fields = Fields({"layers": said.layers, "experts": said.experts})
        self._layers, self._experts = (fields.integer(name, 0, least=0) for name in ("layers", "experts"))
        problems += fields.problems
        for name in self._lines:
            if (LAYER in name and not plain.get("layers")) or (EXPERT in name and not plain.get("experts")):
                problems.append(f"{name!r} is repeated, but the file does not say how often (layers, experts)")
        self._rules, wrong = Rules.gather(said.rules)
        problems += [f"rules: {problem}" for problem in wrong]

    def _read_lines(self) -> Iterator[tuple[str, _Line]]:
        for name, line in self.said.tensors.items():
            try:
                yield name, msgspec.convert(line, _Line)
            except msgspec.ValidationError:
                sound, wrong = gather(line, _Line)
                self.problems += [f"{name!r}: {problem}" for problem in wrong]
                self._unknown.add(name)  # it is there, for ties and rules, but how it is cut cannot be checked
                yield name, _Line(**{"shape": (1,), **sound, "tp": None})

    @property
    def total(self) -> int:
        """Number of tensors; a line that is repeated nobody knows how often counts once."""
        return sum(
            ((self._layers or 1) if LAYER in n else 1) * ((self._experts or 1) if EXPERT in n else 1)
            for n in self._lines
        )

    def model(self) -> ModelSpec:
        """Return the model, as good as it can be made."""
        tensors = tuple(self._tensors())
        tied = {**self.said.tied, **self._rules.tied}
        before = {t.fqn for t in tensors if t.place == "first"}
        places = {alias: "last" if self._layers or to not in before else "first" for alias, to in tied.items()}
        idle = self._rules.unused([t.fqn for t in tensors] + list(tied), [])
        self.problems += [f"rules: '{pattern}' matches nothing" for pattern in sorted(idle)]
        return ModelSpec(self.said.name, tensors, tuple(Tied(a, t, places[a]) for a, t in tied.items()))

    def _tensors(self) -> Iterator[Described]:
        place = "first"
        for in_layers, block in groupby(self._lines.items(), key=lambda item: LAYER in item[0]):
            lines = list(block)
            if not in_layers:
                yield from self._block(lines, layer=None, place=place)
                continue
            place = "last"
            for layer in range(self._layers or 1):
                yield from self._block(lines, layer=layer, place=place)

    def _block(self, lines: Sequence[tuple[str, _Line]], *, layer: int | None, place: str) -> Iterator[Described]:
        for of_experts, block in groupby(lines, key=lambda item: EXPERT in item[0]):
            once = list(block)
            for expert in range(self._experts or 1) if of_experts else (None,):
                for name, line in once:
                    fqn = name.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
                    if layer or expert:
                        self.repeated.add(repr(fqn))
                    yield self._tensor(name, fqn, line, layer=layer, expert=expert, place=line.stage or place)

    def _tensor(self, name: str, fqn: str, line: _Line, **where: Any) -> Described:
        kind = line.kind or ("expert" if where.get("expert") is not None else kind_of(line.shape))
        split = None
        try:
            split = None if name in self._unknown else _split(fqn, line, self._rules)
        except ConfigError as error:
            self._unknown.add(name)
            self.problems.append(f"{fqn!r}: {error}")
        trainable = line.trainable and kind != "buffer"
        return Described(fqn, line.shape, kind, split=split, dtype=line.dtype, trainable=trainable, **where)


def _split(fqn: str, line: _Line, rules: Rules) -> Split | None:
    if line.kind == "buffer":
        return None
    rule: TensorRule | None = rules.rule_for(fqn)
    if line.tp is not None:
        rule = Rules.of({"tensors": [{**line.tp, "match": re.escape(fqn)}]}).tensors[0]
    return Split.of_rule(rule, line.shape) if rule is not None else None
