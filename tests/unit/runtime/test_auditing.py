"""Audits of jobs whose ranks are threads: every fault is named to the element, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import ckpt
from ckpt.analysis.claims import DERIVATION, PROVED, REFUTED, REPLICA, UNPROVED, AuditReport
from ckpt.auditing import audit
from ckpt.errors import ConfigError, RankFailure
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, MASTER, PARAM
from ckpt.runtime import auditing, comparing
from ckpt.runtime.comparing import IN_AUDIT, IN_SAVE, Limits
from tests.property.fake import (
    FakeEngine,
    Layout,
    Model,
    comms,
    cut,
    each,
    engines,
    numbered,
    run_ranks,
    weights,
    zero1,
)


def audited(made: list[FakeEngine]) -> AuditReport:
    reports = each(run_ranks(comms(len(made)), lambda rank: audit(made[rank])))
    for other in reports[1:]:
        assert other.to_json() == reports[0].to_json(), "every rank has the same report"
    return reports[0]


def job(world: int, layout: Layout | None = None) -> list[FakeEngine]:
    model = Model(derived={"w"})
    model.tensors = {
        ("w", MASTER): weights((40,), 1),
        ("w", "exp_avg"): numbered("float32", (40,), 2),
        ("norm", PARAM): numbered("bfloat16", (5, 3), 3),
        ("mean", BUFFER): numbered("float32", (8,), 1),
        ("count", BUFFER): torch.tensor(7),
    }
    model.tensors["w", PARAM] = model.tensors["w", MASTER].bfloat16()
    whole = {key: cut("replicated", t.shape, world) for key, t in model.tensors.items()}
    return engines(model, {**whole, **(layout or {})}, world, filled=True)


def live(engine: FakeEngine, fqn: str, role: str) -> torch.Tensor:
    return next(s.tensor for s in engine.shards if s.spec.key == (fqn, role))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sound_job_has_no_findings_and_constants_prove_nothing(world):
    report = audited(job(world))
    assert report.clean
    assert report.total(REFUTED) == 0
    state = {(c.kind, c.fqn, c.role): c for c in report.claims}
    assert state[DERIVATION, "w", PARAM].total(PROVED) == 80
    if world > 1:
        assert state[REPLICA, "w", "exp_avg"].total(PROVED) == 160
        assert state["buffer", "count", BUFFER].total(UNPROVED) == 8, "one number is always constant"
    else:
        assert len(report.claims) == 1, "a single rank claims no replica"


def test_zeros_are_proved_by_no_number_of_probes_but_by_one_with_values():
    made = job(2)
    for one in made:
        live(one, "w", "exp_avg").zero_()
    before = audited(made)
    (claim,) = [c for c in before.claims if c.role == "exp_avg"]
    assert (claim.total(UNPROVED), claim.total(PROVED)) == (160, 0)
    (claim,) = [c for c in (before & before).claims if c.role == "exp_avg"]
    assert claim.total(PROVED) == 0
    for one in made:
        live(one, "w", "exp_avg").copy_(torch.arange(40.0))
    after = audited(made)
    for both in (before & after, after & before):
        (claim,) = [c for c in both.claims if c.role == "exp_avg"]
        assert (claim.total(UNPROVED), claim.total(PROVED)) == (0, 160)
        assert both.probes == 2
    live(made[1], "w", "exp_avg")[3] = 0.0
    refuted = audited(made)
    for both in (refuted & after, AuditReport.combine([after, before, refuted])):
        (claim,) = [c for c in both.claims if c.role == "exp_avg"]
        assert claim.total(REFUTED) == 160
        assert len(both.findings) == 1


def test_one_flipped_bit_is_named_to_the_element():
    made = job(3)
    live(made[1], "w", "exp_avg").view(torch.int32)[7] ^= 1 << 20
    distance = abs(live(made[1], "w", "exp_avg")[7].double() - live(made[0], "w", "exp_avg")[7].double()).item()
    (found,) = audited(made).findings
    assert (found.kind, found.fqn, found.role) == (REPLICA, "w", "exp_avg")
    assert found.sides == ((0, 2), (1,))
    assert found.difference is not None
    assert found.difference.box == Box((7,), (1,))
    assert (found.difference.elements, found.difference.max_abs) == (1, distance)
    assert "tensor 'w' (exp_avg): replica copies differ: 1 element in [7:8]" in str(found)


def test_buffers_are_of_their_own_kind():
    made = job(3)
    for rank, one in enumerate(made):
        live(one, "mean", BUFFER)[2:4] = float(rank)
    (found,) = audited(made).findings
    assert (found.kind, found.sides) == ("buffer", ((0,), (1,), (2,)))
    assert found.difference is not None
    assert (found.difference.box, found.difference.max_abs) == (Box((2,), (2,)), 2.0)


def test_a_param_changed_without_its_master_on_every_rank_is_a_derivation():
    made = job(2)
    for one in made:
        live(one, "w", PARAM)[5] += 1.0
    report = audited(made)
    (found,) = report.findings
    assert found.kind == DERIVATION
    assert found.sides[1] == (0, 1)
    assert found.difference is not None
    assert (found.difference.box, found.difference.elements, found.difference.max_abs) == (Box((5,), (1,)), 1, 1.0)
    (claim,) = [c for c in report.claims if c.kind == DERIVATION]
    assert claim.total(REFUTED) == 80


def test_a_param_changed_on_one_rank_tells_which_side_its_master_contradicts():
    """Two ranks that differ have no majority, but only one of them is cast(master)."""
    zero = {key: cut("flat", (40,), 2) for key in (("w", MASTER), ("w", "exp_avg"))}
    made = job(2, zero)
    live(made[1], "w", PARAM)[[3, 30]] += 1.0
    report = audited(made)
    replicas = [f for f in report.findings if f.kind == REPLICA]
    casts = [f for f in report.findings if f.kind == DERIVATION]
    assert [f.sides for f in replicas] == [((0,), (1,))] * 2
    assert [(f.sides, f.difference.box) for f in casts] == [
        (((0,), (1,)), Box((3,), (1,))),
        (((1,), (1,)), Box((30,), (1,))),
    ]


def test_nan_against_a_number_reaches_json_as_a_count():
    made = job(2)
    live(made[1], "norm", PARAM)[0, 0] = float("nan")
    live(made[1], "norm", PARAM)[4, 2] = 2.0
    report = audited(made)
    (plain,) = json.loads(report.to_json(), parse_constant=pytest.fail)["findings"]
    assert (plain["elements"], plain["unordered"]) == (2, 1)
    assert plain["box"] == {"offsets": [0, 0], "sizes": [5, 3]}


def test_only_so_many_chunks_are_looked_at_and_every_tensor_gets_its_turn(monkeypatch):
    monkeypatch.setattr(auditing, "IN_AUDIT", Limits(3, 16, batch_bytes=1))
    model = Model()
    model.tensors = {("a", BUFFER): torch.zeros(8, 1024), ("b", BUFFER): torch.zeros(3), ("c", PARAM): torch.zeros(3)}
    whole = {key: cut("replicated", t.shape, 2) for key, t in model.tensors.items()}
    made = engines(model, whole, 2, filled=True)
    for key in model.tensors:
        live(made[1], *key).add_(1.0)
    report = audited(made)
    assert len(report.findings) == 10
    assert report.detailed == 3
    assert {f.fqn for f in report.findings if f.difference is not None} == {"a", "b", "c"}
    assert all(f.sides == ((0,), (1,)) for f in report.findings)


@pytest.mark.parametrize(("sides", "distance"), [(2, 10.0), (3, 20.0), (4, 30.0)])
def test_more_sides_than_are_compared_are_all_listed(monkeypatch, sides, distance):
    monkeypatch.setattr(auditing, "IN_AUDIT", Limits(32, sides))
    made = job(4)
    for rank, one in enumerate(made):
        live(one, "mean", BUFFER)[0] = float(10 * rank)
    (found,) = audited(made).findings
    assert found.sides == ((0,), (1,), (2,), (3,))
    assert found.difference is not None
    assert found.difference.max_abs == distance
    assert found.plain()["sides_compared"] == sides
    assert ("sides compared" in str(found)) == (sides < 4)


def test_nothing_is_left_in_the_store_and_the_engine_is_untouched():
    made = job(2)
    live(made[1], "w", "exp_avg")[0] = 9.0
    before = [bytes(b.numpy().data) for one in made for b in one.buffers]
    jobs = comms(2)
    each(run_ranks(jobs, lambda rank: audit(made[rank])))
    assert [bytes(b.numpy().data) for one in made for b in one.buffers] == before
    assert not jobs[0].store.check(["compare/1/0/0/1"])


def test_what_travels_is_bounded_in_bytes():
    assert [IN_AUDIT.sides_of(n) for n in (4, 1 << 19, 1 << 20, 4 << 20, 64 << 20)] == [16, 16, 8, 2, 2]
    assert IN_SAVE.chunks * (IN_SAVE.sides_of(4 << 20) - 1) * (4 << 20) == 32 << 20


def test_a_rank_that_fails_in_the_middle_leaves_nothing_in_the_store(monkeypatch):
    def refuse(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(comparing, "difference", refuse)
    made = job(3)
    live(made[1], "w", "exp_avg")[0] = 9.0
    jobs = comms(3)
    keys: set[str] = set()
    key_of = comparing._Exchange._key

    def remembered(*args: Any) -> str:
        keys.add(key_of(*args))
        return key_of(*args)

    monkeypatch.setattr(comparing._Exchange, "_key", remembered)
    for result in run_ranks(jobs, lambda rank: audit(made[rank])):
        assert isinstance(result, RankFailure)
        assert result.failures == {0: "MemoryError: no room"}
    (key,) = keys
    assert not jobs[0].store.check([key])


def test_what_only_counts_as_whole_is_said_to_be_kept():
    made = job(3)
    live(made[2], "w", "exp_avg")[0] = 9.0
    live(made[2], "norm", PARAM)[0, 0] = 9.0
    made[0].assumed = made[2].assumed = {"w"}
    assert {f.fqn: f.all_kept for f in audited(made).findings} == {"w": True, "norm": False}


def test_reports_of_different_layouts_are_not_combined():
    with pytest.raises(ConfigError, match="of one layout, found 2"):
        audited(job(2)) & audited(job(3))
    with pytest.raises(ConfigError, match="found 0"):
        AuditReport.combine([])


def test_a_rank_that_fails_takes_all_along():
    made = job(3)
    made[1].describe = lambda: (_ for _ in ()).throw(RuntimeError("no memory"))  # type: ignore[method-assign]
    for result in run_ranks(comms(3), lambda rank: audit(made[rank])):
        assert isinstance(result, RankFailure)
        assert result.failures == {1: "RuntimeError: no memory"}


def test_ranks_that_call_different_things_are_told(tmp_path):
    made = job(2)
    for result in run_ranks(comms(2), lambda r: audit(made[r]) if r else ckpt.save(made[r], tmp_path)):
        assert isinstance(result, ConfigError)
        assert "ckpt.save" in str(result)
        assert "ckpt.audit" in str(result)


def test_zero1_claims_what_it_replicates_and_no_more():
    model = Model(derived={"w"})
    model.tensors = {("w", MASTER): weights((40,), 1), ("w", "exp_avg"): numbered("float32", (40,), 2)}
    model.tensors["w", PARAM] = model.tensors["w", MASTER].bfloat16()
    report = audited(engines(model, zero1(model, 2), 2, filled=True))
    assert {(c.kind, c.role) for c in report.claims} == {(REPLICA, PARAM), (DERIVATION, PARAM)}
    assert report.total(PROVED) == 160
