"""Rank functions of test_audit.py: faults put into live engines, and what ckpt says of them."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

import ckpt
from ckpt.analysis.domains import Domains
from ckpt.analysis.holdings import pieces_of
from ckpt.analysis.refuting import left_of
from ckpt.analysis.report import analyze as report_of
from ckpt.engine.deepspeed import DeepSpeedAdapter
from ckpt.layout.spec import PARAM
from ckpt.repo.holders import graph_of_index, holdings_of_index, hosts_of_index, refutations_of_index
from ckpt.repo.repository import Repository
from ckpt.store.open import open_store
from tests.harness.models import make_engine, train
from tests.property.fake import Model, cut, engines


def live(engine: Any, fqn: str, role: str) -> torch.Tensor | None:
    """Return this rank's first piece of a tensor, if it has any; writing into it reaches the engine."""
    shards = DeepSpeedAdapter(engine).describe().shards
    return next((s.tensor for s in shards if s.spec.key == (fqn, role)), None)


def flip_moment(engine: Any, rank: int) -> None:
    """One bit of one element, on one rank."""
    moment = live(engine, "blocks.0.up.weight", "exp_avg")
    if rank == 1 and moment is not None:
        flat = moment.view(torch.int32)
        flat[2, 3] ^= 1 << 21


def drift_norm(engine: Any, rank: int) -> None:
    """A norm's weight on one rank, as after a missing all-reduce between tensor-parallel ranks."""
    weight = live(engine, "norm.weight", PARAM)
    if rank == 1 and weight is not None:
        weight[4:7] += 0.5


def move_param(engine: Any, rank: int) -> None:
    """The first element of a param, on all ranks that hold it; its master untouched."""
    for shard in DeepSpeedAdapter(engine).describe().shards:
        if shard.spec.key == ("blocks.1.proj.bias", PARAM) and shard.box.offsets == (0,):
            shard.tensor[:1] += 1.0


FAULTS = {"moment": flip_moment, "norm": drift_norm, "param": move_param}


def audited(rank: int, world: int, *, engine: dict[str, Any], steps: int, faults: list[str]) -> dict[str, Any]:
    """Train, put faults in, audit, and save: what both say."""
    job = make_engine(**engine)
    train(job, steps)
    for fault in faults:
        with torch.no_grad():
            FAULTS[fault](job, rank)
    report = ckpt.audit(job)
    text = report.to_json().decode()
    assert "NaN" not in text
    return json.loads(text)


def probes(rank: int, world: int, *, engine: dict[str, Any]) -> dict[str, Any]:
    """Audit before the first step, after two steps, and both combined."""
    job = make_engine(**engine)
    train(job, 1)
    moments = [s.tensor for s in DeepSpeedAdapter(job).describe().shards if s.spec.role.startswith("exp_avg")]
    kept = [m.clone() for m in moments]
    for moment in moments:
        moment.zero_()
    before = ckpt.audit(job)
    for moment, value in zip(moments, kept, strict=True):
        moment.copy_(value)
    train(job, 1, start=1)
    after = ckpt.audit(job)
    both = {"before": before, "after": after, "both": before & after}
    return {name: json.loads(report.to_json()) for name, report in both.items()}


def saved_with_faults(rank: int, world: int, *, root: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Save an engine whose norm drifted on one rank and one of whose params is not its master's cast."""
    job = make_engine(**engine)
    train(job, 2)
    drift_norm(job, rank)
    move_param(job, rank)
    report = ckpt.save(job, root)
    return {"divergences": list(report.divergences), "underived": list(report.underived), "n": report.bytes_underived}


def wrong_engine(rank: int, world: int) -> str:
    """One rank passes something that is no engine."""
    try:
        ckpt.audit(object() if rank == 1 else adapter(rank, world, rows=4))
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def adapter(rank: int, world: int, rows: int) -> Any:
    """A raw adapter whose one tensor is replicated."""
    model = Model()
    model.tensors = {("w", PARAM): torch.arange(rows * 1024, dtype=torch.int32).reshape(rows, 1024)}
    layout = {("w", PARAM): cut("replicated", (rows, 1024), world)}
    return engines(model, layout, world, filled=True)[rank]


def large_chunks(rank: int, world: int) -> dict[str, Any]:
    """Chunks of the largest size travel between the two sides: elements of the first and of the last one differ."""
    one = adapter(rank, world, rows=17_408)
    if rank == 1:
        one.shards[0].tensor[5, 7] += 3
        one.shards[0].tensor[-1, -1] += 4
    return json.loads(ckpt.audit(one).to_json())


def content(rank: int, world: int, *, engine: dict[str, Any]) -> dict[str, Any]:
    """What the module's own state dict shows, with no word from the engine."""
    job = make_engine(**engine)
    train(job, 2)
    return json.loads(ckpt.analyze(job.module.state_dict()).to_json())


def live_and_stored(rank: int, world: int, *, root: str, engine: dict[str, Any]) -> dict[str, Any]:
    """The report of a live engine, and that of its checkpoint."""
    os.environ["CKPT_HOST"] = f"node{rank // 2}"
    job = make_engine(**engine)
    train(job, 1)
    report = ckpt.analyze(job, lose="host:node0")
    ckpt.save(job, root)
    index = Repository(open_store(root)).read_index(1)
    hosts = hosts_of_index(index)
    pieces = pieces_of(graph_of_index(index))
    stored = report_of(holdings_of_index(index), Domains.by_host(world, hosts), lost="host:node0", pieces=pieces)
    return {
        "live": report.to_json().decode(),
        "stored": stored.to_json().decode(),
        "hosts": list(hosts),
        "domains": report.domain_count,
    }


def refuted(rank: int, world: int, *, root: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Faults in a live engine: its report as claimed and as audited, that of its checkpoint, and of combined probes."""
    job = make_engine(**engine)
    train(job, 1)
    sound = ckpt.audit(job)
    train(job, 1, start=1)
    with torch.no_grad():
        for fault in FAULTS.values():
            fault(job, rank)
    asked: dict[str, Any] = {"domains": "rank", "lose": [0]}
    reports = {"claimed": ckpt.analyze(job, **asked), "audited": ckpt.analyze(job, audit=True, **asked)}
    combined = sound & ckpt.audit(job)
    ckpt.save(job, root)
    index = Repository(open_store(root)).read_index(2)
    graph = graph_of_index(index)
    left = left_of(graph, refutations_of_index(index, graph))
    domains = Domains.by_rank(world)
    reports["stored"] = report_of(left.holdings, domains, lost=[0], pieces=left.pieces, redundancy=left.redundancy)
    train(job, 1, start=2)  # what several probes have found counts, whatever is there now
    reports["combined"] = ckpt.analyze(job, audit=combined, **asked)
    return {name: json.loads(report.to_json()) for name, report in reports.items()}
