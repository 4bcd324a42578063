"""Layers of a pipeline: a file for each layer, whose names are the layer's own, and modules that stages share.

A ``TiedLayerSpec`` builds its whole module on every stage, but shares only the weights that it was told to. Which these
are stands in no file. A weight that is shared is the same on both stages, bit for bit, with its moments; anything else
in the module goes its own way, and is another tensor there (as the adapter of the live engine has it).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_files import numel_of
from ckpt.convert.deepspeed.read_optim import Optimizer
from ckpt.convert.deepspeed.read_plain import shapes_by_name
from ckpt.convert.deepspeed.read_zero import is_zero3, part_sizes
from ckpt.convert.torchfile.names import Stored
from ckpt.errors import MissingChunk
from ckpt.layout.spec import ITEMSIZE, MASTER
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.convert.deepspeed.read_model import Model

_NUMBERED = re.compile(r"(\d+)\..*")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.*)")
_WINDOWS, _WINDOW = 64, 4096
"""How many places of a tensor are compared, and elements of each: shared weights never differ, others do everywhere."""

Spread = dict[str, list[tuple[int, int, str, int, int]]]
"""role -> (first element, elements, file, byte of the first, bytes of one) of a parameter's pieces"""


@dataclass(slots=True)
class _Stage:
    """``layers``: that carry their number in names. ``tied``: key -> name in the module -> shape, None if not known."""

    layers: set[int]
    tied: dict[str, dict[str, tuple[int, ...] | None]]


def gather_layers(model: Model) -> None:
    """Put the layers' tensors into the modules of their stages, under the names that the whole model has."""
    job = model.job
    stages = {mp: _stage(model, mp) for mp in range(job.mp)}
    first_layers: dict[tuple[int, str], int] = {}
    for tp in range(job.tp):
        pending = {mp: set(stages[mp].tied) for mp in range(tp, job.mp, job.tp)}
        for layer in sorted(n for n, t in job.files.layers if t == tp):
            held = job.files.read(job.files.layers[layer, tp])
            mp, key = _home(stages, range(tp, job.mp, job.tp), pending, layer, held)
            if key is not None:
                pending[mp].discard(key)
                first_layers.setdefault((mp, key), layer)
            prefix = f"{layer}." if key is None else f"tied_modules.{key}."
            for name, value in held.items():
                model.modules[mp].setdefault(f"{prefix}{name}", value)
                if isinstance(value, Stored):
                    model.shapes[mp].setdefault(f"{prefix}{name}", value.shape)
    _check_layers(model, stages)
    model.shape_groups()
    if job.pp > 1 and job.files.optim:  # else nothing says that they differ
        _set_apart(model, stages, first_layers)


def _check_layers(model: Model, stages: dict[int, _Stage]) -> None:
    """Check that there is a file for every layer that the model's files name parameters or buffers of, but for stages
    with experts: those have all of their module in one file.
    """
    tp, trees = model.job.tp, model.job.models
    apart = {mp: one for mp, one in stages.items() if trees[mp].get("module") is None}
    missing = sorted({(n, mp % tp) for mp, one in apart.items() for n in one.layers} - model.job.files.layers.keys())
    if missing:
        names = [f"layer_{n:02d}-model_{t:02d}-model_states.pt" for n, t in missing]
        raise MissingChunk(f"{model.job.files.where}: {some(names)} missing, of a pipeline of {model.job.pp} stage(s)")


def _stage(model: Model, mp: int) -> _Stage:
    found = _Stage(set(), {})
    known = mp not in model.unshaped
    shapes: dict[str, Any] = {
        name: shape if known else None for names in model.groups[mp] for name, shape in names.items()
    }
    shapes |= shapes_by_name(model.job.models[mp].get("optimizer"))
    for name in (*shapes, *model.buffers[mp]):
        if m := _NUMBERED.fullmatch(name):
            found.layers.add(int(m[1]))
        elif m := _TIED.fullmatch(name):
            found.tied.setdefault(m[1], {})[m[2]] = shapes.get(name)
    return found


