"""What analysis and planning cost as the job grows: Llama-3 405B, tp 8 x pp 16 x dp 128, and DCP's planner beside it.

``tools/setup && .venv/bin/python tools/bench_scale.py``. No process group, no weights: layouts are computed.

1. The whole analysis (``ckpt analyze --preset llama3-405b``), each time in a process of its own: description, who holds
   what, survival of hosts, report as JSON; then with twice the data-parallel ranks.
2. One rank's own planning (``ckpt/plan/local_plan.py``), for a rank of the first, a middle and the last stage, from its
   own cells. What other ranks would tell it (loads, sizes of groups) is given: the exchange is not in the time.
   "sends": digests to the owners of its shared chunks, in each save (the same number comes in, on average).
3. The whole job planned by one rank, as live jobs do it today: 1,024 ranks of Llama-3 8B.
4. All ranks' process groups, which every rank decodes and checks at each load, and at the save of a new layout.
5. ``torch.distributed.checkpoint``: ``DefaultSavePlanner`` on DTensors of the same tensors, one pipeline stage of the
   405B job. DTensors know no flat partitions: what ZeRO cuts flat is cut by rows here, as FSDP2 does. Each rank makes a
   local plan; all of them are gathered by one rank, which makes the global plan. Nothing is extrapolated: the rows say
   how many ranks were run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from llama_layout import LLAMA_8B, LLAMA_405B, Job
from measure import machine
from rich.console import Console
from rich.table import Table

from ckpt.analysis.domains import Domains
from ckpt.analysis.report import analyze
from ckpt.describe.closed import holdings
from ckpt.describe.presets import preset
from ckpt.errors import LayoutError
from ckpt.format.digest import SIZE
from ckpt.layout.graph import ShardGraph
from ckpt.layout.mesh import problems_of_claims
from ckpt.layout.spec import RankLayout
from ckpt.plan.local_plan import GroupPlan, plan_of_rank
from ckpt.plan.save_plan import build_save_plan
from ckpt.plan.wire import decode_layouts, encode_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GB = 1e9
ROLES = {"master": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}


def milliseconds(work: Callable[[], object], runs: int) -> tuple[str, str]:
    """Return "median (min–max)" of the milliseconds that ``work`` takes, and the median of its CPU time, which says
    more on a machine that does other things too. A run before is not counted.
    """
    work()
    wall, cpu = [], []
    for _ in range(runs):
        start = time.perf_counter(), time.process_time()
        work()
        wall.append(1e3 * (time.perf_counter() - start[0]))
        cpu.append(1e3 * (time.process_time() - start[1]))
    return f"{median(wall):.1f} ({min(wall):.1f}–{max(wall):.1f})", f"{median(cpu):.1f}"


def analyse_once(zero: int, dp: int) -> None:
    """Analyse the 405B job and print what it took: run in a process of its own, for its peak memory."""
    start = time.perf_counter(), time.process_time()
    held = holdings(preset("llama3-405b", zero=zero, dp=dp))
    described = time.perf_counter() - start[0]
    report = analyze(held, Domains.by_host(held.world, held.world // 8))
    nbytes = len(report.to_json())
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([held.world, described, wall, cpu, peak, nbytes / 1e3, report.total.redundant_share]))


def whole_analysis(runs: int) -> Table:
    """Time the whole analysis, with 128 and with 256 data-parallel ranks."""
    table = _table(
        f"The whole analysis in one process, Llama-3 405B tp 8 x pp 16 (median of {runs}, min–max)",
        (
            "layout",
            "ranks",
            "who holds what, s",
            "all of it, s",
            "CPU s",
            "times dp 128",
            "peak MiB",
            "JSON kB",
            "redundant",
        ),
    )
    for zero in (1, 3):
        before = 0.0
        for dp in (128, 256):
            command = [sys.executable, __file__, "--analyse", f"{zero}", f"{dp}"]
            found = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(runs)]
            world, described, wall, cpu, peak, size, share = (median(column) for column in zip(*found, strict=True))
            every = [one[2] for one in found]
            table.add_row(
                f"ZeRO-{zero}",
                f"{world:,}",
                f"{described:.2f}",
                f"{wall:.2f} ({min(every):.2f}–{max(every):.2f})",
                f"{cpu:.2f}",
                f"{cpu / before:.2f}" if before else "",
                f"{peak:.0f}",
                f"{size:.0f}",
                f"{share:.1%}",
            )
            before = cpu
    return table


def digests_sent(plans: Sequence[GroupPlan], rank: int) -> int:
    """Return the bytes of digests that a rank sends in a save: one for each chunk that another rank owns."""
    return SIZE * sum(owner != rank for plan in plans for owner in plan.owners)


def own_planning(runs: int) -> Table:
    """Time one rank's own planning in the large job."""
    table = _table(
        f"One rank's own planning, Llama-3 405B on 16,384 ranks (median of {runs}, min–max)",
        (
            *("layout", "rank of", "holds, GB", "cells known", "groups"),
            *("chunks held", "writes, GB", "sends, kB", "ms", "CPU ms"),
        ),
    )
    for zero in (1, 3):
        job = Job(LLAMA_405B, tp=8, pp=16, dp=128, zero=zero)
        for where, rank in (("first stage", 0), ("middle stage", job.rank(7, 64, 3)), ("last stage", job.world - 1)):
            view = job.view(rank)

            def told(ranks: tuple[int, ...], mine: int) -> Sequence[int]:
                return [mine] * len(ranks)  # the slices of a group's members are equal, up to the last one's padding

            plans = plan_of_rank(view, told)
            table.add_row(
                f"ZeRO-{zero}",
                where,
                f"{job.layout(rank).nbytes / GB:.2f}",
                f"{sum(map(len, view.cells.values())):,}",
                f"{len(plans)}",
                f"{sum(len(plan.chunks) for plan in plans):,}",
                f"{sum(plan.loads[plan.ranks.index(rank)] for plan in plans) / GB:.3f}",
                f"{digests_sent(plans, rank) / 1e3:.1f}",
                *milliseconds(lambda view=view: plan_of_rank(view, told), runs),
            )
    return table


