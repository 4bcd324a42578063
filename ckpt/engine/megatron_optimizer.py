"""Where Megatron-core's optimizers keep their state: every wrapper reduced to a list of :class:`Partition`.

A Megatron optimizer wraps inner ones: those step the model's own fp32 parameters, fp32 copies beside 16-bit ones, or,
under the distributed optimizer, this rank's range of either. Ranges follow from buckets that ignore where a parameter
begins; what is in the wrapper's books (``gbuf_ranges``) is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.shared_check import class_names
from ckpt.engine.shared_partition import Named, Partition, Piece
from ckpt.errors import ConfigError, UnsupportedLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def wrappers_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, in order; those without parameters (of a frozen stage) included."""
    if "ChainedOptimizer" in class_names(optimizer):
        return [wrapper for one in optimizer.chained_optimizers for wrapper in wrappers_of(one)]
    return [optimizer]


def stepping(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain that have something to step."""
    return [wrapper for wrapper in wrappers_of(optimizer) if not wrapper.is_stub_optimizer]


def inner_optimizer(optimizer: Any) -> Any:
    """Return one inner optimizer that stands for all of a chain: their groups in order, their states together.

    None if this rank steps nothing.
    """
    inners = [wrapper.optimizer for wrapper in stepping(optimizer)]
    if len(inners) < 2:
        return inners[0] if inners else None
    joined = object.__new__(type(inners[0]))
    vars(joined).update(vars(inners[0]))
    joined.param_groups = [group for inner in inners for group in inner.param_groups]
    joined.state = _States(inners)
    return joined


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers as one mapping; each key is looked up in the optimizer that steps it."""

    def __init__(self, inners: Sequence[Any]) -> None:
        self._inners = inners
        self._home = {id(p): inner for inner in inners for group in inner.param_groups for p in group["params"]}

    def get(self, key: Any, default: Any = None) -> Any:
        return self._home[id(key)].state.get(key, default)  # `[key]` would make an entry: the dicts have a default

    def __contains__(self, key: object) -> bool:
        return key in self._home[id(key)].state

    def __getitem__(self, key: Any) -> Any:
        return self._home[id(key)].state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._home[id(key)].state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._home[id(key)].state[key]

    def __iter__(self) -> Iterator[Any]:
        for inner in self._inners:
            yield from inner.state

    def __len__(self) -> int:
        return sum(len(inner.state) for inner in self._inners)


# ---------------------------------------------------------------------------------------------------------- partitions


def partitions_of(optimizer: Any, named: dict[int, Named]) -> list[Partition]:
    """Return this rank's partitions; groups are counted through the chain.

    Under the distributed optimizer they name only parameters of which this rank steps something: who steps the others,
    in which group, is not recorded anywhere.

    Raises:
        UnsupportedLayout: a parameter that is not in the model, or a range of another size than its memory.
    """
    found: list[Partition] = []
    first = 0
    for wrapper in stepping(optimizer):
        found += _BUILDERS[type(wrapper).__name__](wrapper, first, lambda p: _name(named, p))
        first += len(wrapper.optimizer.param_groups)
    return found


def _name(named: dict[int, Named], p: torch.Tensor) -> Named:
    if id(p) not in named:
        raise UnsupportedLayout(f"the optimizer steps a parameter of shape {list(p.shape)} that the model lacks")
    return named[id(p)]


def _fp32(wrapper: Any, first: int, name: Callable[[Any], Named]) -> Iterator[Partition]:
    for g, group in enumerate(wrapper.optimizer.param_groups, first):
        for p in group["params"]:
            yield _whole(p, g, name(p), separate=False)


def _float16(wrapper: Any, first: int, name: Callable[[Any], Named]) -> Iterator[Partition]:
    groups = zip(wrapper.float16_groups, wrapper.fp32_from_float16_groups, wrapper.fp32_from_fp32_groups, strict=True)
    for g, (low, masters, full) in enumerate(groups, first):
        for p, master in zip(low, masters, strict=True):
            yield _whole(master, g, name(p), separate=True)
        for p in full:
            yield _whole(p, g, name(p), separate=False)


def _whole(key: torch.Tensor, group: int, named: Named, *, separate: bool) -> Partition:
    piece = Piece(named.fqn, named.tiling, 0, named.numel, 0)
    return Partition(key, group, separate, [named.fqn], [piece], flat=False)


def _distributed(wrapper: Any, first: int, name: Callable[[Any], Named]) -> Iterator[Partition]:
    full = zip(wrapper.model_fp32_groups, wrapper.shard_fp32_groups, strict=True)
    low = zip(wrapper.model_float16_groups, wrapper.shard_fp32_from_float16_groups, strict=True)
    for separate, groups in ((False, full), (True, low)):
        for g, (params, keys) in enumerate(groups, first):
            for p, key in zip(params, keys, strict=True):
                yield _range(wrapper, key, g, p, name(p), separate)


def _range(wrapper: Any, key: torch.Tensor, group: int, p: Any, named: Named, separate: bool) -> Partition:
    held = wrapper._get_model_param_range_map(p)["param"]
    if key.numel() != held.size:
        raise UnsupportedLayout(f"range of {named.fqn!r}: expected {held.size} elements, found {key.numel()}")
    piece = Piece(named.fqn, named.tiling, held.start, held.size, 0)
    return Partition(key, group, separate, [named.fqn], [piece])


_BUILDERS: dict[str, Callable[[Any, int, Callable[[Any], Named]], Iterator[Partition]]] = {
    "FP32Optimizer": _fp32,
    "Float16OptimizerWithFloat16Params": _float16,
    "DistributedOptimizer": _distributed,
}
"""By exact class name: a subclass (LayerWiseDistributedOptimizer) keeps its state elsewhere."""


def derived_names(partitions: Sequence[Partition], named: dict[int, Named]) -> set[str]:
    """Return the FQNs of parameters that have a master: here or, under the distributed optimizer, on another rank."""
    elsewhere = {entry.fqn for entry in named.values() if getattr(entry.param, "main_param_sharded", False)}
    return elsewhere | {fqn for partition in partitions if partition.separate for fqn in partition.members}


# ------------------------------------------------------------------------------------------------------------ refusals


def refuse_unsupported(chunks: Sequence[Any], optimizer: Any) -> None:
    """Check the engine as a whole.

    Raises:
        UnsupportedLayout: a feature whose state this adapter cannot express; ``problems`` lists all of them.
    """
    problems = [f"{type(chunk).__name__}: Megatron's FSDP" for chunk in chunks if _is_fsdp(chunk)]
    wrappers = wrappers_of(optimizer)
    for wrapper in wrappers:
        name, config = type(wrapper).__name__, getattr(wrapper, "config", None)
        if name not in _BUILDERS:
            problems.append(f"{name}: expected {', '.join(sorted(_BUILDERS))} or a ChainedOptimizer of them")
        if "HybridDeviceOptimizer" in class_names(wrapper.optimizer):
            problems.append("HybridDeviceOptimizer (optimizer_cpu_offload): its masters are its own")
        if getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False):
            problems.append("use_precision_aware_optimizer: the masters are inside of the fused optimizer")
    kinds = sorted({type(wrapper.optimizer).__name__ for wrapper in wrappers if wrapper.optimizer is not None})
    if len(kinds) > 1:
        problems.append(f"a chain of different optimizers ({', '.join(kinds)})")
    if problems:
        raise UnsupportedLayout(f"{type(optimizer).__name__} cannot be saved or loaded", tuple(dict.fromkeys(problems)))


