"""A torch optimizer out of a state dict: its groups by parameter name, and which class it was. Reads nothing.

``optimizer.state_dict()`` knows parameters by number only: the first of the first group is 0. Their names follow from
the module's order and from the shapes of what the optimizer keeps of each, where only one way fits.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.torchfile.optimizer import Unmatched, only_way
from ckpt.errors import MalformedData
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ckpt.convert.dcp.names import OptimizerKeys

Group = dict[str, Any]
"""``params``: names; ``options``: the rest, as :func:`ckpt.engine.shared_groups.capture_groups` has them."""

MAX_COUNT = 2**63
_ADDED = frozenset({"initial_lr", "param_names", "name", "swa_lr"})
"""Options that no optimizer has by itself: schedulers and users add them."""

_SCHEDULERS: dict[str, frozenset[str]] = {
    "CosineAnnealingWarmRestarts": frozenset({"T_0", "T_i", "T_mult", "T_cur", "eta_min"}),
    "CosineAnnealingLR": frozenset({"T_max", "eta_min"}),
    "OneCycleLR": frozenset({"total_steps", "cycle_momentum"}),
    "LinearLR": frozenset({"start_factor", "end_factor", "total_iters"}),
    "PolynomialLR": frozenset({"power", "total_iters"}),
    "ConstantLR": frozenset({"factor", "total_iters"}),
    "StepLR": frozenset({"step_size", "gamma"}),
    "MultiStepLR": frozenset({"milestones", "gamma"}),
    "ExponentialLR": frozenset({"gamma"}),
    "LambdaLR": frozenset({"lr_lambdas"}),
    "SequentialLR": frozenset({"_milestones", "_schedulers"}),
    "ReduceLROnPlateau": frozenset({"patience", "num_bad_epochs", "cooldown"}),
}
"""Class -> keys of its state that tell it from all that stand below it."""
_SCALER = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})


def groups_of(
    keys: OptimizerKeys,
    values: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    state_shapes: Mapping[str, Sequence[tuple[int, ...]]],
    where: str,
) -> tuple[list[Group], dict[str, str]]:
    """Return the optimizer's groups, and number (as digits) -> name of each parameter that is known by number.

    Args:
        keys: of the optimizer.
        values: key -> option's value.
        shapes: the model's tensors in the module's order.
        state_shapes: owner, by name or number -> shapes of its state.
        where: for messages.

    Raises:
        Unmatched: parameters by number, and not exactly one way to name them.
        MalformedData: groups without the list of their parameters.
    """
    by_number: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for number, options in enumerate(_listed(values[keys.groups], keys.root, where) if keys.groups else ()):
        by_number[number] = dict(options)
    for key, (owner, option) in keys.options.items():
        if isinstance(owner, int):
            by_number.setdefault(owner, {})[option] = values[key]
        else:
            by_name.setdefault(owner, {})[option] = values[key]
    if not by_number:
        return _gathered(by_name), {}
    groups, names = [], dict[str, str]()
    members = []
    for number, options in sorted(by_number.items()):
        params = options.pop("params", None)
        if not isinstance(params, list) or any(type(p) not in (int, str) for p in params):
            raise MalformedData(f"{where}: group {number} of optimizer {keys.root!r} does not list its parameters")
        members.append(params)
        groups.append({"params": params, "options": options})
    if any(type(p) is int for params in members for p in params):
        names = _names_of_numbers(members, shapes, state_shapes)
        for group in groups:
            group["params"] = [names[str(p)] for p in group["params"]]
    return groups, names


def _listed(groups: Any, root: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise MalformedData(f"{where}: param_groups of optimizer {root!r} is no list of groups")
    return groups


def _gathered(by_name: Mapping[str, dict[str, Any]]) -> list[Group]:
    """Put together the parameters with equal options: which groups there were is not recorded in this form."""
    found: dict[str, Group] = {}
    for name, options in by_name.items():
        words = repr(sorted(options.items()))
        found.setdefault(words, {"params": [], "options": options})["params"].append(name)
    return list(found.values())


def _names_of_numbers(
    members: Sequence[Sequence[Any]],
    shapes: Mapping[str, tuple[int, ...]],
    state_shapes: Mapping[str, Sequence[tuple[int, ...]]],
) -> dict[str, str]:
    """Return number (as digits) -> name: every group lists its parameters in the module's order, as scripts do."""
    numbers = [p for params in members for p in params]
    found = only_way(members, shapes, {p: state_shapes.get(str(p), ()) for p in numbers})
    if found is None:
        raise Unmatched(
            f"it knows its parameters by number ({some(numbers)}), and the shapes of its state do not say in one way "
            "only which those are: save what torch.distributed.checkpoint.state_dict.get_state_dict returns"
        )
    return {str(number): name for number, name in found.items()}


