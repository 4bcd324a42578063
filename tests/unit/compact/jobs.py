"""Jobs of one process that log their gradients, and what is compared of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import ckpt
from ckpt.engine.find import adapter_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Optimizers = "Callable[[list[dict[str, Any]]], torch.optim.Optimizer]"


class Net(torch.nn.Module):
    """Layers, a buffer that forward changes, a parameter that nobody trains, and one that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(24, 40), torch.nn.Linear(40, 24)
        self.norm = torch.nn.BatchNorm1d(40)
        self.frozen = torch.nn.Parameter(torch.arange(64.0), requires_grad=False)
        self.idle = torch.nn.Parameter(torch.ones(5))
        self.gain = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is trained to be the input."""
        found: torch.Tensor = self.two(self.norm(self.one(x)).relu()) * self.gain + self.frozen[:24]
        return found


class Trained:
    """A model, its optimizer and a scheduler; ``engine`` is what a script would pass to :func:`ckpt.save`."""

    def __init__(self, seed: int = 0, make: Any = None, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.model = Net().to(dtype)
        named = dict(self.model.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        rest = [p for name, p in named.items() if not name.endswith("bias") and name != "frozen"]
        make = make or (lambda groups: torch.optim.AdamW(groups, lr=1e-2))
        self.optimizer = make([{"params": rest}, {"params": biases, "lr": 3e-3, "weight_decay": 0.0}])
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.engine = self.model, self.optimizer, self.scheduler
        self.dtype = dtype

    def train(self, steps: int, start: int, behind: Callable[[], None] = lambda: None) -> None:
        """Take steps; what they see depends on the state and their numbers alone."""
        for step in range(start, start + steps):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).to(self.dtype)
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(self.model(x), x).backward()
            self.optimizer.step()
            self.scheduler.step()
            behind()

    def state(self) -> dict[str, bytes]:
        """Return the bytes of all tensors, and what is beside them."""
        described = adapter_for(self.engine).describe()
        found = {f"{one.spec}": one.tensor.detach().clone().numpy(force=True).tobytes() if one.spec.dtype != "bfloat16"
                 else one.tensor.detach().float().numpy().tobytes() for one in described.shards}  # fmt: skip
        found["objects"] = repr(described.objects).encode()
        found["rng"] = torch.get_rng_state().numpy().tobytes()
        return found


@contextmanager
def kept(job: Trained, root: Path, **options: Any) -> Iterator[Any]:
    """Keep a job's checkpoints and its log while the block runs."""
    with ckpt.Checkpointer(job.engine, root, extra={"mark": 3}, **{"keep": None, **options}) as keeper:
        if keeper._handle is not None:  # what is done while the job is alive needs its first full save
            keeper._handle.durable.settled()
        yield keeper


def trained(root: Path, steps: int = 9, full_every: int = 5, make: Any = None, **options: Any) -> Trained:
    """Return a job that has logged so many steps and ended."""
    job = Trained(0, make, options.pop("dtype", torch.float32))
    with kept(job, root, full_every=full_every, **options) as keeper:
        job.train(steps, 0, keeper.step)
    return job


def loaded(root: Path, make: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Trained]:
    """Return the report of a load into a job of other weights, and that job."""
    job = Trained(7, make, dtype)
    return ckpt.load(job.engine, root, extra={"mark": 0}, **options), job
