"""What the ranks of test_megatron.py do."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.engine.megatron import MegatronAdapter
from ckpt.errors import CkptError
from tests.harness.megatron_models import make_engine, snapshot, start, train


def _loaded(engine: Any, root: str, **options: Any) -> list[str]:
    return list(ckpt.load(engine, root, **options).notes)


def continuation(rank: int, world: int, *, root: str, layout: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Train, save, train on; then load into a fresh engine of other weights, and into the trained one, and train on."""
    start(**layout)
    first = make_engine(**engine)
    train(first, 3)
    refused = _settle(first)
    here = snapshot(first)
    report = ckpt.save(first, root)
    losses = train(first, 3, first=3)
    _settle(first)
    final = snapshot(first)
    found: dict[str, Any] = {"report": dataclasses.asdict(report), "losses": losses, "refused": refused}
    found["moved"] = here != final
    for label, target in (("fresh", make_engine(seed=7, **engine)), ("same", first)):
        notes = _loaded(target, root)
        again = ckpt.save(target, f"{root}-{label}") if label == "fresh" else None
        found[label] = {
            "notes": notes,
            "state": _differing(here, snapshot(target)),
            "losses": train(target, 3, first=3) == losses,
            "refused": _settle(target),
            "final": _differing(final, snapshot(target)),
            "divergences": list(again.divergences) if again else [],
        }
    return found


def _settle(engine: Any) -> str:
    """Gather parameters that a step has left to the next forward pass; return what a save says before."""
    if not engine[0][0].ddp_config.overlap_param_gather:
        return ""
    error = _refusal(engine)
    for chunk in engine[0]:
        chunk.start_param_sync(force_sync=True)
    return error