def whole_job() -> Table:
    """Time what every rank of a live job does today when a layout is new."""
    table = _table(
        "The whole job planned, as each live rank does today: Llama-3 8B, tp 8 x pp 4 x dp 32",
        ("layout", "ranks", "received, MB", "decode, CPU s", "graph", "plan", "chunks", "largest writer / mean"),
    )
    for zero in (1, 3):
        job = Job(LLAMA_8B, tp=8, pp=4, dp=32, zero=zero)
        encoded = [encode_layout(job.layout(rank)) for rank in range(job.world)]
        start = time.process_time()
        layouts = decode_layouts(encoded)
        decoded = time.process_time()
        graph = ShardGraph.build(layouts)
        graph.check()
        built = time.process_time()
        plan = build_save_plan(graph)
        planned = time.process_time()
        loads = plan.loads()
        table.add_row(
            f"ZeRO-{zero}",
            f"{job.world:,}",
            f"{sum(map(len, encoded)) / 1e6:.1f}",
            f"{decoded - start:.2f}",
            f"{built - decoded:.2f}",
            f"{planned - built:.2f}",
            f"{len(plan.chunks):,}",
            f"{max(loads) * job.world / sum(loads):.3f}",
        )
    return table


def exchanged_groups(runs: int) -> Table:
    """Time what every rank does with all ranks' process groups."""
    table = _table(
        f"All ranks' process groups, as each rank decodes and checks them (median of {runs}, min–max)",
        ("layout", "ranks", "received, MB", "ms", "CPU ms"),
    )
    for pp, dp, tp in ((1, 2048, 1), (1, 16384, 1), (16, 128, 8)):
        ranks = np.arange(pp * dp * tp).reshape(pp, dp, tp)
        named: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(ranks.size)]
        for axis, name in enumerate(("pp", "dp", "tp")):
            for group in np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]).tolist():
                whole = tuple(group)
                for rank in group:
                    named[rank].append((name, whole))
        encoded = [encode_layout(RankLayout(rank, groups=tuple(groups))) for rank, groups in enumerate(named)]
        del named

        def check(encoded: Sequence[bytes] = encoded) -> None:
            problems = problems_of_claims(decode_layouts(encoded))
            if problems:
                raise LayoutError("a grid is whole", tuple(problems))

        table.add_row(
            f"dp {dp}, tp {tp}, pp {pp}",
            f"{ranks.size:,}",
            f"{sum(map(len, encoded)) / 1e6:.2f}",
            *milliseconds(check, runs),
        )
    return table


