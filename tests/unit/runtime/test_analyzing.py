"""``ckpt.analyze`` of jobs whose ranks are threads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import ckpt
from ckpt.analysis.claims import UNPROVED
from ckpt.analysis.domains import Domains
from ckpt.analysis.holdings import pieces_of
from ckpt.analysis.refuting import left_of
from ckpt.analysis.report import analyze as report_of
from ckpt.analyzing import analyze
from ckpt.auditing import audit as audit_of
from ckpt.errors import ConfigError, RankFailure
from ckpt.layout.spec import BUFFER, MASTER, PARAM
from ckpt.repo.holders import graph_of_index, holdings_of_index, hosts_of_index, refutations_of_index
from ckpt.repo.repository import Repository
from ckpt.store.memory import MemoryStore
from tests.property.fake import (
    KINDS,
    FakeEngine,
    comms,
    cut,
    each,
    engines,
    run_ranks,
    save_all,
    small_model,
    weights,
    zero1,
)


def everywhere(made, **options):
    found = each(run_ranks(comms(len(made)), lambda rank: analyze(made[rank], **options)))
    for other in found[1:]:
        assert other.to_json() == found[0].to_json(), "every rank has the same report"
    return found[0]


def job(world: int, kind: str = "zero1") -> list[FakeEngine]:
    model = small_model()
    layout = zero1(model, world)
    if kind != "zero1":
        layout = {key: cut(kind, t.shape, world) for key, t in model.tensors.items()}
    return engines(model, layout, world, filled=True)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["zero1", *KINDS])
def test_a_checkpoint_gives_the_same_report_as_the_live_job(kind, world, monkeypatch):
    monkeypatch.setenv("CKPT_HOST", "node")
    made = job(world, kind)
    store = MemoryStore()
    save_all(made, store)
    index = Repository(store).read_index(1)
    by_host = Domains.by_host(world, hosts_of_index(index))
    live = everywhere(made)
    assert report_of(holdings_of_index(index), by_host).to_json() == live.to_json()
    lost = everywhere(made, domains="rank", lose="rank:0", k=min(2, world))
    pieces = pieces_of(graph_of_index(index))
    again = report_of(holdings_of_index(index), Domains.by_rank(world), lost="rank:0", k=min(2, world), pieces=pieces)
    assert again.to_json() == lost.to_json()


def test_domains_can_be_given_in_every_way():
    made = job(4)
    ways = [{0: "a", 1: "a", 2: "b", 3: "b"}, {"a": [0, 1], "b": [2, 3]}, lambda rank: "ab"[rank // 2]]
    reports = [everywhere(made, domains=way, lose="a") for way in ways]
    assert len({r.to_json() for r in reports}) == 1
    assert reports[0].domain_count == 2
    assert reports[0].loss.ranks == "0-1"
    assert everywhere(made, domains=Domains.by_rank(4)).domain_kind == "rank"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"domains": "rack"}, "domains='rack': expected 'host', 'rank'"),
        ({"domains": {0: "a"}}, "no domain is given for rank"),
        ({"lose": "host:nowhere"}, "names no host of this job"),
        ({"lose": [7]}, "not in this job of 2 ranks"),
        ({"k": 0}, "at least 1"),
        ({"k": "1"}, "found '1'"),
        ({"k": True}, "found True"),
        ({"lose": 0}, "expected one text of names ('host:a,rank:0-3') or the numbers of ranks, found 0"),
        ({"lose": ["rank:0", 1, None]}, "found among them 'rank:0', None"),
        ({"domains": {0: None, 1: ("a",)}}, "rank(s) 0: expected the name of a domain, found None"),
        ({"domains": lambda rank: ("a", rank)}, "rank(s) 1: expected the name of a domain, found ('a', 1)"),
        ({"domains": {None: [0, 1]}}, "key None: expected a rank, or the name of a domain"),
        ({"domains": 2}, "expected a mapping, or a function of the rank, found 2"),
        ({"audit": "yes"}, "audit='yes': expected a truth value, or an AuditReport"),
    ],
)
def test_wrong_arguments_are_one_error_on_every_rank(options, text):
    made = job(2)
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank], **options)):
        assert isinstance(result, ConfigError)
        assert text in str(result)


def test_all_that_is_wrong_with_the_arguments_is_said_at_once():
    made = job(2)
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank], domains="rack", lose=0, k=0, audit=1)):
        assert isinstance(result, ConfigError)
        assert [word for word in ("domains=", "lose:", "k:", "audit=") if word in str(result)] == [
            "domains=",
            "lose:",
            "k:",
            "audit=",
        ]


def test_numbers_of_any_type_are_numbers():
    made = job(2)
    domains = {np.int64(0): np.int32(7), np.int64(1): "b"}
    found = everywhere(made, domains=domains, lose=np.array([1]), k=np.int64(2))
    assert found.loss.domains == ("b",)
    assert found.to_json() == everywhere(made, domains={0: "7", 1: "b"}, lose="b", k=2).to_json()


def test_a_dict_of_torchs_objects_is_an_engine_and_one_of_tensors_is_not():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = {"model": model, "optimizer": optimizer}
    assert isinstance(analyze(engine, k=1), ckpt.AnalysisReport)
    assert analyze(engine).to_json() == analyze((model, optimizer)).to_json()
    for state in ({"model": model.state_dict()}, {}, {"model": {}}):
        assert isinstance(analyze(state), ckpt.ContentReport)
    with pytest.raises(ConfigError, match="'model': a Linear, expected a tensor"):
        analyze({"model": model, "w": torch.ones(2)})


def test_ranks_that_ask_for_different_things_are_told():
    made = job(2)
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank], k=1 + rank)):
        assert isinstance(result, ConfigError)
        assert "disagree on the options" in str(result)
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank] if rank else {"w": torch.ones(2)})):
        assert isinstance(result, ConfigError)
        assert "disagree on the" in str(result)


def test_domains_that_differ_at_the_end_of_a_long_list_are_different():
    """What is exchanged is short; two ranks that mean different things are told all the same."""
    made = job(2)
    names = [{0: "x" * 500, 1: f"{'x' * 500}{rank}"} for rank in range(2)]
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank], domains=names[rank])):
        assert isinstance(result, ConfigError)
        assert "disagree on the options" in str(result)
        assert len(str(result)) < 1500


def test_a_host_without_a_name_is_refused(monkeypatch):
    monkeypatch.setenv("CKPT_HOST", "")
    for result in run_ranks(comms(2), lambda rank: analyze(job(2)[rank])):
        assert isinstance(result, ConfigError)
        assert "CKPT_HOST" in str(result)


def test_an_audit_comes_along_if_asked_for():
    made = job(3)
    next(s.tensor for s in made[2].shards if s.spec.key == ("emb", PARAM))[1, 1] = 5.0
    report = everywhere(made, audit=True)
    document = json.loads(report.to_json())
    (finding,) = document["audit"]["findings"]
    assert (finding["fqn"], finding["sides"]) == ("emb", [[0, 1], [2]])
    plain = json.loads(everywhere(made).to_json())
    assert plain["redundancy"] is None
    numbers = document["redundancy"]
    assert numbers["claimed"] == plain["total"]["bytes_held"] - plain["total"]["bytes_unique"]
    assert numbers["refuted"] == 6 * 4 * 2 == plain["total"]["bytes_held"] - document["total"]["bytes_held"]
    assert numbers["proved"] + numbers["unproved"] + numbers["refuted"] == numbers["claimed"]
    assert numbers["proved"] >= 7 * 8 * 2, "the buffer's two other copies"
    assert plain["total"]["bytes_unique"] == document["total"]["bytes_unique"]


def live(one: FakeEngine, fqn: str, role: str) -> torch.Tensor:
    return next(s.tensor for s in one.shards if s.spec.key == (fqn, role))


def drift(made):
    live(made[1], "emb", PARAM)[2, 1] = 9.0


def own_statistics(made):
    for rank, one in enumerate(made):
        live(one, "mean", BUFFER)[:] = rank // 2


def round_otherwise(made):
    for one in made:
        live(one, "w", PARAM)[0, 0] += 1.0


def one_master(made):
    """Cut in slices, it is only the master itself that its param is no cast of; copied, its copies differ as well."""
    live(made[0], "w", MASTER).view(torch.int32).view(-1)[0] ^= 1 << 20


def one_bit_of_a_master(made):
    """That the cast does not see: all params are the cast of either, and the save stores them all the same."""
    for rank, one in enumerate(made):
        if rank != 2:
            live(one, "norm", MASTER).view(torch.int32)[3] ^= 1


def one_param(made):
    live(made[0], "scale", PARAM).view(torch.int16)[...] ^= 1


FAULTS = [drift, own_statistics, round_otherwise, one_master, one_bit_of_a_master, one_param]


@pytest.mark.parametrize("kept", ["one", "assumed", "all"])
@pytest.mark.parametrize("kind", ["zero1", "replicated"])
@pytest.mark.parametrize("faults", [[one] for one in FAULTS] + [FAULTS], ids=[f.__name__ for f in FAULTS] + ["all"])
def test_a_checkpoint_knows_what_an_audit_at_that_moment_finds(faults, kind, kept):
    model = small_model()
    model.tensors["norm", MASTER] = weights((6,), 3)
    model.tensors["norm", PARAM] = model.tensors["norm", MASTER].bfloat16()
    model.derived.add("norm")
    layout = {key: cut("replicated", t.shape, 4) for key, t in model.tensors.items()}
    made = engines(model, zero1(model, 4) | {("norm", MASTER): layout["norm", MASTER]}, 4, filled=True)
    if kind == "replicated":
        made = engines(model, layout, 4, filled=True)
    for fault in faults:
        fault(made)
    store = MemoryStore()
    if kept == "assumed":
        for one in made:
            one.assumed = {fqn for fqn, _ in model.tensors}
    save_all(made, store, on_divergence="keep-all" if kept == "all" else "warn")
    if kept == "all":  # an audit is not told of the policy, so this is how it would know
        for one in made:
            one.assumed = {fqn for fqn, _ in model.tensors}
    audited = json.loads(everywhere(made, audit=True, domains="rank", lose=[0, 1]).to_json())
    index = Repository(store).read_index(1)
    graph = graph_of_index(index)
    left = left_of(graph, refutations_of_index(index, graph))
    stored = report_of(left.holdings, Domains.by_rank(4), lost=[0, 1], pieces=left.pieces, redundancy=left.redundancy)
    found = json.loads(stored.to_json())
    assert found["redundancy"]["refuted"] > 0
    assert audited.pop("audit")["findings"]
    assert found.pop("audit") is None
    for name in ("proved", "unproved"):
        assert found["redundancy"].pop(name) is None
        assert audited["redundancy"].pop(name) >= 0
    assert found == audited


def test_probes_of_different_steps_are_looked_at_together():
    """Equal by accident in one, which proves nothing, and different in the other."""
    made = job(2, "replicated")
    for one in made:
        live(one, "w", "exp_avg").zero_()
    before = each(run_ranks(comms(2), lambda rank: audit_of(made[rank])))[0]
    assert before.clean
    for rank, one in enumerate(made):
        live(one, "w", "exp_avg")[...] = torch.arange(15).reshape(5, 3) + rank
    after = each(run_ranks(comms(2), lambda rank: audit_of(made[rank])))[0]
    for one in made:
        live(one, "w", "exp_avg").zero_()  # whatever it is now
    held = {}
    for name, audit in {"before": before, "both": before & after, "other order": after & before}.items():
        report = everywhere(made, audit=audit, domains="rank")
        held[name] = {role.role: role.bytes_held for role in report.roles}["exp_avg"]
        assert json.loads(report.to_json())["audit"] == audit.plain()
    assert held == {"before": 2 * 60, "both": 60, "other order": 60}
    assert before.redundant(UNPROVED) - (before & after).redundant(UNPROVED) == 60


def test_an_audit_of_another_layout_or_of_one_rank_alone_is_refused():
    audits = []
    for kind in ("flat", "replicated"):
        made = job(2, kind)
        audits.append(each(run_ranks(comms(2), lambda rank, made=made: audit_of(made[rank])))[0])
    made = job(2, "flat")
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank], audit=audits[1])):
        assert isinstance(result, ConfigError)
        assert "expected one of this layout" in str(result)
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank], audit=audits[rank])):
        assert isinstance(result, ConfigError)
        assert "disagree on the options" in str(result)


def test_an_engine_that_cannot_be_described_stops_all():
    made = job(2)
    made[0].describe = lambda: (_ for _ in ()).throw(ckpt.UnsupportedLayout("tensor 'w'"))  # type: ignore[method-assign]
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank])):
        assert isinstance(result, RankFailure)
        assert result.failures == {0: "UnsupportedLayout: tensor 'w'"}
