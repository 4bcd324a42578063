"""What lies where in the optimizer files of ZeRO: flat tensors, cut by parameters that only the model's file names.

ZeRO-1 and 2 put the parameters of a group one behind the other, pad the end, and give each rank an equal slice: a
parameter may begin on one rank and end on the next. ZeRO-3 cuts every parameter by itself, and a group may be several
sub-groups. What a slice is of follows from shapes alone; where DeepSpeed wrote down its own books, they must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_files import attributes, numel_of, whole
from ckpt.convert.torchfile.names import Stored, kind_of
from ckpt.errors import MalformedData, UnsupportedFeature

if TYPE_CHECKING:
    from collections.abc import Sequence

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``[start, start + numel)`` of a flattened parameter, found at element ``offset`` of the flat tensors."""

    name: str
    start: int
    numel: int
    offset: int


@dataclass(slots=True)
class Partition:
    """What one rank has of one group (or sub-group). ``key``: the file; ``group``: number of the parameter group;
    ``expert``: expert-parallel rank that its names are local to; None: they are not. ``flat``: the master; ``size``:
    elements that it has with its padding. ``members``: all parameters of the group, on any rank.
    """

    key: str
    group: int
    expert: int | None
    flat: Stored
    size: int
    state: dict[str, Any]
    slices: list[Slice] = field(default_factory=list)
    members: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cut:
    """Into how many parts a group is cut, which of them is at hand, and the expert-parallel rank (see Partition)."""

    parts: int
    index: int
    expert: int | None = None


