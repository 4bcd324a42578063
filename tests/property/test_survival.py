"""Survival is true: state is really held, really lost, and rebuilt from what is left, element by element.

The oracle knows nothing of combinations or kill sets. It asks of every element which of its roles some survivor holds,
and what follows from them by a cast.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.analysis import chance, worst
from ckpt.analysis.blocks import SetTable, blocks_of
from ckpt.analysis.chance import NothingLost, expected_share, lost_terms
from ckpt.analysis.combination import minimal
from ckpt.analysis.domains import Domains
from ckpt.analysis.holdings import Holdings, RankSets, TensorRows, holdings_of, pieces_of
from ckpt.analysis.kills import kill_table
from ckpt.analysis.losing import lose
from ckpt.analysis.report import analyze
from ckpt.analysis.survival import rounded, survival_table
from ckpt.analysis.worst import worst_losses
from ckpt.layout.box import Box
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import BUFFER, ITEMSIZE, MASTER, PARAM, TensorSpec
from tests.property.layouts import any_job, elements

Element = tuple[int, ...]


class Cluster:
    """Ranks that hold numpy arrays."""

    def __init__(self, layouts, graph):
        self.graph = graph
        self.truth = {}
        for spec in graph.specs:
            seed = len(self.truth)
            values = (np.arange(prod(spec.shape)) + 1.0) * (1 + seed) + 0.0001
            self.truth[spec] = values.reshape(spec.shape).astype(np.float32)
        for spec in graph.specs:
            if spec.role == PARAM and spec.fqn in graph.derived:
                master = next(s for s in graph.specs if s.key == (spec.fqn, MASTER))
                self.truth[spec] = self.truth[master].astype(spec.dtype)
        self.memory = {
            one.rank: [(s.spec, s.box, self.truth[s.spec][s.box.relative_to(Box.whole(s.spec.shape))].copy())
                       for s in one.shards]
            for one in layouts
        }  # fmt: skip

    def kill(self, ranks):
        for rank in ranks:
            del self.memory[rank]

    def read(self, rank, spec, element):
        """The value that this rank has in memory; KeyError if it is lost or never was there."""
        for held, box, values in self.memory[rank]:
            if held == spec and box.contains(Box(element, (1,) * len(element))):
                return values[tuple(e - o for e, o in zip(element, box.offsets, strict=True))]
        raise KeyError((rank, spec, element))

    def holders(self, spec):
        """element -> surviving ranks"""
        found: dict[Element, set[int]] = {}
        for rank, shards in self.memory.items():
            for held, box, _ in shards:
                if held == spec:
                    for element in elements(box):
                        found.setdefault(element, set()).add(rank)
        return found

    def specs_of(self, fqn) -> list[TensorSpec]:
        return [spec for spec in self.graph.specs if spec.fqn == fqn]


def main_spec(specs):
    return next((s for s in specs if s.role == PARAM), specs[0])


def at(spec: TensorSpec, main: TensorSpec, element: Element) -> Element:
    return element if spec.shape == main.shape else ()


def rebuildable(specs: list[TensorSpec], derived: bool, main: TensorSpec, holders, element: Element) -> bool:
    """Do the surviving roles of this element give all of them?"""
    known = {s.role for s in specs if holders[s].get(at(s, main, element))}
    dtypes = {s.role: s.dtype for s in specs}
    if derived and MASTER in known:
        known.add(PARAM)
    if derived and PARAM in known and dtypes[PARAM] == dtypes[MASTER]:
        known.add(MASTER)
    return known == set(dtypes)


def cost(specs: list[TensorSpec], derived: bool, main: TensorSpec) -> int:
    """Bytes that must be kept of an element."""
    return sum(ITEMSIZE[s.dtype] for s in specs if s.shape == main.shape and not (derived and s.role == PARAM))


def lost_by_hand(cluster: Cluster) -> tuple[dict[str, set[Element]], dict[str, int]]:
    """fqn -> elements that cannot be rebuilt; fqn -> bytes lost."""
    gone, nbytes = {}, {}
    for fqn in {s.fqn for s in cluster.graph.specs}:
        specs, derived = cluster.specs_of(fqn), fqn in cluster.graph.derived
        main = main_spec(specs)
        holders = {spec: cluster.holders(spec) for spec in specs}
        gone[fqn] = {e for e in elements(Box.whole(main.shape)) if not rebuildable(specs, derived, main, holders, e)}
        nbytes[fqn] = len(gone[fqn]) * cost(specs, derived, main) + sum(
            s.itemsize for s in specs if s.shape != main.shape and not holders[s].get(())
        )
    return gone, nbytes


def ranks_in(text: str) -> list[int]:
    return [r for part in text.split(",") for r in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)]


@settings(max_examples=250, deadline=None)
@given(any_job, st.data())
def test_what_is_promised_is_rebuilt_and_what_is_called_lost_cannot_be(layouts, data):
    graph = ShardGraph.build(layouts)
    graph.check()
    holdings = holdings_of(graph)
    lost = data.draw(st.sets(st.integers(0, len(layouts) - 1)), label="lost")
    found = lose(holdings, Domains.by_rank(len(layouts)), lost, pieces_of(graph))
    without_pieces = lose(holdings, Domains.by_rank(len(layouts)), lost)
    cluster = Cluster(layouts, graph)
    before = {spec: cluster.holders(spec) for spec in graph.specs}
    cluster.kill(lost)
    gone, nbytes = lost_by_hand(cluster)

    listed = {one.fqn: one for one in found.tensors}
    assert len(listed) == len(found.tensors)
    for fqn, lost_elements in gone.items():
        specs = cluster.specs_of(fqn)
        main = main_spec(specs)
        if fqn not in listed:
            for spec in specs:
                kept = cluster.holders(spec) == before[spec]
                assert kept or not prod(main.shape) or spec.shape != main.shape, (
                    "a tensor that is not listed lost no copy"
                )
            continue
        one = listed[fqn]
        assert {e for offsets, sizes in one.boxes for e in elements(Box(offsets, sizes))} == lost_elements
        assert (one.elements, one.bytes) == (len(lost_elements), nbytes[fqn])
        for spec in specs:
            assert one.roles_gone.get(spec.role, 0) == len(before[spec]) - len(cluster.holders(spec))
        promised: set[Element] = set()
        for source in one.rebuild_from:
            rebuilt_by_boxes = [e for offsets, sizes in source.boxes for e in elements(Box(offsets, sizes))]
            assert source.elements == len(rebuilt_by_boxes)
            assert not promised & set(rebuilt_by_boxes)
            promised.update(rebuilt_by_boxes)
            for element in rebuilt_by_boxes:
                rebuild(cluster, specs, main, source, element)
        untouched = {
            e
            for e in elements(Box.whole(main.shape))
            if all(cluster.holders(s).get(e) == before[s][e] for s in specs if s.shape == main.shape)
            and all(cluster.holders(s) for s in specs if s.shape != main.shape)
        }
        assert promised | untouched | lost_elements == set(elements(Box.whole(main.shape)))
        assert not promised & untouched
        assert not lost_elements & (promised | untouched)
    assert found.bytes == sum(nbytes.values())
    assert [(t.fqn, t.elements, t.bytes, t.roles_gone) for t in without_pieces.tensors] == [
        (t.fqn, t.elements, t.bytes, t.roles_gone) for t in found.tensors
    ]


def rebuild(cluster, specs, main, source, element):
    """From every rank that the source names, exactly as it says."""
    have = {}
    by_role = {s.role: s for s in specs}
    for role, text in source.ranks.items():
        spec = by_role[role]
        values = {cluster.read(rank, spec, at(spec, main, element)).tobytes() for rank in ranks_in(text)}
        assert values == {cluster.truth[spec][at(spec, main, element)].tobytes()}
        have[role] = cluster.truth[spec][at(spec, main, element)]
    if PARAM not in have and PARAM in by_role:
        have[PARAM] = have[MASTER].astype(by_role[PARAM].dtype)
    if MASTER not in have and MASTER in by_role:
        assert by_role[PARAM].dtype == by_role[MASTER].dtype
        have[MASTER] = have[PARAM]
    for role, spec in by_role.items():
        assert have[role] == cluster.truth[spec][at(spec, main, element)]


@settings(max_examples=100, deadline=None)
@given(any_job, st.data())
def test_the_survival_table_is_what_trying_every_loss_shows(layouts, data):
    graph = ShardGraph.build(layouts)
    world = len(layouts)
    kinds = st.lists(st.sampled_from("abcde"), min_size=world, max_size=world)
    domains = Domains.of("host", world, dict(enumerate(data.draw(kinds))))
    names = domains.names
    holdings = holdings_of(graph)
    blocks, sets = blocks_of(holdings), SetTable(holdings.sets)
    rows = {row.lost: row for row in survival_table(kill_table(blocks, sets, domains))}
    total_bytes = total_params = None
    assert sorted(rows) == list(range(len(names) + 1))
    for lost, row in rows.items():
        results = []
        for chosen in combinations(names, lost):
            cluster = Cluster(layouts, graph)
            cluster.kill([r for r in range(world) if domains.of_rank[r] in chosen])
            gone, nbytes = lost_by_hand(cluster)
            params = sum(len(e) for fqn, e in gone.items() if BUFFER not in {s.role for s in cluster.specs_of(fqn)})
            results.append((sum(nbytes.values()), params))
        if total_bytes is None:
            total_bytes = graph.bytes_unique()
            total_params = sum(
                prod(main_spec(s).shape)
                for s in ([x for x in graph.specs if x.fqn == f] for f in {x.fqn for x in graph.specs})
                if s[0].role != BUFFER
            )
        for held, total, index in ((row.bytes, total_bytes, 0), (row.parameters, total_params, 1)):
            losses = [one[index] for one in results]
            assert held.worst == held.worst_upper == total - max(losses)
            mean = 1 - Fraction(sum(losses), len(losses) * total) if total else 1
            assert held.expected_share == rounded(float(mean))
        safe = Fraction(sum(one[0] == 0 for one in results), len(results))
        assert row.nothing_lost == row.nothing_lost_upper == rounded(float(safe))
        assert row.exact
        assert row.nothing_lost_exact


kills = st.frozensets(st.integers(0, 6), min_size=1, max_size=4)
families = st.lists(st.lists(kills, min_size=1, max_size=3).map(minimal), min_size=1, max_size=6)


@settings(deadline=None)
@given(families, st.data(), st.sampled_from(["all", "sweep", "bounds", "few tries"]))
def test_bounds_enclose_the_truth_and_exact_numbers_are_the_truth(families, data, effort):
    weight = np.array(
        data.draw(st.lists(st.tuples(*[st.integers(0, 9)] * 2), min_size=len(families), max_size=len(families))),
        np.int64,
    )
    domains = data.draw(st.integers(7, 9))
    with pytest.MonkeyPatch.context() as patch:
        if effort != "all":
            patch.setattr(worst, "TRIES", 200 if effort == "few tries" else 0)
            patch.setattr(chance, "UNIONS", 4 if effort == "few tries" else 1)
            patch.setattr(worst, "SWEPT", worst.SWEPT if effort == "sweep" else 0)
            patch.setattr(chance, "SWEPT", chance.SWEPT if effort == "sweep" else 0)
        lower, upper = worst_losses(families, weight, domains)
        safety = NothingLost(families, domains)
        terms = lost_terms(families, weight)
        for lost in range(domains + 1):
            sums = [
                sum((weight[i] for i, f in enumerate(families) if any(k <= set(c) for k in f)), np.zeros(2, np.int64))
                for c in combinations(range(domains), lost)
            ]
            greatest = np.max(sums, axis=0)
            assert (lower[lost] <= greatest).all()
            assert (greatest <= upper[lost]).all()
            for w in range(2):
                total = int(weight[:, w].sum())
                mean = 1 - Fraction(int(sum(s[w] for s in sums)), len(sums) * total) if total else 1
                assert expected_share(terms[w], total, domains, lost) == float(mean)
            safe = Fraction(
                sum(not any(k <= set(c) for f in families for k in f) for c in combinations(range(domains), lost)),
                len(sums),
            )
            low, high = safety.bounds(lost)
            assert low - 1e-12 <= safe <= high + 1e-12
            if effort in {"all", "sweep"}:
                assert (lower[lost] == greatest).all()
                assert (upper[lost] == greatest).all()
                assert low == high == float(safe)


@st.composite
def nested(draw, members=tuple(range(8))):
    """Sets that are disjoint or nested."""
    made = [frozenset(members)] if draw(st.booleans()) else []
    if len(members) > 1:
        cut = draw(st.integers(1, len(members) - 1))
        made += draw(nested(members[:cut])) + draw(nested(members[cut:]))
    return made


@settings(deadline=None)
@given(nested(), st.data())
def test_disjoint_and_nested_kill_sets_are_exact_without_trying_anything(sets, data):
    families = [(one,) for one in data.draw(st.permutations(sets))]
    amounts = data.draw(st.lists(st.integers(0, 20), min_size=len(families), max_size=len(families)))
    weight = np.array(amounts, np.int64).reshape(-1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worst, "TRIES", 0)
        patch.setattr(worst, "SWEPT", 0)
        lower, upper = worst_losses(families, weight, 8)
    for lost in range(9):
        truth = max(
            sum(int(w) for (one,), w in zip(families, weight[:, 0], strict=True) if one <= set(c))
            for c in combinations(range(8), lost)
        )
        assert lower[lost, 0] == upper[lost, 0] == truth


def renumbered(holdings: Holdings, data) -> Holdings:
    """The same holdings, told by somebody who met the sets and rows in another order."""
    order = data.draw(st.permutations(range(len(holdings.sets))))
    sets = RankSets()
    number = {-1: -1} | {old: sets.number(holdings.sets[old]) for old in order}
    tensors = []
    for one in holdings.tensors:
        rows = list(data.draw(st.permutations(range(len(one.volume)))))
        holders = np.vectorize(number.__getitem__, otypes=[np.int64])(one.holders)
        tensors.append(TensorRows(one.fqn, one.shape, one.columns, one.derived, one.volume[rows], holders[rows]))
    return Holdings(holdings.world, sets, tuple(tensors), holdings.aliases)


@settings(deadline=None, max_examples=60)
@given(any_job, st.data())
def test_the_report_does_not_show_who_told_the_holdings(layouts, data):
    holdings = holdings_of(ShardGraph.build(layouts))
    domains = Domains.by_host(len(layouts), 2)
    lost = [len(layouts) - 1]
    k = min(2, len(domains.names))
    first = analyze(holdings, domains, lost=lost, k=k)
    assert analyze(renumbered(holdings, data), domains, lost=lost, k=k).to_json() == first.to_json()
    assert first.total.bytes_held == ShardGraph.build(layouts).bytes_held()
    assert first.total.bytes_unique == ShardGraph.build(layouts).bytes_unique()
    assert sum(one.bytes for one in first.classes) == first.total.bytes_unique
    for row in first.must_write:
        worst_case = max(0, *(r.bytes.worst < first.total.bytes_unique for r in first.survival if r.lost <= row.losses))
        assert (row.bytes > 0) == bool(worst_case), "what must be written is what some loss can take"
