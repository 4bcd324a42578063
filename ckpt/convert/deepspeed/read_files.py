"""The files of one DeepSpeed checkpoint: which there are, which rank each is of, and whether they belong together.

Ranks are numbers in the names, never positions in a sorted list: ``zero_pp_rank_10`` sorts before ``zero_pp_rank_2``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt.convert.options import ReadOptions
from ckpt.convert.torchfile.file import Inert, read_tree
from ckpt.convert.torchfile.names import kind_of
from ckpt.errors import CkptError, ConfigError, MalformedData, MissingChunk, NoSuchCheckpoint, ObjectNotFound
from ckpt.store.base import Store
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Iterator

LATEST = "latest"
MAX_RANKS = 1_000_000
_MAX_LATEST = 4096
_NO_FOLDERS = (".pt", ".pth", ".bin", ".py", ".json", ".safetensors", ".distcp", ".metadata")
_TAG = re.compile(r"global_step(\d+)(?:_universal)?")
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)-?(?:model_(?P<tp>\d+)-?)?-?model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")


@dataclass(slots=True)
class Files:
    """The files of one tag. ``model``: (model-parallel rank, data-parallel rank) -> key, the second 0 below ZeRO-3;
    ``optim`` alike. ``layers``: (layer of a pipeline, tensor-parallel rank). ``experts``: (layer of experts, number of
    the expert, model-parallel rank). ``expert_optim``: (expert-parallel rank, model-parallel rank).
    """

    store: Store
    where: str
    options: ReadOptions
    model: dict[tuple[int, int], str] = field(default_factory=dict)
    optim: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optim: dict[tuple[int, int], str] = field(default_factory=dict)
    partitioned: bool = False
    """is there a model file for every data-parallel rank (ZeRO-3)?"""

    @classmethod
    def of(cls, store: Store, tag: str, where: str, options: ReadOptions) -> Files:
        """List the files of a tag.

        Raises:
            MalformedData: two files are of the same rank, or files of ZeRO-3 and of another stage stand side by side.
        """
        found = cls(store, where, options)
        kinds: set[bool] = set()
        names = sorted(store.children(tag))
        if "zero" in names and any((m := _MODEL.fullmatch(name)) and m["dp"] is None for name in names):
            # A universal checkpoint of ours has model files for engines of all stages: one of them says everything.
            names = [name for name in names if not ((m := _MODEL.fullmatch(name)) and m["dp"] is not None)]
        for name in names:
            key = f"{tag}/{name}" if tag else name
            if m := _EXPERT.fullmatch(name):
                found._put(found.experts, (int(m["layer"] or 0), int(m["expert"]), int(m["mp"])), key)
            elif m := _LAYER.fullmatch(name):
                found._put(found.layers, (int(m["layer"]), int(m["tp"] or 0)), key)
            elif m := _MODEL.fullmatch(name):
                kinds.add(m["dp"] is not None)
                found._put(found.model, (int(m["mp"]), int(m["dp"] or 0)), key)
            elif m := _OPTIM.fullmatch(name):
                found._put(found.optim, (int(m["mp"]), int(m["dp"])), key)
            elif m := _EXPERT_OPTIM.fullmatch(name):
                found._put(found.expert_optim, (int(m["ep"]), int(m["mp"])), key)
        if len(kinds) == 2:
            raise MalformedData(
                f"{where}: two checkpoints in one folder: mp_rank_*_model_states.pt, and "
                f"zero_pp_rank_*_mp_rank_*_model_states.pt of ZeRO-3"
            )
        found.partitioned = kinds == {True}
        return found

    def _put(self, into: dict[Any, str], rank: tuple[int, ...], key: str) -> None:
        if into.setdefault(rank, key) != key:
            raise MalformedData(f"{self.where}: two checkpoints in one folder: {into[rank]} and {key} are of one rank")

    def read(self, key: str) -> dict[str, Any]:
        """Return what a file holds, as :func:`~ckpt.convert.torchfile.file.read_tree`; its tensors are not read."""
        options = self.options
        tree = read_tree(self.store, key, trust_pickle=options.trust_pickle, seen=options.seen)
        if not isinstance(tree, dict):
            raise MalformedData(f"{self.where}: {key} holds a {kind_of(tree)}, expected a dictionary")
        return tree

    def expect(self, present: dict[tuple[int, int], str], mp: int, dp: int, pattern: str, what: str) -> None:
        """Check that files are there for ``mp`` x ``dp`` ranks and no others.

        Raises:
            MissingChunk: files are missing; all of them by name.
            MalformedData: there are files of further ranks.
        """
        if mp * dp > MAX_RANKS:
            raise MalformedData(f"{self.where}: {what}, at most {MAX_RANKS} ranks")
        wanted = {(m, d) for m in range(mp) for d in range(dp)}
        missing = [pattern.format(mp=m, dp=d) for m, d in sorted(wanted - present.keys())]
        if missing:
            raise MissingChunk(f"{self.where}: {some(missing)} missing, of {what}")
        extra = sorted(present[rank] for rank in present.keys() - wanted)
        if extra:
            raise MalformedData(f"{self.where}: two checkpoints in one folder: {some(extra)} beside files of {what}")


def is_tag(names: list[str]) -> bool:
    """Are these files of a DeepSpeed checkpoint? Any of them, so that one that is missing can be named."""
    return any(kind.fullmatch(name) for name in names for kind in (_MODEL, _OPTIM, _EXPERT_OPTIM, _LAYER))


def tags_of(store: Store) -> list[str]:
    """Return the folders of checkpoints below a root, by the number of their step; the empty name for the root."""
    names = store.children("")
    if is_tag(names):
        return [""]
    return sorted((n for n in names if not n.endswith(_NO_FOLDERS) and is_tag(_inside(store, n))), key=_in_order)


def _inside(store: Store, name: str) -> list[str]:
    try:
        return store.children(name)
    except ObjectNotFound:  # a file
        return []


def _in_order(tag: str) -> tuple[int, str]:
    found = _TAG.fullmatch(tag)
    return (int(found[1]) if found else -1, tag)


def pick_tag(
    store: Store,
    where: str,
    tags: list[str],
    step: int | None,
    options: ReadOptions,
    pointers: tuple[str, ...] = (LATEST,),
) -> str:
    """Return the folder of one checkpoint of a root: of ``step``; else what ``latest`` names; else the only one.

    ``pointers``: files that do what ``latest`` does, the first one that is there counts.

    Raises:
        NoSuchCheckpoint: there is none, or ``latest`` names one that is gone.
        ConfigError: there are several, and nothing says which one is meant.
    """
    if not tags:
        raise NoSuchCheckpoint(f"{where}: no DeepSpeed checkpoint")
    if step is not None:
        named = [tag for tag in tags if (found := _TAG.fullmatch(tag)) and int(found[1]) == step]
        held = named or [tag for tag in tags if _step_in(store, tag, where, options) == step]
        if not held:
            raise NoSuchCheckpoint(f"{where}: no step {step}, found {some(tags) if tags != [''] else 'another one'}")
        if len(held) > 1:
            raise ConfigError(f"{where}: {some(held)} are all of step {step}: name the folder of one of them")
        return held[0]
    if tags == [""]:
        return ""
    for pointer in pointers:
        if store.size(pointer) is not None:
            tag = store.get(pointer, 0, _MAX_LATEST).decode("utf-8", "replace").strip()
            if tag in tags:
                return tag
            raise NoSuchCheckpoint(f"{where}: {pointer} names {tag!r}, found {some(tags)}: choose one (--step)")
    if len(tags) > 1:
        raise ConfigError(
            f"{where}: no file {pointers[0]}, and several checkpoints ({some(tags)}): choose one (--step)"
        )
    return tags[0]


def _step_in(store: Store, tag: str, where: str, options: ReadOptions) -> int | None:
    files = Files.of(store, tag, where, replace(options, seen=None))  # of another checkpoint, perhaps
    if not files.model:
        return None
    step = files.read(files.model[min(files.model)]).get("global_steps")
    return step if isinstance(step, int) else None


@contextmanager
def plausible(where: str) -> Iterator[None]:
    """Turn what Python raises at values of other types than DeepSpeed writes into :class:`MalformedData`."""
    try:
        yield
    except CkptError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise MalformedData(f"{where}: not what DeepSpeed writes ({error!r:.300})") from error


def whole(value: Any, what: str, *, least: int = 0) -> int:
    """Return a count that a file gave.

    Raises:
        MalformedData: it is no whole number, or too small.
    """
    if type(value) is not int or value < least:
        raise MalformedData(f"{what} is {value!r:.80}, expected a whole number of at least {least}")
    return value


def numel_of(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def shapes_of(groups: Any, what: str) -> list[dict[str, tuple[int, ...]]]:
    """Return ``param_shapes``: for each group (or sub-group) name -> shape, in the order of its flat tensor.

    Raises:
        MalformedData: it is something else.
    """
    if isinstance(groups, dict):  # one group, as DeepSpeed before 0.5 wrote it
        groups = [groups]
    if not isinstance(groups, list | tuple) or not all(isinstance(g, dict) for g in groups):
        raise MalformedData(f"{what}: param_shapes is a {kind_of(groups)}, expected a list of dictionaries")
    found = []
    for group in groups:
        for name, shape in group.items():
            if not isinstance(name, str) or not isinstance(shape, list | tuple):
                raise MalformedData(f"{what}: param_shapes has {name!r:.80}: {shape!r:.80}")
            for size in shape:
                whole(size, f"{what}: a size of {name!r}")
        found.append({name: tuple(shape) for name, shape in group.items()})
    return found


def attributes(record: Any) -> dict[str, Any]:
    """Return the attributes of an object of one of DeepSpeed's classes, whose class was not loaded."""
    if isinstance(record, Inert):
        return record.attributes
    return getattr(record, "__dict__", {}) if not isinstance(record, dict) else record


def differing(values: dict[str, Any]) -> dict[str, list[str]]:
    """Return shown value -> keys of the files that have it, if they do not all have the same."""
    found: dict[str, list[str]] = defaultdict(list)
    for key, value in values.items():
        found[repr(value)].append(key)
    return found if len(found) > 1 else {}
