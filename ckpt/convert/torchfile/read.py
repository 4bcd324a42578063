"""A plain ``torch.save`` of a training loop: a state dict, or a dictionary that has one beside an optimizer's."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from ckpt.convert.opened import Builder, Loose
from ckpt.convert.torchfile.file import Stored, read_tree
from ckpt.convert.torchfile.names import kind_of
from ckpt.convert.torchfile.optimizer import NAMES, Number, Unmatched, names_of_numbers
from ckpt.convert.torchfile.parts import Parts, parts_of, state_of
from ckpt.convert.torchfile.state_dict import clean_names, role_of
from ckpt.convert.torchfile.stored import add_stored, equal_bytes, loaded
from ckpt.engine.shared_partition import clean_name
from ckpt.errors import CkptError, ConfigError, MalformedData, MissingChunk, NoSuchCheckpoint
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, PARAM
from ckpt.runtime.extras import ENGINE, EXTRA, VALUE
from ckpt.runtime.objects import encode_object
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.convert.opened import Opened
    from ckpt.convert.options import ReadOptions
    from ckpt.store.base import Store

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
INDEX = "pytorch_model.bin.index.json"
MAX_INDEX = 256 << 20
_BESIDE = {"optimizer": ("optimizer.pt", "optimizer.bin"), "scheduler": ("scheduler.pt", "scheduler.bin")}
"""What Hugging Face's trainer and accelerate put beside a model, and the word for it in a file of its own."""
_OTHERS = ("_states.pt", "training_args.bin", "common.pt", *(name for names in _BESIDE.values() for name in names))
"""Ends of names of files that are no model by themselves."""
_OTHER_FORMATS = (".safetensors", ".metadata", ".distcp")
_HEAD = 4 << 10
"""Bytes of a tensor's beginning by which it is looked for."""
_NUMBERS = {bool: ("bool", "?"), int: ("int64", "<q"), float: ("float64", "<d")}
"""dtype and bytes of a state that is a plain number, as an engine would store it."""


def is_torch(store: Store) -> bool:
    """Is there a file that may be a state dict, and none of another format? Looks at names only."""
    names = store.children("")
    return bool(_candidates(names)) and not any(name.endswith(_OTHER_FORMATS) for name in names)


def _candidates(names: list[str]) -> list[str]:
    return sorted(
        n for n in names if n.endswith(SUFFIXES) and not n.endswith(_OTHERS) and not n.startswith("rng_state")
    )


def open_torch(store: Store, where: str, *, step: int | None = None, options: ReadOptions) -> Opened:
    """Return what a file of ``torch.save`` holds, or the files of a Hugging Face folder.

    Tensors of equal place, shape and strides are tied; the first name counts. Whoever saved copies of them (from a GPU,
    tensor by tensor) names them in the rules. The optimizer's state comes under the
    names of the parameters if their order tells which is whose (``optimizer``); else it is left
    out, and told as lost. Whatever else the file has comes as an object.

    Args:
        store: the folder.
        where: what messages call it.
        step: of the checkpoint, if the file does not say it.
        options: ``trust_pickle``, and ``rules.tied``.

    Raises:
        NoSuchCheckpoint: no such file, or one of another step.
        ConfigError: several.
        MissingChunk: a file that an index names is not there.
        MalformedData, UnsupportedFeature: see :func:`~ckpt.convert.torchfile.file.read_tree`.
    """
    parts = _read(store, where, options)
    if step is not None and parts.step not in (None, step):
        raise NoSuchCheckpoint(f"{where}: is of step {parts.step}, asked for step {step}")
    builder = Builder("torch", where, store)
    builder.step = parts.step if parts.step is not None else step or 0
    builder.notes += parts.notes
    builder.lost += parts.lost
    names = clean_names(parts.tensors, where)
    tied = options.rules.tied if options.rules is not None else {}
    places = {names[name]: stored for name, stored in parts.tensors.items()}
    builder.aliases.update(_ties(store, places, tied))
    owners = _owners(builder, parts.optimizer, places, store)
    _add_model(builder, places, store)
    if parts.extra_states:
        builder.objects.append(Loose("modules", ENGINE, (0,), loaded(store, parts.extra_states)))
    if parts.step is not None:
        builder.objects.append(Loose("engine", ENGINE, (0,), {"global_steps": parts.step}))
    if parts.optimizer is not None and owners is not None:
        _add_optimizer(builder, parts.optimizer, owners, store)
    elif parts.optimizer is not None:  # so that a load misses it, and does not take this for a file of weights
        builder.objects.append(Loose("optimizer", ENGINE, (0,), None))
    if parts.scheduler is not None:
        builder.objects.append(Loose("scheduler", ENGINE, (0,), {"class": "", "state": loaded(store, parts.scheduler)}))
    for name, value in parts.rest.items():
        _add_object(builder, name, value, store)
    return builder.build()


