"""The fork server: imports torch and DeepSpeed once (10 s), then forks one child a rank for every case (ms).

One JSON request a line on standard input, one JSON answer a line on the original standard output. The server itself
never has a second thread or a process group: a forked child would inherit locks that nobody will ever release.
Run by :mod:`tests.harness.pool`, never by hand.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

DUMP_SECONDS = 2.0
"""How long a rank that ran out of time may take to write its stacks before it is killed."""


def _import_everything() -> None:
    import deepspeed.ops
    import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed.runtime.zero.stage3
    import torch
    import torch._dynamo
    import torch.distributed
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # DeepSpeed refuses fp16 on a CPU without fp16 matmul kernels; torch computes it all the same, only slower.
    CPU_Accelerator.is_fp16_supported = lambda self: True
    # Only `inference_all_reduce` uses this operator, and compiling it takes over a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)


def _die_with_parent() -> None:
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_rank(rank: int, request: dict[str, Any]) -> None:
    """Body of one child: run the target and leave ``rank<n>.json`` behind."""
    folder = Path(request["folder"])
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(0)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    world = request["world"]
    os.environ.update(request["env"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=2 * request["timeout"]),  # the pool's own timeout, with stacks, comes first
        )
        module, _, function = request["target"].partition(":")
        value = getattr(importlib.import_module(module), function)(rank, world, **request["kwargs"])
        result = {"value": value}
        text = json.dumps(result)
    except BaseException as error:
        trace = traceback.format_exc()
        text = json.dumps({"type": type(error).__name__, "message": str(error), "traceback": trace})
    part = folder / f"rank{rank}.part"
    part.write_text(text)
    part.rename(folder / f"rank{rank}.json")  # a rank that is killed meanwhile must not leave half a result


def _fork_rank(rank: int, request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _die_with_parent()
        os.setpgid(0, 0)  # so that whatever a rank starts is killed with it
        _run_rank(rank, request)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    finally:
        os._exit(70)  # only if writing the result itself failed


def _reap(alive: dict[int, int], codes: dict[int, int]) -> None:
    for rank, pid in list(alive.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes[rank] = os.waitstatus_to_exitcode(status)
            del alive[rank]


def _wait(alive: dict[int, int], codes: dict[int, int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive and time.monotonic() < deadline:
        _reap(alive, codes)
        time.sleep(0.005)


def _preload(modules: list[str]) -> None:
    """Import what only some cases need, once for all of them: a module that is there already costs nothing."""
    for name in modules:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError(f"importing {modules} has started a thread: forking would be unsafe")


def _run_case(request: dict[str, Any]) -> dict[str, Any]:
    from tests.harness import jit_ops

    _preload(request["preload"])
    for op in request["ops"]:
        jit_ops.load(op)
    alive = {rank: _fork_rank(rank, request) for rank in range(request["world"])}
    pids, codes = list(alive.values()), dict[int, int]()
    _wait(alive, codes, request["timeout"])
    late = sorted(alive)
    if late:
        for pid in alive.values():
            os.kill(pid, signal.SIGUSR1)
        _wait(alive, codes, DUMP_SECONDS)
    for pid in alive.values():
        os.kill(pid, signal.SIGKILL)
    for pid in pids:  # what a rank started and left behind is in its process group
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    _wait(alive, codes, 60.0)
    return {"codes": [codes.get(r, -9) for r in range(request["world"])], "late": late}


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    _die_with_parent()
    _import_everything()
    threads = len(os.listdir("/proc/self/task"))
    print(json.dumps({"ready": True, "threads": threads}), file=answers)
    for line in sys.stdin:
        try:
            answer = _run_case(json.loads(line))
        except Exception:
            answer = {"broken": traceback.format_exc()}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
