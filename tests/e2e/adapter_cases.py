"""Rank functions of test_deepspeed_adapter.py: the adapter without a repository, tensors handed over in memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ckpt.engine.deepspeed import DeepSpeedAdapter
from ckpt.engine.shared_check import class_names
from ckpt.errors import LayoutError
from ckpt.layout.box import Box
from ckpt.layout.spec import MASTER, PARAM, TensorSpec
from ckpt.runtime.objects import decode_object, encode_object
from tests.harness.models import make_engine, train

if TYPE_CHECKING:
    from ckpt.engine.base import LiveShard

Held = dict[tuple[str, str, Box], torch.Tensor]
Whole = dict[tuple[str, str], torch.Tensor]


# ---------------------------------------------------------------------------------------------- a load, without a store


def held(adapter: DeepSpeedAdapter) -> Held:
    """Return a copy of everything that this rank declares, each declaration checked against its tensor."""
    found: Held = {}
    for shard in adapter.describe().shards:
        assert tuple(shard.tensor.shape) == shard.box.sizes, shard
        assert str(shard.tensor.dtype) == f"torch.{shard.spec.dtype}", shard
        assert shard.box.within(shard.spec.shape), shard
        key = (*shard.spec.key, shard.box)
        assert key not in found, f"declared twice: {key}"
        found[key] = shard.tensor.clone()
    return found


def specs(shards: list[LiveShard]) -> dict[str, dict[str, TensorSpec]]:
    """Return what all ranks hold together, as a manifest would list it."""
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, [s.spec for s in shards])
    found: dict[str, dict[str, TensorSpec]] = {}
    for spec in (spec for ranks in lists for spec in ranks):
        assert found.setdefault(spec.fqn, {}).setdefault(spec.role, spec) == spec
    return found


def reader(captured: Held) -> Any:
    """Return a ``read`` for :func:`load` that gives each rank its own pieces back."""
    return lambda spec, box: captured[(*spec.key, box)]


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a box in a tensor held in full."""
    return whole[box.relative_to(Box.whole(tuple(whole.shape)))]


def through_json(objects: dict[str, Any]) -> dict[str, Any]:
    """Return ``objects`` as a checkpoint gives them back."""
    document, tensors = encode_object(objects, "objects")
    decoded: dict[str, Any] = decode_object(document, [t.clone() for t in tensors], "memory")
    return decoded


def load(adapter: DeepSpeedAdapter, saved: Any, read: Any, objects: dict[str, Any]) -> list[str]:
    """Run the protocol; ``read(spec, box)`` returns the values of a box."""
    state = adapter.describe_for_load(saved)
    found = adapter.compare([objects])
    if found.conflicts:
        raise LayoutError("optimizer groups differ", found.conflicts)
    assert not found.missing, found
    assert not found.unexpected, found
    late = [s for s in state.shards if s.spec.role == PARAM and s.spec.fqn not in state.derived]
    for shard in state.shards:
        if shard.spec.role != PARAM:
            shard.tensor.copy_(read(shard.spec, shard.box))
    adapter.refresh()
    for shard in late:
        shard.tensor.copy_(read(shard.spec, shard.box))
    return adapter.finish([objects])


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """Return the full low-precision parameters, read by DeepSpeed's own means."""
    import deepspeed

    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone()
    return found


def persistent_are_gathered(engine: Any) -> bool:
    """Are the parameters that ZeRO-3 keeps whole between steps there, as after a step?"""
    return all(p.numel() == p.ds_numel for p in getattr(engine.optimizer, "persistent_parameters", []))


