"""A checkpoint of Megatron-core (``torch_dist``), opened for conversion.

It is a checkpoint of DCP with ``common.pt`` beside it, for what all ranks have alike. Names and roles are those that
our adapter of Megatron gives to the same job. Which parameters are in which group of the optimizer is not recorded:
they are told by the rule that Megatron itself makes its groups by, or the checkpoint is refused.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.dcp.items import Item, boxes_of, check_found, placed, read_items
from ckpt.convert.dcp.metadata import METADATA, Metadata, TensorItem, read_metadata, world_of
from ckpt.convert.dcp.optimizer import count_of, optimizer_class
from ckpt.convert.folders import chosen_folder, folders_with
from ckpt.convert.megatron.bucket_files import BELOW, BucketFiles
from ckpt.convert.megatron.bucket_state import BucketState
from ckpt.convert.megatron.groups import groups_of
from ckpt.convert.megatron.names import EXTRA, OUTPUT, ROLES, STATE, WORDS, Key
from ckpt.convert.opened import Builder, Loose
from ckpt.convert.options import ReadOptions
from ckpt.convert.torchfile.file import Stored, read_tree
from ckpt.convert.torchfile.names import kind_of
from ckpt.convert.torchfile.state_dict import role_of
from ckpt.convert.torchfile.stored import add_stored, load_stored, loaded
from ckpt.errors import MalformedData, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, ITEMSIZE, MASTER, PARAM
from ckpt.runtime.extras import ENGINE, VALUE
from ckpt.store.base import Store
from ckpt.store.open import url_below
from ckpt.words import some

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator

    from ckpt.convert.opened import Opened

SAMPLE = 256
"""Elements of a parameter that are compared with the optimizer's copy."""
COMMON, CONFIG = "common.pt", "metadata.json"
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq")
_KIND = "param_state_sharding_type"
_SCHEDULER = "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler"
_OURS = frozenset({"is_expert_parallel", "params", "step"})
"""Keys of a group that are no settings: where experts are, members, and a count that each parameter gets."""
_MEGATRONS = frozenset({
    "default_config", "wd_mult", "lr_mult", "is_decoupled_lr", "max_lr", "min_lr", "start_wd", "end_wd", "pre_wd_mult",
    "pre_mult",
})  # fmt: skip
"""Settings that Megatron adds to those of torch's optimizers."""


def is_megatron(store: Store) -> bool:
    """Is there a Megatron-core checkpoint at the root of ``store``, or of a step below it? Looks at names only.

    Of a format that is not read as well (zarr, which has no ``.metadata``), so that it is told by its name.
    """
    if store.size(COMMON) is not None:
        return any(store.size(one) is not None for one in (METADATA, CONFIG))
    beside = folders_with(store, METADATA).keys() | folders_with(store, CONFIG).keys()
    return bool(folders_with(store, COMMON).keys() & beside)


def open_megatron(store: Store, where: str, *, step: int | None = None, options: ReadOptions | None = None) -> Opened:
    """Open a checkpoint that ``megatron.core.dist_checkpointing`` wrote.

    Args:
        store: its folder, or the one above, with ``iter_0000010``, ….
        where: what messages call it.
        step: which iteration's folder; None: the newest.
        options: how it is read.

    Raises:
        NoSuchCheckpoint, ObjectNotFound: no such checkpoint, or a file of it is not there.
        UnsupportedFeature: another format of Megatron's (zarr), or buckets whose content is not told by weights.
        MalformedData: files that are not what the metadata says.
    """
    folder, _ = chosen_folder(store, where, COMMON, step)
    place = url_below(where, folder.rstrip("/")) if folder else where
    return _Opening(store, place, folder, options or ReadOptions()).run()