def _read(store: Store, where: str, options: ReadOptions) -> Parts:
    """Return the parts of the one model."""
    there = store.children("")
    found = _candidates(there) or (there if len(there) == 1 else [])  # of a file that was named, the name is no matter
    if INDEX in there:
        tree: Any = {}
        for key in _indexed(store, where):
            tree |= _dictionary(store, key, options)
    else:
        if not found:
            raise NoSuchCheckpoint(f"{where}: no file *{', *'.join(SUFFIXES)} that may be a state dict")
        if len(found) > 1:
            raise ConfigError(f"{where}: {some(found)} may each be a checkpoint: give the path of one")
        tree = _dictionary(store, found[0], options)
    parts = parts_of(tree)
    if not parts.tensors:
        raise MalformedData(f"{where}: holds no tensors of a model, its keys are {some([str(key) for key in tree])}")
    for name, keys in _BESIDE.items():
        for key in set(keys) & set(there):
            value = _dictionary(store, key, options)
            if getattr(parts, name) is None:
                setattr(parts, name, value)
    return parts


def _dictionary(store: Store, key: str, options: ReadOptions) -> dict[Any, Any]:
    tree = state_of(read_tree(store, key, trust_pickle=options.trust_pickle, seen=options.seen))
    if not isinstance(tree, dict):
        raise MalformedData(f"{key!r} in {store.url}: holds a {kind_of(tree)}, expected a dictionary of tensors")
    return tree


