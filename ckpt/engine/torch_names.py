"""The tensors of a module under the names that a checkpoint gives them, whatever wraps the module or parts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.engine.shared_check import class_names
from ckpt.engine.shared_partition import clean_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckpt.engine.base import Context

_HOLDERS = ("DistributedDataParallel", "DataParallel")
"""Modules that keep the user's module as ``.module``, by class name: a user's own ``.module`` keeps its name."""

EXTRA_STATE = "_extra_state"
"""``nn.Module``'s own name for what ``get_extra_state`` returns."""


def modules_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module with its name without wrappers; one that is reachable twice comes under both names."""
    clean: dict[str, str] = {"": ""}
    known: dict[str, torch.nn.Module] = {"": module}
    for name, child in module.named_modules(remove_duplicate=False):
        if name:
            parent, _, leaf = name.rpartition(".")
            held = leaf == "module" and bool(class_names(known[parent]) & set(_HOLDERS))
            clean[name], known[name] = clean[parent] if held else joined(clean[parent], leaf), child
        yield clean_name(f"{clean[name]}.").removesuffix("."), child


def parameters_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every parameter, as the optimizer knows it: of a FSDP2 module that stands unsharded, the sharded one."""
    sharded = _sharded(module)
    for prefix, child in modules_of(module):
        for name, p in child._parameters.items():
            if p is not None:
                yield joined(prefix, name), sharded.get((id(child), name), p)


def buffers_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the persistent buffers; those that are not persistent are rebuilt by the model's own code."""
    for prefix, child in modules_of(module):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield joined(prefix, name), buffer


def fsdp_modules(module: torch.nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was applied to."""
    return [child for child in module.modules() if "FSDPModule" in class_names(child)]


def _sharded(module: torch.nn.Module) -> dict[tuple[int, str], Any]:
    """Return (id of a module, name of a parameter in it) -> sharded parameter, for all that FSDP2 shards.

    Between forward and backward, and after an evaluation, ``fully_shard`` leaves gathered copies in the place of
    parameters; its own books have what is trained.
    """
    found: dict[tuple[int, str], Any] = {}
    for child in fsdp_modules(module):
        state = child._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for one in (one for group in groups if group is not None for one in group.fsdp_params):
            about = one._module_info
            places = [(about.module, about.param_name)]
            places += zip(about.shared_modules, about.shared_param_names, strict=True)
            found |= {(id(owner), name): one.sharded_param for owner, name in places}
    return found


def joined(prefix: str, name: str) -> str:
    """Return the dotted name."""
    return f"{prefix}.{name}" if prefix else name


def marked_name(local: str, stage: int | None) -> str:
    """Return a name that tells the stage of a pipeline as well; without a pipeline the name itself."""
    return local if stage is None else f"stage{stage}.{local}"


def global_name(context: Context, local: str, stage: int | None, *, several: bool) -> str:
    """Return the global name of what a stage of a pipeline (None: no pipeline) calls ``local``.

    Rules may speak of ``stage2.blocks.0.weight`` as well as of ``blocks.0.weight``, the former first. A user's function
    gets the plain name, or the marked one if ``several`` stages on this rank may use the same.
    """
    marked = marked_name(local, stage)
    if context.rename is not None:
        return context.name(marked if several else local)
    found = context.rules.rename(marked)
    return found if found != marked else context.rules.rename(local)