@dataclass(slots=True)
class _Opening:
    store: Store
    where: str
    folder: str
    options: ReadOptions
    builder: Builder = field(init=False)
    metadata: Metadata = field(init=False)
    common: dict[Any, Any] = field(init=False)
    values: dict[str, Any] = field(default_factory=dict)
    chains: dict[str, int] = field(default_factory=dict)
    """name of a parameter -> which optimizer of a chain has its state"""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pieces: dict[str, list[tuple[Box, Stored]]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[tuple[str, str], Stored] = field(default_factory=dict)
    """(name, role) -> some box of a parameter, or of the optimizer's copy of it"""
    unstepped: dict[str, list[str]] = field(default_factory=dict)
    """role -> keys of what has it by its name alone"""

    def run(self) -> Opened:
        self._check_backend()
        self.metadata = read_metadata(self.store, self.where, self.folder)
        self.common = self._common()
        self.builder = Builder("megatron", self.where, self.store)
        self.builder.engine, self.builder.world = "megatron", self._world()
        self._buckets(self._tensors())
        self.builder.notes += [f"not stepped, {role} by name: {some(keys)}" for role, keys in self.unstepped.items()]
        self._check_copies()
        groups = groups_of(self._optimizers(), self.chains, self.shapes, self.store, self.where)
        self._steps(groups)
        self._ties()
        every = tuple(range(self.builder.world))
        self.builder.objects += [Loose(name, kind, every, tree) for name, kind, tree in self._objects(groups)]
        return self.builder.build()

    # ---------------------------------------------------------------------------------------------------------- files

    def _check_backend(self) -> None:
        data = self.store.get(self.folder + CONFIG, 0, 1 << 16)
        try:
            found = json.loads(data)
            backend, version = found["sharded_backend"], found["sharded_backend_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MalformedData(f"{CONFIG} in {self.where}: expected the name of a format") from error
        if (backend, version) != ("torch_dist", 1):
            raise UnsupportedFeature(
                f"{self.where}: format {backend!r:.40} version {version!r:.40} of Megatron, expected 'torch_dist' 1: "
                "load it with a release of Megatron that reads it and save it with --dist-ckpt-format torch_dist "
                "(dist_checkpointing.save's default)"
            )

    def _common(self) -> dict[Any, Any]:
        options = self.options
        tree = read_tree(self.store, self.folder + COMMON, trust_pickle=options.trust_pickle, seen=options.seen)
        if not isinstance(tree, dict):
            raise MalformedData(f"{COMMON} in {self.where}: a {kind_of(tree)}, expected a dictionary")
        return tree

    def _world(self) -> int:
        return world_of(place.key for tensor in self.metadata.tensors.values() for _, place in tensor.boxes)

    # -------------------------------------------------------------------------------------------------------- tensors

    def _tensors(self) -> BucketFiles:
        """Find the bytes of all tensors, and read the values; return what is stored as buckets."""
        tensors, values = self.metadata.tensors, self.metadata.values
        items = [item for key, one in tensors.items() for item in boxes_of(key, one)]
        loose = [Item(key, place) for key, place in values.items() if EXTRA.fullmatch(key) or BELOW.match(key)]
        others = sorted(values.keys() - {item.label for item in loose})
        if others:  # generators, in Megatron's training script
            self.builder.lost.append(f"{some(others)}: objects of single ranks: left out")
        found = read_items(self.store, [*items, *loose], self.options)
        buckets = BucketFiles(self.where, self.store, self.builder.world)
        for item, value in zip(loose, map(placed, found[len(items) :]), strict=True):
            if BELOW.match(item.label):
                buckets.add_value(item.label, value)
            else:
                self.values[item.label] = value
        stepped = {m["name"] for m in map(STATE.fullmatch, tensors) if m}
        each = iter(zip(items, found, strict=False))
        states = []
        for key, one in tensors.items():
            parts = [(box, item, there) for (box, _), (item, there) in zip(one.boxes, each, strict=False)]
            state = STATE.fullmatch(key)
            if BELOW.match(key):
                places = [(box.offsets[:1], check_found(item, one, box, there)) for box, item, there in parts]
                buckets.add_tensor(key, one.dtype, one.shape, places)
            elif state:
                states.append((key, one, parts, state))
            else:
                self._add(Key.of(key), self._role(key, one, stepped), one, parts)
        for key, one, parts, state in states:
            self._state(key, one, parts, state)
        return buckets

    def _role(self, key: str, tensor: TensorItem, stepped: set[str]) -> str:
        if key in stepped:
            return PARAM
        leaf = key.rpartition(".")[2]
        role = BUFFER if leaf in _BUFFERS else role_of(key, tensor.dtype)
        if stepped:
            self.unstepped.setdefault(role, []).append(key)
        return role

    def _state(self, key: str, tensor: TensorItem, parts: list[tuple[Box, Item, Any]], state: re.Match[str]) -> None:
        role, base = ROLES.get(state["role"], state["role"]), state["name"]
        model = self.metadata.tensors.get(base)
        if model is None or model.shape != tensor.shape:
            found = "which the model lacks" if model is None else f"whose shape is {list(model.shape)}"
            raise UnsupportedFeature(
                f"{self.where}: {key!r} of shape {list(tensor.shape)} is state of {base!r}, {found}: state that is "
                "flattened or cut otherwise cannot be placed"
            )
        names = self._add(Key.of(base), role, tensor, parts, skip=role == MASTER and tensor.dtype == model.dtype)
        self.chains.update(dict.fromkeys(names, int(state["chain"] or 0)))
        if role == MASTER and tensor.dtype != model.dtype:
            self.builder.derived.update(names)

    def _add(
        self, key: Key, role: str, tensor: TensorItem, parts: list[tuple[Box, Item, Any]], *, skip: bool = False
    ) -> set[str]:
        """Add a tensor, or each of those that are stacked in it; return their names. ``skip``: it is a second copy."""
        if len(tensor.shape) < key.axes:
            raise MalformedData(
                f"{self.where}: {key.key!r} has shape {list(tensor.shape)}, and {key.axes} axes in front"
            )
        names = set()
        shape = tensor.shape[key.axes :]
        for box, item, there in parts:
            stored = check_found(item, tensor, box, there)
            for at in key.indexes(box):
                name = key.name(at)
                names.add(name)
                part = _inside(stored, key, box, at)
                if role in (PARAM, BUFFER):
                    self.shapes[name] = shape
                if role == PARAM:
                    self.pieces[name].append((key.inner(box), part))
                if role in (PARAM, MASTER):
                    self.samples.setdefault((name, role), part)
                if not skip:
                    spec = self.builder.spec(name, role, tensor.dtype, shape)
                    add_stored(self.builder, spec, key.inner(box), part, self.store)
        return names

    def _buckets(self, files: BucketFiles) -> None:
        """Give the state that is stored as buckets to its parameters."""
        chains = files.chains()
        if not chains:
            return
        kind = next((one.get(_KIND) for one in self._optimizers()), None)
        about = f"the distributed optimizer's state is stored as its buckets ({kind!r:.60})"
        found = BucketState(self.store, self.pieces, self.shapes).add(chains, self.builder)
        if found.problem:
            raise UnsupportedFeature(
                f"{self.where}: {about}, which do not record which parameter is where, and the weights do not tell: "
                f"{found.problem}; load it with the layout that it was saved from and save it as 'fully_reshardable' "
                "(--dist-ckpt-optim-fully-reshardable)"
            )
        self.chains.update(found.chains)
        self.common["optimizer"] = {n: {**one.settings, _KIND: kind} for n, one in enumerate(chains)}
        self.builder.notes.append(f"{about}: which parameter is where is told by the weights, all of which agree")
        if found.told:
            self.builder.notes.append(
                f"{some(sorted(found.told))} have the same weights in every layer: whose state is whose follows the "
                "order of Megatron's modules"
            )

    def _check_copies(self) -> None:
        """Compare some elements of parameters with the distributed optimizer's copies.

        Megatron-core 0.16.1 writes the state of an embedding that is tied across pipeline stages shifted by the padding
        of another bucket: all of it is then another element's, and nothing else in the files shows that.
        """
        if not any(_KIND in tree for tree in self._optimizers()):
            return
        wrong = []
        for (name, role), master in sorted(self.samples.items(), key=lambda item: item[0]):
            param = self.samples.get((name, PARAM))
            if role != MASTER or param is None or param.shape != master.shape:
                continue
            high, low = (load_stored(self.store, _few(one)) for one in (master, param))
            if not torch.equal(high.to(low.dtype), low):
                wrong.append(name)
        if wrong:
            raise UnsupportedFeature(
                f"{self.where}: what the optimizer has for {some(wrong)} is not that parameter's: Megatron-core "
                "misplaces the state of tied embeddings when it gathers it across pipeline stages; save the optimizer "
                "as 'dp_reshardable', or weights without it"
            )

    def _ties(self) -> None:
        if WORDS in self.shapes and OUTPUT not in self.shapes:
            self.builder.aliases[OUTPUT] = WORDS
            self.builder.notes.append(f"no {OUTPUT} is stored: taken as tied to {WORDS}")

    # ------------------------------------------------------------------------------------------------------ optimizer

    def _optimizers(self) -> Iterator[Any]:
        """Yield what ``common.pt`` has of each optimizer of a chain."""
        tree = self.common.get("optimizer")
        if not isinstance(tree, dict):
            return
        chained = bool(tree) and all(type(key) is int for key in tree)
        for one in (tree[key] for key in sorted(tree)) if chained else (tree,):
            if not isinstance(one, dict):
                raise MalformedData(f"{COMMON} in {self.where}: an optimizer that is a {kind_of(one)}")
            yield one

    def _steps(self, groups: list[dict[str, Any]]) -> None:
        """Give each parameter its count of steps, which is stored once for a group or an optimizer."""
        for group in groups:
            count = group.pop("state").get("common_step", group["options"].get("step"))
            if isinstance(count, torch.Tensor) and count.numel() == 1:
                value, dtype = count.item(), str(count.dtype).removeprefix("torch.")
            elif type(count) in (int, float):
                value, dtype = count, "float32"  # as torch's optimizers count; Megatron wrote it as a number
            else:
                continue
            data = torch.tensor(value, dtype=getattr(torch, dtype)).reshape(1).view(torch.uint8).numpy().tobytes()
            for name in group["params"]:
                self.builder.add_value(self.builder.spec(name, "step", dtype, ()), data)
            self.builder.step = count_of([self.builder.step, value])
        if not groups and type(self.common.get("iteration")) is int:
            self.builder.step = count_of([self.common["iteration"]])

    # -------------------------------------------------------------------------------------------------------- objects

    def _objects(self, groups: list[dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
        """Yield (name, kind, tree) of what stands beside the tensors, as our adapter has it."""
        yield "engine", ENGINE, {"global_steps": self.builder.step}
        yield "setup", ENGINE, {"wrappers": [self._wrapper()]}
        if groups:
            self.builder.notes.append("members of the optimizer's groups are told by Megatron's default rule")
            for group in groups:
                group["options"] = {k: v for k, v in group["options"].items() if k not in _OURS}
            plain = [{"options": {k: v for k, v in g["options"].items() if k not in _MEGATRONS}} for g in groups]
            yield "optimizer", ENGINE, {"class": optimizer_class(plain), "groups": groups}
        scheduler = self.common.get("opt_param_scheduler")
        yield "scheduler", ENGINE, {"class": _SCHEDULER, "state": loaded(self.store, scheduler)} if scheduler else None
        yield "loss_scaler", ENGINE, self._scaler()
        modules = self._modules()
        if modules:
            yield "modules", ENGINE, modules
        rest = {}
        for name, value in self.common.items():
            if name not in ("optimizer", "opt_param_scheduler"):
                try:
                    rest[str(name)] = loaded(self.store, value)
                except UnsupportedFeature as error:
                    self.builder.lost.append(f"{COMMON}: {name}: {error}: left out")
        if rest:
            yield "megatron", VALUE, rest

    def _wrapper(self) -> str:
        """Return the class of Megatron's optimizers, as what they save tells."""
        if any(_KIND in tree for tree in self._optimizers()):
            return "DistributedOptimizer"
        return "Float16OptimizerWithFloat16Params" if self.builder.derived else "FP32Optimizer"

    def _scaler(self) -> dict[str, Any]:
        for tree in self._optimizers():
            state = loaded(self.store, tree.get("grad_scaler"))
            if isinstance(state, dict) and isinstance(state.get("scale"), torch.Tensor):
                trackers = {k: state[k] for k in ("growth_tracker", "hysteresis_tracker") if k in state}
                return {"cur_scale": state["scale"].item(), **trackers} if trackers else {}
        return {}

    def _modules(self) -> dict[str, Any]:
        """Return the extra state of modules."""
        found = {}
        for key, value in self.values.items():
            extra = EXTRA.fullmatch(key)
            value = loaded(self.store, value)
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            if extra is None or value is None or (isinstance(value, torch.Tensor) and not value.numel()):
                continue
            at, shape = (tuple(int(n) for n in (extra[what] or "").split(".") if n) for what in ("place", "shape"))
            found[Key.of(extra["name"]).module(at, shape) if at else extra["name"]] = value
        return found


def _few(stored: Stored) -> Stored:
    """Return some of the elements that lie one behind the other at the start of a box."""
    count = min(stored.volume, SAMPLE) if stored.is_contiguous else 1
    return replace(stored, shape=(count,), strides=(1,))


def _inside(stored: Stored, key: Key, box: Box, at: tuple[int, ...]) -> Stored:
    """Return the part of a stored box at an index of the axes in front."""
    steps = zip(at, box.offsets[: key.axes], stored.strides[: key.axes], strict=True)
    skipped = sum((index - first) * stride for index, first, stride in steps)
    return replace(
        stored,
        shape=stored.shape[key.axes :],
        strides=stored.strides[key.axes :],
        start=stored.start + skipped * ITEMSIZE[stored.dtype],
    )
