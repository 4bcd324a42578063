"""What ``ckpt.on_preemption`` costs a training loop: one look at the job's key-value store at every step boundary.

    python tools/bench_preemption.py [RANKS]

Each rank is a process of this machine; rank 0 hosts the store. Prints the median of the looks, rank by rank.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import ckpt

LOOKS = 2000


def measure(rank: int, world: int, port: str) -> None:
    """Body of one rank."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    model = torch.nn.Linear(1, 1)
    watch = ckpt.on_preemption((model, torch.optim.SGD(model.parameters())), "unused", signals=())
    seconds = []
    dist.barrier()
    for _ in range(LOOKS):
        began = time.perf_counter()
        watch.check()
        seconds.append(time.perf_counter() - began)
    dist.barrier()
    watch.close()
    spread = statistics.quantiles(seconds, n=10)
    print(
        f"rank {rank} of {world}: {statistics.median(seconds) * 1e6:.0f} us a look "
        f"(10% below {spread[0] * 1e6:.0f}, 10% above {spread[-1] * 1e6:.0f})",
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen([sys.executable, __file__, "--rank", str(rank), str(world), str(port)])
        for rank in range(world)
    ]
    for one in ranks:
        one.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measure(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
