"""Which keys of a DCP state dict are the model's, which an optimizer's, and what each of these says. Pure.

A user chooses how the dictionaries are nested. What is certain is what torch's own functions write: an optimizer has
``param_groups``, by number (``optimizer.state_dict()``, ``get_state_dict``) or by parameter (flattened), and ``state``
by the same; a module's state dict is one flat dictionary, and its names are those that the optimizer calls by name.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.convert.dcp.metadata import Path
from ckpt.engine.shared_partition import clean_name
from ckpt.errors import UnsupportedFeature
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpt.convert.dcp.metadata import Metadata

EXTRA_STATE = "_extra_state"
_MAX_DIGITS = 10
_BY_NAME = "param_to_group_meta"
"""Where Megatron's FSDP (``fsdp_dtensor``) has the options of each parameter; there are no groups then."""
_MODELS = ("model", "module", "models", "state_dict", "model_state_dict", "model_state", "net", "network")
_OPTIMIZERS = ("optim", "optimizer", "optimizers", "opt", "optim_state", "optimizer_state_dict")


@dataclass(slots=True)
class OptimizerKeys:
    """An optimizer's keys below ``root``. ``state``: key -> (parameter by name, or by number as digits; state's name).
    ``options``: key -> (number of the group, or the parameter's name; option). ``groups``: key of a value that is the
    list of all groups, as torch before 2.4 left it; empty if there is none.
    """

    root: str
    state: dict[str, tuple[str, str]] = field(default_factory=dict)
    options: dict[str, tuple[int | str, str]] = field(default_factory=dict)
    groups: str = ""


@dataclass(slots=True)
class Structure:
    """``model``: key of a tensor -> its name, in the module's order. ``extra``: key -> (module with extra state, place
    in that state). ``others``: keys of everything else. ``lost``: a line for each optimizer that is left out.
    """

    model: dict[str, str] = field(default_factory=dict)
    extra: dict[str, tuple[str, Path]] = field(default_factory=dict)
    optimizers: list[OptimizerKeys] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Rest:
    """Keys of one optimizer that are not split into parameter and name yet: what stands behind ``state.``."""

    state: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)


def structure_of(metadata: Metadata, where: str, *, weights: bool = False) -> Structure:
    """Tell the keys apart.

    ``weights``: nothing else is wanted; an optimizer that does not fit the model is left out, and no error.

    Raises:
        UnsupportedFeature: it cannot be told which tensors are the model's, or whose state an optimizer has.
    """
    keys = metadata.keys()
    found = Structure()
    rests: list[_Rest] = []
    taken: set[str] = set()
    for root in _roots(keys):
        optimizer, rest = _optimizer(metadata, root, [key for key in keys if key not in taken])
        taken |= {*optimizer.state, *optimizer.options, *rest.state, *rest.options, optimizer.groups}
        found.optimizers.append(optimizer)
        rests.append(rest)
    left = [key for key in keys if key not in taken]
    location = _model_location(metadata, left, found.optimizers, rests, where)
    names = {key: name for key in left for place, name, _ in [_placed(metadata, key)] if place == location}
    unwrapped = _unwrapped(names)
    for key in left:
        name = unwrapped.get(key)
        if name is not None and _is_extra(name):
            found.extra[key] = name.rpartition(".")[0], _placed(metadata, key)[2]
        elif name is not None and key in metadata.tensors:
            found.model[key] = name
        else:
            found.others.append(key)
    for optimizer, rest in zip(tuple(found.optimizers), rests, strict=True):
        try:
            _split(optimizer, rest, found.model.values(), where)
        except UnsupportedFeature as error:
            if not weights:
                raise
            found.optimizers.remove(optimizer)
            found.lost.append(str(error))
    return found


def _roots(keys: Iterable[str]) -> list[str]:
    """Return what stands before ``param_groups``; where no groups were saved, before the state of an optimizer."""
    groups: dict[str, None] = {}
    states: dict[str, None] = {}
    for key in keys:
        parts = key.split(".")
        if "param_groups" in parts:
            groups[".".join(parts[: parts.index("param_groups")])] = None
        elif "state" in parts[1:] and parts[parts.index("state", 1) - 1] in _OPTIMIZERS:
            states[".".join(parts[: parts.index("state", 1)])] = None
    return [*groups, *(root for root in states if root not in groups)]


def _optimizer(metadata: Metadata, root: str, keys: Iterable[str]) -> tuple[OptimizerKeys, _Rest]:
    found, rest = OptimizerKeys(root), _Rest()
    start = f"{root}." if root else ""
    numbered = f"{start}param_groups.0.params" in metadata.values  # told by number, where paths are not known
    found.groups = f"{start}param_groups" if f"{start}param_groups" in metadata.values else ""
    keys = list(keys)
    name_of = _without_modules if any(key.startswith(f"{start}{_BY_NAME}.") for key in keys) else clean_name
    for key in keys:
        below = key[len(start) :]
        kind, _, tail = below.partition(".")
        if not key.startswith(start) or kind not in ("state", "param_groups", _BY_NAME) or not tail:
            continue
        steps = _below(metadata, key, root)
        if kind in ("state", _BY_NAME):
            split, whole = (found.state, rest.state) if kind == "state" else (found.options, rest.options)
            if len(steps) > 2 and steps[0] == kind:
                split[key] = name_of(str(steps[1])), ".".join(map(str, steps[2:]))
            else:
                whole[key] = name_of(tail)
        else:
            number, _, option = tail.partition(".")
            nested = steps[0] == "param_groups" if metadata.paths else numbered
            if nested and number.isdecimal() and len(number) < _MAX_DIGITS and option:
                found.options[key] = int(number), option
            else:
                rest.options[key] = clean_name(tail)
    return found, rest