def _refusal(engine: Any) -> str:
    try:
        MegatronAdapter(engine).describe()
    except CkptError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [f"{k}: {a.get(k)} != {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]


# -------------------------------------------------------------------------------------------------- other layouts


def leave(rank: int, world: int, *, root: str, layout: dict[str, Any], engine: dict[str, Any]) -> None:
    """Train with a plain optimizer and save; leave this rank's weights and moments in a file, by Megatron's names."""
    from megatron.core import parallel_state as ps

    start(**layout)
    job = make_engine(**engine)
    train(job, 3)
    ckpt.save(job, root)
    place = {
        "tp": ps.get_tensor_model_parallel_rank(),
        "pp": ps.get_pipeline_model_parallel_rank(),
        "ep": ps.get_expert_model_parallel_rank(),
    }
    torch.save({"place": place, "state": _by_name(job)}, f"{root}-oracle{rank}")


def _by_name(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    (chunk,), optimizer, _ = engine
    parameters = chunk.module.named_parameters()
    names = {id(getattr(p, "main_param", p)): name.removeprefix("module.") for name, p in parameters}
    return {
        names[id(key)]: {"weight": key.detach(), **wrapper.optimizer.state[key]}
        for wrapper in optimizer.chained_optimizers
        for group in wrapper.optimizer.param_groups
        for key in group["params"]
    }


def pass_on(
    rank: int, world: int, *, source: str, into: str, layout: dict[str, Any], engine: dict[str, Any]
) -> dict[str, Any]:
    """Load what another layout saved and save it again."""
    start(**layout)
    job = make_engine(seed=7, **engine)
    notes = _loaded(job, source)
    report = ckpt.save(job, into)
    return {"notes": notes, "divergences": list(report.divergences), "report": dataclasses.asdict(report)}


def compare(rank: int, world: int, *, root: str, oracle: str, ranks: int, engine: dict[str, Any]) -> dict[str, Any]:
    """Load on one rank; compare with the files of :func:`leave`, put together by hand. Return what differs."""
    start()
    job = make_engine(seed=7, **engine)
    notes = _loaded(job, root)
    whole = _assembled([torch.load(f"{oracle}-oracle{r}", weights_only=True) for r in range(ranks)])
    here = _by_name(job)
    wrong = [f"{n} {k}" for n, roles in whole.items() for k, v in roles.items() if not torch.equal(here[n][k], v)]
    return {"notes": notes, "wrong": wrong, "names": here.keys() == whole.keys(), "losses": train(job, 1, first=3)}


LAYERS, EXPERTS = 4, 4

_ROWS = ("word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_GATE_UP = ("linear_fc1.weight", "linear_fc1.bias")


def _assembled(files: list[dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the model of one rank: written down from how Megatron's layers compute, not from what they declare."""
    sizes = {axis: 1 + max(one["place"][axis] for one in files) for axis in ("tp", "pp", "ep")}
    state = {tuple(one["place"].values()): one["state"] for one in reversed(files)}  # of replicas the first
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for pp in range(sizes["pp"]):
        for ep in range(sizes["ep"]):
            parts = [state[tp, pp, ep] for tp in range(sizes["tp"])]
            for name in parts[0]:
                if not name.endswith("output_layer.weight"):  # the last stage's copy of the embedding
                    shifted = _shifted(name, "layers", pp * LAYERS // sizes["pp"])
                    shifted = _shifted(shifted, "local_experts", ep * EXPERTS // sizes["ep"])
                    whole[shifted] = {k: _joined(name, [part[name][k] for part in parts]) for k in parts[0][name]}
    return whole


def _shifted(name: str, what: str, by: int) -> str:
    fields = name.split(".")
    if what in fields:
        at = fields.index(what) + 1
        fields[at] = str(int(fields[at]) + by)
    return ".".join(fields)


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
    }


def before_first_step(rank: int, world: int, *, root: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Save an engine that has not stepped; load it into one that has."""
    start(tp=world)
    first, second = make_engine(**engine), make_engine(seed=7, **engine)
    ckpt.save(first, root)
    here = snapshot(first)
    losses = train(first, 2)
    train(second, 2)
    notes = _loaded(second, root)
    return {"notes": notes, "state": _differing(here, snapshot(second)), "losses": train(second, 2) == losses}


def generators(rank: int, world: int, *, root: str, tp: int, save: bool) -> dict[str, Any]:
    """Save or load the generators of tensor-parallel regions, whose states are made up: only CUDA has real ones."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    start(tp=tp)
    job = make_engine(layers=1)
    tracker = get_cuda_rng_tracker()
    tracker.set_states({"model-parallel-rng": torch.full((16,), rank if save else 99, dtype=torch.uint8)})
    notes = []
    if save:
        ckpt.save(job, root)
    else:
        notes = _loaded(job, root)
    return {"notes": notes, "state": tracker.get_states()["model-parallel-rng"].unique().tolist()}


def schedules(rank: int, world: int, *, root: str) -> dict[str, str]:
    """Load a checkpoint under schedules of other settings, as Megatron's own options decide."""
    start()
    job = make_engine(layers=1)
    train(job, 3)
    ckpt.save(job, root)
    found = {}
    for label, options in {
        "neither": {"use_checkpoint_opt_param_scheduler": False},
        "checkpoint": {"use_checkpoint_opt_param_scheduler": True},
        "override": {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": True},
    }.items():
        other = make_engine(layers=1, scheduler={"max_lr": 5e-2, **options})
        try:
            ckpt.load(other, root)
            found[label] = f"{other[2].max_lr:g} {other[2].num_steps}"
        except CkptError as error:
            found[label] = f"{type(error).__name__}: {error}"
    return found


def padding(rank: int, world: int, *, root: str, source: dict[str, Any], engine: dict[str, Any]) -> Any:
    """Save with the true size of the vocabulary given; return what is stored, and what a load leaves in the padding."""
    start(**source)
    rules = {"tensors": [{"match": "embedding.word_embeddings.weight", "dim": 0, "size": 100}]}
    first, second = make_engine(**engine), make_engine(seed=7, **engine)
    train(first, 2)
    train(second, 1)
    before = _padding(second)
    ckpt.save(ckpt.Parallel(first, rules=rules), root)
    shapes = {
        tuple(s.spec.shape)
        for s in MegatronAdapter(first, ckpt.Parallel(first, rules=rules).context).describe().shards
        if s.spec.fqn == "embedding.word_embeddings.weight" and s.spec.shape
    }
    ckpt.load(ckpt.Parallel(second, rules=rules), root)
    a, b = map(_words, (first, second))
    low = 64 * dist.get_rank()
    rows = max(0, min(64, 100 - low))
    cleared = [before, _padding(second)]
    return {"shapes": sorted(shapes), "equal": torch.equal(a[:rows], b[:rows]), "rows": rows, "padding": cleared}


def _words(engine: Any) -> torch.Tensor:
    return next(p for name, p in engine[0][0].named_parameters() if name.endswith("word_embeddings.weight"))


def _padding(engine: Any) -> dict[str, float]:
    """Return the largest value of the embedding's last row on this rank: padding, if it is the last rank."""
    (wrapper,) = engine[1].chained_optimizers
    weight = _words(engine)
    key = getattr(weight, "main_param", weight)
    if hasattr(wrapper, "shard_fp32_groups"):  # with one data-parallel rank, its range is all of it
        models = [p for group in (*wrapper.model_fp32_groups, *wrapper.model_float16_groups) for p in group]
        shards = [p for group in (*wrapper.shard_fp32_groups, *wrapper.shard_fp32_from_float16_groups) for p in group]
        key = next(shard for p, shard in zip(models, shards, strict=True) if p is weight)
    state = wrapper.optimizer.state[key]
    found = {"param": weight, "master": key, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    return {name: float(t.detach().view(-1, 32)[-1].abs().max()) for name, t in found.items()}


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return the error of every state that must be refused, by what is wrong with it."""
    start(tp=world)
    job = make_engine(distributed=True)
    train(job, 1)
    (chunk,), optimizer, _ = job
    (wrapper,) = optimizer.chained_optimizers
    errors: dict[str, str] = {}

    def attempt(label: str, engine: Any = job) -> None:
        errors[label] = _refusal(engine)

    def with_value(label: str, owner: Any, name: str, value: Any) -> None:
        present = getattr(owner, name)
        setattr(owner, name, value)
        attempt(label)
        setattr(owner, name, present)

    attempt("fine")
    config = type("Config", (), {"use_precision_aware_optimizer_no_fp8_or_ds_fp8": True})()
    with_value("precision aware", wrapper, "config", config)
    with_value("offload", wrapper, "optimizer", type("HybridDeviceOptimizer", (), {})())
    with_value("fsdp", chunk, "ddp_config", type("Config", (), {"use_megatron_fsdp": True})())
    with_value("gradients", chunk.bucket_groups[0], "grad_reduce_handle", object())
    with_value("gather", chunk.bucket_groups[0], "param_gather_handle", object())
    other = object.__new__(type("LayerWiseDistributedOptimizer", (type(wrapper),), {}))
    vars(other).update(vars(wrapper))
    attempt("wrapper", (chunk, other))
    model = chunk.module
    model.stray = torch.nn.Parameter(torch.zeros(3))
    plain = type(model).sharded_state_dict
    type(model).sharded_state_dict = lambda *a, **k: {n: v for n, v in plain(*a, **k).items() if n != "stray"}
    attempt("stray")
    type(model).sharded_state_dict = plain
    return errors
