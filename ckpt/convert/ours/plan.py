"""The plan of a conversion into our own format: who of the target's ranks owns what, and what is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt.convert.assemble import LEAST_MEMORY, Assembler
from ckpt.convert.casting import cast_lines, origins
from ckpt.convert.loose import Carried, carry, names_of
from ckpt.convert.opened import Opened
from ckpt.convert.options import ALL, WriteOptions
from ckpt.convert.ours.committing import name_of
from ckpt.convert.ours.own_copies import OwnCopy, own_copies
from ckpt.convert.ours.packs import may_be_stored
from ckpt.convert.ours.tasks import RANKS, Task, tasks_of
from ckpt.convert.target import Layouts
from ckpt.layout.graph import ShardGraph
from ckpt.plan.save_plan import build_save_plan
from ckpt.plan.wire import combined
from ckpt.repo.repository import checked_step
from ckpt.runtime.agree import JobPlan, layout_digest
from ckpt.runtime.extras import Item, encode_item
from ckpt.store.blocks import BLOCK_BYTES

if TYPE_CHECKING:
    from ckpt.convert.target import Target
    from ckpt.layout.spec import TensorSpec

SHOWN = 8
"""Tensors of a role that are listed; of more their number is told."""
MEMORY_OF_A_PACK = 64 << 20
"""Bytes of a worker's budget for each pack that it writes at the same time."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is known before a byte is written. ``items``: (object, its ranks), by the rank that owns it. ``own``: copies
    of ranks that had others than the rest, likewise. ``memory``: bytes that all workers together hold at most.
    """

    opened: Opened
    options: WriteOptions
    job: JobPlan
    step: int
    attempt: str
    tasks: tuple[Task, ...]
    carried: Carried
    items: Mapping[int, Sequence[tuple[Item, tuple[int, ...]]]]
    own: Mapping[int, Sequence[OwnCopy]]
    lost: tuple[str, ...]
    made: tuple[str, ...]
    memory: int

    @property
    def nbytes(self) -> int:
        """Bytes of chunks that will be written, if every cast is what it should be."""
        return sum(task.nbytes for task in self.tasks)


def plan_ours(opened: Opened, target: Target, options: WriteOptions | None = None, *, wide: int = 0) -> Conversion:
    """Plan to write ``opened`` as a step of our own.

    Args:
        opened: the source.
        target: what each rank of the target holds.
        options: how. ``dtype`` allows casts; which dtypes there are to be, the layouts say.
        wide: packs that may be open at once where they take no memory meanwhile; 0: as many as there is memory for.

    Raises:
        LayoutError: the target's layouts do not form a whole, or have tensors of another shape than the source.
        MissingState: the source lacks a tensor of the target, or has it in a dtype that was not asked to be cast.
        MissingChunk: a file of the source is gone, or has another size.
        BudgetTooSmall: the budget is too small for so many workers.
        ConfigError: generators that cannot be seeded for new ranks.
    """
    ways = options or WriteOptions()
    assembler = assembler_of(opened, ways)
    job = _job(opened, target)
    assembler.check(job.graph.specs)
    assembler.check_packs()
    ranks = min(RANKS, max(1, ways.memory // max(1, ways.workers) // MEMORY_OF_A_PACK))
    tasks = tuple(tasks_of(job.plan, may_be_stored(assembler), ranks=ranks, wide=wide))
    carried = carry(opened.objects if ways.roles == ALL else (), opened.world, job.graph.world)
    own, merged = own_copies(opened, job.graph.specs, job.graph.world)
    lost = [*_left_out(opened, job.graph.specs), *merged, *carried.lost]
    if ways.roles != ALL:
        lost += names_of(opened.objects)
    items, made = _items(carried), origins(assembler.catalog, job.graph.specs)
    # What goes into which pack, not why: a run may go on with other workers and memory if they arrange it alike.
    packs = [(task.packs, len(task.contents)) for task in tasks]
    said = (packs, ways.roles, ways.dtype, sorted((rank, [i.identity for i, _ in own]) for rank, own in items.items()))
    return Conversion(
        opened,
        ways,
        job,
        checked_step(opened.step if ways.step is None else ways.step),
        name_of(opened, job.plan, job.layout, said),
        tasks,
        carried,
        items,
        own,
        tuple(dict.fromkeys(lost)),
        tuple(dict.fromkeys([*cast_lines(assembler.catalog, made), *carried.made])),
        max(1, min(ways.workers, len(tasks))) * (assembler.held + shares(ways)[1]),
    )


def assembler_of(opened: Opened, options: WriteOptions) -> Assembler:
    """Return what puts the source's tensors together within a worker's share of the memory."""
    return Assembler(opened, memory=shares(options)[0], cast=options.dtype is not None)


def shares(options: WriteOptions) -> tuple[int, int]:
    """Return what each worker's assembler and each worker's writer may hold, in bytes."""
    each = options.memory // max(1, options.workers)
    writer = min(max(each // 4, 2 * BLOCK_BYTES), 16 * BLOCK_BYTES)
    return max(each - writer, min(each, LEAST_MEMORY)), writer


def _job(opened: Opened, target: Target) -> JobPlan:
    layouts = target.layouts
    graph = layouts.graph() if isinstance(layouts, Layouts) else ShardGraph.build(layouts)
    graph.check()
    names = {spec.fqn for spec in graph.specs}
    ties = {a: t for a, t in opened.aliases.items() if t in names and a not in names}
    graph = replace(graph, aliases=dict(sorted({**ties, **graph.aliases}.items())))
    digest = layouts.digest() if isinstance(layouts, Layouts) else combined([layout_digest(one) for one in layouts])
    return JobPlan(digest, graph, build_save_plan(graph))


def _items(carried: Carried) -> dict[int, list[tuple[Item, tuple[int, ...]]]]:
    """Encode the objects and give each to one of its ranks, in turn."""
    found: dict[int, list[tuple[Item, tuple[int, ...]]]] = {}
    for turn, one in enumerate(carried.objects):
        item = encode_item(one.name, one.kind, one.tree, f"{one.kind} state {one.name!r}")
        found.setdefault(one.ranks[turn % len(one.ranks)], []).append((item, one.ranks))
    return found


def _left_out(opened: Opened, specs: Sequence[TensorSpec]) -> list[str]:
    names = {spec.fqn for spec in specs}
    wanted = {(opened.aliases.get(spec.fqn, spec.fqn), spec.role) for spec in specs} | {spec.key for spec in specs}
    left: dict[str, list[str]] = {}
    for spec in opened.specs:
        if spec.key not in wanted:
            left.setdefault(spec.role, []).append(spec.fqn)
    lines = []
    for role, fqns in sorted(left.items()):
        if len(fqns) <= SHOWN:
            lines += [f"tensor {fqn!r} ({role})" for fqn in fqns]
        else:
            whole = "" if any(fqn not in names for fqn in fqns) else " whose parameters stay"
            lines.append(f"{role} of {len(fqns)} tensors{whole}")
    return lines
