"""Stepped tensors of which a rank holds nothing: a shard without rows, a partition that is padding alone.

No gradient comes for them, and yet their optimizer keeps state of them that is saved and belongs to the whole tensor:
how many steps it has taken. So they are stepped, with an empty gradient, exactly when the log says that they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ckpt.gradlog.share import held_runs, local_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckpt.engine.base import Stepped
    from ckpt.gradlog.record import Call, RankHead
    from ckpt.gradlog.replaying.mapping import Target


class Told(NamedTuple):
    """What a record says of a step. ``entries``: numbers of those whose gradient it has."""

    head: RankHead
    call: Call
    entries: Collection[int]


def begin_padding(stepped: Sequence[Stepped]) -> None:
    """Give partitions that are padding alone the state that they would have: no checkpoint has it.

    What they hold is nobody's, but some kernels count steps for all tensors together, and round otherwise where one of
    them counts differently.
    """
    for one in stepped:
        state = one.optimizer.state
        if not local_of(one.key).numel() or state.get(one.key) or held_runs(one):
            continue
        like = [other for other in stepped if other.optimizer is one.optimizer and state.get(other.key)]
        if like:
            other = max(like, key=lambda it: (it.group == one.group, local_of(it.key).numel()))
            state[one.key] = {k: _blank(v, other.key, one.key) for k, v in state[other.key].items()}


def _blank(value: object, key: torch.Tensor, wanted: torch.Tensor) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros_like(wanted, dtype=value.dtype) if value.shape == key.shape else value.clone()


def stepped_entries(told: Told) -> set[int]:
    """Return the numbers of the entries that were stepped.

    Logs of earlier releases do not name entries of a group where the rank has logged no element of it: of such a group
    the settings are there all the same, if it was stepped.
    """
    entries = told.head.entries
    named = {(entries[number].optimizer, entries[number].group) for number in told.entries}
    silent = {(one.optimizer, one.group) for one in told.call.options} - named
    return set(told.entries) | {i for i, one in enumerate(entries) if (one.optimizer, one.group) in silent}


def empty_that_step(
    targets: Sequence[Target], filled: Sequence[Target], own: Told | None, told: Mapping[int, Told], *, same: bool
) -> list[Target]:
    """Return the targets without elements that were stepped.

    Args:
        targets: all of them.
        filled: those whose gradients the step has.
        own: the record that this rank continues; None: it took no step.
        told: rank of the log -> what its record says, of all that are read.
        same: are the entries of ``own`` the targets, one for one?
    """
    empty = [(i, one) for i, one in enumerate(targets) if not one.copies]
    if not empty:
        return []
    if same:
        stepped = set() if own is None else stepped_entries(own)
        return [one for i, one in empty if i in stepped]
    known = {fqn for one in told.values() for entry in one.head.entries for fqn in entry.members}
    moved = {fqn for one in told.values() for i in stepped_entries(one) for fqn in one.head.entries[i].members}
    return [one for _, one in empty if _moved_elsewhere(one, known, moved, filled)]


def _moved_elsewhere(one: Target, known: Collection[str], moved: Collection[str], filled: Sequence[Target]) -> bool:
    """Was it stepped, as those say that know it? Where none does, it went with the rest of its group."""
    if any(fqn in known for fqn in one.stepped.members):
        return any(fqn in moved for fqn in one.stepped.members)
    place = one.stepped.optimizer, one.stepped.group
    return any((other.stepped.optimizer, other.stepped.group) == place for other in filled)
