"""The adapter for ``deepspeed.DeepSpeedEngine``: ZeRO 0–3, fp32, bf16 and fp16, optimizer and parameters on GPU or CPU.

With tensor, pipeline, expert and sequence parallelism (docs/engines.md). DeepSpeed itself is never imported: its
classes are recognized by name. What things are called is in ``deepspeed_naming``, who shares what in
``deepspeed_mesh``, where state lives in ``deepspeed_layout``, plain values in ``deepspeed_objects``, what is refused in
``deepspeed_refuse``; optimizer state and groups are read as those of every other engine (``shared_state``,
``shared_groups``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.engine.base import Context, EngineState, LiveShard, dtype_name
from ckpt.engine.deepspeed_ending import at_step_end
from ckpt.engine.deepspeed_layout import (
    after_writing,
    before_writing,
    clear_parameter_padding,
    inner_optimizer,
    parameter_views,
    partitions_of,
    rebuild_low_precision,
    relink_state,
)
from ckpt.engine.deepspeed_naming import Naming
from ckpt.engine.deepspeed_objects import capture_counters, capture_objects, compare_objects, restore_objects
from ckpt.engine.deepspeed_refuse import (
    refuse_mid_accumulation,
    refuse_pending_gradients,
    refuse_unsupported,
)
from ckpt.engine.deepspeed_running import multiply_up
from ckpt.engine.shared_check import check_tensor
from ckpt.engine.shared_partition import stepped_of
from ckpt.engine.shared_shards import master_shards, tensor_shards
from ckpt.engine.shared_state import StateLoad, state_shards
from ckpt.errors import ConfigError
from ckpt.layout.spec import BUFFER, PARAM, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from ckpt.engine.base import Mismatch, SavedSpecs, Stepped
    from ckpt.engine.shared_partition import Named, Partition


class DeepSpeedAdapter:
    """One ``DeepSpeedEngine`` on one rank; see :class:`ckpt.engine.base.EngineAdapter`.

    Every shard's tensor is a view of the engine's own memory, so a load changes no ``data_ptr`` of a parameter, master
    or moment. The exceptions: a scalar of the optimizer state (``step``), which :meth:`finish` puts back, and under
    ZeRO-3 the gathered copies of persistent parameters, whose memory is DeepSpeed's to move (its own steps do): there
    it is the partitions (``ds_tensor``), masters and moments that stay where they are.
    """

    kind = "deepspeed"
    stepped_by_torch = True

    def __init__(self, engine: Any, context: Context | None = None) -> None:
        self._engine = engine
        self._context = context or Context()
        self._loading: StateLoad | None = None
        self._names: tuple[Naming, list[Partition]] | None = None

    def step(self) -> int:
        """Return the number of optimizer steps taken, skipped ones (fp16 overflow) included."""
        return int(self._engine.global_steps)

    def module(self) -> torch.nn.Module:
        """Return the user's module; the engine calls it in every forward."""
        module: torch.nn.Module = self._engine.module
        return module

    def describe(self) -> EngineState:
        """Return what this rank holds.

        Raises:
            UnsupportedLayout: a feature, parameter, buffer or state entry that cannot be expressed; it is named.
            ConfigError: gradients are pending, of a half-done accumulation window or before its step.
        """
        state, naming, partitions = self._survey()
        inner = inner_optimizer(self._engine.optimizer)
        state.shards += _parameter_shards(naming.named.values())
        for partition in partitions:
            state.shards += master_shards(partition)
            state.shards += state_shards(inner, partition)
        state.objects = capture_objects(self._engine, partitions, naming)
        return state

    def describe_for_load(self, saved: SavedSpecs) -> EngineState:
        """Return the pieces to be written; ``objects`` is empty. The engine is not touched.

        Raises:
            UnsupportedLayout, ConfigError: as :meth:`describe`.
        """
        state, naming, partitions = self._survey()
        state.shards += _parameter_shards(naming.named.values())
        self._loading = StateLoad(inner_optimizer(self._engine.optimizer), saved)
        for partition in partitions:
            state.shards += master_shards(partition)
            state.shards += self._loading.prepare(partition)
        return state

    def compare(self, objects: Sequence[Mapping[str, Any]]) -> Mismatch:
        """Return what is stepped on one side only or in other groups, and modules whose extra state is."""
        naming = Naming.of(self._engine, self._context)
        partitions = partitions_of(self._engine.optimizer, naming.named)
        return compare_objects(self._engine, partitions, naming, objects)

    def refresh(self) -> None:
        """Hand over new optimizer state and rebuild the parameters from the masters. A collective under ZeRO-1 and 2.

        Under ZeRO-3 gathered parameters are dropped until :meth:`finish`.
        """
        before_writing(self._engine.optimizer)
        if self._loading is not None:
            self._loading.attach()
        naming = Naming.of(self._engine, self._context)
        clear_parameter_padding((*naming.named.values(), *naming.buffers))
        rebuild_low_precision(self._engine.optimizer)

    def finish(self, objects: Sequence[Mapping[str, Any]]) -> list[str]:
        """Put back optimizer scalars, hyperparameters, counters, scheduler and loss scaler. A collective under ZeRO-3.

        Raises:
            LayoutError: scalars of parameters that share a partition do not fit together.
        """
        if self._loading is None:
            raise ConfigError("finish() without describe_for_load(): nothing is being loaded")
        loading, self._loading = self._loading, None
        optimizer = self._engine.optimizer
        # First: whatever fails below may fail on some ranks only, and they must not leave the others in a collective.
        after_writing(optimizer)
        naming = Naming.of(self._engine, self._context)
        partitions = partitions_of(optimizer, naming.named)
        notes = loading.finish()
        notes += restore_objects(self._engine, partitions, naming, objects)
        relink_state(optimizer, all(loading.inner.state.get(p.key) for p in partitions))
        multiply_up(loading.inner, partitions)
        return notes

    def stepped(self) -> list[Stepped]:
        """Return this rank's masters, or parameters without them; see :class:`ckpt.engine.base.ReplayableAdapter`."""
        _, _, partitions = self._survey()
        inner = inner_optimizer(self._engine.optimizer)
        return [] if inner is None else stepped_of(inner, partitions)

    def modules(self) -> list[torch.nn.Module]:
        """Return the user's module."""
        return [self.module()]

    def counters(self) -> dict[str, Any]:
        """Return counters, scheduler and loss scaler as they are now."""
        return capture_counters(self._engine, self._named()[0])

    def replayed(self, objects: Sequence[Mapping[str, Any]]) -> list[str]:
        """Rebuild the parameters from the masters and put back counters and hyperparameters. A collective."""
        optimizer = self._engine.optimizer
        before_writing(optimizer)
        rebuild_low_precision(optimizer)
        after_writing(optimizer)
        self._names = None
        naming, partitions = self._named()
        notes = restore_objects(self._engine, partitions, naming, objects)
        inner = inner_optimizer(optimizer)
        relink_state(optimizer, all(inner.state.get(p.key) for p in partitions))
        return notes

    def at_step_end(self, call: Callable[[], None]) -> Callable[[], None]:
        """See :class:`ckpt.engine.base.EndsSteps`, and :func:`ckpt.engine.deepspeed_ending.at_step_end`."""
        return at_step_end(self._engine, inner_optimizer(self._engine.optimizer), call)

    def _named(self) -> tuple[Naming, list[Partition]]:
        """Return names and partitions, worked out once: who asks in every step has an engine that stays as it is."""
        if self._names is None:
            naming = Naming.of(self._engine, self._context)
            self._names = naming, partitions_of(self._engine.optimizer, naming.named)
        return self._names

    def _survey(self) -> tuple[EngineState, Naming, list[Partition]]:
        naming = Naming.of(self._engine, self._context)
        refuse_unsupported(self._engine, naming.problems)
        refuse_mid_accumulation(self._engine)
        named = naming.named
        partitions = partitions_of(self._engine.optimizer, named)
        stepped = {fqn for partition in partitions for fqn in partition.members}
        refuse_pending_gradients(self._engine, [entry.param for entry in named.values() if entry.fqn in stepped])
        state = EngineState(aliases=naming.aliases, groups=naming.mesh.groups, unused=naming.tiler.unused())
        state.assumed = naming.tiler.assumed
        state.derived = {fqn for partition in partitions if partition.separate for fqn in partition.members}
        state.shards += tensor_shards(naming.buffers, BUFFER)
        return state, naming, partitions


def _parameter_shards(named: Iterable[Named]) -> Iterator[LiveShard]:
    for entry in named:
        tensor = getattr(entry.param, "ds_tensor", entry.param)
        check_tensor(entry.fqn, PARAM, tensor)
        spec = TensorSpec(entry.fqn, PARAM, dtype_name(tensor.dtype), entry.shape)
        for box, view in parameter_views(entry):
            yield LiveShard(spec, box, view)
