"""``ckpt.analyze`` of jobs whose ranks are threads."""

from __future__ import annotations

import json

import pytest
import torch

import ckpt
from ckpt.analysis.domains import Domains
from ckpt.analysis.holdings import pieces_of
from ckpt.analysis.report import analyze as report_of
from ckpt.analyzing import analyze
from ckpt.errors import ConfigError, RankFailure
from ckpt.layout.spec import PARAM
from ckpt.repo.holders import graph_of_index, holdings_of_index, hosts_of_index
from ckpt.repo.repository import Repository
from ckpt.store.memory import MemoryStore
from tests.property.fake import KINDS, FakeEngine, comms, cut, each, engines, run_ranks, save_all, small_model, zero1


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
    lost = everywhere(made, domains="rank", lose="rank:0", k=2)
    pieces = pieces_of(graph_of_index(index))
    again = report_of(holdings_of_index(index), Domains.by_rank(world), lost="rank:0", k=2, pieces=pieces)
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
    ],
)
def test_wrong_arguments_are_one_error_on_every_rank(options, text):
    made = job(2)
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank], **options)):
        assert isinstance(result, ConfigError)
        assert text in str(result)


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
    assert plain == {key: value for key, value in document.items() if key != "audit"}


def test_an_engine_that_cannot_be_described_stops_all():
    made = job(2)
    made[0].describe = lambda: (_ for _ in ()).throw(ckpt.UnsupportedLayout("tensor 'w'"))  # type: ignore[method-assign]
    for result in run_ranks(comms(2), lambda rank: analyze(made[rank])):
        assert isinstance(result, RankFailure)
        assert result.failures == {0: "UnsupportedLayout: tensor 'w'"}