def _is_fsdp(chunk: Any) -> bool:
    names = {"FullyShardedDataParallel", "TorchFullyShardedDataParallel", "MegatronFSDP"}
    return bool(class_names(chunk) & names) or getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False)


def refuse_in_flight(chunks: Sequence[Any], *, loading: bool) -> None:
    """Check that no gradient or parameter is under way between the ranks.

    A backward pass without its step cannot be told: Megatron's gradient buffers keep their values until the next
    ``zero_grad_buffer()``.

    Raises:
        ConfigError: gradients are being reduced, or parameters are older than their masters (``overlap_param_gather``).
    """
    buckets = [
        bucket
        for chunk in chunks
        for bucket in (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ()))
    ]
    if any(bucket.grad_reduce_handle is not None for bucket in buckets):
        raise ConfigError("gradients are being reduced: save or load after optimizer.step()")
    for bucket in buckets:
        late = bucket.ddp_config.overlap_param_gather and not bucket.param_gather_dispatched and not loading
        if late or bucket.param_gather_handle is not None:
            raise ConfigError(
                "parameters are not gathered since the last step (overlap_param_gather): call "
                "start_param_sync(force_sync=True) on every model chunk before you save or load"
            )


# -------------------------------------------------------------------------------- writing back, in Megatron's own order


@torch.no_grad()
def rebuild_parameters(optimizer: Any) -> None:
    """Copy masters to the model's parameters and gather those, as every step does. A collective."""
    for wrapper in stepping(optimizer):
        if hasattr(wrapper, "_copy_main_params_to_model_params"):
            wrapper._copy_main_params_to_model_params()
    chunks = {id(chunk): chunk for wrapper in wrappers_of(optimizer) for chunk in getattr(wrapper, "model_chunks", ())}
    for chunk in chunks.values():
        chunk.start_param_sync(force_sync=True)