def same(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> list[str]:
    """Return the keys under which two states differ in any bit."""
    return [str(k) for k in sorted(a.keys() | b.keys(), key=str) if k not in a or k not in b or not equal(a[k], b[k])]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def pointers(adapter: DeepSpeedAdapter) -> dict[tuple[str, str, Box], int]:
    """Return the addresses of everything but the optimizer's scalars, which are not tensors in every optimizer."""
    shards = adapter.describe().shards
    return {(*s.spec.key, s.box): s.tensor.data_ptr() for s in shards if s.spec.shape or s.spec.role == "buffer"}


# ------------------------------------------------------------------------------------------------------------- cases


def declare(rank: int, world: int, **options: Any) -> dict[str, Any]:
    """Return everything that a rank declares after two steps, and what the model itself says."""
    engine = make_engine(**options)
    train(engine, 2)
    state = DeepSpeedAdapter(engine).describe()
    return {
        "wrapper": type(engine.optimizer).__name__,
        "shards": [
            [s.spec.fqn, s.spec.role, s.spec.dtype, s.spec.shape, s.box.offsets, s.box.sizes] for s in state.shards
        ],
        "derived": sorted(state.derived),
        "aliases": state.aliases,
        "params": {
            n: [list(getattr(p, "ds_shape", p.shape)), p.requires_grad] for n, p in engine.module.named_parameters()
        },
        "buffers": sorted(n for n, _ in engine.module.named_buffers() if n != "scratch"),
    }


def index_oracle(rank: int, world: int, **options: Any) -> list[str]:
    """Write each element's global index through the adapter; read it by name through DeepSpeed. Return differences."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = make_engine(**options)
    donor = make_engine(**{**options, "seed": 5})
    train(donor, 1)
    adapter, source = DeepSpeedAdapter(engine), DeepSpeedAdapter(donor).describe()
    bases = {name: 20_000 * i for i, (name, _) in enumerate(engine.module.named_parameters())}
    shift = {PARAM: 0, MASTER: 1, "exp_avg": 2, "exp_avg_sq": 3}

    def values(spec: TensorSpec, box: Box) -> torch.Tensor:
        if spec.role not in shift or spec.dtype != "float32":
            return torch.full(box.sizes, 3.0)
        return part(expected(spec.fqn, spec.role, spec.shape), box)

    def expected(fqn: str, role: str, shape: Any) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel()).view(shape) + float(bases[fqn] + shift[role])

    load(adapter, specs(source.shards), values, through_json(source.objects))
    wrong = []
    low = gathered(engine)
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        shape = getattr(p, "ds_shape", p.shape)
        for role in (MASTER, "exp_avg", "exp_avg_sq"):
            read = safe_get_full_fp32_param(p) if role == MASTER else safe_get_full_optimizer_state(p, role)
            if not torch.equal(read.view(shape), expected(name, role, shape)):
                wrong.append(f"{name} {role}")
        if not torch.equal(low[name], expected(name, MASTER, shape).to(low[name].dtype)):
            wrong.append(f"{name} param")
    return wrong


def lies(rank: int, world: int, **options: Any) -> list[str]:
    """Return the parameters whose master, as DeepSpeed's accessor gives it, is not what the parameter was cast from."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = make_engine(**options)
    train(engine, 2)
    masters = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    return [n for n, p in engine.module.named_parameters() if not torch.equal(masters[n].to(p.dtype), p)]


def round_trip(rank: int, world: int, before: int = 3, after: int = 3, **options: Any) -> dict[str, Any]:
    """Train, capture, train on; then load the capture into a fresh engine of other weights and into the old one."""
    first = make_engine(**options)
    adapter = DeepSpeedAdapter(first)
    train(first, before)
    captured, state = held(adapter), adapter.describe()
    saved, objects, low = specs(state.shards), through_json(copy.deepcopy(state.objects)), gathered(first)
    skipped = first.skipped_steps
    losses = train(first, after, start=before)
    final = held(adapter)
    report: dict[str, Any] = {"wrapper": type(first.optimizer).__name__, "skipped": [skipped, first.skipped_steps]}

    for label, engine in (("fresh", make_engine(**{**options, "seed": 7})), ("same", first)):
        target = DeepSpeedAdapter(engine)
        here = pointers(target)
        notes = load(target, saved, reader(captured), objects)
        moved = [str(k) for k, pointer in here.items() if pointers(target).get(k, pointer) != pointer]
        report[label] = {
            "notes": notes,
            "moved": moved,
            "state": same(captured, held(target)),
            "gathered": persistent_are_gathered(engine),
            "params": same(low, gathered(engine)),
            "objects": {k: v for k, v in target.describe().objects.items() if v != objects[k]},
            "losses": train(engine, after, start=before) == losses,
            "final": same(final, held(target)),
        }
    return report


def before_first_step(rank: int, world: int, **options: Any) -> dict[str, Any]:
    """Capture an engine that has not stepped; load it into one that has."""
    first = make_engine(**options)
    state = DeepSpeedAdapter(first).describe()
    captured, saved, objects = held(DeepSpeedAdapter(first)), specs(state.shards), through_json(state.objects)
    losses = train(first, 3)
    second = make_engine(**{**options, "seed": 7})
    train(second, 2)
    target = DeepSpeedAdapter(second)
    notes = load(target, saved, reader(captured), objects)
    return {
        "roles": sorted({role for roles in saved.values() for role in roles}),
        "state": same(captured, held(target)),
        "losses": train(second, 3) == losses,
        "notes": notes,
    }


def collect(adapter: DeepSpeedAdapter) -> Whole:
    """Return every tensor in full: the ranks' boxes put together, each element covered."""
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, [(s.spec, s.box, s.tensor) for s in adapter.describe().shards])
    found: Whole = {}
    covered: Whole = {}
    for spec, box, tensor in (entry for ranks in lists for entry in ranks):
        if spec.key not in found:
            found[spec.key] = torch.zeros(spec.shape, dtype=tensor.dtype)
            covered[spec.key] = torch.zeros(spec.shape, dtype=torch.bool)
        part(found[spec.key], box).copy_(tensor)
        part(covered[spec.key], box).fill_(True)
    assert all(c.all() for c in covered.values())
    return found


