"""Whatever ranks need: each place is read once and comes to everybody who needs it once, evenly over hosts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.digest import digest
from ckpt.format.manifest import ChunkEntry, IndexPart, PackRef
from ckpt.layout.spec import PARAM, TensorSpec
from ckpt.plan.read_plan import Places, plan_together, runs_of_numbers

SPAN = 64


@st.composite
def jobs(draw: st.DrawFn):
    """A checkpoint of a few packs, what each rank needs of it, and the ranks' hosts."""
    entries, at = [], 0
    packs = draw(st.integers(1, 4))
    for pack in range(packs):
        start = 8
        for nbytes in draw(st.lists(st.sampled_from([4, 8, 20, 100]), max_size=12)):
            start += draw(st.sampled_from([0, 0, 0, 4]))
            entries.append(ChunkEntry(0, (at,), (nbytes // 4,), digest(b"%d" % at), pack, start, nbytes))
            at, start = at + nbytes // 4, start + nbytes
    refs = tuple(PackRef(key=f"steps/1/a/packs/{n}.safetensors", nbytes=1 << 20) for n in range(packs))
    part = IndexPart(rank=0, packs=refs, chunks=tuple(entries))
    places = Places([TensorSpec("w", PARAM, "float32", (at,))], [part])
    world = draw(st.integers(1, 6))
    kinds = draw(st.lists(st.sets(st.integers(0, max(0, len(entries) - 1))), min_size=1, max_size=3))
    whole = set(range(len(entries)))
    chosen = [draw(st.sampled_from([whole, *kinds])) & whole for _ in range(world)]
    hosts = [f"host{draw(st.integers(0, 2))}" for _ in range(world)]
    return places, chosen, hosts


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_each_place_is_read_once_and_handed_to_each_who_needs_it_once(job):
    places, needs, hosts = job
    units = plan_together(places.order, [runs_of_numbers(n) for n in needs], hosts, span=SPAN)
    assert [u.number for u in units] == list(range(len(units)))
    came: dict[int, list[int]] = {}
    for unit in units:
        assert len(set(unit.chain)) == len(unit.chain)
        seen = [hosts[rank] for rank in unit.chain]
        assert sum(a != b for a, b in pairwise(seen)) == len(set(seen)) - 1
        assert unit.nbytes <= SPAN or len(unit.items) == 1
        for number, at in unit.items:
            entry = places.order[number].entry
            assert (unit.key, unit.start + at) == (places.order[number].key, entry.start)
            assert at + entry.nbytes <= unit.nbytes == unit.stored
            came.setdefault(number, []).extend(unit.chain)
    wanted = {n: [r for r, need in enumerate(needs) if n in need] for need in needs for n in need}
    assert {n: sorted(ranks) for n, ranks in came.items()} == wanted


@settings(max_examples=100, deadline=None)
@given(jobs(), st.integers(2, 4), st.integers(1, 3))
def test_what_all_need_is_read_evenly_over_hosts(job, hosts, ranks):
    places, _, _ = job
    names = [f"host{h}" for h in range(hosts) for _ in range(ranks)]
    everything = runs_of_numbers(range(len(places.order)))
    units = plan_together(places.order, [everything] * len(names), names, span=SPAN)
    total, largest = sum(u.stored for u in units), max((u.stored for u in units), default=0)
    for host in set(names):
        read = sum(u.stored for u in units if names[u.chain[0]] == host)
        assert abs(read - total / hosts) <= ranks * largest
    for rank in range(len(names)):
        read = sum(u.stored for u in units if u.chain[0] == rank)
        assert abs(read - total / len(names)) <= 2 * largest


@settings(max_examples=50, deadline=None)
@given(jobs(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_index_parts(job, random):
    places, needs, hosts = job
    part = places._parts[0]
    numbers = {id(e): n for e in part.chunks for n in [places.number(e)]}
    shuffled = list(part.chunks)
    random.shuffle(shuffled)
    specs = [place.spec for place in places.order[:1]]
    again = Places(specs, [IndexPart(rank=0, packs=part.packs, chunks=tuple(shuffled))]) if specs else places
    assert [again.number(e) for e in part.chunks] == [numbers[id(e)] for e in part.chunks]
    runs = [runs_of_numbers(n) for n in needs]
    assert plan_together(again.order, runs, hosts, span=SPAN) == plan_together(places.order, runs, hosts, span=SPAN)
