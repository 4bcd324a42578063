"""Rank functions of test_adapter_faults.py: what an adversary found, on real engines through ``save`` and ``load``."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ckpt
from ckpt.engine.deepspeed import DeepSpeedAdapter
from ckpt.engine.shared_partition import Partition
from ckpt.engine.shared_state import kinds_of_fresh
from tests.harness.models import TinyGPT, batch, ds_config, make_engine, make_optimizer, param_groups, train


def content(engine: Any) -> dict[str, Any]:
    """Return a hash of every tensor that this rank holds, and the optimizer's groups."""
    state = DeepSpeedAdapter(engine).describe()
    found: dict[str, Any] = {}
    for shard in state.shards:
        raw = shard.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[f"{shard.spec.key} {shard.box}"] = hashlib.sha256(raw).hexdigest()
    found["groups"] = repr(state.objects["optimizer"])
    return found


def error_of(call: Any) -> str:
    """Return how ``call`` fails, or ``""``."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def inner(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def build(model: Any, groups: Any, stage: int = 1, optimizer: Any = None, dtype: str = "bf16", **config: Any) -> Any:
    """Return an engine around a model of the caller's making; ``groups``: model -> groups; no scheduler by default."""
    import deepspeed

    made = (optimizer or (lambda g: make_optimizer("AdamW", g)))(groups(model))
    settings = ds_config(stage, dtype, **{"scheduler": False, **config})
    return deepspeed.initialize(model=model, optimizer=made, config=settings)[0]


def gpt(seed: int = 0, frozen: int = 0) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(frozen_blocks=frozen)


# ---------------------------------------------------------------------------------------------------------- groups


def regroup(rank: int, world: int, root: str, source: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Save from one grouping and load into another, strictly and not."""
    first = make_engine(**source)
    train(first, 2)
    inner(first).param_groups[0]["lr"] = 0.03125
    ckpt.save(first, root)
    second = make_engine(**{**source, **change, "seed": 7})
    own = [group["lr"] for group in inner(second).param_groups]
    before = content(second)
    strict = error_of(lambda: ckpt.load(second, root))
    untouched = content(second) == before
    usable = error_of(lambda: train(second, 1))
    third = make_engine(**{**source, **change, "seed": 8})
    report = ckpt.load(third, root, strict=False, cast=True)  # what was frozen has had no master
    return {
        "strict": strict,
        "untouched": untouched,
        "usable": usable,
        "missing": list(report.missing),
        "unexpected": list(report.unexpected),
        "notes": list(report.notes),
        "own": own,
        "lr": [group["lr"] for group in inner(third).param_groups],
        "steps": third.global_steps,
        "moments": moments(third),
        "saved moments": moments(first),
        "trains": error_of(lambda: train(third, 2, start=2)),
    }


def moments(engine: Any) -> dict[str, bool]:
    """Which parameters have a first moment that is not zero, as far as this rank holds any of it?"""
    found: dict[str, bool] = {}
    for shard in DeepSpeedAdapter(engine).describe().shards:
        if shard.spec.role == "exp_avg":
            found[shard.spec.fqn] = found.get(shard.spec.fqn, False) or bool(shard.tensor.any())
    return found


class Late(torch.nn.Module):
    """``late`` has never had a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = torch.nn.Linear(12, 12), torch.nn.Linear(12, 12)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.early(tokens.to(self.early.weight.dtype)).float().square().mean()


def never_had_a_gradient(rank: int, world: int, root: str, stage: int) -> list[Any]:
    """A parameter that is stepped but has no state yet is not missing."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return build(Late(), lambda m: [{"params": list(m.parameters())}], stage, dtype="fp32")

    first, second = make(0), make(1)
    train(first, 2)
    ckpt.save(first, root)
    report = ckpt.load(second, root)
    return [list(report.missing), content(first) == content(second), train(first, 1) == train(second, 1)]


def swapped_groups_with_scheduler(rank: int, world: int, root: str) -> list[Any]:
    """Groups found in another order bring the scheduler's lists of one value a group along."""
    import deepspeed

    def make(seed: int, reverse: bool) -> Any:
        model = gpt(seed)
        groups = param_groups(model)
        groups[0]["lr"], groups[1]["lr"] = 1e-2, 1e-3
        optimizer = torch.optim.AdamW(groups[::-1] if reverse else groups)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        config = ds_config(1, scheduler=False)
        return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]

    first, second = make(0, reverse=False), make(1, reverse=True)
    train(first, 2)
    ckpt.save(first, root)
    ckpt.load(second, root)
    train(first, 2, start=2)
    train(second, 2, start=2)
    return [[g["lr"] for g in inner(first).param_groups], [g["lr"] for g in inner(second).param_groups]]


