"""Rank functions of test_peers.py: the cases of gradient logs, with each rank on an emulated host."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import ckpt
from ckpt.gradlog.copies.memory import HostMemory
from ckpt.store.open import open_store
from tests.e2e import gradlog_cases
from tests.e2e.adapter_cases import held, same
from tests.e2e.async_cases import Job

if TYPE_CHECKING:
    from collections.abc import Sequence


def on_host(rank: int, world: int, *, case: str, hosts: Sequence[str], memory: str, **options: Any) -> Any:
    """Run a case of gradlog_cases."""
    _be_on(hosts[rank], memory)
    return getattr(gradlog_cases, case)(rank, world, **options)


def _be_on(host: str, memory: str) -> None:
    os.environ["CKPT_HOST"], os.environ["CKPT_PEER_MEMORY"] = host, memory


def copies(rank: int, world: int, *, hosts: Sequence[str], memory: str, root: str, lose: str | None) -> dict[str, Any]:
    """Tell whose records each host has copies of; then lose those of one host."""
    import shutil

    found: dict[str, Any] = {}
    for host in dict.fromkeys(hosts):
        _be_on(host, memory)
        there = HostMemory.there(open_store(root).url)
        assert there is not None
        found[host] = sorted([r, steps] for (_, r), steps in there.held().items() if steps)
        if host == lose:
            shutil.rmtree(there.folder)
    return found


def train_and_end(
    rank: int,
    world: int,
    *,
    hosts: Sequence[str],
    memory: str,
    root: str,
    kind: str,
    steps: int,
    peers: int,
    **rest: Any,
) -> dict[str, Any]:
    """Train to the end of the job, with a restart of the log in between; tell what is left in memory."""
    _be_on(hosts[rank], memory)
    job = Job(kind, seed=0, **rest)
    with ckpt.Checkpointer(job.engine, root, full_every=3, peers=peers) as keeper:
        for step in range(steps):
            job.train(1, step)
            keeper.step()
        sent = keeper._peers is not None and keeper._peers.sent
    dist.barrier()
    return {"sent": bool(sent), "left": [str(p) for p in Path(memory).rglob("*") if p.is_file()]}


def train_and_fail(
    rank: int, world: int, *, hosts: Sequence[str], memory: str, root: str, kind: str, steps: int, **rest: Any
) -> dict[str, Any]:
    """Leave the context by an exception, as a job does of which a host was lost."""
    _be_on(hosts[rank], memory)
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    job = Job(kind, seed=0, **rest)
    try:
        with ckpt.Checkpointer(job.engine, root, full_every=100, peers=1) as keeper:
            for step in range(steps):
                job.train(1, step)
                keeper.step()
            keeper.flush()
            gradlog_cases._wait_for_copies(keeper, steps)
            raise ConnectionError("a host is gone")
    except ConnectionError:
        pass
    dist.barrier()
    return {"left": len([p for p in Path(memory).rglob("*") if p.is_file()])}


def elsewhere(rank: int, world: int, *, hosts: Sequence[str], memory: str, root: str, kind: str, **rest: Any) -> Any:
    """Replay in another layout, with the help of copies and without."""
    _be_on(hosts[rank], memory)
    job = Job(kind, seed=7, **rest)
    report = ckpt.load(job.engine, root, extra={"mark": 0}, cast=True)
    replayed = held(job.adapter)
    _be_on(hosts[rank], f"{memory}-none")
    other = Job(kind, seed=8, **rest)
    alone = ckpt.load(other.engine, root, extra={"mark": 0}, cast=True)
    return {
        "step": report.step,
        "same": same(held(other.adapter), replayed),
        "reads": [report.log_bytes, alone.log_bytes_from_memory],
        "all": report.log_bytes_from_memory == alone.log_bytes > 0,
    }
