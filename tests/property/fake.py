"""A training engine that is nothing but tensors in a layout, and jobs whose ranks are threads.

Every element of every tensor has a value that tells where it belongs, so that a misplaced one shows. A job's ranks
share a ``HashStore``, exactly what a real job's rendezvous offers, and no process group.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from ckpt.engine.base import EngineState, LiveShard, Mismatch, torch_dtype
from ckpt.layout.box import Box, boxes_of_range, overlaps
from ckpt.layout.spec import BUFFER, ITEMSIZE, MASTER, PARAM, TensorSpec
from ckpt.runtime import behind
from ckpt.runtime.comm import Comm
from ckpt.runtime.staging import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Key = tuple[str, str]
PADDING = 0x5A
"""Every byte of padding: must never be found in a file or in a tensor."""


def numbered(dtype: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """A tensor whose element's bits are its global index plus ``seed`` thousands (as far as the dtype is wide)."""
    count = prod(shape)
    if dtype == "bool":
        return ((torch.arange(count) + seed) % 3 == 0).reshape(tuple(shape))
    size = ITEMSIZE[dtype]
    words = (torch.arange(count, dtype=torch.int64) + 1 + seed * 100_003).reshape(-1, 1)
    shifts = torch.arange(size, dtype=torch.int64) * 8
    raw = ((words >> shifts.clamp(max=56)) & 0xFF).to(torch.uint8)
    if size > 8:
        raw[:, 8:] = 0x11
    return raw.reshape(-1).view(torch_dtype(dtype)).reshape(tuple(shape))


def weights(shape: Sequence[int], seed: int) -> torch.Tensor:
    """An fp32 master with bits below bf16, each element different."""
    count = prod(shape)
    return (seed + (1 + torch.arange(count, dtype=torch.float32)) * 1.0009765625).reshape(tuple(shape))