def save_whole(rank: int, world: int, path: str, steps: int = 3, **options: Any) -> list[str]:
    """Train and leave the whole state in a file, free of any layout."""
    engine = make_engine(**options)
    train(engine, steps)
    adapter = DeepSpeedAdapter(engine)
    state, whole = adapter.describe(), collect(adapter)
    saved = specs(state.shards)
    if rank == 0:
        torch.save({"whole": whole, "saved": saved, "objects": through_json(state.objects)}, path)
    return sorted({role for _, role in whole})


def load_whole(rank: int, world: int, path: str, **options: Any) -> dict[str, Any]:
    """Load such a file into another layout; return notes, what differs, and whether training goes on."""
    stored = torch.load(path, weights_only=False)
    whole: Whole = stored["whole"]
    engine = make_engine(**{"seed": 7, **options})
    adapter = DeepSpeedAdapter(engine)

    def read(spec: TensorSpec, box: Box) -> torch.Tensor:
        source = whole.get(spec.key)
        if spec.role == MASTER and source is None:
            source = whole[spec.fqn, PARAM]  # ZeRO-0 fp32: the parameter is the weight
        if spec.role == PARAM and (spec.fqn, MASTER) in whole:
            source = whole[spec.fqn, MASTER]
        assert source is not None, spec
        return part(source, box)

    notes = load(adapter, stored["saved"], read, stored["objects"])
    after = collect(adapter)
    differ = []
    for (fqn, role), tensor in after.items():
        reference = whole.get((fqn, role))
        if role in (MASTER, PARAM):
            reference = whole.get((fqn, MASTER), whole[fqn, PARAM])
        assert reference is not None, (fqn, role)
        if not torch.equal(tensor, reference.to(tensor.dtype)):
            differ.append(f"{fqn} {role}")
    steps = {str(type(v).__name__) for s in inner(engine).state.values() for k, v in s.items() if k == "step"}
    losses = train(engine, 2, start=3)
    return {
        "wrapper": type(engine.optimizer).__name__,
        "notes": notes,
        "differ": differ,
        "roles": sorted({role for _, role in after}),
        "missing": sorted({role for _, role in whole.keys() - after.keys()}),
        "step types": sorted(steps),
        "counters": [engine.global_steps, engine.micro_steps],
        "finite": all(torch.isfinite(torch.tensor(losses)).tolist()),
        "losses": losses,
    }


def inner(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def refusals(rank: int, world: int) -> dict[str, str]:
    """Return the error of every state that must be refused, by what is wrong with it."""
    engine = make_engine(2, gas=2)
    train(engine, 1)
    adapter = DeepSpeedAdapter(engine)
    errors: dict[str, str] = {}

    def attempt(label: str, owner: Any, name: str, value: Any) -> None:
        present = getattr(owner, name)
        setattr(owner, name, value)
        try:
            adapter.describe()
            errors[label] = "accepted"
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}"
        finally:
            setattr(owner, name, present)

    weight = next(iter(engine.module.parameters()))
    weight.allreduce = True
    key = engine.optimizer.single_partition_of_fp32_groups[0]
    state = inner(engine).state[key]
    attempt("expert", weight, "allreduce", False)
    attempt("mpu", engine, "mpu", type("Mpu", (), {"get_model_parallel_world_size": lambda self: 2})())
    attempt("hpz", engine, "zero_hpz_partition_size", lambda: 2)
    attempt("quantized", engine, "zero_quantized_weights", lambda: True)
    attempt("zenflow", engine.optimizer, "zenflow", True)
    attempt("two stages on a rank", engine, "module", type("DualPipeVModule", (torch.nn.Module,), {})())
    attempt("autoep", engine, "module", torch.nn.Sequential(type("AutoEPMoELayer", (torch.nn.Module,), {})()))
    attempt("wrapper", engine, "optimizer", type("NewOptimizer", (), {"optimizer": inner(engine)})())
    attempt("mid-accumulation", engine, "micro_steps", 3)
    inner(engine).state[key] = {**state, "factor": torch.zeros(3)}
    attempt("odd state", engine, "global_steps", 1)
    inner(engine).state[key] = {**state, "note": "text"}
    attempt("text state", engine, "global_steps", 1)
    inner(engine).state[key] = {**state, "param": torch.zeros(())}
    attempt("state named param", engine, "global_steps", 1)
    inner(engine).state[key] = state
    running = engine.module._buffers["running"]
    for label, odd in (("meta", running.to("meta")), ("sparse", running.float().to_sparse())):
        engine.module._buffers["running"] = odd
        attempt(label, engine, "global_steps", 1)
    engine.module._buffers["running"] = running
    attempt("fine", engine, "global_steps", 1)
    return errors


