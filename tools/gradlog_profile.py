"""What a step's record costs, part by part: on the thread that trains, and on the one that stores."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from functools import wraps
from typing import TYPE_CHECKING, Any

from gradlog_turns import BLOCK, Log, Raw, Way, in_turn

import ckpt.gradlog.writing.log as logging_
from ckpt.gradlog.writing.capture import Capture
from ckpt.gradlog.writing.log import GradientLog
from ckpt.gradlog.writing.watch import Watch
from ckpt.store import local_appender

if TYPE_CHECKING:
    from bench_gradlog import Bench

PARTS: tuple[tuple[str, Any, str], ...] = (
    ("take: gradient into half precision, proved", Capture, "_take"),
    ("check: digest before the step", Watch, "check"),
    ("step(): all of it", GradientLog, "end_step"),
    ("step(): digest behind the step", Watch, "look"),
    ("step(): counters, generators, extra", logging_, "collect"),
    ("step(): copies of them", logging_, "_objects"),
    ("frame: all of it", GradientLog, "_frame"),
    ("frame: norm", logging_, "sum_of_squares"),
    ("frame: digest", logging_, "frame_of"),
    ("append: all of it", local_appender.LocalAppender, "append"),
    ("append: fdatasync", os, "fdatasync"),
)
"""What is timed: name, owner, attribute. A part with ``: all of it`` holds those behind it of the same first word."""


class Meter:
    """Wall and CPU seconds of some functions, and CPU seconds of all, while a way has its turn."""

    def __init__(self) -> None:
        self.way = ""
        self.turns: defaultdict[str, int] = defaultdict(int)
        self.parts: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.cpu: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._before = [0.0, 0.0]

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        """Time a function from now on, while the durable log has its turn."""
        original = getattr(owner, attribute)

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                if self.way == "log":
                    self.parts[name][0] += time.perf_counter() - wall
                    self.parts[name][1] += time.thread_time() - cpu

        setattr(owner, attribute, timed)

    def turn(self, way: str) -> None:
        """Begin with a way's turn, or (without a name) end it."""
        found = _cpu()
        if way:
            self.turns[way] += 1
        else:
            for i, one in enumerate(found):
                self.cpu[self.way][i] += one - self._before[i]
        self.way, self._before = way, found


def profile(bench: Bench) -> None:
    """Print the parts of a record's cost, and the whole loop with the log, with parts of it, and with a raw writer."""
    meter = Meter()
    for name, owner, attribute in PARTS:
        meter.watch(name, owner, attribute)
    nbytes = 2 * bench.job.params // bench.world + (18 << 10)
    ways: dict[str, Way] = {
        "nothing": Way(),
        "log": Log(bench, f"{bench.root}/log"),
        "log, synced every 5 steps": Log(bench, f"{bench.root}/log", flush_every=5),
        "log, not synced": Unsynced(bench, f"{bench.root}/log"),
        "log in /dev/shm": Log(bench, f"{bench.options.shm}/log"),
        "raw": Raw(f"{bench.root}/raw", nbytes, sync=True),
        "raw, not synced": Raw(f"{bench.root}/raw", nbytes, sync=False),
    }
    seconds = in_turn(bench, ways, meter.turn)
    for name, value in seconds.items():
        own, machine = (one / meter.turns[name] / BLOCK for one in meter.cpu[name])
        bench.tell(
            item="profile",
            way=name,
            step_ms=_ms(value),
            more_ms=_ms(value - seconds["nothing"]),
            ratio=round(value / seconds["nothing"], 4),
            rank_cpu_ms=_ms(max(bench.all(own))),
            machine_cpu_ms=_ms(max(bench.all(machine))),
        )
    steps = meter.turns["log"] * BLOCK
    for name, _, _ in PARTS:
        wall, cpu = (max(bench.all(one / steps)) for one in meter.parts[name])
        bench.tell(item="profile", part=name, wall_ms=_ms(wall), cpu_ms=_ms(cpu))


class Unsynced(Log):
    """A log whose writes are left to the kernel."""

    def begin(self) -> None:
        self._sync, os.fdatasync = os.fdatasync, lambda fd: None  # type: ignore[assignment]
        super().begin()

    def end(self) -> None:
        os.fdatasync = self._sync
        super().end()


def _cpu() -> list[float]:
    """Return the CPU seconds of this process, and of the whole machine (with what the kernel does by itself)."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(one) for one in file.readline().split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = ticks[:8]
    return [time.process_time(), (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