# -------------------------------------------------------------------------------------------------- hyperparameters


def odd_options(rank: int, world: int, root: str) -> dict[str, Any]:
    """Hyperparameters of every storable kind come back bit for bit; one that cannot be stored refuses the save."""
    first, second = make_engine(1, scheduler=False), make_engine(1, scheduler=False, seed=7)
    train(first, 1)
    odd = {
        "lr": np.float64(0.1) / 3,
        "clip": np.float32(0.7),
        "many": np.arange(3, dtype=np.int16),
        "tensor": torch.tensor([0.1, float("nan")]),
        "nested": {"a": (1, 2.5), "b": [np.int64(3), None]},
        "label": "decay",
    }
    inner(first).param_groups[0].update(odd)
    ckpt.save(first, root)
    report = ckpt.load(second, root)
    group = inner(second).param_groups[0]
    same = [n for n, v in odd.items() if repr(group.get(n)) == repr(v) and type(group.get(n)) is type(v)]
    inner(first).param_groups[1]["schedule"] = os.stat
    refused = error_of(lambda: ckpt.save(first, root, step=9))
    return {"same": same == list(odd), "notes": list(report.notes), "refused": refused, "steps": ckpt.steps(root)}


# ------------------------------------------------------------------------------------------------------ extra state


class Counting(TinyGPT):
    """Keeps a history in a submodule and on itself, in the way of ``nn.Module``."""

    class Part(torch.nn.Module):
        seen: Any = ()

        def get_extra_state(self) -> Any:
            return {"seen": self.seen, "table": torch.arange(3.0) + len(self.seen)}

        def set_extra_state(self, state: Any) -> None:
            assert torch.equal(state["table"], torch.arange(3.0) + len(state["seen"]))
            self.seen = state["seen"]

    def __init__(self) -> None:
        super().__init__()
        self.part, self.calls = self.Part(), 0

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.part.seen += (self.calls,)
        return super().forward(tokens, targets)


def extra_state(rank: int, world: int, root: str, stage: int) -> dict[str, Any]:
    """Save a model with extra state; load it into its like, and into one without."""

    def make(seed: int, model: Any) -> Any:
        torch.manual_seed(seed)
        return build(model(), param_groups, stage)

    first, second, plain = make(0, Counting), make(1, Counting), make(2, TinyGPT)
    train(first, 3)
    ckpt.save(first, f"{root}/counting")
    ckpt.load(second, f"{root}/counting")
    ckpt.save(plain, f"{root}/plain", step=0)
    unexpected = error_of(lambda: ckpt.load(plain, f"{root}/counting"))
    missing = error_of(lambda: ckpt.load(second, f"{root}/plain"))
    report = ckpt.load(second, f"{root}/plain", strict=False)
    return {
        "calls": [second.module.calls, list(second.module.part.seen)],
        "unexpected": unexpected,
        "missing": missing,
        "report": list(report.missing),
    }


RANDOM_LTD = {
    "data_efficiency": {
        "enabled": True,
        "data_routing": {
            "enabled": True,
            "random_ltd": {
                "enabled": True,
                "total_layer_num": 2,
                "random_ltd_layer_num": 1,
                "random_ltd_layer_id": [0],
                "model_mask_name": None,
                "model_type": "decoder",
                "hidden_state_order": "batch_seq_dim",
                "random_ltd_schedule": {
                    "min_value": 2,
                    "max_value": 12,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"require_steps": 10, "seq_per_step": 1},
                },
            },
        },
    }
}


def random_ltd(rank: int, world: int, root: str) -> dict[str, Any]:
    """Save and load the random-LTD scheduler; let an engine that samples by a curriculum be refused."""
    first, second = make_engine(1, extra=RANDOM_LTD), make_engine(1, extra=RANDOM_LTD, seed=7)
    train(first, 3)
    ckpt.save(first, root)
    fresh = second.random_ltd_scheduler.state_dict()
    report = ckpt.load(second, root)
    plain = make_engine(1, seed=8)
    other = ckpt.load(plain, root)
    plain.curriculum_learning_enabled, plain.training_dataloader = (lambda: True), object()
    return {
        "moved": fresh != first.random_ltd_scheduler.state_dict(),
        "same": second.random_ltd_scheduler.state_dict() == first.random_ltd_scheduler.state_dict(),
        "notes": [list(report.notes), list(other.notes)],
        "curriculum": error_of(lambda: ckpt.save(plain, root, step=9)),
    }


