"""What a checkpoint is to become: which rank of the target holds which boxes of which tensors.

The model comes from the source (:mod:`ckpt.convert.model_of`), the cuts from the engines' own rules
(:mod:`ckpt.describe`), and which roles there are from the source again: whatever its optimizer had is carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import msgspec

from ckpt.convert.known import known_layout
from ckpt.convert.model_of import ParameterGroup, model_of, parameter_groups, roles_of, shape_of
from ckpt.convert.naming import stack_of
from ckpt.convert.options import ALL, WEIGHTS
from ckpt.convert.safetensors.config import config_beside
from ckpt.convert.shared_heads import shared_heads, shared_keys
from ckpt.describe.exact import rank_layout
from ckpt.describe.model import refuse
from ckpt.describe.parallel import Parallel
from ckpt.describe.placement import Column, Description
from ckpt.describe.world import World
from ckpt.errors import ConfigError
from ckpt.format.digest import raw_digest
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, MASTER, PARAM, RankLayout, Shard, TensorSpec
from ckpt.plan.wire import combined, encode_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.convert.model_of import Roles
    from ckpt.convert.opened import Opened
    from ckpt.convert.safetensors.config import Beside
    from ckpt.describe.model import Described, ModelSpec
    from ckpt.layout.graph import ShardGraph
    from ckpt.layout.rules import Rules


MAX_RANKS = 2**16
"""Each rank is a file at least, or several, and is planned for: more are a slip of the finger."""


class Layouts(Sequence[RankLayout]):
    """The layout of each target rank, made when asked for and not kept: of a large world only one is in memory."""

    def __init__(self, description: Description, everywhere: Sequence[TensorSpec]) -> None:
        self._description = description
        self._everywhere = tuple(Shard(spec, Box.whole(spec.shape)) for spec in everywhere)
        self._world = World(description, tuple(everywhere))

    def graph(self) -> ShardGraph:
        """Return ``ShardGraph.build`` of all layouts, made without them."""
        return self._world.graph()

    def digest(self) -> bytes:
        """Return the digest of all layouts, as a job of these ranks would agree on it."""
        digests = [b""] * len(self)
        for one in self._world.ranks():
            digests[one.rank] = raw_digest(encode_rows(one.specs, one.shards, one.aliases, one.derived))
        return combined(digests)

    def __len__(self) -> int:
        return self._description.parallel.ranks

    @overload
    def __getitem__(self, rank: int) -> RankLayout: ...
    @overload
    def __getitem__(self, rank: slice) -> list[RankLayout]: ...
    def __getitem__(self, rank: int | slice) -> RankLayout | list[RankLayout]:
        if isinstance(rank, slice):
            return [self[r] for r in range(*rank.indices(len(self)))]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        found = rank_layout(self._description, rank)
        return RankLayout(rank, found.shards + self._everywhere, found.aliases, found.derived)


@dataclass(frozen=True, slots=True)
class Target:
    """``parallel``: degrees, ZeRO stage, engine. ``layouts[r]``: what rank ``r`` holds, made when asked for.

    ``description``: the model on its mesh: its ``stages``, ``on_stage`` (in module order), ``tiling``, ``mesh``, ….
    ``groups``: of the optimizer, as the source has them; empty if it does not say. ``specs``: every tensor and role of
    the target. ``notes``: a line for each thing that was assumed.
    """

    parallel: Parallel
    layouts: Sequence[RankLayout]
    description: Description
    groups: tuple[ParameterGroup, ...]
    specs: tuple[TensorSpec, ...]
    notes: tuple[str, ...] = ()


class _Carried(Description):
    """A description whose roles are those of a source, whatever its optimizer keeps."""

    def __init__(self, model: ModelSpec, parallel: Parallel, roles: dict[str, Roles], derived: frozenset[str]) -> None:
        self._roles, self._derived = roles, derived
        super().__init__(model, parallel)

    def columns(self, tensor: Described) -> tuple[Column, ...]:
        """Return the roles of a tensor, ascending by name; a state of another shape is carried whole."""
        found = []
        for role, spec in sorted(self._roles[tensor.fqn].items()):
            if role in (PARAM, BUFFER):
                found.append(Column(role, spec.dtype, of_param=True))
            elif spec.shape == tensor.shape:
                found.append(Column(role, spec.dtype))
            else:
                found.append(Column(role, spec.dtype, scalar=True, shape=spec.shape))
        return tuple(found)

    def derived(self, tensor: Described) -> bool:
        """Is the parameter claimed to be the cast of a master?"""
        return tensor.fqn in self._derived and MASTER in self._roles[tensor.fqn]


def target_of(
    opened: Opened,
    *,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    zero: int | None = None,
    rules: Rules | None = None,
    engine: str | None = None,
    stages: tuple[int, ...] = (),
    vocabulary_multiple: int | None = None,
    roles: str = ALL,
    dtype: str | None = None,
    cut: bool = True,
    otherwise_whole: bool = False,
) -> Target:
    """Return the target that these flags mean.

    Args:
        opened: the source.
        dp: data-parallel ranks; as for all degrees and the stage, None: as in the source where that is known, else 1.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks, inside of ``dp``.
        zero: ZeRO stage, 0 to 3 (None and not known: 0).
        rules: how tensor parallelism cuts which tensor; every tensor needs a rule if ``tp`` is more than 1.
        engine: what cuts the optimizer (:data:`ckpt.describe.parallel.ENGINES`); None: chosen by the stage.
        stages: layers of each pipeline stage; empty: as in the source if it has as many stages, else equal.
        vocabulary_multiple: pad each tensor rank's rows of a vocabulary to a multiple of it; None: the engine's.
        roles: ``all``, or ``weights`` for parameters and buffers.
        dtype: of parameters and buffers in floating point; None: the source's.
        cut: does the target's format have slices of a model? If not, what is left open of ``tp``, ``pp`` and ``ep`` is
            1 whatever the source's is.
        otherwise_whole: if nothing says how tensors are cut, and nobody has asked for ``tp``, cut none of them.

    Raises:
        ConfigError: every reason at once why the source cannot be laid out like that.
    """
    asked = {"dp": dp, "tp": tp, "pp": pp, "ep": ep, "zero": zero}
    source, source_stages = known_layout(opened)
    if not cut:
        source, source_stages = {name: n for name, n in source.items() if name in ("dp", "zero")}, ()
    known = {name: value if value is not None else source.get(name) for name, value in asked.items()}
    given: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    if engine is None:
        given = _engine(given)
    if not stages and given.get("pp", 1) == len(source_stages) > 1:
        stages = source_stages
    parallel = Parallel(**{"engine": engine, **given}, stages=stages, vocabulary_multiple=vocabulary_multiple)
    groups = parameter_groups(opened)
    beside = config_beside(opened, autotp=engine == "deepspeed") if parallel.tp > 1 else None
    said = opened.splits if source.get("tp", 1) % parallel.tp == 0 else {}
    model, problems = model_of(opened, rules, groups, cut=beside, said=said)
    if problems and otherwise_whole and tp is None and not (rules is not None and rules.tensors):
        again: dict[str, Any] = {**known, "dp": parallel.dp * parallel.tp if dp is None else dp, "tp": 1}
        found = target_of(opened, **again, rules=rules, stages=stages, roles=roles, dtype=dtype)
        note = f"tp 1, and the others of {parallel.tp} ranks data-parallel: nothing says how tensors are cut"
        return replace(found, notes=(*found.notes, note))
    if stack_of(t.fqn for t in model.tensors) == "":
        parallel = msgspec.structs.replace(parallel, stages=_with_tensors(stages, model.layers))
    problems = [*parallel.problems(), *problems, *_misfits(model, parallel)]
    if beside is not None:
        problems += shared_heads(model, parallel, beside.tensors)
        if vocabulary_multiple is not None and any(t.split is not None and t.split.balanced for t in model.tensors):
            problems.append("AutoTP pads no vocabulary (--vocabulary-multiple): only rules can say that yours does")
    held = {fqn: _wanted(one, roles, dtype) for fqn, one in roles_of(opened).items()}
    derived = frozenset(opened.derived) if roles == ALL else frozenset()
    problems += _uncut(model, parallel, held) if problems else []
    if problems:
        as_before = f" (tp {parallel.tp} is SRC's: give --rules, or --tp 1)" if tp is None and parallel.tp > 1 else ""
        refuse(f"{opened.where} cannot be laid out like this{as_before}", dict.fromkeys(problems))
    description = _Carried(model, parallel, held, derived)
    empty = [spec for one in held.values() if 0 in shape_of(one) for spec in one.values()]
    specs = tuple(sorted(spec for one in held.values() for spec in one.values()))
    notes = (*_idle_rules(rules, held, opened), *(_cut_notes(model, parallel, beside) if beside is not None else ()))
    return Target(parallel, Layouts(description, empty), description, groups, specs, notes)


def _engine(given: dict[str, Any]) -> dict[str, Any]:
    """Return the degrees with an engine that cuts an optimizer like this, whatever the user's own is called.

    DeepSpeed refuses some combinations that others have: ZeRO-3 with pipelines or experts is FSDP2's, and ZeRO-2
    differs from ZeRO-1 in gradients, which no checkpoint holds.
    """
    zero, together = given.get("zero"), given.get("pp", 1) > 1 or given.get("ep", 1) > 1
    if zero == 3 and together:
        return {**given, "engine": "fsdp2"}
    return {**given, "engine": "deepspeed", "zero": 1} if zero == 2 and together else given


def _with_tensors(stages: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return the stages without the layers behind the last one that has tensors.

    A DeepSpeed pipeline numbers all that it runs, and the last may be a function, or a tied layer.

    >>> _with_tensors((3, 3), 5), _with_tensors((2, 2), 5)
    ((3, 2), (2, 2))
    """
    found, room = list[int](), layers
    for n in stages:
        found.append(min(n, room) if n > 0 else n)
        room -= found[-1]
    return tuple(found)