def _without_modules(name: str) -> str:
    """Return a name without the wrappers around the model, of which Megatron's FSDP has more here than elsewhere."""
    name = clean_name(name)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _below(metadata: Metadata, key: str, root: str) -> tuple[str | int, ...]:
    """Return the rest of a key's path below ``root``."""
    path = metadata.path(key)
    for n in range(len(path)):
        if ".".join(map(str, path[:n])) == root:
            return path[n:]
    return path[-1:]


def _placed(metadata: Metadata, key: str) -> tuple[str, str, Path]:
    """Return the dictionary that a key was in, its name there, and where it is in what stood under that name."""
    path = metadata.path(key)
    if len(path) > 1 or metadata.paths:
        extra = (n for n, step in enumerate(path) if isinstance(step, str) and _is_extra(step))
        at = next(extra, len(path) - 1)  # a module's extra state may be a dictionary, which was flattened too
        return ".".join(map(str, path[:at])), str(path[at]), path[at + 1 :]
    head, _, tail = key.partition(".")
    return (head, tail, ()) if head in _MODELS and tail else ("", key, ())


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def _model_location(
    metadata: Metadata, keys: Iterable[str], optimizers: Iterable[OptimizerKeys], rests: Iterable[_Rest], where: str
) -> str:
    """Return the dictionary that is the model's state dict."""
    owned: set[str] = set()
    for optimizer, rest in zip(optimizers, rests, strict=True):
        owned |= {owner for owner, _ in optimizer.state.values()}
        owned |= {part for tail in (*rest.state.values(), *rest.options.values()) for part in _starts(tail)}
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for key in keys:
        if key in metadata.tensors:
            place, name, _ = _placed(metadata, key)
            places[place][key] = name
    scores = {place: len(owned & set(_unwrapped(names).values())) for place, names in places.items()}
    best = max(scores.values(), default=0)
    fitting = [place for place, score in scores.items() if score == best]
    if best == 0:
        named = [place for place in places if place.rpartition(".")[2] in _MODELS]
        fitting = named or [place for place, names in places.items() if any("." in name for name in names.values())]
        fitting = fitting or list(places)
    if len(fitting) == 1:
        return fitting[0]
    shown = [f"{place or 'the top'!r} ({len(names)} tensors, {next(iter(names.values()))!r}, …)"
             for place, names in places.items()]  # fmt: skip
    raise UnsupportedFeature(
        f"{where}: cannot tell which tensors are the model's: found {some(shown)}; expected one dictionary that is a "
        "module's state dict (model.…, app.model.…, or alone)"
        if places
        else f"{where}: holds no tensor of a model: found {some(sorted(keys))}"
    )


def _starts(name: str) -> Iterator[str]:
    """Yield everything that stands before a dot."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _unwrapped(names: dict[str, str]) -> dict[str, str]:
    """Return names without what wrapper modules add, also of a whole model (``DistributedDataParallel``)."""
    cleaned = {key: clean_name(name) for key, name in names.items()}
    while cleaned and all(name.startswith("module.") for name in cleaned.values()):
        cleaned = {key: name.removeprefix("module.") for key, name in cleaned.items()}
    return cleaned


def _split(optimizer: OptimizerKeys, rest: _Rest, names: Iterable[str], where: str) -> None:
    """Split keys in which a parameter's name and that of its state are joined by a dot, both of which have dots."""
    known = set(names)
    numbers = {str(n) for n, _ in optimizer.options.values()}
    unknown: list[str] = []

    def owner_of(tail: str) -> str | None:
        found = [part for part in _starts(tail) if part in known]
        if not found and numbers:  # a state by number, of a writer that has not said how it was nested
            found = [part for part in _starts(tail) if part.isdecimal()]
        return found[-1] if found else None

    for table, tails in ((optimizer.state, rest.state), (optimizer.options, rest.options)):
        for key, tail in tails.items():
            owner = owner_of(tail)
            if owner is None:
                unknown.append(key)
            else:
                table[key] = owner, tail[len(owner) + 1 :]
    named = {owner for owner, _ in optimizer.state.values() if not owner.isdecimal()}
    unknown += [key for key, (owner, _) in optimizer.state.items() if owner in named - known]
    if unknown:
        raise UnsupportedFeature(
            f"{where}: optimizer {optimizer.root!r} has state of parameters that the model lacks: "
            f"{some(sorted(unknown))}; the model has {some(sorted(known))} (it can be read alone: --roles weights)"
        )
