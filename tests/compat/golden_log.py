"""The job whose gradient logs are golden. A change here would hide a change of the format: do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import ckpt

if TYPE_CHECKING:
    from pathlib import Path

FULL, LAST, SKIPPED = 3, 8, 6
WIDTH = 8


class GoldenJob:
    """Gradients of half precision that a scaler unscales, a step that it skips, a buffer, a scheduler, ``extra``.

    Values are made without random numbers, whose order may change between releases of torch.
    """

    def __init__(self, root: Path, **options: Any) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
        with torch.no_grad():
            for number, tensor in enumerate(self.model.parameters()):
                tensor.copy_(torch.linspace(-1, 1 + number, tensor.numel()).reshape(tensor.shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.cursor = {"at": 0}
        engine = (self.model, self.optimizer, self.scheduler, self.scaler)
        self.keeper = ckpt.Checkpointer(engine, root, keep=None, extra={"cursor": self.cursor["at"]}, **options)

    def train(self) -> None:
        """Take the next step."""
        number = self.keeper.number + 1
        inputs = torch.linspace(-2, number, 4 * WIDTH).reshape(4, WIDTH)
        self.optimizer.zero_grad()
        loss = self.model(inputs).pow(2).mean() * (float("inf") if number == SKIPPED else 1.0)
        self.scaler.scale(loss).backward()
        for one in self.model.parameters():  # as a reduction in half precision does
            one.grad = one.grad.bfloat16().float()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.keeper.step()

    def state(self) -> dict[str, list[str]]:
        """What a replay has to come to, as numbers in hexadecimal."""
        tensors = {**self.model.state_dict()}
        for number, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{name}/{number}": value for name, value in state.items()}
        return {name: [float(x).hex() for x in value.double().flatten()] for name, value in tensors.items()}


def write(root: Path, codec: str) -> dict[str, list[str]]:
    """Train with a log that goes on behind a full save; return the last state."""
    job = GoldenJob(root, full_every=1000, log_codec=codec)
    for step in range(LAST):
        job.train()
        if step + 1 == FULL:
            job.keeper.save().durable.wait()
    state = job.state()
    job.keeper.close()
    return state
