"""A checkpoint of ``torch.distributed.checkpoint``, opened for conversion.

The names of tensors, the roles of what an optimizer keeps, and the objects beside them are those that our torch adapter
gives to the same job, so that it loads the one as the other. ``metadata`` reads what there is, ``names`` tells
the user's dictionaries apart, ``items`` finds the bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.convert.dcp.items import Found, Item, boxes_of, check_found, equal_bytes, placed, read_items
from ckpt.convert.dcp.metadata import METADATA, Metadata, TensorItem, read_metadata, world_of
from ckpt.convert.dcp.names import OptimizerKeys, Structure, structure_of
from ckpt.convert.dcp.optimizer import count_of, groups_of, optimizer_class, scaler_of, scheduler_of
from ckpt.convert.folders import chosen_folder, folders_with
from ckpt.convert.opened import Builder, Loose
from ckpt.convert.options import WEIGHTS, ReadOptions
from ckpt.convert.torchfile.file import Stored
from ckpt.convert.torchfile.names import kind_of
from ckpt.convert.torchfile.optimizer import Unmatched
from ckpt.convert.torchfile.state_dict import role_of
from ckpt.convert.torchfile.stored import add_stored, loaded
from ckpt.engine.shared_state import NOT_OPTIMIZER_STATE
from ckpt.errors import ConfigError, MalformedData, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, ITEMSIZE, PARAM
from ckpt.runtime.extras import ENGINE, VALUE
from ckpt.runtime.objects import encode_object
from ckpt.store.base import Store
from ckpt.store.open import url_below
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.convert.opened import Opened

SMALL = 16 << 20
"""Bytes of tensors beside model and optimizer that are carried with plain values, in each dictionary of the user's."""
_SCALARS = {bool: ("bool", "<?"), int: ("int64", "<q"), float: ("float64", "<d")}
_PARAMETERS = ("weight", "bias")
"""What modules of torch call their parameters."""


def is_dcp(store: Store) -> bool:
    """Is there a DCP checkpoint at the root of ``store``, or in a folder of a step below it? Looks at names only."""
    return store.size(METADATA) is not None or bool(folders_with(store, METADATA))


def open_dcp(store: Store, where: str, *, step: int | None = None, options: ReadOptions | None = None) -> Opened:
    """Open a checkpoint that ``torch.distributed.checkpoint`` wrote.

    Args:
        store: its folder, or one that has a folder for each step.
        where: what messages call it.
        step: which step's folder; None: the newest.
        options: how it is read.

    Raises:
        NoSuchCheckpoint, ObjectNotFound: no such checkpoint, or a file of it is not there.
        UnsupportedFeature: what cannot be told apart or carried; named.
        MalformedData: files that are not what the metadata says.
    """
    folder, number = chosen_folder(store, where, METADATA, step)
    place = url_below(where, folder.rstrip("/")) if folder else where
    return _Opening(store, place, folder, number, options or ReadOptions()).run()


