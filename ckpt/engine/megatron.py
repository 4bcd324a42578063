"""The adapter for Megatron-core: ``(model chunks, optimizer)`` or ``(model chunks, optimizer, scheduler)``.

Tensor, pipeline (virtual stages too), expert and context parallelism; the plain and the distributed optimizer. Megatron
itself is never imported: its classes are recognized by name. Names and tilings are in ``megatron_model``, where state
lives in ``megatron_optimizer``, plain values in ``megatron_objects``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from ckpt.engine.base import Context, EngineState
from ckpt.engine.megatron_ending import at_step_end
from ckpt.engine.megatron_model import Survey, axis_groups, survey
from ckpt.engine.megatron_objects import (
    capture_counters,
    capture_objects,
    compare_objects,
    restore_objects,
    steps_taken,
)
from ckpt.engine.megatron_optimizer import (
    derived_names,
    inner_optimizer,
    partitions_of,
    rebuild_parameters,
    refuse_in_flight,
    refuse_unsupported,
    stepping,
)
from ckpt.engine.shared_check import class_names
from ckpt.engine.shared_partition import clear_padding, stepped_of
from ckpt.engine.shared_shards import master_shards, tensor_shards
from ckpt.engine.shared_state import StateLoad, state_shards
from ckpt.errors import ConfigError
from ckpt.layout.spec import BUFFER, PARAM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from ckpt.engine.base import Mismatch, SavedSpecs, Stepped
    from ckpt.engine.shared_partition import Partition


def is_megatron(engine: object) -> TypeGuard[tuple[Any, ...]]:
    """Is this a model with an optimizer of Megatron-core?"""
    return isinstance(engine, tuple) and len(engine) in (2, 3) and "MegatronOptimizer" in class_names(engine[1])


class MegatronAdapter:
    """A Megatron-core model and its optimizer on one rank; see :class:`ckpt.engine.base.EngineAdapter`.

    Args:
        engine: ``(model, optimizer)`` or ``(model, optimizer, scheduler)``; ``model`` is a module or a list of virtual
            pipeline chunks, wrapped as it is trained.
        context: what the user says beyond it: a rule with ``size`` for a padded vocabulary, names, groups.

    Every shard's tensor is a view of the engine's own memory, but for scalars of the optimizer state (``step``), which
    :meth:`finish` puts back.
    """

    kind = "megatron"
    stepped_by_torch = True

    def __init__(self, engine: tuple[Any, ...], context: Context | None = None) -> None:
        model, self._optimizer, *rest = engine
        self._chunks = list(model) if isinstance(model, list | tuple) else [model]
        self._scheduler = rest[0] if rest else None
        self._context = context or Context()
        self._loading: StateLoad | None = None
        self._found: Survey | None = None

    def step(self) -> int:
        """Return the number of optimizer steps taken; skipped ones (fp16 overflow) are not counted by Megatron."""
        return steps_taken(self._optimizer)

    def module(self) -> torch.nn.Module:
        """Return the first model chunk; every forward pass runs it."""
        module: torch.nn.Module = self._chunks[0]
        return module

    def describe(self) -> EngineState:
        """Return what this rank holds.

        Raises:
            UnsupportedLayout: a feature, parameter, buffer or state entry that cannot be expressed; it is named.
            ConfigError: gradients or parameters are under way between the ranks.
        """
        state, found, partitions = self._survey(loading=False)
        inner = inner_optimizer(self._optimizer)
        for partition in partitions:
            state.shards += master_shards(partition)
            state.shards += state_shards(inner, partition)
        state.objects = capture_objects(self._optimizer, self._scheduler, found, partitions, self._context)
        return state

    def describe_for_load(self, saved: SavedSpecs) -> EngineState:
        """Return the pieces to be written; ``objects`` is empty. The engine is not touched.

        Raises:
            UnsupportedLayout, ConfigError: as :meth:`describe`.
        """
        state, _, partitions = self._survey(loading=True)
        self._loading = StateLoad(inner_optimizer(self._optimizer), saved)
        for partition in partitions:
            state.shards += master_shards(partition)
            state.shards += self._loading.prepare(partition)
        return state

    def compare(self, objects: Sequence[Mapping[str, Any]]) -> Mismatch:
        """Return what is stepped on one side only or in other groups, and modules whose extra state is."""
        found = survey(self._chunks, self._context)
        partitions = partitions_of(self._optimizer, found.named)
        return compare_objects(self._optimizer, self._scheduler, found, partitions, objects)

    def refresh(self) -> None:
        """Hand over new optimizer state, clear padding, and rebuild the parameters from the masters.

        A collective under the distributed optimizer, where each rank has masters of its range only.
        """
        if self._loading is not None:
            self._loading.attach()
        found = survey(self._chunks, self._context)
        clear_padding((*found.named.values(), *found.buffers))
        rebuild_parameters(self._optimizer)

    def finish(self, objects: Sequence[Mapping[str, Any]]) -> list[str]:
        """Put back optimizer scalars, hyperparameters, scheduler, loss scaler and generators. No collective.

        Raises:
            LayoutError: scalars of parameters that share a partition do not fit together.
        """
        if self._loading is None:
            raise ConfigError("finish() without describe_for_load(): nothing is being loaded")
        loading, self._loading = self._loading, None
        found = survey(self._chunks, self._context)
        partitions = partitions_of(self._optimizer, found.named)
        notes = loading.finish()
        return notes + restore_objects(self._optimizer, self._scheduler, found, partitions, self._context, objects)

    def stepped(self) -> list[Stepped]:
        """Return this rank's masters, or parameters without them; see :class:`ckpt.engine.base.ReplayableAdapter`."""
        _, _, partitions = self._survey(loading=False)
        found: list[Stepped] = []
        first = 0
        for wrapper in stepping(self._optimizer):
            inner, last = wrapper.optimizer, first + len(wrapper.optimizer.param_groups)
            own = [replace(one, group=one.group - first) for one in partitions if first <= one.group < last]
            found += stepped_of(inner, own)
            first = last
        return found

    def modules(self) -> list[torch.nn.Module]:
        """Return all model chunks."""
        return list(self._chunks)

    def counters(self) -> dict[str, Any]:
        """Return scheduler, loss scaler, modules' extra state and generators as they are now."""
        if self._found is None or self._found.extras:  # extra state is looked up with all the names
            self._found = survey(self._chunks, self._context)
        return capture_counters(self._optimizer, self._scheduler, self._found, self._context)

    def replayed(self, objects: Sequence[Mapping[str, Any]]) -> list[str]:
        """Rebuild the parameters from the masters and put back what goes with the step. A collective, as `refresh`."""
        rebuild_parameters(self._optimizer)
        found = survey(self._chunks, self._context)
        partitions = partitions_of(self._optimizer, found.named)
        return restore_objects(self._optimizer, self._scheduler, found, partitions, self._context, objects)

    def at_step_end(self, call: Callable[[], None]) -> Callable[[], None]:
        """See :class:`ckpt.engine.base.EndsSteps`, and :func:`ckpt.engine.megatron_ending.at_step_end`."""
        return at_step_end(self._optimizer, self._scheduler, call)

    def _survey(self, *, loading: bool) -> tuple[EngineState, Survey, list[Partition]]:
        refuse_unsupported(self._chunks, self._optimizer)
        refuse_in_flight(self._chunks, loading=loading)
        found = survey(self._chunks, self._context)
        partitions = partitions_of(self._optimizer, found.named)
        state = EngineState(aliases=found.aliases, groups=axis_groups(self._context), unused=found.unused)
        state.assumed = found.assumed
        state.derived = derived_names(partitions, found.named)
        state.shards += tensor_shards(found.named.values(), PARAM)
        state.shards += tensor_shards(found.buffers, BUFFER)
        return state, found, partitions
