"""The adapter protocol: what ``ckpt`` needs to know of a training engine, and all that it needs to know.

An adapter turns framework objects into :class:`LiveShard` (a box of a named global tensor and the live memory that
holds it) and plain Python state. Flat buffers, padding, partition arithmetic and gathered parameters end here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch

from ckpt.errors import ConfigError, UnsupportedLayout
from ckpt.layout.box import Box
from ckpt.layout.rules import Rules
from ckpt.layout.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Context:
    """What the user says of an engine beyond what its framework records; made by :class:`ckpt.Parallel`.

    ``groups``: axis (``tp``, ``dp``, ``pp``, …) -> the ranks of this rank's process group along it, in group order.
    ``rename``: name on this rank -> global name, in place of the rules' names.
    """

    rules: Rules = field(default_factory=Rules)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rename: Callable[[str], str] | None = None

    def name(self, local: str) -> str:
        """Return the global name of what this rank calls ``local``.

        Raises:
            ConfigError: the user's function failed or returned no name.
        """
        if self.rename is None:
            return self.rules.rename(local)
        try:
            name: Any = self.rename(local)
        except Exception as error:
            raise ConfigError(f"names({local!r}) raised {type(error).__name__}: {error}") from error
        if not (name and isinstance(name, str)):
            raise ConfigError(f"names({local!r}) returned {name!r}, expected the global name of that tensor")
        return name


SavedSpecs = Mapping[str, Mapping[str, "TensorSpec"]]
"""What a checkpoint holds: fqn -> role -> spec."""


@dataclass(frozen=True, slots=True)
class LiveShard:
    """One rank's piece of one tensor and the live memory that holds it.

    ``tensor`` has shape ``box.sizes`` and dtype ``spec.dtype``; on a load, writing into it must reach the engine,
    at once or in :meth:`EngineAdapter.refresh` / :meth:`EngineAdapter.finish`. ``owner``: the framework's own tensor (a
    ``DTensor``, a parameter) if ``tensor`` is not a view of it in torch's eyes: its version counter tells of writes.
    """

    spec: TensorSpec
    box: Box
    tensor: torch.Tensor
    owner: torch.Tensor | None = None


@dataclass(slots=True)
class EngineState:
    """What one rank holds.

    ``shards``: every piece, padding excluded. A ``param`` that has a ``master`` is listed too, and its FQN is in
    ``derived``. ``aliases``: tied name -> listed name. ``objects``: name -> tree of plain Python values and tensors
    (counters, scheduler, loss scaler, optimizer groups); a job's ranks have the same, or few variants (one a pipeline
    stage). ``groups``: axis -> the ranks of this rank's process group along it (``tp``, ``dp``, ``pp``, …); they are
    checked to tile the world. ``unused``: rules of the user that fit nothing on this rank; a rule that is unused on
    every rank is an error. ``assumed``: FQNs that count as whole on all tensor-parallel ranks because
    nobody, or only the user, says so; if their bytes turn out to differ, every rank's copy is kept.
    """

    shards: list[LiveShard] = field(default_factory=list)
    derived: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    assumed: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How the engine's ``objects`` and a checkpoint's differ, one line each.

    ``missing``: the engine has it, the checkpoint does not. ``unexpected``: the reverse; it counts if *all* ranks say
    it, because a pipeline stage has no place for what belongs to the others. ``conflicts``: both hold it,
    but arranged so that it cannot be carried over as it was.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """One tensor that a torch optimizer steps, and which elements of which global tensors lie where in it.

    ``optimizer``: whose ``step`` it is (of a ``ZeroRedundancyOptimizer`` the local one). ``key``: the tensor that
    stands in its ``param_groups`` and keys its state; flat or not, whole or a slice, maybe a ``DTensor``. ``group``:
    index in ``optimizer.param_groups``. ``members``: FQNs of everything in it, on all ranks that share it. ``places``:
    for a tensor with the local shape of ``key`` (its gradient) yields (fqn, shape of the global tensor, box, view):
    what this rank holds, padding excluded. ``shown``: the optimizer that the user and schedulers see; its groups are
    those of ``optimizer``, one for one.
    """

    optimizer: torch.optim.Optimizer
    key: torch.Tensor
    group: int
    members: tuple[str, ...]
    places: Callable[[torch.Tensor], Iterator[tuple[str, tuple[int, ...], Box, torch.Tensor]]]
    shown: torch.optim.Optimizer


@runtime_checkable
class ReplayableAdapter(Protocol):
    """An adapter whose engine's optimizer steps can be logged and repeated (:mod:`ckpt.gradlog`)."""

    def stepped(self) -> list[Stepped]:
        """Return what the optimizers step on this rank, in an order that is the same in every process of this job.

        Raises:
            UnsupportedLayout: as ``describe``.
        """

    def modules(self) -> list[torch.nn.Module]:
        """Return all modules of the user's that this rank runs; their buffers may be replaced while it trains."""

    def counters(self) -> dict[str, Any]:
        """Return what of :attr:`EngineState.objects` changes from step to step, without the optimizer's groups."""

    def replayed(self, objects: Sequence[Mapping[str, Any]]) -> list[str]:
        """Rebuild what follows from the stepped tensors, and put back ``objects``. May be a collective.

        ``objects``: :attr:`EngineState.objects` of the checkpoint, as ``finish`` gets them, with the counters behind
        the last step that was repeated.

        Returns:
            Notes, as :meth:`EngineAdapter.finish`.
        """


