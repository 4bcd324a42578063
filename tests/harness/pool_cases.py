"""Rank functions of test_pool.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any


def add_up(rank: int, world: int, *, base: int) -> dict[str, Any]:
    """Prove that the group works: the sum of base + rank over all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([base + rank])
    dist.all_reduce(total)
    return {"rank": rank, "world": world, "total": int(total), "threads": torch.get_num_threads()}


def wait_for_nobody(rank: int, world: int) -> None:
    """Rank 0 enters a collective that rank 1, in a second thread, never enters."""
    import torch.distributed as dist

    if rank == 0:
        dist.barrier()
    sleeper = threading.Thread(target=_sleep_in_a_thread)
    sleeper.start()
    sleeper.join()


def _sleep_in_a_thread() -> None:
    time.sleep(1000)


def fail_on_one(rank: int, world: int) -> str:
    """Rank 1 raises."""
    if rank == 1:
        print("about to fail")
        raise ValueError("no such luck")
    return "fine"


def kill_one(rank: int, world: int) -> str:
    """Rank 1 is gone without a word, once rank 0 is here: one that is still meeting the others would fail to."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.set(f"here {rank}", "1")
    store.wait(["here 0", "here 1"])
    if rank == 1:
        store.set("going", "1")
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["going"])
    return "survived"


def environment(rank: int, world: int, *, name: str) -> str | None:
    """Return a variable of the rank's environment."""
    return os.environ.get(name)


def is_loaded(rank: int, world: int, *, name: str) -> bool:
    """Is a module there already?"""
    return name in sys.modules