def dcp_state(job: Job, p: int, rank: int) -> dict[str, object]:
    """Return what one rank of a pipeline stage would hand to ``torch.distributed.checkpoint.save``, on no memory."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    ranks = torch.arange(job.dp * job.tp).view(job.dp, job.tp)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=rank)
    found: dict[str, object] = {}
    for fqn, shape, dim in job.model.stage(p, job.pp):
        by_tensor = Replicate() if dim is None else Shard(dim)
        for role, dtype in {"param": "bfloat16", **ROLES}.items():
            by_data = Replicate() if role == "param" and job.zero == 1 else Shard(0)
            # Only shapes count: the global one is given, the local one is not looked at.
            local = torch.empty((1,) * len(shape), dtype=getattr(torch, dtype), device="meta")
            stride = (shape[1], 1) if len(shape) == 2 else (1,)
            found[f"{fqn}.{role}"] = DTensor.from_local(
                local, mesh, [by_data, by_tensor], run_check=False, shape=torch.Size(shape), stride=stride
            )
        found[f"{fqn}.step"] = torch.zeros(())
    return found


def dcp_planning(sizes: Sequence[int], runs: int) -> Table:
    """Time torch's planner on one stage of the large job, with fewer and with all of its data-parallel ranks."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    table = _table(
        f"torch.distributed.checkpoint, DefaultSavePlanner: one middle stage of 405B (local: median of {runs})",
        ("layout", "ranks run", "items a rank", "local plan, ms", "CPU ms", "global plan, s", "CPU s", "CPU ms a rank"),
    )
    for zero in (1, 3):
        for dp in sizes:
            job = Job(LLAMA_405B, tp=8, pp=16, dp=dp, zero=zero)
            plans = []
            for rank in range(job.dp * job.tp):
                planner = DefaultSavePlanner()
                planner.set_up_planner(dcp_state(job, 7, rank), None, rank == 0)
                if rank == 0:
                    local = milliseconds(planner.create_local_plan, runs)
                plans.append(planner.create_local_plan())
            start = time.perf_counter(), time.process_time()
            DefaultSavePlanner().create_global_plan(plans)
            wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
            table.add_row(
                f"ZeRO-{zero}",
                f"{len(plans):,} (dp {dp} x tp 8)",
                f"{len(plans[0].items):,}",
                *local,
                f"{wall:.2f}",
                f"{cpu:.2f}",
                f"{1e3 * cpu / len(plans):.1f}",
            )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("layout", "rank of") else "right", no_wrap=True)
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--dcp-dp", type=int, nargs="*", default=[16, 128], help="data-parallel ranks; none: skip DCP")
    parser.add_argument("--analyse", type=int, nargs=2, metavar=("ZERO", "DP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.analyse:
        analyse_once(*options.analyse)
        return
    console = Console(width=130, highlight=False)
    console.print(f"[dim]{machine()}[/]")
    console.print(whole_analysis(min(options.runs, 3)))
    console.print(own_planning(options.runs))
    console.print(whole_job())
    console.print(exchanged_groups(options.runs))
    if options.dcp_dp:
        console.print(dcp_planning(options.dcp_dp, options.runs))
    console.print(f"[dim]load average at the end: {os.getloadavg()[0]:.1f}[/]")


if __name__ == "__main__":
    main()