@runtime_checkable
class EndsSteps(Protocol):
    """An adapter that knows where a training step ends, so that the loop need not say it."""

    def at_step_end(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have ``call`` called behind all that changes in a step, and before the loop takes its next batch.

        Returns:
            A function that ends it, and leaves the engine as it was.

        Raises:
            ConfigError: it cannot be told where that is.
        """


@runtime_checkable
class EngineAdapter(Protocol):
    """One live engine on one rank.

    A load calls, on all ranks alike: ``describe_for_load`` → ``compare`` → (tensors are written into the shards'
    memory) → ``refresh`` → (stored, non-derived ``param`` pieces are written) → ``finish``.
    """

    kind: str
    """Name of the adapter as it is written to the manifest, e.g. ``"deepspeed"``.

    An adapter may also have ``stepped_by_torch = True``: nothing but buffers changes between two optimizer steps, and
    all steps go through ``torch.optim.Optimizer.step``. Otherwise ``ckpt.async_save`` copies all shards in the call.
    """

    def step(self) -> int:
        """Return the optimizer step that the state stands at."""

    def describe(self) -> EngineState:
        """Return what this rank holds. No collective, no copy of tensors, no change of the engine.

        Raises:
            UnsupportedLayout: a tensor cannot be expressed; the message names it.
            ConfigError: gradients are pending: the engine is between a backward pass and the step that uses it.
        """

    def describe_for_load(self, saved: SavedSpecs) -> EngineState:
        """Return the pieces to be written, without changing the engine: the load may still be refused.

        Optimizer state that a fresh engine does not have yet is allocated beside it, with the roles and dtypes that
        ``saved`` names, and handed over in :meth:`refresh`; state that ``saved`` lacks altogether (a checkpoint from
        before the first step) is dropped there.
        """

    def compare(self, objects: Sequence[Mapping[str, Any]]) -> Mismatch:
        """Return what :meth:`finish` could not put back, while the load can still be refused.

        ``objects``: what the ranks of the saved job had as :attr:`EngineState.objects`, equal ones once, this rank's
        own (the rank of the same number, modulo the saved world) first. No collective, no change of the engine. With
        ``strict`` a load ends here if there is anything; otherwise :meth:`finish` is called with the same objects and
        has to make the best of them.
        """

    def refresh(self) -> None:
        """Take over what was written and rebuild derived copies (low-precision parameters). May be a collective."""

    def finish(self, objects: Sequence[Mapping[str, Any]]) -> list[str]:
        """Put back ``objects`` and make the engine ready to train. May be a collective.

        Returns:
            Notes for the report: anything that could not be carried over as it was, in plain words.
        """

    def module(self) -> torch.nn.Module | None:
        """Return the module that runs forward, so that a half-loaded engine can be made to refuse (None: has none)."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return this project's name of a torch dtype (``torch.bfloat16`` -> ``"bfloat16"``)."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of one of :data:`ckpt.layout.spec.ITEMSIZE`'s names."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedLayout(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return found
