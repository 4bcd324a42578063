"""How fast the ranks of one host load, against a raw cold read of the same bytes by as many processes.

``tools/setup && .venv/bin/python tools/bench_load.py --dir DIRECTORY --ranks 4 --mb 1200 --runs 5``

Two states of that many megabytes, plain layers and AdamW: ``ddp`` (every rank needs all of it) and ``fsdp`` (each rank
its share). In each round every way runs once, in an order that is shuffled anew; before each the files are dropped
from the page cache, and the share that is still in it is printed. A time is that of the slowest rank, CPU seconds are
those of all ranks together. ``raw``: each process reads its share of the packs into one buffer, again and again, with
nothing else done to the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from measure import MB, Peak, cached_share, files_below, filesystem, machine, make_cold

CALL = 8 << 20
WAYS = ("raw: O_DIRECT", "raw: preadv", "ckpt: once", "ckpt: each", "ckpt: auto")


def raw_read(folder: Path, rank: int, world: int, direct: bool) -> int:
    """Read this rank's share of all packs; return its bytes."""
    import mmap

    packs = [path for path in files_below(folder) if "packs" in path.parts]
    total = sum(path.stat().st_size for path in packs)
    first, last, at, done = rank * total // world, (rank + 1) * total // world, 0, 0
    buffer = memoryview(mmap.mmap(-1, CALL))
    for path in packs:
        size = path.stat().st_size
        begin, end = max(first - at, 0) // 4096 * 4096, min(last - at, size)
        if end > begin:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            while begin < end:
                want = min(CALL, -(-(end - begin) // 4096) * 4096)
                got = os.preadv(fd, [buffer[:want]], begin)
                if got <= 0:
                    break
                begin, done = begin + got, done + got
            os.close(fd)
        at += size
    return done


# ------------------------------------------------------------------------------------------------ what each rank does


def make(kind: str, mb: int, world: int) -> tuple[Any, Any, list[Any]]:
    """Return model, optimizer and the rank's tensors."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    width = 1024
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(max(1, round(mb * MB / (12 * width * (width + 1)))))))
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        model: Any = net
    else:
        model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return model, optimizer, [t.to_local() if hasattr(t, "to_local") else t for t in (t.detach() for t in state)]


def rank_main() -> None:
    import torch
    import torch.distributed as dist

    import ckpt

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    asked = json.loads(os.environ["BENCH"])
    for kind in asked["kinds"]:
        folder = Path(asked["folder"]) / kind
        model, optimizer, state = make(kind, asked["mb"], world)
        ckpt.save((model, optimizer), str(folder), step=1)
        before = [float(t.double().sum()) for t in state]
        shuffled = random.Random(0)
        for turn in range(asked["runs"]):
            ways = list(asked["ways"])
            shuffled.shuffle(ways)
            for way in ways:
                for tensor in state:
                    tensor.fill_(-1.0)
                dist.barrier()
                if rank == 0:
                    make_cold(folder)
                cached = cached_share(folder) if rank == 0 else 0.0
                dist.barrier()
                report = None
                with Peak() as peak:
                    began, cpu = time.perf_counter(), time.process_time()
                    if way.startswith("raw"):
                        read = raw_read(folder, rank, world, "DIRECT" in way)
                    else:
                        report = ckpt.load((model, optimizer), str(folder), read=way.split()[1])
                        read = 0
                    took, cpu = time.perf_counter() - began, time.process_time() - cpu
                wrong = report is not None and [float(t.double().sum()) for t in state] != before
                most = torch.tensor([took, peak.added / (1 << 20)])
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
                total = torch.tensor([cpu, float(read), float(wrong)], dtype=torch.float64)
                dist.all_reduce(total)
                if rank == 0:
                    store = report.bytes_from_store if report else total[1].item()
                    told = {"kind": kind, "way": way, "seconds": most[0].item(), "cpu": total[0].item()}
                    told |= {"peak": most[1].item(), "store": store, "wrong": total[2].item(), "cached": cached}
                    told |= {"phases": report.phases if report else {}, "turn": turn}
                    print("BENCH " + json.dumps(told), flush=True)
        del model, optimizer, state
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the file system to measure")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=int, default=1200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--verbose", action="store_true", help="every run, with the seconds of rank 0 by phase")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ckpt-load-", dir=options.dir) as folder:
        asked = {"folder": folder, "mb": options.mb, "runs": options.runs, "kinds": options.kinds, "ways": options.ways}
        ranks = []
        for rank in range(options.ranks):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1"}
            env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "BENCH": json.dumps(asked)}
            env |= {"PYTHONPATH": os.environ.get("PYTHONPATH", str(Path(__file__).resolve().parents[1]))}
            output = subprocess.PIPE if rank == 0 else None
            ranks.append(subprocess.Popen([sys.executable, __file__, "--rank"], env=env, stdout=output, text=True))
        try:
            lines = ranks[0].stdout.read().splitlines()
            codes = [process.wait(60) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        print(f"{machine()}; {filesystem(Path(folder))}; {options.ranks} ranks, {options.mb} MB, {options.runs} runs")
    show([json.loads(line.removeprefix("BENCH ")) for line in lines if line.startswith("BENCH ")], options)


def show(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.verbose:
        for one in found:
            print(one)
    for kind in options.kinds:
        print(f"\n{kind}\n\n| way | median, s | from | to | of raw | CPU, s | from store, MB | peak, MiB | cached |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        base = 0.0
        for way in options.ways:
            runs = [one for one in found if (one["kind"], one["way"]) == (kind, way)]
            if any(one["wrong"] for one in runs):
                sys.exit(f"{kind}, {way}: the wrong bytes")
            times = sorted(one["seconds"] for one in runs)
            base = base or median(times)
            cells = [f"{median(times):.2f}", f"{times[0]:.2f}", f"{times[-1]:.2f}", f"{base / median(times):.2f}"]
            cells += [f"{median(one['cpu'] for one in runs):.2f}", f"{median(one['store'] for one in runs) / MB:.0f}"]
            cells += [f"{max(one['peak'] for one in runs):.0f}", f"{max(one['cached'] for one in runs):.2f}"]
            print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    rank_main() if "--rank" in sys.argv else main()
