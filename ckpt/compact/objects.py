"""What the new base has beside tensors: the last record's objects on each rank, and groups with the last options."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ckpt.compact.records import records_of
from ckpt.convert.loose import carry
from ckpt.gradlog.record import read_options
from ckpt.gradlog.replaying.replay import update_group
from ckpt.runtime.extras import ENGINE, encode_item, owned_items
from ckpt.runtime.objects import decode_object

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt.compact.records import OpenRecord
    from ckpt.compact.source import Source
    from ckpt.convert.opened import Loose
    from ckpt.gradlog.record import Entry, RankHead
    from ckpt.runtime.extras import Item

GROUPS = "optimizer"
Owned = list[tuple["Item", tuple[int, ...]]]
"""Objects that a rank stores, with all ranks that have the same."""
Named = dict[tuple[str, str], Any]
"""(kind, name) -> tree"""


def last_records(source: Source) -> list[OpenRecord]:
    """Return the last record of each rank of the last log."""
    end = source.stretches[-1]
    return [next(iter(records_of(source.store, end.number, rank, end.last, end.last))) for rank in range(end.world)]


def objects_of(source: Source, last: Sequence[OpenRecord]) -> tuple[list[Owned], list[str]]:
    """Return for each rank the objects that it stores, with all ranks that have the same, and what is noted.

    Args:
        source: what is compacted.
        last: each rank's last record.

    Raises:
        ConfigError: generators of the base that cannot be seeded for ranks that it did not have.
        MalformedData: a record's objects are not what this release reads.
    """
    carried = carry(source.opened.objects, source.opened.world, source.world)
    everyone = []
    for rank, one in enumerate(last):
        trees = _of_base(carried.objects, rank)
        for found in one.record.objects:
            inner = [one.tensor(t.name, t.dtype, t.shape) for t in found.tensors]
            where = f"{one.where}: object {found.name!r}"
            trees[found.kind, found.name] = decode_object(found.document.encode(), inner, where)
        if (ENGINE, GROUPS) in trees:
            trees[ENGINE, GROUPS] = _with_options(trees[ENGINE, GROUPS], source.last[rank], one)
        everyone.append(
            [encode_item(name, kind, tree, f"{kind} state {name!r}") for (kind, name), tree in trees.items()]
        )
    identities = [{f"{item.kind}:{item.name}": item.identity for item in items} for items in everyone]
    owned = [owned_items(items, identities, rank) for rank, items in enumerate(everyone)]
    return owned, [*carried.lost, *carried.made]


def _of_base(objects: Sequence[Loose], rank: int) -> Named:
    return {(one.kind, one.name): one.tree for one in objects if rank in one.ranks}


def _with_options(tree: Any, head: RankHead, last: OpenRecord) -> Any:
    """Return the optimizer's groups with the hyperparameters behind the last step."""
    if not isinstance(tree, dict):
        return tree
    tree = copy.deepcopy(tree)
    places = places_of_groups(tree, head, [(one.optimizer, one.group) for one in last.record.options])
    for one in last.record.options:
        group = places.get((one.optimizer, one.group))
        if group is not None:
            update_group(group["options"], read_options(one, last.where))
    return tree


def places_of_groups(
    tree: Mapping[str, Any], head: RankHead, said: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return (optimizer, group) of a log's rank -> the group in the object ``optimizer`` of a checkpoint.

    Groups of several optimizers stand there one behind the other. Where the rank steps nothing of some, they are told
    by their members.
    """
    groups = [one for one in tree.get("groups", ()) if isinstance(one, dict) and isinstance(one.get("options"), dict)]
    if len(groups) == len(said):
        return dict(zip(sorted(said), groups, strict=True))
    of: dict[str, dict[str, Any]] = {}
    for group in groups:
        of.update(dict.fromkeys(group.get("params", ()), group))
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for entry in head.entries:
        for fqn in entry.members:
            if fqn in of:
                found.setdefault((entry.optimizer, entry.group), of[fqn])
    return found


def tensors_in_groups(source: Source, rank: int, entry: Entry) -> list[str]:
    """Return the names of hyperparameters of an entry's group that are tensors (a learning rate can be one)."""
    tree = source.groups(rank)
    for group in tree.get("groups", ()) if isinstance(tree, dict) else ():
        if set(entry.members) & set(group.get("params", ())):
            return [name for name, value in group["options"].items() if isinstance(value, torch.Tensor)]
    return []