def _indexed(store: Store, where: str) -> list[str]:
    data = store.get(INDEX, 0, MAX_INDEX + 1)
    try:
        files = sorted(set(json.loads(data[:MAX_INDEX])["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedData(f"{where}: {INDEX} is no index ({error!r:.200})") from error
    there = set(store.children(""))
    missing = [str(name) for name in files if name not in there]
    if missing:
        raise MissingChunk(f"{where}: {some(missing)} is not there, {INDEX} says it should")
    return files


def _ties(store: Store, places: Mapping[str, Stored], tied: Mapping[str, str]) -> dict[str, str]:
    """Return tied name -> listed name: of tensors in one place, and of what the rules say (``tied``)."""
    first: dict[Stored, str] = {}
    found: dict[str, str] = {}
    for fqn, stored in places.items():
        target = first.get(stored) if stored.volume else None
        if target is None and tied.get(fqn) in places:
            target = tied[fqn]
            _check_tied(store, fqn, target, stored, places[target])
        if target is not None:
            found[fqn] = target
        else:
            first[stored] = fqn
    return found


def _copies(store: Store, places: Mapping[str, Stored], stepped: set[str], rest: list[str]) -> dict[str, str]:
    """Return tied name -> listed name: of ``rest``, which no optimizer steps, what is a matrix that one does, byte for
    byte. Such a pair was one tensor, and was saved tensor by tensor.
    """
    found: dict[str, str] = {}
    heads: dict[tuple[str, tuple[int, ...], bytes], list[str]] = {}
    wanted = {(places[name].dtype, places[name].shape) for name in rest if len(places[name].shape) > 1}
    for name in (*sorted(stepped), *rest):
        one = places[name]
        if (one.dtype, one.shape) not in wanted or not one.volume or not one.is_contiguous:
            continue
        # What they begin with tells nearly all apart, so that the whole of few is read.
        alike = heads.setdefault((one.dtype, one.shape, store.get(one.key, one.start, min(one.nbytes, _HEAD))), [])
        if name in stepped:
            alike.append(name)
        else:
            same = next((other for other in alike if equal_bytes(store, one, places[other])), None)
            found |= {} if same is None else {name: same}
    return found


def _add_model(builder: Builder, places: Mapping[str, Stored], store: Store) -> None:
    """Add the model's tensors, but for the tied ones."""
    for fqn, stored in places.items():
        if fqn not in builder.aliases:
            spec = builder.spec(fqn, role_of(fqn, stored.dtype), stored.dtype, stored.shape)
            add_stored(builder, spec, Box.whole(spec.shape), stored, store)


def _check_tied(store: Store, fqn: str, target: str, one: Stored, other: Stored) -> None:
    """See that two tensors which the rules say are one are so: a file that was saved tensor by tensor has both."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not equal_bytes(store, one, other):
        raise MalformedData(f"{fqn!r} and {target!r} are not the same tensor, the rules say that they are tied")


# ----------------------------------------------------------------------------------------------------------- optimizer


def _owners(
    builder: Builder, optimizer: dict[str, Any] | None, places: Mapping[str, Stored], store: Store
) -> dict[Number, str] | None:
    """Return the parameter of each of the optimizer's numbers; None if nothing tells them. Finds ties on its way."""
    shapes = {
        fqn: stored.shape
        for fqn, stored in places.items()
        if fqn not in builder.aliases and role_of(fqn, stored.dtype) == PARAM
    }

    def clean(name: str) -> str:
        found = clean_name(name)
        found = found if found in shapes or found in builder.aliases else found.removeprefix("module.")
        return builder.aliases.get(found, found)

    if optimizer is None:
        return None
    try:
        names = names_of_numbers(optimizer, shapes, clean)
    except Unmatched as error:
        builder.lost.append(f"the optimizer's state is left out, nothing tells which parameter is whose: {error}")
        return None
    stepped = set(names.values())
    copies = _copies(store, places, stepped, [name for name in shapes if name not in stepped])
    builder.aliases.update(copies)
    builder.notes += [
        f"{name} is {other}, byte for byte, and not stepped: taken as tied" for name, other in copies.items()
    ]
    return names


def _add_optimizer(builder: Builder, optimizer: dict[str, Any], names: dict[Number, str], store: Store) -> None:
    for number, state in optimizer["state"].items():
        if number not in names or not isinstance(state, dict):
            builder.lost.append(f"optimizer state {number!r:.80} is left out: it belongs to no parameter")
            continue
        for role, value in state.items():
            _add_state(builder, names[number], str(role), value, store)
    groups = [
        {
            "params": [names[n] for n in group["params"]],
            "options": loaded(store, {key: value for key, value in group.items() if key not in ("params", NAMES)}),
        }
        for group in optimizer["param_groups"]
    ]
    builder.objects.append(Loose("optimizer", ENGINE, (0,), {"class": "", "groups": groups}))


def _add_state(builder: Builder, fqn: str, role: str, value: Any, store: Store) -> None:
    if role in (PARAM, BUFFER):
        builder.lost.append(f"optimizer state {role!r} of {fqn!r} is left out: it has the name of the model's own")
    elif isinstance(value, Stored):
        spec = builder.spec(fqn, role, value.dtype, value.shape)
        add_stored(builder, spec, Box.whole(spec.shape), value, store)
    elif type(value) in _NUMBERS and (type(value) is not int or -(1 << 63) <= value < 1 << 63):
        dtype, form = _NUMBERS[type(value)]
        builder.add_value(builder.spec(fqn, role, dtype, ()), struct.pack(form, value))
    elif value is not None:
        builder.lost.append(f"optimizer state {role!r} of {fqn!r} is left out: it is a {kind_of(value)}")


# -------------------------------------------------------------------------------------------------------------- objects


def _add_object(builder: Builder, name: str, value: Any, store: Store) -> None:
    """Keep what else the file has, as an extra object of the user's; what cannot be kept is told."""
    try:
        tree = loaded(store, value)
        encode_object(tree, name)  # can it be stored? What trusted code made may be anything.
    except CkptError as error:
        builder.lost.append(f"{name!r} is left out: {error}")
        return
    builder.objects.append(Loose(name, EXTRA if isinstance(tree, dict) else VALUE, (0,), tree))