def count_of(values: Iterable[float]) -> int:
    """Return the largest of some counts of steps; what is no count (NaN, infinite, beyond 64 bits) is none."""
    return int(max((value for value in values if 0 <= value < MAX_COUNT), default=0))


def optimizer_class(groups: Sequence[Group]) -> str:
    """Return the full name of the class of torch whose groups have these options; empty if none or several have.

    ``AdamW`` differs from ``Adam`` in the value of an option.
    """
    if not groups:
        return ""
    options = groups[0]["options"]
    wanted = frozenset(options) - _ADDED
    found = [name for name, (names, _) in _torch_optimizers().items() if names == wanted]
    decoupled = "decoupled_weight_decay"
    if len(found) > 1 and decoupled in options:
        found = [n for n in found if _torch_optimizers()[n][1].get(decoupled) == options[decoupled]]
    return found[0] if len(found) == 1 else ""


def default_options(name: str, states: Collection[str]) -> dict[str, Any]:
    """Return what the groups of torch's optimizer have by default: of the class of this name, wherever it is from, or
    of the one that keeps these states. Empty if there is none.
    """
    kind = name.rpartition(".")[2]
    of_states = {"exp_avg_sq": "AdamW", "momentum_buffer": "SGD", "sum": "Adagrad", "square_avg": "RMSprop"}
    wanted = [kind, *(found for state, found in of_states.items() if state in states)]
    known = {full.rpartition(".")[2]: defaults for full, (_, defaults) in _torch_optimizers().items()}
    return next((dict(known[one]) for one in wanted if one in known), {})


@lru_cache(maxsize=1)
def _torch_optimizers() -> dict[str, tuple[frozenset[str], dict[str, Any]]]:
    """Return full name -> (options of a group, their defaults), of all optimizers of torch.

    Taken from their signatures: to make one imports torch's compiler, which takes seconds.
    """
    found = {}
    for kind in vars(torch.optim).values():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            known = list(inspect.signature(kind).parameters.values())[1:]  # the first are the parameters
            options: dict[str, Any] = {one.name: one.default for one in known}
            if issubclass(kind, torch.optim.Adam) and kind is not torch.optim.Adam:  # AdamW
                options["decoupled_weight_decay"] = True
            found[f"{kind.__module__}.{kind.__qualname__}"] = (frozenset(options), options)
    return found


def scheduler_of(tree: Any) -> dict[str, Any] | None:
    """Return an LR scheduler as our engines keep it, if a value is the state of one of torch's; else None."""
    if not isinstance(tree, dict) or "last_epoch" not in tree:
        return None
    name = next((kind for kind, keys in _SCHEDULERS.items() if keys <= tree.keys()), "LRScheduler")
    return {"class": f"torch.optim.lr_scheduler.{name}", "state": tree}


def scaler_of(tree: Any) -> dict[str, Any] | None:
    """Return a gradient scaler as our engines keep it, if a value is the state of one; else None."""
    if not isinstance(tree, dict) or tree.keys() != _SCALER:
        return None
    return {"class": "torch.amp.grad_scaler.GradScaler", "state": tree}