@dataclass
class Model:
    """A global state: what all ranks together hold."""

    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    derived: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    def spec(self, key: Key) -> TensorSpec:
        tensor = self.tensors[key]
        return TensorSpec(*key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def nbytes(self) -> int:
        """Bytes of one copy of everything that is not derived."""
        return sum(t.numel() * t.element_size() for k, t in self.tensors.items() if not self.is_derived(k))

    def is_derived(self, key: Key) -> bool:
        return key[1] == PARAM and key[0] in self.derived


Layout = dict[Key, list[list[Box]]]
"""tensor -> for each rank the boxes that it holds"""


def cut(kind: str, shape: Sequence[int], world: int, shift: int = 0) -> list[list[Box]]:
    """Distribute a tensor over ranks in one of the ways that real engines use."""
    whole = Box.whole(shape)
    volume = whole.volume
    nothing: list[list[Box]] = [[] for _ in range(world)]
    if kind == "replicated" or volume == 0:
        return [[whole] for _ in range(world)]
    if kind == "one":
        nothing[shift % world] = [whole]
        return nothing
    if kind == "flat":  # ZeRO: alignment makes the partition uneven, the last ranks may get nothing
        part = -(-volume // world) + shift % 3
        return [boxes_of_range(shape, min(r * part, volume), min((r + 1) * part, volume)) for r in range(world)]
    if kind in ("rows", "columns"):
        dim = 0 if kind == "rows" else len(shape) - 1
        if not shape:
            return cut("one", shape, world, shift)
        part = -(-shape[dim] // world)
        for rank in range(world):
            low, high = min(rank * part, shape[dim]), min((rank + 1) * part, shape[dim])
            if high > low:
                offsets = tuple(low if d == dim else 0 for d in range(len(shape)))
                sizes = tuple(high - low if d == dim else n for d, n in enumerate(shape))
                nothing[rank].append(Box(offsets, sizes))
        return nothing
    if kind == "interleaved":  # fused gate/up: each rank holds a slice of both halves
        if not shape or shape[0] < 2:
            return cut("one", shape, world, shift)
        half = shape[0] // 2
        for start, stop in ((0, half), (half, shape[0])):
            part = -(-(stop - start) // world)
            for rank in range(world):
                low, high = min(start + rank * part, stop), min(start + (rank + 1) * part, stop)
                if high > low:
                    nothing[rank].append(Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])))
        return nothing
    if kind == "pairs":  # HSDP: two halves of the job hold the same, cut by flat range inside
        groups = 2 if world % 2 == 0 else 1
        inner = cut("flat", shape, world // groups, shift)
        return inner * groups
    raise ValueError(kind)


KINDS = ("replicated", "one", "flat", "rows", "columns", "interleaved", "pairs")


class FakeEngine:
    """One rank's adapter. ``peers``: the engines of all ranks, filled in by :func:`engines`."""

    kind = "fake"
    stepped_by_torch = True

    def __init__(self, model: Model, layout: Layout, rank: int, *, filled: bool, at_step: int = 1) -> None:
        self.model, self.rank, self.at_step = model, rank, at_step
        self.peers: list[FakeEngine] = [self]
        self.finished: Mapping[str, Any] | None = None
        self.notes: list[str] = []
        self.assumed: set[str] = set()
        self.buffers: list[torch.Tensor] = []
        self.the_module: torch.nn.Module | None = None
        self.shards: list[LiveShard] = []
        for number, (key, ranks) in enumerate(layout.items()):
            spec = model.spec(key)
            for box in ranks[rank]:
                live = self._memory(spec, box, number)
                if filled:
                    live.copy_(model.tensors[key][box.relative_to(Box.whole(spec.shape))])
                self.shards.append(LiveShard(spec, box, live))

    def _memory(self, spec: TensorSpec, box: Box, number: int) -> torch.Tensor:
        """Padded on both sides, and for every third tensor transposed in memory."""
        size = spec.itemsize
        buffer = torch.full((box.volume * size + 8 * size,), PADDING, dtype=torch.uint8)
        self.buffers.append(buffer)
        flat = buffer[4 * size : 4 * size + box.volume * size].view(torch_dtype(spec.dtype))
        if number % 3 == 2 and box.ndim > 1:
            return flat.reshape(box.sizes[::-1]).permute(*range(box.ndim - 1, -1, -1))
        return flat.reshape(box.sizes)

    def step(self) -> int:
        return self.at_step

    def describe(self) -> EngineState:
        return EngineState(
            list(self.shards),
            set(self.model.derived),
            dict(self.model.aliases),
            dict(self.model.objects),
            assumed=set(self.assumed),
        )

    def describe_for_load(self, saved: Mapping[str, Mapping[str, TensorSpec]]) -> EngineState:
        return self.describe()

    def compare(self, objects: Sequence[Mapping[str, Any]]) -> Mismatch:
        return Mismatch()

    def refresh(self) -> None:
        """Params from the masters of all ranks, as an all-gather would bring them."""
        for mine in self.shards:
            if mine.spec.role != PARAM or mine.spec.fqn not in self.model.derived:
                continue
            masters = [s for e in self.peers for s in e.shards if s.spec.key == (mine.spec.fqn, MASTER)]
            for m, _, common in overlaps([s.box for s in masters], [mine.box]):
                source = masters[m].tensor[common.relative_to(masters[m].box)]
                mine.tensor[common.relative_to(mine.box)].copy_(source)

    def finish(self, objects: Sequence[Mapping[str, Any]]) -> list[str]:
        self.finished = objects[0] if objects else {}
        return list(self.notes)

    def module(self) -> torch.nn.Module | None:
        return self.the_module

    def differences(self) -> list[str]:
        """Where this rank's memory is not what the model says, padding included."""
        wrong = []
        for shard in self.shards:
            wanted = self.model.tensors[shard.spec.key][shard.box.relative_to(Box.whole(shard.spec.shape))]
            if bytes(tensor_bytes(shard.tensor)) != bytes(tensor_bytes(wanted)):
                wrong.append(f"rank {self.rank}: {shard.spec} {shard.box}")
        for shard, buffer in zip(self.shards, self.buffers, strict=True):
            edge = 4 * shard.spec.itemsize
            if not bool((buffer[:edge] == PADDING).all() and (buffer[-edge:] == PADDING).all()):
                wrong.append(f"rank {self.rank}: padding of {shard.spec} {shard.box} was written")
        return wrong


def engines(model: Model, layout: Layout, world: int, *, filled: bool, at_step: int = 1) -> list[FakeEngine]:
    """The adapters of all ranks of one job."""
    made = [FakeEngine(model, layout, rank, filled=filled, at_step=at_step) for rank in range(world)]
    for engine in made:
        engine.peers = made
    return made


def small_model(step: int = 1) -> Model:
    """A mixed-precision model with one of everything; ``step`` changes all values but the frozen one's."""
    model = Model(derived={"w", "scale"}, aliases={"head": "emb"}, objects={"scheduler": {"last": step, "lr": [0.1]}})
    model.tensors = {
        ("emb", PARAM): numbered("bfloat16", (6, 4), 0),  # frozen
        ("w", MASTER): weights((5, 3), step * 10),
        ("w", "exp_avg"): numbered("float32", (5, 3), step * 7 + 1),
        ("scale", MASTER): weights((), step * 10 + 5) + 0.0001,
        ("scale", "step"): torch.tensor(float(step)),
        ("mean", BUFFER): numbered("float64", (7,), step * 7 + 2),
        ("none", BUFFER): torch.empty((0, 3)),
    }
    for fqn in ("w", "scale"):
        model.tensors[fqn, PARAM] = model.tensors[fqn, MASTER].to(torch.bfloat16)
    return model


def zero1(model: Model, world: int) -> Layout:
    """Params, buffers and scalars everywhere; masters and moments cut flat."""
    return {
        key: cut("flat" if key[1] in (MASTER, "exp_avg") else "replicated", tensor.shape, world)
        for key, tensor in model.tensors.items()
    }


# -- jobs whose ranks are threads --------------------------------------------------------------------------------------

_local = threading.local()


def _current() -> Comm:
    return _local.comm


def _behind(timeout: float | None) -> Comm:
    """The communicator of the current rank's asynchronous saves: keys of its own in the same store."""
    front = _current()
    if front not in _behinds:
        kv = None if front.kv is None else dist.PrefixStore("behind", front.kv)  # type: ignore[arg-type]
        _behinds[front] = Comm(kv, front.rank, front.world)  # type: ignore[arg-type]
    return _behinds[front]


_behinds: weakref.WeakKeyDictionary[Comm, Comm] = weakref.WeakKeyDictionary()


class _FlightOfRank(threading.local, behind._Flight):
    """The last asynchronous save of each rank."""


@contextmanager
def thread_communicators(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Let ``ckpt.save`` and ``ckpt.load`` find the communicator of the thread that calls them."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("ckpt.saving.communicator", _current))
        stack.enter_context(mock.patch("ckpt.saving.background_communicator", _behind))
        stack.enter_context(mock.patch("ckpt.preempting.communicator", _current))
        stack.enter_context(mock.patch("ckpt.runtime.behind._last", _FlightOfRank()))
        stack.enter_context(mock.patch("ckpt.loading.communicator", _current))
        stack.enter_context(mock.patch("ckpt.auditing.communicator", _current))
        stack.enter_context(mock.patch("ckpt.analyzing.communicator", _current))
        # Waiting ranks look more often than in a real job: hundreds of jobs run in a second here.
        quick = SimpleNamespace(monotonic=clock, sleep=lambda seconds: time.sleep(min(seconds, 0.001)))
        stack.enter_context(mock.patch("ckpt.runtime.comm.time", quick))
        yield


def comms(world: int, kv: Any = None) -> list[Comm]:
    """Communicators of a new job."""
    if world == 1 and kv is None:
        return [Comm(None, 0, 1)]
    if kv is None:
        kv = dist.HashStore()
        kv.set_timeout(timedelta(seconds=30))
    return [Comm(kv, rank, world) for rank in range(world)]


def run_ranks(
    jobs: Sequence[Comm], work: Callable[[int], Any], clock: Callable[[], float] = time.monotonic
) -> list[Any]:
    """Run ``work(rank)`` on every rank at once; return each rank's result or the exception that it ended with."""
    results: list[Any] = [None] * len(jobs)

    def one(rank: int) -> None:
        _local.comm = jobs[rank]
        try:
            results[rank] = work(rank)
        except BaseException as error:  # the test decides what it means
            results[rank] = error

    with thread_communicators(clock):
        if len(jobs) == 1:
            one(0)
        else:
            threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(len(jobs))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive(), "a rank hangs"
    return results


def each(results: Sequence[Any]) -> list[Any]:
    """Raise the first rank's exception if any rank ended with one, else return the results."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def save_all(made: Sequence[FakeEngine], root: Any, **options: Any) -> list[Any]:
    """``ckpt.save`` on every rank; raises what a rank raised."""
    import ckpt

    return each(run_ranks(comms(len(made)), lambda rank: ckpt.save(made[rank], root, **options)))


def load_all(made: Sequence[FakeEngine], root: Any, **options: Any) -> list[Any]:
    """``ckpt.load`` on every rank; raises what a rank raised."""
    import ckpt

    return each(run_ranks(comms(len(made)), lambda rank: ckpt.load(made[rank], root, **options)))