@dataclass(slots=True)
class _Opening:
    store: Store
    where: str
    folder: str
    number: int
    """of the folder"""
    options: ReadOptions
    places: dict[str, list[tuple[Box, Stored]]] = field(default_factory=dict)
    """key of a tensor -> its boxes"""
    scalars: dict[str, bytes] = field(default_factory=dict)
    """key of a tensor of one number -> its bytes"""
    values: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    named: list[OptimizerKeys] = field(default_factory=list)
    """the optimizers of which it is known what they step"""
    builder: Builder = field(init=False)
    metadata: Metadata = field(init=False)
    structure: Structure = field(init=False)

    def run(self) -> Opened:
        self.metadata = read_metadata(self.store, self.where, self.folder, trust=self.options.trust_pickle)
        self.structure = structure_of(self.metadata, self.where, weights=self.options.roles == WEIGHTS)
        self.builder = Builder("dcp", self.where, self.store)
        self.builder.lost += self.structure.lost
        self.builder.engine, self.builder.world = "torch", self._world()
        self._read()
        names = self._optimizers()
        self._model(names)
        objects = self._objects()
        self.builder.objects += [Loose(n, kind, tuple(range(self.builder.world)), tree) for n, kind, tree in objects]
        return self.builder.build()

    def _world(self) -> int:
        """Return how many ranks saved it, as far as the names of the files tell."""
        boxes = (place for tensor in self.metadata.tensors.values() for _, place in tensor.boxes)
        return world_of(place.key for place in (*boxes, *self.metadata.values.values()))

    def _read(self) -> None:
        """Find the bytes of all tensors and read all plain values."""
        left_out = self._left_out()
        tensors = {key: one for key, one in self.metadata.tensors.items() if key not in left_out}
        items = [item for key, one in tensors.items() for item in boxes_of(key, one)]
        loose = [Item(key, place) for key, place in self.metadata.values.items()]
        found = read_items(self.store, [*items, *loose], self.options)
        self.values = {item.label: placed(one) for item, one in zip(loose, found[len(items) :], strict=True)}
        each = iter(zip(items, found, strict=False))
        for key, one in tensors.items():
            self.places[key] = []
            for box, _ in one.boxes:
                item, there = next(each)
                self.places[key].append((box, check_found(item, one, box, there)))
                if isinstance(there, Found) and there.data is not None and there.stored.volume == 1:
                    self.scalars[key] = there.data

    def _left_out(self) -> set[str]:
        """Return keys of tensors that belong to nothing that we know, in dictionaries with too many bytes of them."""
        found: set[str] = set()
        alike: dict[str | int, list[str]] = {}
        for key in self.structure.others:
            if key in self.metadata.tensors:
                alike.setdefault(self.metadata.path(key)[0], []).append(key)
        for keys in alike.values():
            nbytes = sum(_nbytes(self.metadata.tensors[key]) for key in keys)
            if nbytes > SMALL:
                found.update(keys)
                what = f"{nbytes} bytes that are neither the model's nor an optimizer's"
                self.builder.lost.append(f"{some(keys)}: {what}: left out")
        return found

    # ------------------------------------------------------------------------------------------------------ optimizer

    def _optimizers(self) -> set[str]:
        """Add the optimizers' state; return the names of what they step."""
        shapes = {name: self.metadata.tensors[key].shape for key, name in self.structure.model.items()}
        may_be = {name: shapes[name] for key, name in self.structure.model.items() if not self._is_buffer(key, name)}
        stepped: set[str] = set()
        weights = self.options.roles == WEIGHTS
        for keys in self.structure.optimizers:
            try:
                stepped |= self._optimizer(keys, shapes, may_be)
            except Unmatched as error:
                self.builder.lost.append(f"the state of optimizer {keys.root!r} is left out: {error}")
            except (UnsupportedFeature, MalformedData) as error:
                if not weights:
                    raise
                self.builder.lost.append(f"the state of optimizer {keys.root!r} is left out: {error}")
        return stepped

    def _optimizer(
        self, keys: OptimizerKeys, shapes: Mapping[str, tuple[int, ...]], may_be: Mapping[str, tuple[int, ...]]
    ) -> set[str]:
        """Add an optimizer's state; return the names of what it steps. ``may_be``: of ``shapes`` what may be those."""
        states: dict[str, list[tuple[int, ...]]] = {}
        for key, (owner, _) in keys.state.items():
            if key in self.metadata.tensors:
                states.setdefault(owner, []).append(self.metadata.tensors[key].shape)
        groups, names = groups_of(keys, self.values, may_be, states, self.where)
        stepped = {name for group in groups for name in group["params"]}
        for key, (owner, role) in keys.state.items():
            name = names.get(owner, owner)
            if name not in shapes:
                raise UnsupportedFeature(
                    f"{self.where}: optimizer {keys.root!r} has state of parameter {owner!r}, which the model "
                    f"lacks: {some(sorted(shapes))}"
                )
            stepped.add(name)
            self._state(key, name, role, shapes[name])
        self.named.append(keys)
        self.groups += groups
        self.classes += [optimizer_class(groups)] * len(groups)
        return stepped

    def _state(self, key: str, name: str, role: str, shape: tuple[int, ...]) -> None:
        if role in NOT_OPTIMIZER_STATE:
            raise UnsupportedFeature(f"{self.where}: {key!r}: state named {role!r}, which has another meaning here")
        if key in self.metadata.tensors:
            tensor = self.metadata.tensors[key]
            if key in self.scalars and tensor.shape == (1,) != shape:  # one number: as our adapter keeps it
                self.builder.add_value(self.builder.spec(name, role, tensor.dtype, ()), self.scalars[key])
            else:
                self._tensor(key, name, role)
            return
        value = self.values[key]
        if value is None:
            return
        if type(value) not in _SCALARS:
            raise UnsupportedFeature(f"{self.where}: {key!r} is a {kind_of(value)}, expected a tensor or a number")
        dtype, form = _SCALARS[type(value)]
        self.builder.add_value(self.builder.spec(name, role, dtype, ()), struct.pack(form, value))

    def _tensor(self, key: str, name: str, role: str) -> None:
        tensor = self.metadata.tensors[key]
        spec = self.builder.spec(name, role, tensor.dtype, tensor.shape)
        for box, stored in self.places[key]:
            add_stored(self.builder, spec, box, stored, self.store)

    # ---------------------------------------------------------------------------------------------------------- model

    def _model(self, stepped: set[str]) -> None:
        keys = {name: key for key, name in self.structure.model.items()}
        tied = self._tied(keys, stepped)
        self.builder.aliases.update(tied)
        guessed: dict[str, list[str]] = {}
        for name, key in keys.items():
            if name in tied:
                continue
            role = self._role(name, key, stepped)
            if stepped and name not in stepped:
                guessed.setdefault(role, []).append(name)
            self._tensor(key, name, role)
        self.builder.notes += [f"not stepped, {role} by name: {some(names)}" for role, names in guessed.items()]

    def _role(self, name: str, key: str, stepped: set[str]) -> str:
        """Return ``param`` or ``buffer``: the format does not record it."""
        tensor = self.metadata.tensors[key]
        if name in stepped:
            return PARAM
        if self._is_buffer(key, name):
            return BUFFER
        named = name.rpartition(".")[2] in _PARAMETERS
        return PARAM if named or not stepped or len(tensor.boxes) > 1 else BUFFER

    def _is_buffer(self, key: str, name: str) -> bool:
        return role_of(name, self.metadata.tensors[key].dtype) == BUFFER

    def _tied(self, keys: dict[str, str], stepped: set[str]) -> dict[str, str]:
        """Return tied name -> listed name: what the user says, and what no optimizer steps but is, byte for byte, a
        matrix that one does. Such a pair is stored twice, and nothing records that it is one tensor.
        """
        said = self.options.rules.tied if self.options.rules else {}
        tied = {name: listed for name, listed in said.items() if name in keys and listed in keys}
        for name, key in keys.items():
            tensor = self.metadata.tensors[key]
            if name in tied or name in stepped or len(tensor.shape) < 2:
                continue
            for other in stepped & keys.keys():
                one = self.metadata.tensors[keys[other]]
                if (one.dtype, one.shape) == (tensor.dtype, tensor.shape) and equal_bytes(
                    self.store, self.places[key], self.places[keys[other]]
                ):
                    tied[name] = other
                    self.builder.notes.append(f"{name} is {other}, byte for byte, and not stepped: taken as tied")
                    break
        return tied

    # -------------------------------------------------------------------------------------------------------- objects

    def _objects(self) -> list[tuple[str, str, Any]]:
        """Return (name, kind, tree) of what stands beside the tensors."""
        schedulers: list[dict[str, Any]] = []
        found: list[tuple[str, str, Any]] = []
        for name, tree in self._others().items():
            rest = _without(tree, schedulers, found)
            if rest is not _NOTHING:
                try:
                    encode_object(rest, name)
                except ConfigError as error:
                    self.builder.lost.append(f"{error}: left out")
                    continue
                found.append((name, VALUE, rest))
                self.builder.notes.append(f"{name}: neither the model's nor an optimizer's: carried as it is")
        steps = [_number(self.metadata.tensors[k].dtype, self.scalars[k]) for k in self._step_keys()]
        epochs = [one["state"]["last_epoch"] for one in schedulers if type(one["state"]["last_epoch"]) is int]
        self.builder.step = count_of([*steps, *self._plain_steps()] or epochs) or self.number
        found.append(("engine", ENGINE, {"global_steps": self.builder.step}))
        found.append(("optimizer", ENGINE, self._optimizer_object()))
        found.append(("scheduler", ENGINE, schedulers[0] if schedulers else None))
        if len(schedulers) > 1:
            every = [0, len(self.groups)]
            found.append(("schedulers", ENGINE, [{**one, "groups": every} for one in schedulers]))
        if self.structure.extra:
            extra: dict[Any, Any] = {}
            for key, (module, path) in self.structure.extra.items():
                _put(extra, (module, *path), loaded(self.store, self._value(key)))
            found.append(("modules", ENGINE, {name: _as_lists(tree) for name, tree in extra.items()}))
        return found

    def _step_keys(self) -> list[str]:
        state = (item for keys in self.structure.optimizers for item in keys.state.items())
        return [key for key, (_, role) in state if role == "step" and key in self.scalars]

    def _plain_steps(self) -> list[float]:
        state = (item for keys in self.structure.optimizers for item in keys.state.items())
        values = [self.values.get(key) for key, (_, role) in state if role == "step"]
        return [float(value) for value in values if isinstance(value, int | float)]

    def _optimizer_object(self) -> dict[str, Any] | None:
        if not self.named:
            return None
        if not all(self.classes) or not self.classes:
            self.builder.notes.append(
                "the optimizer's class is not recorded, and its options fit none of torch's alone"
            )
        groups = loaded(self.store, self.groups)
        names = list(dict.fromkeys(self.classes))
        if len(self.named) > 1:
            groups = [{**group, "class": name} for group, name in zip(groups, self.classes, strict=True)]
        return {"groups": groups, "class": ", ".join(names)}

    def _value(self, key: str) -> Any:
        """Return a value, or where a tensor is; None for one in several parts."""
        if key not in self.places:
            return self.values[key]
        boxes = self.places[key]
        return boxes[0][1] if len(boxes) == 1 else None

    def _others(self) -> dict[str, Any]:
        """Return name -> tree, of the user's own entries."""
        found: dict[str, Any] = {}
        for key in self.structure.others:
            if key not in self.places and key not in self.values:  # too large
                continue
            value = self._value(key)
            if value is None and key in self.places:
                self.builder.lost.append(f"{key}: a tensor in several parts among plain values: left out")
                continue
            path = tuple(map(str, self.metadata.path(key)[:1])) + self.metadata.path(key)[1:]
            try:
                _put(found, path, loaded(self.store, value))
            except UnsupportedFeature as error:
                self.builder.lost.append(f"{key}: {error}: left out")
        return {name: _as_lists(tree) for name, tree in found.items()}


