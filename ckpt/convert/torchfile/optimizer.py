"""Whose state is whose in the state dict of a torch optimizer, which knows its parameters by number only. Pure.

The numbers count the parameters in the order in which the optimizer got them: group by group, and in each group in the
order of the model, since that is how everybody makes groups. So one group has the model's order, and several have it if
no shape is in two of them (decay and no decay: matrices and vectors). An optimizer may step a part of the model only
(LoRA): then the shapes have to leave one way to find it. Shapes of the state are the proof; where they do not agree, or
several orders do, nothing is guessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.convert.torchfile.file import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Shape = tuple[int, ...]
MAX_WAYS = 10_000
"""Ways to number the parameters that are followed at once."""
MAX_WORK = 20_000_000
"""Steps of the search after which it is given up."""
NAMES = "param_names"
"""Key of a group under which torch keeps the names, if the optimizer got ``named_parameters()``."""


class Unmatched(Exception):
    """Why the numbers cannot be told from each other."""


Number = int | str
"""How an optimizer's state dict calls a parameter; FSDP's and DCP's full ones have names there."""


def names_of_numbers(
    state: Mapping[str, Any], params: Mapping[str, Shape], clean: Callable[[str], str]
) -> dict[Number, str]:
    """Return the name of each of the optimizer's numbers.

    Args:
        state: ``optimizer.state_dict()``, with :class:`~ckpt.convert.torchfile.file.Stored` tensors.
        params: name -> shape of the model's parameters in the model's order, tied ones once.
        clean: returns the listed name for one that the state dict has.

    Raises:
        Unmatched: nothing tells it.
    """
    groups = [_numbers(group) for group in state["param_groups"]]
    numbers = [n for group in groups for n in group]
    if len(set(numbers)) != len(numbers):
        raise Unmatched("a parameter is in two groups")
    shapes = {n: _shape(state["state"].get(n)) for n in numbers}
    found = _named(state["param_groups"], groups, clean)
    if found is None and len(numbers) == len(params) and len(groups) == 1:
        found = dict(zip(numbers, params, strict=True))
    if found is None:
        found = only_way(groups, params, {n: _shapes(state["state"].get(n)) for n in numbers})
    if found is None:
        if len(numbers) != len(params):
            raise Unmatched(
                f"it has {len(numbers)} parameters, the model {len(params)}, and shapes do not tell in one way which"
            )
        found = _by_shape(groups, shapes, params)
    for n, name in found.items():
        if name not in params:
            raise Unmatched(f"it knows a parameter {name!r}, which the model does not have")
        if not fits(state["state"].get(n), params[name]):
            raise Unmatched(f"its parameter {n} would be {name!r} {list(params[name])}, its state is {shapes[n]}")
    return found


def _numbers(group: Any) -> list[Number]:
    numbers = group.get("params") if isinstance(group, dict) else None
    if not isinstance(numbers, list) or any(type(n) not in (int, str) for n in numbers):
        raise Unmatched("its groups do not list their parameters by number")
    return numbers


def _named(
    groups: Sequence[Mapping[str, Any]], numbers: Sequence[list[Number]], clean: Callable[[str], str]
) -> dict[Number, str] | None:
    """Return what torch says itself, if it does for all."""
    found: dict[Number, str] = {}
    for group, mine in zip(groups, numbers, strict=True):
        names = mine if all(isinstance(n, str) for n in mine) else group.get(NAMES)
        if not isinstance(names, list) or len(names) != len(mine) or not all(isinstance(one, str) for one in names):
            return None
        found |= {n: clean(str(name)) for n, name in zip(mine, names, strict=True)}
    return found


def _by_shape(
    groups: Sequence[list[Number]], shapes: Mapping[Number, Shape | None], params: Mapping[str, Shape]
) -> dict[Number, str]:
    owner: dict[Shape, int] = {}
    for g, numbers in enumerate(groups):
        for n in numbers:
            shape = shapes[n]
            if shape is None:
                raise Unmatched(f"it has {len(groups)} groups, and its parameter {n} has no state that shows its shape")
            if owner.setdefault(shape, g) != g:
                raise Unmatched(f"it has {len(groups)} groups, and two of them have parameters of shape {list(shape)}")
    waiting = [iter(numbers) for numbers in groups]
    found: dict[Number, str] = {}
    for name, shape in params.items():
        number = next(waiting[owner[shape]], None) if shape in owner else None
        if number is None:
            raise Unmatched(f"it has no parameter of the shape of {name!r}, {list(shape)}")
        found[number] = name
    return found


def _shape(state: Any) -> Shape | None:
    """Return the shape of the parameter that a state is of, as far as it shows."""
    return max(_shapes(state), key=len, default=None)


def _shapes(state: Any) -> list[Shape]:
    return [one.shape for one in state.values() if isinstance(one, Stored)] if isinstance(state, dict) else []


def only_way(
    groups: Sequence[Sequence[Number]], params: Mapping[str, Shape], states: Mapping[Number, Sequence[Shape]]
) -> dict[Number, str] | None:
    """Return the name of each number if every group lists its parameters in the model's order, and there is one way.

    The model's tensors are gone through; each is the next parameter of a group, or of none (frozen, a buffer, a tied
    name).

    Args:
        groups: numbers of each.
        params: name -> shape of the model's tensors, in its order.
        states: number -> shapes of what the optimizer keeps of it.
    """
    left = tuple(len(numbers) for numbers in groups)
    ways: dict[tuple[int, ...], tuple[Any, ...] | None] = {(0,) * len(groups): ()}  # None: more than one way
    work = 0
    for n, (name, shape) in enumerate(params.items(), 1):
        least = sum(left) - (len(params) - n)  # what must be dealt out by now, or some would be left at the end
        after: dict[tuple[int, ...], tuple[Any, ...] | None] = {}
        for at, way in ways.items():
            work += len(groups)
            if work > MAX_WORK or len(after) > MAX_WAYS:
                return None
            moves: list[tuple[tuple[int, ...], Any]] = [(at, way)] if sum(at) >= least else []
            for g, numbers in enumerate(groups):
                if at[g] < len(numbers) and _may_be(shape, states.get(numbers[at[g]], ())):
                    step = way if way is None else (way, (numbers[at[g]], name))
                    moves.append(((*at[:g], at[g] + 1, *at[g + 1 :]), step))
            for place, step in moves:
                after[place] = None if place in after else step
        ways = after
    found, names = ways.get(left), dict[Number, str]()
    if found is None:
        return None
    while found:
        found, (number, name) = found
        names[number] = name
    return dict(reversed(names.items()))


def _may_be(shape: Shape, states: Sequence[Shape]) -> bool:
    """Can a tensor of this shape be the parameter that has these states, or factors of them? Without any, whatever."""
    kept = [one for one in states if one not in ((), (1,))]
    # A single one of fewer dimensions is that of another parameter: a bias has the length of its matrix's rows.
    factors = len(set(kept)) > 1 and all(_left_of(one, shape) for one in kept)
    return not kept or shape in kept or factors


def fits(state: Any, shape: Shape) -> bool:
    """Can this be the state of a parameter of this shape: as large, single numbers, or factors of it?

    Factors have the shape without some of its dimensions, or with 1 for them (Adafactor's rows and columns).
    """
    stored = [one for one in state.values() if isinstance(one, Stored)] if isinstance(state, dict) else []
    return all(one.shape == shape or one.volume == 1 or _left_of(one.shape, shape) for one in stored)


def _left_of(part: Shape, whole: Shape) -> bool:
    rest = iter(whole)
    return all(any(size == other for other in rest) for size in part if size != 1)
