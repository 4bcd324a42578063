"""What ranks plan for themselves is, together, the job's plan; and that plan writes everything once, evenly."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.layout.box import first_overlap
from ckpt.layout.graph import Cell, ShardGraph
from ckpt.layout.spec import MASTER, TensorSpec
from ckpt.plan.local_plan import Group, RankView, groups_of, plan_of_rank
from ckpt.plan.save_plan import SavePlan, build_save_plan
from tests.property.meshes import Mesh
from tests.property.test_graph_and_plan import jobs


@st.composite
def meshes(draw):
    dp = draw(st.integers(1, 4))
    return Mesh(
        pp=draw(st.integers(1, 4)),
        dp=dp,
        tp=draw(st.integers(1, 4)),
        ep=draw(st.sampled_from([1, 2])) if dp % 2 == 0 else 1,
        zero=draw(st.sampled_from([0, 1, 3])),
        width=draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 4)),
        tied=draw(st.booleans()),
    )


def view_of(graph: ShardGraph, groups: dict[tuple[int, ...], Group], rank: int) -> RankView:
    """What a rank would know: its own cells, the masters in the place of its derived params, and nothing else."""
    cells: dict[TensorSpec, list[Cell]] = {}
    for spec, every in graph.cells.items():
        own = [cell for cell in every if rank in cell.ranks]
        if own:
            cells[spec] = own
    derived = graph.derived & {spec.fqn for spec in cells if spec.role == "param"}
    foreign = {}
    for spec, every in graph.cells.items():
        if spec.role == MASTER and spec.fqn in derived:
            params = [cell.box for s, own in cells.items() if s.key == (spec.fqn, "param") for cell in own]
            cells[spec] = [c for c in every if any(c.box.intersect(box) for box in params) or rank in c.ranks]
            foreign |= {c.ranks: groups[c.ranks].nbytes for c in cells[spec] if rank not in c.ranks}
    return RankView(rank, cells, frozenset(derived), foreign)


def owned_in_smaller_groups(plan: SavePlan, size: int) -> list[int]:
    owned = [0] * plan.world
    for i, (chunk, owner) in enumerate(zip(plan.chunks, plan.owners, strict=True)):
        if len(chunk.ranks) < size and i not in plan.proofs:
            owned[owner] += chunk.nbytes
    return owned


def check_union(graph: ShardGraph, plan: SavePlan, chunk_bytes: int) -> None:
    """Every rank plans alone; what it finds must be exactly what the job's plan says of the chunks that it holds."""
    groups = groups_of(graph.cells, graph.derived)
    told = {size: owned_in_smaller_groups(plan, size) for size in {len(ranks) for ranks in groups}}
    whole = {}
    for i, (chunk, owner) in enumerate(zip(plan.chunks, plan.owners, strict=True)):
        proof = plan.chunks[plan.proofs[i]].box if i in plan.proofs else None
        whole[chunk.spec, chunk.box] = (chunk.ranks, owner, proof)
    for rank in range(graph.world):

        def exchange(ranks: tuple[int, ...], mine: int, rank: int = rank) -> list[int]:
            assert mine == told[len(ranks)][rank], "what a rank tells is what the others will count with"
            return [told[len(ranks)][member] for member in ranks]

        local = {}
        for part in plan_of_rank(view_of(graph, groups, rank), exchange, chunk_bytes):
            for i, (chunk, owner) in enumerate(zip(part.chunks, part.owners, strict=True)):
                local[chunk.spec, chunk.box] = (part.ranks, owner, part.proofs.get(i))
        assert local == {key: found for key, found in whole.items() if rank in found[0]}


def check_once(graph: ShardGraph, plan: SavePlan) -> None:
    boxes = defaultdict(list)
    for chunk in plan.chunks:
        boxes[chunk.spec].append(chunk.box)
    for spec in graph.specs:
        assert first_overlap(boxes[spec]) is None
        assert sum(box.volume for box in boxes[spec]) * spec.itemsize == spec.nbytes


def bound(groups: list[Group], largest: int) -> int:
    """Return what the largest writer may write. Nobody can do better than the mean over any set of ranks of what only
    they hold; one chunk more is the price of whole chunks. Where holder sets cross (neither apart nor one in the
    other), what such groups hold may come on top.
    """
    sets = [(frozenset(group.ranks), group.nbytes) for group in groups if group.nbytes]
    best = max((-(-sum(n for inner, n in sets if inner <= outer) // len(outer)) for outer, _ in sets), default=0)
    crossing = sum(n for one, n in sets if any(one & other and not (one <= other or other <= one) for other, _ in sets))
    return best + largest + crossing


@settings(max_examples=150, deadline=None)
@given(meshes(), st.sampled_from([16, 64, 1024]))
def test_on_meshes_the_local_plans_are_the_plan_and_write_everything_once_and_evenly(mesh, chunk_bytes):
    graph = ShardGraph.build([mesh.layout(rank) for rank in range(mesh.world)])
    graph.check()
    plan = build_save_plan(graph, chunk_bytes)
    check_union(graph, plan, chunk_bytes)
    check_once(graph, plan)
    loads = plan.loads()
    assert sum(loads) == graph.bytes_unique(), "every param is proved by a rank that holds its master"
    largest = max((chunk.nbytes for chunk in plan.chunks if len(chunk.ranks) > 1), default=0)
    assert max(loads) <= bound(list(groups_of(graph.cells, graph.derived).values()), largest)


@settings(deadline=None)
@given(jobs(), st.integers(1, 64))
def test_in_any_layout_the_local_plans_are_the_plan(layouts, chunk_bytes):
    """Params here need not lie where their masters do: pieces that nobody can prove are shared out like all others."""
    graph = ShardGraph.build(layouts)
    plan = build_save_plan(graph, chunk_bytes)
    check_union(graph, plan, chunk_bytes)
    check_once(graph, plan)
