"""Rank functions of test_sharing.py."""

from __future__ import annotations

import os
import random
import resource
import signal
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import ckpt
from ckpt.errors import CkptError
from ckpt.runtime import restoring
from ckpt.runtime.sharing import HERE, Sharing
from tests.e2e.broadcast_cases import Failing
from tests.property.fake import KINDS, FakeEngine, Layout, Model, cut, engines, numbered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DTYPES = ("float32", "bfloat16", "float64", "uint8", "int64", "complex64")


def drawn(rng: random.Random, world: int) -> tuple[Model, Layout, Layout]:
    """A model, and two ways to distribute it."""
    model = Model()
    for number in range(rng.randint(1, 6)):
        shape = tuple(rng.randint(1, 90) for _ in range(rng.randint(0, 3)))
        model.tensors[f"layer.{number}", "param"] = numbered(rng.choice(DTYPES), shape, number)
    saved, loaded = (
        {k: cut(rng.choice(KINDS), t.shape, world, rng.randint(0, 5)) for k, t in model.tensors.items()}
        for _ in range(2)
    )
    return model, saved, loaded


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Tell which hosts share memory, and how often this rank says that a unit is in its own."""
    seen: dict[str, Any] = {"hosts": [], "told": 0}
    real_share, real_tell = restoring.share, Sharing.tell

    def share(*args: Any, **options: Any) -> Sharing | None:
        found = real_share(*args, **options)
        seen["hosts"] = sorted(found.hosts) if found is not None else []
        return found

    def tell(self: Sharing, rank: int, number: int, slot: int, what: int) -> None:
        seen["told"] += what == HERE
        real_tell(self, rank, number, slot, what)

    with mock.patch.object(restoring, "share", share), mock.patch.object(Sharing, "tell", tell):
        yield seen


def left_open() -> list[str]:
    """Shared memory that this process still has."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ckpt" in line] + [
        name
        for name in (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_exists(fd))
        if "memfd:ckpt" in name
    ]


def fd_exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def random_layouts(
    rank: int, world: int, *, root: str, seeds: Sequence[int], hosts: Sequence[str] = (), budget: int = 16 << 20
) -> dict[str, Any]:
    """Save and load once for each seed, in small units; ``hosts``: name of each rank's."""
    if hosts:
        os.environ["CKPT_HOST"] = hosts[rank]
    wrong, told = [], 0
    for seed in seeds:
        rng = random.Random(seed)
        model, saved, loaded = drawn(rng, world)
        folder, span = f"{root}/{seed}", rng.choice([64, 4096, 100_000])
        with ExitStack() as stack, watched() as seen:
            stack.enter_context(mock.patch("ckpt.plan.local_plan.CHUNK_BYTES", span))
            stack.enter_context(mock.patch("ckpt.runtime.restoring.span_for", return_value=span))
            stack.enter_context(mock.patch("ckpt.runtime.sharing.SLOTS", rng.randint(1, 4)))
            ckpt.save(engines(model, saved, world, filled=True)[rank], folder, step=1)
            engine: FakeEngine = engines(model, loaded, world, filled=False)[rank]
            ckpt.load(engine, folder, read="once", budget=budget)
        wrong += [f"seed {seed}, span {span}, {seen['hosts']}: {line}" for line in engine.differences()]
        told += seen["told"]
    return {"wrong": wrong, "told": told, "hosts": seen["hosts"], "left": left_open()}


def big(filled: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1 if filled else 2)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def same(engine: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(engine[0].parameters(), big(True)[0].parameters(), strict=True))


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def refused(rank: int, world: int, *, root: str, victim: int, hosts: Sequence[str]) -> dict[str, Any]:
    """Load where ``victim`` may have no file as large as the shared memory would be."""
    os.environ["CKPT_HOST"] = hosts[rank]
    ckpt.save(big(True), root, step=1)
    engine = big(False)
    with watched() as seen, ExitStack() as stack:
        if rank == victim:
            stack.enter_context(limited(resource.RLIMIT_FSIZE, 1 << 20))
        ckpt.load(engine, root, read="once")
    return {**seen, "same": same(engine), "left": left_open()}


def fails(rank: int, world: int, *, root: str, victim: int, how: str, at: int) -> dict[str, Any]:
    """Load while ``victim`` fails; then load again with what is left."""
    ckpt.save(big(True), root, step=1)
    engine, error = big(False), ""
    store: Any = Failing(root, how, at) if rank == victim else root
    with watched() as seen:
        try:
            ckpt.load(engine, store, read="once")
        except CkptError as caught:
            error = f"{type(caught).__name__}: {caught}"
    result = {**seen, "error": error, "left": left_open(), "again": None}
    if how != "kill":
        ckpt.load(engine, root, read="once")
        result["again"] = same(engine)
    return result


def gone_while_lent(rank: int, world: int, *, root: str, victim: int) -> dict[str, Any]:
    """Load while ``victim`` dies with the first unit that a neighbour lends it, and never returns it."""
    ckpt.save(big(True), root, step=1)
    engine, error = big(False), ""
    with ExitStack() as stack:
        if rank == victim:
            stack.enter_context(mock.patch.object(Sharing, "look", die))
        try:
            ckpt.load(engine, root, read="once")
        except CkptError as caught:
            error = f"{type(caught).__name__}: {caught}"
    return {"error": error, "left": left_open()}


def die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