def optimizer_of(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the optimizer's part of an optimizer file.

    Raises:
        MalformedData: there is none.
        UnsupportedFeature: it was written with a feature whose state is elsewhere.
    """
    found = tree.get("optimizer_state_dict")
    if not isinstance(found, dict):
        raise MalformedData(f"{key}: no optimizer_state_dict, found {sorted(map(str, tree))[:6]}")
    if found.get("ds_zero_partition_groups") is not None:
        raise UnsupportedFeature(f"{key}: experts of AutoEP, which DeepSpeed has put in place of the model's own")
    return found


def is_zero3(optimizer: dict[str, Any]) -> bool:
    """Is this the optimizer of ZeRO-3?"""
    return "fp32_flat_groups" in optimizer


def base_of(optimizer: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the user's own optimizer gave: the state of each of its tensors in order, and its groups.

    A job with ``elastic_checkpoint`` wrote the states alone.
    """
    base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    if isinstance(base, list):
        return [one if isinstance(one, dict) else {} for one in base], []
    if not isinstance(base, dict) or not isinstance(base.get("param_groups"), list):
        raise MalformedData(f"the state of the optimizer is a {kind_of(base)}, expected state and param_groups")
    states = base.get("state") or {}
    order = [number for group in base["param_groups"] for number in group.get("params", ())]
    return [states.get(number) or {} for number in order], base["param_groups"]


def zero12(
    key: str,
    optimizer: dict[str, Any],
    shapes: Sequence[Shapes],
    cuts: Sequence[Cut],
    sizes: list[int],
    *,
    round_robin: bool,
) -> list[Partition]:
    """Return a rank's partitions under ZeRO-1 or 2, or ``BF16_Optimizer``.

    Args:
        key: the file.
        optimizer: what it holds.
        shapes: ``param_shapes`` of the model's file.
        cuts: for each group.
        sizes: for each group the elements of a part, see :func:`part_sizes`.
        round_robin: with ``round_robin_gradients`` DeepSpeed's books are of the order that the groups do not have.

    Raises:
        MalformedData: what the file holds is not what shapes and books say.
    """
    flats = _tensors(optimizer.get("single_partition_of_fp32_groups"), len(shapes), key)
    states, _ = base_of(optimizer)
    aligned = optimizer.get("param_alignment_paddings") or [None] * len(shapes)
    books = (None if round_robin else optimizer.get("param_slice_mappings")) or [None] * len(shapes)
    if len(states) != len(shapes) or len(aligned) != len(shapes) or len(books) != len(shapes):
        raise MalformedData(f"{key}: {len(states)} groups, the model's file has {len(shapes)}")
    found = []
    for g, (names, cut, size, flat) in enumerate(zip(shapes, cuts, sizes, flats, strict=True)):
        offsets, total = _offsets(names, aligned[g], key)
        if size * cut.parts < total:
            raise MalformedData(
                f"{key}: group {g} has {cut.parts} parts of {size} elements, its parameters have {total}: the files "
                f"are of another number of ranks, or the state was offloaded to NVMe"
            )
        low = cut.index * size
        one = Partition(key, g, cut.expert, flat, size, states[g], members=list(names))
        for name, shape in names.items():
            start = max(0, low - offsets[name])
            stop = min(numel_of(shape), low + size - offsets[name])
            if start < stop:
                one.slices.append(Slice(name, start, stop - start, offsets[name] + start - low))
        _check_books(one, books[g])
        _check_room(one)
        found.append(one)
    return found


def part_sizes(optimizer: dict[str, Any], groups: int, key: str) -> list[int]:
    """Return the elements of a part of each group, padding included, from the file of the first part.

    ZeRO-1 and 2 leave the padding out of the file, ``BF16_Optimizer`` does not.
    """
    flats = _tensors(optimizer.get("single_partition_of_fp32_groups"), groups, key)
    lean = "zero_stage" in optimizer
    paddings = optimizer.get("group_paddings")
    if not lean or not isinstance(paddings, list) or len(paddings) != groups:
        return [flat.volume for flat in flats]
    return [flat.volume + whole(pad, f"{key}: group_paddings") for flat, pad in zip(flats, paddings, strict=True)]


def zero3(key: str, optimizer: dict[str, Any], shapes: Sequence[Shapes], parts: int, index: int) -> list[Partition]:
    """Return a rank's partitions under ZeRO-3, one for each sub-group.

    Raises:
        MalformedData: what the file holds is not what the shapes say.
    """
    flats = _tensors(optimizer.get("fp32_flat_groups"), len(shapes), key)
    states, groups = base_of(optimizer)
    if len(states) != len(shapes):
        raise MalformedData(f"{key}: {len(states)} sub-groups, the model's file has {len(shapes)}")
    owner = [g for g, group in enumerate(groups) for _ in group.get("params", ())] or [0] * len(shapes)
    found = []
    for n, (names, flat) in enumerate(zip(shapes, flats, strict=True)):
        one = Partition(key, owner[n], None, flat, flat.volume, states[n], members=list(names))
        offset = 0
        for name, shape in names.items():
            numel = numel_of(shape)
            part = -(-numel // parts)
            start = min(index * part, numel)
            held = max(0, min(part, numel - start))
            if held:
                one.slices.append(Slice(name, start, held, offset))
            offset += part
        if flat.volume != offset:
            raise MalformedData(
                f"{key}: sub-group {n} has {flat.volume} elements, its parameters on {parts} ranks have {offset}: the "
                f"files are of another number of ranks, or the state was offloaded to NVMe (or is hpZ's or MiCS's)"
            )
        found.append(one)
    return found


def _tensors(values: Any, count: int, key: str) -> list[Stored]:
    if not isinstance(values, list | tuple) or len(values) != count:
        found = len(values) if isinstance(values, list | tuple) else f"a {kind_of(values)}"
        raise MalformedData(f"{key}: expected the masters of {count} groups, found {found}")
    for value in values:
        if not isinstance(value, Stored) or len(value.shape) != 1 or not value.is_contiguous:
            raise MalformedData(f"{key}: a master that is no flat tensor: {value!r:.200}")
    return list(values)


def _offsets(names: Shapes, paddings: Any, key: str) -> tuple[dict[str, int], int]:
    """Return where each parameter starts in its group, and where the last one ends."""
    holes = list(paddings) if isinstance(paddings, list | tuple) else [0] * len(names)
    if len(holes) != len(names):
        raise MalformedData(f"{key}: {len(holes)} alignment paddings for {len(names)} parameters")
    offsets, end = {}, 0
    for (name, shape), hole in zip(names.items(), holes, strict=True):
        offsets[name] = end
        end += numel_of(shape) + whole(hole, f"{key}: an alignment padding")
    return offsets, end


def _check_books(one: Partition, books: Any) -> None:
    """Compare with DeepSpeed's own record of what a rank has, which newer releases keep."""
    if not isinstance(books, dict):
        return
    said = {name: (attributes(at).get("start"), attributes(at).get("numel")) for name, at in books.items()}
    own = {s.name: (s.offset, s.numel) for s in one.slices}
    wrong = [name for name in said.keys() | own.keys() if said.get(name, (0, 0)) != own.get(name, (0, 0))]
    wrong = [name for name in wrong if said.get(name, (0, 0))[1] or name in own]
    if wrong:
        name = min(wrong)
        raise MalformedData(
            f"{one.key}: {name!r} is said to be {said.get(name)} (first element, elements) of the flat tensor of group "
            f"{one.group}, by the shapes in the model's file it is {own.get(name)}: files of two checkpoints"
        )


def _check_room(one: Partition) -> None:
    end = max((s.offset + s.numel for s in one.slices), default=0)
    if one.flat.volume < end:
        raise MalformedData(
            f"{one.key}: the master of group {one.group} has {one.flat.volume} elements, its parameters need {end}"
        )
