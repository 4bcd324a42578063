"""A job of one process that logs its gradients, small enough to be run many times in a test."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import msgspec
import torch

import ckpt
from ckpt.format.frames import HEADER, frame_of, parse_frame
from ckpt.format.pack import parse_header
from ckpt.gradlog.record import DOCUMENT, Record, decode, encode_record
from ckpt.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt.store.base import Store

WIDTH = 8
PARAMETERS = WIDTH * WIDTH + WIDTH


class LoggedJob:
    """A linear layer, AdamW and (with ``scale``) a gradient scaler, kept by a :class:`ckpt.Checkpointer`.

    ``overflows``: steps whose gradient is infinite, so that the scaler skips them.
    """

    def __init__(
        self, root: str | Path | Store, *, lr: float = 1e-2, scale: float | None = None, full_every: int = 1000,
        overflows: frozenset[int] = frozenset(), **options: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(7)
        self.model = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW([{"params": [self.model.weight]}, {"params": [self.model.bias]}], lr=lr)
        self.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        parts = [self.model, self.optimizer, *([self.scaler] if self.scaler is not None else [])]
        self.overflows = overflows
        self.keeper = ckpt.Checkpointer(tuple(parts), root, full_every=full_every, **{"keep": None, **options})
        if self.keeper._handle is not None:  # a test that looks into the root expects the first full save there
            self.keeper._handle.durable.settled()

    @property
    def number(self) -> int:
        """Steps that were taken, those of jobs before this one included."""
        return self.keeper.number

    def train(self, steps: int) -> LoggedJob:
        """Take steps; what they see depends on their number alone."""
        for _ in range(steps):
            number = self.number + 1
            generator = torch.Generator().manual_seed(number)
            loss = self.model(torch.randn(4, WIDTH, generator=generator)).pow(2).mean()
            self.optimizer.zero_grad()
            if number in self.overflows:
                loss = loss * float("inf")
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.keeper.step()
        return self

    def close(self) -> list[float]:
        """End the job and return its weights."""
        self.keeper.close()
        return self.weights()

    def weights(self) -> list[float]:
        """Return the weights, to be compared."""
        found: list[float] = self.model.weight.detach().flatten().tolist()
        return found


def logged(root: str | Path | Store, steps: int, **options: Any) -> list[float]:
    """Run a job from its last step (or the first) on, and end it. Returns its weights."""
    return LoggedJob(root, **options).train(steps).close()


def loaded(root: str | Path | Store, **options: Any) -> tuple[int, list[float]]:
    """Load into a new job that logs nothing. Returns the step and the weights."""
    torch.manual_seed(11)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=1.0)
    report = ckpt.load((model, optimizer), root, **options)
    weights: list[float] = model.weight.detach().flatten().tolist()
    return report.step, weights


def with_objects(objects: dict[str, bytes]) -> MemoryStore:
    """Return a store that holds these objects."""
    store = MemoryStore()
    store.objects = dict(objects)
    return store


@functools.cache
def _two_logs() -> tuple[tuple[str, bytes], ...]:
    store = MemoryStore()
    logged(store, 12, full_every=5)
    logged(store, 3)
    return tuple(store.objects.items())


def two_logs() -> dict[str, bytes]:
    """Return a history of 15 steps: checkpoints 0, 5 and 10 and steps to 12 on log 1, and 13 to 15 on log 2.

    Each record is an object of its own, as in a store whose objects cannot grow.
    """
    return dict(_two_logs())


def frames_in(data: bytes) -> list[tuple[int, bytes]]:
    """Return (step, payload) of the records of a file."""
    found, at = [], 0
    while at < len(data):
        frame = parse_frame(data[at : at + HEADER], at, "a file")
        found.append((frame.step, data[frame.start : frame.start + frame.nbytes]))
        at = frame.end
    return found


def parts_of(payload: bytes) -> dict[str, bytes]:
    """Return the bytes of each tensor of a record, its words included."""
    table = parse_header(payload, len(payload), "a record")
    return {name: payload[start:stop] for name, (_, _, start, stop) in table.items()}


def changed_record(data: bytes, change: Callable[[Record], Record]) -> bytes:
    """Return a file of records with each of them changed, and its digests right again."""
    out = b""
    for step, payload in frames_in(data):
        parts = parts_of(payload)
        record = decode(parts.pop(DOCUMENT), Record, "a record")
        raw = {name: ("uint8", [data]) for name, data in parts.items()}
        out += b"".join(frame_of(step, encode_record(change(record), raw)))
    return out


def on_two_ranks(objects: dict[str, bytes]) -> dict[str, bytes]:
    """Return the same with logs of two ranks that have logged the same: to be looked at, not to be replayed."""
    found = {}
    for key, data in objects.items():
        if key.endswith("/directory.json.zst"):  # it says that one rank has logged all
            continue
        found[key] = data
        if key.endswith("/log.json") or key.endswith("/head.json"):
            found[key] = json.dumps({**json.loads(data), "world": 2}).encode()
        if "/rank00000/" in key:
            other = key.replace("rank00000", "rank00001")
            if key.endswith("/head.json"):
                found[other] = json.dumps({**json.loads(found[key]), "rank": 1}).encode()
            else:
                found[other] = changed_record(data, lambda record: msgspec.structs.replace(record, rank=1))
    return found