_NOTHING = object()


def _without(tree: Any, schedulers: list[dict[str, Any]], found: list[tuple[str, str, Any]]) -> Any:
    """Return a tree without the schedulers and the gradient scaler in it, which go into the lists."""
    scheduler, scaler = scheduler_of(tree), scaler_of(tree)
    if scheduler is not None:
        schedulers.append(scheduler)
        return _NOTHING
    if scaler is not None:
        found.append(("scaler", ENGINE, scaler))
        return _NOTHING
    if not isinstance(tree, dict):
        return tree
    rest = {key: _without(value, schedulers, found) for key, value in tree.items()}
    kept = {key: value for key, value in rest.items() if value is not _NOTHING}
    return kept if kept or not rest else _NOTHING


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        inner = tree.setdefault(step, {})
        if not isinstance(inner, dict):
            raise UnsupportedFeature(f"{'.'.join(map(str, path))}: stands below something that is a value itself")
        tree = inner
    tree[path[-1]] = value


def _as_lists(tree: Any) -> Any:
    """Return a tree whose dictionaries with numbers for keys are lists, as they were before they were flattened."""
    if not isinstance(tree, dict):
        return tree
    children = {key: _as_lists(value) for key, value in tree.items()}
    if children and all(type(key) is int for key in children):
        return [children[key] for key in sorted(children)]
    return children


def _nbytes(tensor: TensorItem) -> int:
    return sum(box.volume for box, _ in tensor.boxes) * ITEMSIZE[tensor.dtype]


def _number(dtype: str, data: bytes) -> float:
    from ckpt.runtime.staging import as_tensor

    return float(as_tensor(bytearray(data), dtype, ()).item())