def _home(
    stages: dict[int, _Stage], ranks: range, pending: dict[int, set[str]], layer: int, held: dict[str, Any]
) -> tuple[int, str | None]:
    """Return the model-parallel rank that a layer is of, and the key of the shared module that it is."""
    for mp in ranks:
        if layer in stages[mp].layers:
            return mp, None
    below = [mp for mp in ranks if stages[mp].layers and min(stages[mp].layers) < layer]
    above = [mp for mp in ranks if stages[mp].layers and max(stages[mp].layers) > layer]
    near = list(dict.fromkeys([*below[-1:], *above[:1]])) or [ranks[0]]
    for only in (pending, {mp: set(stages[mp].tied) for mp in near}):
        for mp in near:
            for key, names in stages[mp].tied.items():
                if key in only[mp] and _fits(names, held):
                    return mp, key
    return near[0], None


def _fits(names: dict[str, tuple[int, ...] | None], held: dict[str, Any]) -> bool:
    tensors = {name: value.shape for name, value in held.items() if isinstance(value, Stored)}
    return bool(names) and all(name in tensors and shape in (None, tensors[name]) for name, shape in names.items())


# ------------------------------------------------------------------------------------------- what is shared, what not


def _set_apart(model: Model, stages: dict[int, _Stage], first_layers: dict[tuple[int, str], int]) -> None:
    job = model.job
    owners: dict[tuple[int, str], int] = {}
    for mp in range(job.mp):
        for key, names in stages[mp].tied.items():
            owner = owners.setdefault((mp % job.tp, key), mp)
            if owner == mp:
                continue
            layer = first_layers.get((mp, key))
            guessed = layer is None
            number = 1 + max(stages[mp].layers, default=-1) if layer is None else layer
            for rest in names:
                local = f"tied_modules.{key}.{rest}"
                if names[rest] is None or _same(model, owner, mp, local):
                    continue
                model.apart[mp, local] = f"tied_modules.{key}@{number}.{rest}"
                if guessed:
                    model.builder.notes.append(
                        f"{local!r} differs between stages: that of stage {mp // job.tp} is "
                        f"{model.apart[mp, local]!r}, though no file says which layer there has it"
                    )


def _same(model: Model, one: int, other: int, local: str) -> bool:
    """Do two stages hold the same of a parameter, at all places that are looked at, masters and state?"""
    first, second = (_spread(model, mp, local) for mp in (one, other))
    numel = numel_of(model.shapes[other][local])
    if not first or not second or first.keys() != second.keys() or model.shapes[one].get(local) is None:
        return True  # nothing says that they differ
    step = max(_WINDOW, -(-numel // _WINDOWS))
    for start in range(0, numel, step):
        stop = min(numel, start + _WINDOW)
        if any(_bytes(model, first[r], start, stop) != _bytes(model, second[r], start, stop) for r in first):
            return False
    return True


def _spread(model: Model, mp: int, local: str) -> Spread:
    job, found = model.job, Spread()
    if not job.files.optim:
        return found
    optimizer = Optimizer(model)
    sizes: list[int] = []
    for dp in range(job.dp):
        key, tree = optimizer.read(mp, dp)
        if dp == 0 and not is_zero3(tree):
            sizes = part_sizes(tree, len(model.groups[mp]), key)
        for part in optimizer.partitions(mp, dp, key, tree, sizes):
            tensors = {MASTER: part.flat, **part.state}
            for piece in (s for s in part.slices if s.name == local):
                for role, stored in tensors.items():
                    if isinstance(stored, Stored) and len(stored.shape) == 1 and stored.volume >= part.flat.volume:
                        width = ITEMSIZE[stored.dtype]
                        at = stored.start + piece.offset * width
                        found.setdefault(role, []).append((piece.start, piece.numel, key, at, width))
    return found


def _bytes(model: Model, pieces: list[tuple[int, int, str, int, int]], start: int, stop: int) -> bytes:
    return b"".join(_parts(model, sorted(pieces), start, stop))


def _parts(model: Model, pieces: list[tuple[int, int, str, int, int]], start: int, stop: int) -> Iterator[bytes]:
    for first, count, key, at, width in pieces:
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            yield model.job.files.store.get(key, at + (low - first) * width, (high - low) * width)