def _misfits(model: ModelSpec, parallel: Parallel) -> Iterator[str]:
    """Yield what model and degrees have against each other, but for tensor parallelism."""
    if parallel.ranks > MAX_RANKS:
        degrees = ", ".join(f"{name} {n}" for name in ("dp", "tp", "pp") if (n := getattr(parallel, name)) > 1)
        yield f"{degrees}: {parallel.ranks} ranks, at most {MAX_RANKS} are written for"
    if parallel.pp > 1 and model.layers < parallel.pp:
        yield f"pp {parallel.pp} is more stages than the {model.layers} layers that the names of its tensors show"
    elif parallel.stages and sum(parallel.stages) != model.layers:
        yield f"the stages hold {sum(parallel.stages)} layers, the names of its tensors show {model.layers}"
    elif not parallel.stages and parallel.pp > 1 and model.layers % parallel.pp:
        yield f"pp {parallel.pp} does not divide the {model.layers} layers: give those of each stage (--stages)"
    if parallel.ep > 1 and not model.experts:
        yield f"ep {parallel.ep}, and no name shows an expert (experts.0. …)"
    elif parallel.ep > 1 and model.experts % parallel.ep:
        yield f"ep {parallel.ep} does not divide the {model.experts} experts"


def _uncut(model: ModelSpec, parallel: Parallel, roles: dict[str, Roles]) -> list[str]:
    """Return what tensor parallelism has against it, told beside problems of other kinds."""
    flat = Parallel(
        engine=parallel.kind,
        zero=parallel.zero,
        tp=parallel.tp,
        vocabulary_multiple=parallel.vocabulary_multiple,
    )
    try:
        _Carried(model, flat, roles, frozenset())
    except ConfigError as error:
        return str(error).split("\n  - ")[1:]
    return []


