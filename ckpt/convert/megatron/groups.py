"""Which parameters are in which group of Megatron's optimizers: not recorded, told by the rule that makes them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ckpt.convert.megatron.names import OUTPUT, WORDS
from ckpt.convert.naming import natural
from ckpt.convert.torchfile.stored import loaded
from ckpt.errors import MalformedData, UnsupportedFeature
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpt.store.base import Store


def groups_of(
    optimizers: Iterable[Any],
    chains: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    store: Store,
    where: str,
) -> list[dict[str, Any]]:
    """Return the groups of all optimizers with their members, settings, and what their state has in common.

    Args:
        optimizers: what is stored of each.
        chains: which of them has the state of which parameter.
        shapes: of each parameter.
        store: where tensors among the settings are.
        where: the checkpoint, for messages.

    Raises:
        UnsupportedFeature: the rule does not give each parameter exactly one group.
        MalformedData: an optimizer without groups.
    """
    found: list[dict[str, Any]] = []
    members: dict[str, list[int]] = defaultdict(list)
    for chain, tree in enumerate(optimizers):
        for options, state in _parts(tree.get("optimizer", tree), where):
            group = {"params": [], "options": loaded(store, options), "state": loaded(store, state)}
            for name, of in chains.items():
                if of == chain and _fits(name, shapes.get(name, ()), group["options"]):
                    members[name].append(len(found))
            found.append(group)
    unclear = sorted(name for name in chains if len(members[name]) != 1)
    if unclear and found:
        raise UnsupportedFeature(
            f"{where}: which group of the optimizer has which parameter is not recorded, and Megatron's "
            f"default rule (no weight decay for biases and vectors) puts {some(unclear)} into "
            f"{sorted({len(members[name]) for name in unclear})} of its {len(found)} groups, expected one"
        )
    for name in sorted(chains, key=natural):
        if found:
            found[members[name][0]]["params"].append(name)
    return found


def _parts(tree: Any, where: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the options of each group of an optimizer, with what is common to the state of all its parameters."""
    groups = tree.get("param_groups", []) if isinstance(tree, dict) else None
    state = tree.get("state", {}) if isinstance(tree, dict) else None
    if not isinstance(groups, list) or not isinstance(state, dict) or not all(isinstance(g, dict) for g in groups):
        raise MalformedData(f"optimizer of {where}: no groups as Megatron saves them")
    return [(options, state) for options in groups]


def _fits(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> bool:
    """Would Megatron put a parameter into the group of these options?"""
    decays = len(shape) != 1 and not name.endswith(".bias")
    apart = name in (OUTPUT, WORDS, "embedding.position_embeddings.weight")
    decoupled = bool(options.get("is_decoupled_lr"))
    return (options.get("wd_mult") != 0.0) == decays and (not decoupled or apart)
