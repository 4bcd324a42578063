"""What the ranks of test_megatron.py do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.megatron import MegatronAdapter
from tests.harness.megatron_models import make_engine, snapshot, start, train


def _loaded(engine: Any, root: str, **options: Any) -> list[str]:
    return list(ckpt.load(engine, root, **options).notes)


def continuation(rank: int, world: int, *, root: str, layout: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Train, save, train on; then load into a fresh engine of other weights, and into the trained one, and train on."""
    start(**layout)
    first = make_engine(**engine)
    train(first, 3)
    here = snapshot(first)
    report = ckpt.save(first, root)
    losses = train(first, 3, first=3)
    final = snapshot(first)
    found: dict[str, Any] = {"report": dataclasses.asdict(report), "losses": losses, "moved": here != final}
    for label, target in (("fresh", make_engine(seed=7, **engine)), ("same", first)):
        notes = _loaded(target, root)
        again = ckpt.save(target, f"{root}-{label}") if label == "fresh" else None
        found[label] = {
            "notes": notes,
            "state": _differing(here, snapshot(target)),
            "losses": train(target, 3, first=3) == losses,
            "final": _differing(final, snapshot(target)),
            "divergences": list(again.divergences) if again else [],
        }
    return found


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [f"{k}: {a.get(k)} != {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]


# -------------------------------------------------------------------------------------------------- other layouts


def leave(rank: int, world: int, *, root: str, layout: dict[str, Any], engine: dict[str, Any]) -> None:
    """Train with a plain optimizer and save; leave this rank's parameters and moments in a file, by Megatron's names."""
    start(**layout)
    job = make_engine(**engine)
    train(job, 3)
    ckpt.save(job, root)
    _leave(rank, job, root)


def _leave(rank: int, engine: Any, root: str) -> None:
    from megatron.core import parallel_state as ps

    (chunk,), optimizer, _ = engine
    (wrapper,) = optimizer.chained_optimizers
    names = {id(getattr(p, "main_param", p)): name for name, p in chunk.module.named_parameters()}
    stored = {
        names[id(key)]: {"weight": key.detach(), **wrapper.optimizer.state[key]}
        for group in wrapper.optimizer.param_groups
        for key in group["params"]
    }
    place = [ps.get_tensor_model_parallel_rank(), ps.get_pipeline_model_parallel_rank(), ps.get_data_parallel_rank()]
    torch.save({"place": place, "state": stored}, Path(f"{root}-oracle{rank}"))


def pass_on(
    rank: int, world: int, *, source: str, target: str, layout: dict[str, Any], engine: dict[str, Any]
) -> dict[str, Any]:
    """Load what another layout saved and save it again."""
    start(**layout)
    job = make_engine(seed=7, **engine)
    notes = _loaded(job, source)
    report = ckpt.save(job, target)
    return {"notes": notes, "divergences": list(report.divergences), "report": dataclasses.asdict(report)}


def compare(
    rank: int, world: int, *, root: str, oracle: str, ranks: int, layers: int, engine: dict[str, Any]
) -> dict[str, Any]:
    """Load on one rank; compare with the files of :func:`leave`, put together by hand. Return what differs."""
    start()
    job = make_engine(seed=7, **engine)
    notes = _loaded(job, root)
    (chunk,), optimizer, _ = job
    (wrapper,) = optimizer.chained_optimizers
    whole = _assembled([torch.load(f"{oracle}-oracle{r}", weights_only=True) for r in range(ranks)], layers)
    wrong, seen = [], 0
    for name, p in chunk.module.named_parameters():
        key = getattr(p, "main_param", p)
        state = {"weight": key.detach(), **wrapper.optimizer.state[key]}
        for role, value in whole.pop(name).items():
            seen += 1
            if not torch.equal(state[role], value):
                wrong.append(f"{name} {role}")
    return {"notes": notes, "wrong": wrong, "left": sorted(whole), "seen": seen, "losses": train(job, 1, first=3)}


_ROWS = ("word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_GATE_UP = ("linear_fc1.weight", "linear_fc1.bias")


def _assembled(files: list[dict[str, Any]], layers: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the model of one rank: written down from how Megatron's layers compute, not from what they declare."""
    stages = 1 + max(one["place"][1] for one in files)
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for stage in range(stages):
        parts = [one["state"] for one in sorted(files, key=lambda f: f["place"]) if one["place"][1:] == [stage, 0]]
        for name in parts[0]:
            if name.endswith("output_layer.weight"):
                continue  # the last stage's copy of the embedding
            fields = name.split(".")
            if "layers" in fields:
                at = fields.index("layers") + 1
                fields[at] = str(int(fields[at]) + stage * layers // stages)
            whole[".".join(fields)] = {k: _joined(name, [part[name][k] for part in parts]) for k in parts[0][name]}
    return whole


def _joined(name: str, values: list[torch.Tensor]) -> torch.Tensor:
    if values[0].ndim == 0:
        return values[0]
    if name.endswith(_ROWS):
        return torch.cat(values)
    if name.endswith(_COLUMNS):
        return torch.cat(values, 1)
    if name.endswith(_GATE_UP):
        return torch.cat([half.chunk(2)[i] for i in (0, 1) for half in values])
    assert all(torch.equal(v, values[0]) for v in values), name
    return values[0]


# ------------------------------------------------------------------------------------------------------- details


def declare(rank: int, world: int, *, layout: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank declares after two steps."""
    start(**layout)
    job = make_engine(**engine)
    train(job, 2)
    adapter = MegatronAdapter(job)
    state = adapter.describe()
    return {
        "step": adapter.step(),
        "groups": {axis: list(ranks) for axis, ranks in state.groups.items()},
        "aliases": state.aliases,
        "derived": sorted(state.derived),
        "shards": [[s.spec.fqn, s.spec.role, list(s.spec.shape), [s.box.offsets, s.box.sizes]] for s in state.shards],
        "scaler": state.objects["loss_scaler"],
        "members": [group["params"] for group in state.objects["optimizer"]["groups"]],
        "view": all(s.tensor.numel() == 1 or s.tensor._is_view() or s.tensor.ndim for s in state.shards),
    }


def padding(rank: int, world: int, *, root: str, source: dict[str, Any], engine: dict[str, Any]) -> Any:
    """Save with the true size of the vocabulary given; return what is stored, and what a load leaves in the padding."""
    start(**source)
    rules = {"tensors": [{"match": "embedding.word_embeddings.weight", "dim": 0, "size": 100}]}
    first, second = make_engine(**engine), make_engine(seed=7, **engine)
    train(first, 2)
    ckpt.save(ckpt.Parallel(first, rules=rules), root)
    shapes = {
        tuple(s.spec.shape)
        for s in MegatronAdapter(first, ckpt.Parallel(first, rules=rules).context).describe().shards
        if s.spec.fqn == "embedding.word_embeddings.weight" and s.spec.shape
    }
    ckpt.load(ckpt.Parallel(second, rules=rules), root)
    a, b = (e[0][0].module.embedding.word_embeddings.weight for e in (first, second))
    low = 64 * dist.get_rank()
    rows = max(0, min(64, 100 - low))
    return {"shapes": sorted(shapes), "equal": torch.equal(a[:rows], b[:rows]), "rows": rows}


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return the error of every state that must be refused, by what is wrong with it."""
    start(tp=world)
    job = make_engine(distributed=True)
    train(job, 1)
    (chunk,), optimizer, scheduler = job
    (wrapper,) = optimizer.chained_optimizers
    errors: dict[str, str] = {}

    def attempt(label: str, engine: Any = job) -> None:
        try:
            MegatronAdapter(engine).describe()
            errors[label] = "accepted"
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}"

    def with_value(label: str, owner: Any, name: str, value: Any) -> None:
        present = vars(owner).get(name)
        setattr(owner, name, value)
        attempt(label)
        setattr(owner, name, present) if present is not None else delattr(owner, name)

    attempt("fine")
    config = type("Config", (), {"use_precision_aware_optimizer_no_fp8_or_ds_fp8": True})()
    with_value("precision aware", wrapper, "config", config)
    with_value("offload", wrapper, "optimizer", type("HybridDeviceOptimizer", (), {})())
    with_value("fsdp", chunk, "ddp_config", type("Config", (), {"use_megatron_fsdp": True})())
    with_value("gradients", chunk.bucket_groups[0], "grad_reduce_handle", object())
    with_value("gather", chunk.bucket_groups[0], "param_gather_handle", object())
    attempt("wrapper", (chunk, type("LayerWiseDistributedOptimizer", (type(wrapper),), vars(wrapper))._new(wrapper)))
    model = chunk.module
    model.stray = torch.nn.Parameter(torch.zeros(3))
    plain = type(model).sharded_state_dict
    type(model).sharded_state_dict = lambda *a, **k: {n: v for n, v in plain(*a, **k).items() if n != "stray"}
    attempt("stray")
    type(model).sharded_state_dict = plain
    return errors