def _wanted(held: Roles, roles: str, dtype: str | None) -> Roles:
    """Return what the target has of a tensor. Weights alone of a tensor that has only a master are made from it."""
    if roles == WEIGHTS:
        made = {PARAM: held[MASTER]} if MASTER in held and PARAM not in held else {}
        held = {role: spec for role, spec in {**made, **held}.items() if role in (PARAM, BUFFER)}
    found = {}
    for role, spec in held.items():
        cast = dtype is not None and role in (PARAM, BUFFER) and spec.dtype.startswith(("float", "bfloat"))
        found[role] = TensorSpec(spec.fqn, role, dtype if cast and dtype else spec.dtype, spec.shape)
    return found


def _idle_rules(rules: Rules | None, roles: dict[str, Roles], opened: Opened) -> tuple[str, ...]:
    if rules is None:
        return ()
    names = [*roles, *opened.aliases]
    return tuple(f"rules: '{idle}' matches nothing" for idle in sorted(rules.unused(names, ())) if idle[:5] != "names")


def _cut_notes(model: ModelSpec, parallel: Parallel, beside: Beside) -> Iterator[str]:
    used = any(t.split is not None and t.split == beside.splits.get(t.fqn) for t in model.tensors)
    yield from (line for line in (beside.note if used else "", shared_keys(model, parallel)) if line)