# ------------------------------------------------------------------------------------------------- optimizer's own


class Momentum(torch.optim.Optimizer):
    """A user's own: counts what it does in an attribute, and keeps a scalar that is not a number."""

    def __init__(self, params: Any, trust: float) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.stats, self.trust = {"steps": 0, "seen": [0]}, trust
        self.first = self.param_groups[0]["params"][0]
        self.report = self.count

    def count(self) -> None:
        self.stats["steps"] += 1
        self.stats["seen"].append(self.stats["steps"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.report()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["trust"], state["flag"] = torch.zeros_like(p), self.trust, False
                state["flag"] = not state["flag"]
                state["mean"].mul_(0.9).add_(p.grad)
                self.first.add_(0.0)
                p.add_(state["mean"], alpha=-group["lr"])


def own_optimizer(rank: int, world: int, root: str, stage: int, dtype: str, trust: float) -> dict[str, Any]:
    """Save and load it into a fresh engine; the trial step must leave no trace in attributes and hooks."""

    def make(seed: int) -> Any:
        model = gpt(seed)
        return build(model, param_groups, stage, lambda groups: Momentum(groups, trust), dtype)

    first, second = make(0), make(1)
    train(first, 2)
    ckpt.save(first, root)
    before = str(inner(second).stats)
    fired: list[str] = []
    handle = register_optimizer_step_pre_hook(lambda *_: fired.append("global"))
    own = inner(second).register_step_pre_hook(lambda *_: fired.append("own"))
    report = ckpt.load(second, root)
    handle.remove()
    own.remove()
    return {
        "stats": str(inner(second).stats) == before,
        "fired": fired,
        "notes": list(report.notes),
        "state": content(first) == content(second),
        "losses": train(first, 2, start=2) == train(second, 2, start=2),
    }


def trial_of_what_cannot_be_copied(rank: int, world: int) -> Any:
    """An attribute that cannot be copied makes the kinds unknown, not wrong."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = Momentum([weight], 0.5)
    partition = Partition(weight, 0, separate=False, members=["w"])
    known = sorted(kinds_of_fresh(optimizer, partition) or ())
    optimizer.stream = (i for i in range(3))
    return [known, kinds_of_fresh(optimizer, partition), weight.tolist(), optimizer.stats["steps"]]


# ---------------------------------------------------------------------------------------------- pending gradients


def pending(rank: int, world: int, root: str, overflow: bool = False, **options: Any) -> dict[str, str]:
    """Try to save at every moment of two windows. ``overflow``: the first steps are skipped."""
    engine = make_engine(**options)
    found: dict[str, str] = {}

    def note(moment: str) -> None:
        found[moment] = error_of(lambda: DeepSpeedAdapter(engine).describe())

    note("fresh")
    for step in range(2):
        last = engine.gradient_accumulation_steps() - 1
        for micro in range(last + 1):
            loss = engine(*batch(step, micro, rank))
            note(f"{step} forward {'first' if micro == 0 else 'next'}")
            engine.backward(loss * 1e30 if overflow else loss)
            note(f"{step} backward")
            engine.step()
            note(f"{step} step" if micro == last else f"{step} inner step")
    engine.optimizer.zero_grad()
    note("zero_grad")
    engine.zero_grad()
    note("engine.zero_grad")
    ckpt.save(engine, root)
    note("save")
    ckpt.load(engine, root)
    note("load")
    engine.eval()
    engine(*batch(9, 0, rank))
    engine.train()
    note("eval")
    weight = next(p for p in engine.module.parameters() if p.requires_grad)
    during: list[str] = []
    handle = weight.register_hook(lambda grad: during.append(error_of(lambda: DeepSpeedAdapter(engine).describe())))
    engine.backward(engine(*batch(3, 0, rank)))
    handle.remove()
    found["in backward"] = during[0] if during else "no hook was called"
    found["load over gradients"] = error_of(lambda: ckpt.load(engine, root))
    found["skipped"] = str(engine.skipped_steps)
    return found


def others_keep_gradients(rank: int, world: int, root: str) -> str:
    """A parameter that requires gradients and that the optimizer was not given keeps its own for ever."""
    engine = build(gpt(), lambda m: [{"params": [p for n, p in m.named_parameters() if n != "positions"]}], 0)
    train(engine, 2)
    engine.module.positions.grad = torch.ones_like(engine.module.positions)
    return error_of(lambda: ckpt.save(engine, root))
