"""The adapter for plain torch loops: DDP, FSDP2, HSDP, DTensor and Megatron-style TP, ZeRO, pipelining.

What an engine consists of is told apart in ``torch_parts``, where tensors belong in ``torch_layout``; optimizer state
and groups are read as those of every other engine (``shared_state``, ``shared_groups``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ckpt.engine.base import Context, EngineState
from ckpt.engine.shared_check import local_tensor
from ckpt.engine.shared_partition import clear_padding, stepped_of
from ckpt.engine.shared_shards import tensor_shards
from ckpt.engine.shared_state import NOT_OPTIMIZER_STATE, StateLoad, state_shards
from ckpt.engine.torch_ending import at_step_end
from ckpt.engine.torch_layout import inner_optimizer, layout_of
from ckpt.engine.torch_names import fsdp_modules
from ckpt.engine.torch_objects import capture_counters, capture_objects, compare_objects, restore_objects
from ckpt.engine.torch_parts import parts_of
from ckpt.errors import ConfigError, UnsupportedLayout
from ckpt.layout.spec import BUFFER, PARAM

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ckpt.engine.base import Mismatch, SavedSpecs, Stepped
    from ckpt.engine.shared_partition import Partition
    from ckpt.engine.torch_layout import Layout


class TorchAdapter:
    """The objects of one torch training loop on one rank; see :class:`ckpt.engine.base.EngineAdapter`.

    To be called between ``optimizer.step()`` and the next backward pass. Gradients are not looked at: nothing tells
    those that a step has used up from those that wait for one, and most loops clear them only before the next pass.

    Every shard's tensor is a view of live memory, so a load changes no ``data_ptr`` of a parameter, buffer or moment.

    Raises:
        ConfigError: ``engine`` is not made of what :func:`ckpt.engine.torch_parts.parts_of` knows.
    """

    kind = "torch"
    stepped_by_torch = True

    def __init__(self, engine: object, context: Context | None = None) -> None:
        self._parts = parts_of(engine)
        self._context = context or Context()
        self._loading: tuple[Layout, list[StateLoad]] | None = None
        self._layout: Layout | None = None

    def step(self) -> int:
        """Return the largest ``step`` in the optimizers' state, else a scheduler's ``last_epoch``, else 0.

        A torch loop counts its steps in a variable of its own: pass that as ``step=`` if a rank may have no optimizer
        state (a ``ZeroRedundancyOptimizer`` with fewer parameters than ranks), if the optimizer keeps no ``step`` (SGD)
        or some step was skipped (GradScaler), because all ranks must come to the same number.
        """
        states = [state for one in self._parts.optimizers for state in inner_optimizer(one).state.values()]
        counts = [int(state["step"]) for state in states if _is_count(state.get("step"))]
        epochs = [one.last_epoch for one in self._parts.schedulers if type(getattr(one, "last_epoch", None)) is int]
        return max(counts or epochs, default=0)

    def module(self) -> torch.nn.Module:
        """Return the user's module; of several stages on a rank the first, without which none can run."""
        return self._parts.models[0].module

    def describe(self) -> EngineState:
        """Return what this rank holds.

        Raises:
            UnsupportedLayout: tensors, optimizer state or features that cannot be expressed; ``problems`` lists all.
        """
        layout, state = self._survey()
        for optimizer, partitions in zip(self._parts.optimizers, layout.partitions, strict=True):
            for partition in partitions:
                try:
                    state.shards += state_shards(inner_optimizer(optimizer), partition) if partition.pieces else ()
                except UnsupportedLayout as error:
                    layout.tiler.problems.append(str(error))
        layout.tiler.check("this engine", state.groups, apart=len(state.groups.get("pp", ())) > 1)
        state.objects = capture_objects(self._parts, layout, self.step())
        return state

    def describe_for_load(self, saved: SavedSpecs) -> EngineState:
        """Return the pieces to be written; ``objects`` is empty. The engine is not touched.

        Raises:
            UnsupportedLayout: as :meth:`describe`.
        """
        layout, state = self._survey({fqn for fqn, specs in saved.items() if specs.keys() - NOT_OPTIMIZER_STATE})
        layout.tiler.check("this engine", state.groups, apart=len(state.groups.get("pp", ())) > 1)
        loads = [StateLoad(inner_optimizer(one), saved) for one in self._parts.optimizers]
        for load, partitions in zip(loads, layout.partitions, strict=True):
            for partition in partitions:
                state.shards += load.prepare(partition)
        self._loading = layout, loads
        return state

    def compare(self, objects: Sequence[Mapping[str, Any]]) -> Mismatch:
        """Return what is stepped on one side only or in other groups, and modules whose extra state is."""
        layout = self._loading[0] if self._loading else layout_of(self._parts, self._context)
        return compare_objects(self._parts, layout, objects)

    def refresh(self) -> None:
        """Hand over new optimizer state, clear padding, and drop gathered copies of FSDP2 parameters."""
        layout, loads = self._being_loaded()
        for load in loads:
            load.attach()
        clear_padding((*layout.named.values(), *layout.buffers))
        for part in self._parts.models:
            for module in fsdp_modules(part.module):
                module.reshard()

    def finish(self, objects: Sequence[Mapping[str, Any]]) -> list[str]:
        """Put back optimizer scalars, hyperparameters, schedulers, gradient scaler and extra state."""
        layout, loads = self._being_loaded()
        self._loading = None
        notes = [note for load in loads for note in load.finish()]
        return notes + restore_objects(self._parts, layout, objects)

    def stepped(self) -> list[Stepped]:
        """Return this rank's parts of what the optimizers step; see :class:`ckpt.engine.base.ReplayableAdapter`."""
        layout, state = self._survey()
        layout.tiler.check("this engine", state.groups, apart=len(state.groups.get("pp", ())) > 1)
        found = zip(self._parts.optimizers, layout.partitions, strict=True)
        return [one for optimizer, partitions in found for one in _stepped(optimizer, partitions)]

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules of all stages."""
        return [part.module for part in self._parts.models]

    def counters(self) -> dict[str, Any]:
        """Return schedulers, gradient scaler and extra state as they are now."""
        if self._layout is None:
            self._layout = layout_of(self._parts, self._context)
        return capture_counters(self._parts, self._layout, self.step())

    def replayed(self, objects: Sequence[Mapping[str, Any]]) -> list[str]:
        """Bring together what each rank has stepped, and put back hyperparameters and schedulers.

        A collective where there is a ``ZeroRedundancyOptimizer``.
        """
        for optimizer in self._parts.optimizers:
            if inner_optimizer(optimizer) is not optimizer:
                optimizer._sync_params()
        for part in self._parts.models:
            for module in fsdp_modules(part.module):
                module.reshard()
        return restore_objects(self._parts, layout_of(self._parts, self._context), objects)

    def at_step_end(self, call: Callable[[], None]) -> Callable[[], None]:
        """See :class:`ckpt.engine.base.EndsSteps`, and :func:`ckpt.engine.torch_ending.at_step_end`."""
        return at_step_end(self._parts, call)

    def _being_loaded(self) -> tuple[Layout, list[StateLoad]]:
        if self._loading is None:
            raise ConfigError("refresh() or finish() without describe_for_load(): nothing is being loaded")
        return self._loading

    def _survey(self, stated: Collection[str] = ()) -> tuple[Layout, EngineState]:
        layout = layout_of(self._parts, self._context, stated)
        state = EngineState(aliases=layout.aliases, unused=layout.tiler.unused(), groups=dict(self._context.groups))
        state.assumed = layout.tiler.assumed
        if self._parts.pipeline:
            state.groups.setdefault("pp", self._parts.pipeline)
        if not layout.tiler.problems:  # a wrong tiling has no views
            state.shards += tensor_shards(layout.named.values(), PARAM)
            state.shards += tensor_shards(layout.buffers, BUFFER)
        return layout, state


def _stepped(optimizer: Any, partitions: list[Partition]) -> list[Stepped]:
    # Of a ZeroRedundancyOptimizer also what other ranks step: nothing of it is held here, and it is known by name.
    return stepped_of(inner_optimizer(optimizer), partitions, optimizer)


def _is_count(value: object) -> bool:
    return type(value) in (int, float) or (isinstance(value, torch.Tensor) and local_tensor(value).numel() == 1)
