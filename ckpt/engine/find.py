"""From a user's engine to its adapter."""

from __future__ import annotations

from ckpt.engine.base import Context, EngineAdapter
from ckpt.engine.megatron import MegatronAdapter, is_megatron
from ckpt.engine.parallel import Parallel
from ckpt.engine.torch_engine import TorchAdapter
from ckpt.engine.torch_parts import is_torch
from ckpt.errors import ConfigError

_METHODS = ("kind", "step", "describe", "describe_for_load", "compare", "refresh", "finish", "module")


def adapter_for(engine: object) -> EngineAdapter:
    """Return the adapter of ``engine``; an object that is an adapter itself (a user's own) is returned as it is.

    Raises:
        ConfigError: no adapter knows this type, or an adapter of the user's own lacks a method or comes with rules that
            it would not see.
    """
    context = Context()
    if isinstance(engine, Parallel):
        context, engine = engine.context, engine.engine
    if isinstance(engine, EngineAdapter):
        if context != Context():
            raise ConfigError(
                f"ckpt.Parallel around an adapter of type {type(engine).__name__}: rules, groups and names would not "
                f"reach it; expected the adapter to name groups and tensors itself"
            )
        return engine
    # By name: DeepSpeed takes seconds to import and need not be installed to save another engine.
    if any(cls.__name__ == "DeepSpeedEngine" for cls in type(engine).__mro__):
        from ckpt.engine.deepspeed import DeepSpeedAdapter

        return DeepSpeedAdapter(engine, context)
    if is_megatron(engine):  # before torch's: it is a tuple too
        return MegatronAdapter(engine, context)
    if is_torch(engine):
        return TorchAdapter(engine, context)
    lacking = [name for name in _METHODS if not hasattr(engine, name)]
    if len(lacking) < len(_METHODS) / 2:  # meant as an adapter
        raise ConfigError(f"an adapter of type {type(engine).__name__} lacks {', '.join(lacking)}")
    raise ConfigError(
        f"no adapter for an engine of type {type(engine).__module__}.{type(engine).__qualname__}: expected a "
        f"deepspeed.DeepSpeedEngine, a tuple like (model, optimizer), or an object with the methods of "
        f"ckpt.engine.base.EngineAdapter"
    )