def offloaded_states(rank: int, world: int) -> str:
    """Describe a ZeRO-3 engine whose states were moved away."""
    engine = make_engine(3, optimizer="FusedAdam")
    train(engine, 1)
    adapter = DeepSpeedAdapter(engine)
    fine = len(adapter.describe().shards)
    engine.offload_states()
    try:
        adapter.describe()
        engine.reload_states()
        return "accepted" if len(adapter.describe().shards) == fine else "partial"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def disagreeing_steps(rank: int, world: int) -> dict[str, str]:
    """Load steps that differ inside one partition, and groups of other members."""
    engine, donor = make_engine(1), make_engine(1, seed=5)
    train(donor, 2)
    source = DeepSpeedAdapter(donor).describe()
    saved, objects = specs(source.shards), through_json(source.objects)
    errors = {}

    def values(spec: TensorSpec, box: Box) -> torch.Tensor:
        return torch.full(box.sizes, 2.0 if spec.fqn == "positions" else 3.0)

    def attempt(label: str, read: Any, data: dict[str, Any]) -> None:
        try:
            load(DeepSpeedAdapter(engine), saved, read, data)
            errors[label] = "accepted"
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}"

    attempt("steps", values, objects)
    moved = copy.deepcopy(objects)
    groups = moved["optimizer"]["groups"]
    groups[1]["params"].append(groups[0]["params"].pop())
    attempt("groups", lambda spec, box: torch.ones(box.sizes), moved)
    swapped = copy.deepcopy(objects)
    swapped["optimizer"]["groups"].reverse()
    attempt("swapped groups", lambda spec, box: torch.ones(box.sizes), swapped)
    return errors


def hyperparameters(rank: int, world: int) -> dict[str, Any]:
    """Hyperparameters that moved during training win over the fresh config; kernel choices do not."""
    donor = make_engine(2, optimizer_options={"weight_decay": 0.3}, groups=1)
    train(donor, 2)
    inner(donor).param_groups[0]["lr"] = 0.0625
    source = DeepSpeedAdapter(donor).describe()
    captured = held(DeepSpeedAdapter(donor))
    engine = make_engine(2, optimizer_options={"foreach": False}, groups=1, scheduler=False)
    notes = load(DeepSpeedAdapter(engine), specs(source.shards), reader(captured), through_json(source.objects))
    group = inner(engine).param_groups[0]
    return {"group": [group[k] for k in ("lr", "weight_decay", "foreach", "betas")], "notes": notes}


def owns_nothing(rank: int, world: int) -> dict[str, Any]:
    """A model of three one-element parameters on four ranks: most ranks have nothing but padding."""
    import deepspeed

    from tests.harness.models import ds_config, make_optimizer

    def build(seed: float) -> Any:
        net = torch.nn.Module()
        net.w = torch.nn.ParameterList(torch.nn.Parameter(torch.full((1,), seed + i)) for i in range(3))
        net.forward = lambda x: (x * net.w[0] * net.w[1] + net.w[2]).square().mean()
        optimizer = make_optimizer("AdamW", [{"params": list(net.parameters())}])
        return deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(1, "fp32"))[0]

    def steps(engine: Any) -> list[float]:
        losses = []
        for _ in range(2):
            loss = engine(torch.full((2,), 1.0 + rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    first = build(1.0)
    steps(first)
    source, captured = DeepSpeedAdapter(first).describe(), held(DeepSpeedAdapter(first))
    mine = sum(s.box.volume for s in source.shards if s.spec.role == MASTER)
    expected = steps(first)
    second = build(9.0)
    objects = through_json(source.objects)
    load(DeepSpeedAdapter(second), specs(source.shards), reader(captured), objects)
    return {
        "masters": mine,
        "state": same(captured, held(DeepSpeedAdapter(second))),
        "losses": steps(second) == expected,
    }


def no_optimizer(rank: int, world: int, stage: int) -> list[str]:
    """An engine for inference has parameters and buffers, and they can be loaded."""
    import deepspeed

    from tests.harness.models import TinyGPT, batch, ds_config

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        config = ds_config(stage, "bf16", scheduler=False)
        return deepspeed.initialize(model=TinyGPT(), config=config)[0]

    first, second = build(0), build(1)
    source, captured = DeepSpeedAdapter(first).describe(), held(DeepSpeedAdapter(first))
    assert not class_names(first.optimizer) & {"Optimizer"}
    load(DeepSpeedAdapter(second), specs(source.shards), reader(captured), through_json(source.objects))
    wrong = same(captured, held(DeepSpeedAdapter(second)))
    first.eval()
    second.eval()
    if not torch.equal(first(*batch(0, 0, rank)), second(*batch(0, 0, rank))):
        wrong.append("loss")
    return wrong
