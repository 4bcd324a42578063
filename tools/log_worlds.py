"""What finding its part of a gradient log costs one rank of a large job: simulated, with the library's own code.

Layouts are computed, not run: the plan of all ranks' gradients is made as at the start of a log, and a few ranks then
read what they need of it from a store that counts. No tensor has memory. Columns: what is *sent* once when a log begins
(the layouts of all ranks, which each of them gets: as at the first full save of a layout); bytes of a rank's own head
and of the directory; then for a load by a job of the same layout (n ranks) or of half the ranks (n/2): requests and
bytes from the store before the first record, heads that are read, ranks whose records are, and CPU time, the most of
any rank that was tried. A step of training has no collective, and nothing in it knows how many ranks there are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from llama_layout import Llama
from rich.table import Table

from ckpt.engine.base import Stepped
from ckpt.gradlog.record import VERSION, RankHead
from ckpt.gradlog.replaying.mapping import check_logged, needed_ranks
from ckpt.gradlog.replaying.needed import read_heads
from ckpt.gradlog.replaying.reading import read_rank_head, run_of
from ckpt.gradlog.share import GRAD, share_of
from ckpt.gradlog.writing.log import new_head
from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.graph import ShardGraph
from ckpt.layout.spec import RankLayout, Shard, TensorSpec
from ckpt.plan.save_plan import SavePlan, build_save_plan
from ckpt.plan.wire import encode_layout
from ckpt.repo.lineage import HEAD, log_key
from ckpt.repo.log_directory import directory_of, write_directory
from ckpt.repo.log_files import DIRECTORY, RANK_HEAD, rank_prefix
from ckpt.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MODEL = Llama(hidden=4096, layers=2, ffn=14336)
Places = list[tuple[str, tuple[int, ...], Box]]
WORLDS = (8, 64, 512, 4096)
FEW = 8
NUMBER = 1


@dataclass(frozen=True)
class Layout:
    """Who steps what. ``cut``: the number of parts of each parameter (or, ZeRO-1, of all of them together)."""

    name: str
    world: int
    cut: int
    kind: str

    def places(self, rank: int) -> Places:
        """Return what a rank steps."""
        shapes = {fqn: shape for fqn, shape, _ in MODEL.stage(0, 1)}
        part = rank % self.cut
        if self.kind == "rows":
            return [(fqn, shape, box) for fqn, shape in shapes.items() for box in _rows(shape, part, self.cut)]
        sizes = {fqn: Box.whole(shape).volume for fqn, shape in shapes.items()}
        total, at, found = sum(sizes.values()), 0, []
        for fqn, shape in shapes.items():
            each, shift = (-(-sizes[fqn] // self.cut), 0) if self.kind == "each" else (-(-total // self.cut), at)
            low, high = (min(max(n * each - shift, 0), sizes[fqn]) for n in (part, part + 1))
            found += [(fqn, shape, box) for box in boxes_of_range(shape, low, high)]
            at += sizes[fqn]
        return found


def _rows(shape: tuple[int, ...], part: int, parts: int) -> list[Box]:
    each = -(-shape[0] // parts)
    low, high = (min(n * each, shape[0]) for n in (part, part + 1))
    return [Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]))] if low < high else []


LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "ZeRO-1": lambda n: Layout("ZeRO-1", n, n, "all"),
    "ZeRO-3": lambda n: Layout("ZeRO-3", n, n, "each"),
    f"HSDP, {FEW} replicas": lambda n: Layout("HSDP", n, max(1, n // FEW), "rows"),
    f"HSDP, {FEW} shards": lambda n: Layout("HSDP", n, min(FEW, n), "rows"),
}


class _Counting(MemoryStore):
    """Has the heads of all ranks, each made when it is asked for; counts requests and bytes."""

    def __init__(self, job: _Logged) -> None:
        super().__init__()
        self._job = job
        self.requests = self.nbytes = self.heads = 0

    def size(self, key: str) -> int | None:
        self._make(key)
        self.requests += 1
        return super().size(key)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self._make(key)
        data = super().get(key, start, nbytes)
        self.requests, self.nbytes = self.requests + 1, self.nbytes + len(data)
        return data

    def _make(self, key: str) -> None:
        if key.endswith(RANK_HEAD) and key not in self.objects:
            self.put(key, msgspec.json.encode(self._job.head(int(key.split("/")[-2].removeprefix("rank")))))


class _Logged:
    """A log that a job of some layout has begun."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        ranks = [RankLayout(r, tuple(_shards(layout.places(r)))) for r in range(layout.world)]
        self.sent = sum(len(encode_layout(one)) for one in ranks)
        graph = ShardGraph.build(ranks)
        graph.check()
        self.plan: SavePlan = build_save_plan(graph)
        self.store = _Counting(self)
        logged = share_of(0, [], self.plan).logged()
        write_directory(self.store, NUMBER, directory_of(logged, layout.world, ""))
        self.directory = len(self.store.objects[f"{log_key(NUMBER)}/{DIRECTORY}"])
        head = msgspec.structs.replace(new_head(0, layout.world), number=NUMBER, run="")
        self.store.put(f"{log_key(NUMBER)}/{HEAD}", msgspec.json.encode(head))

    def head(self, rank: int) -> RankHead:
        """Return what a rank says of its part."""
        shared = share_of(rank, stepped_of(self.layout.places(rank)), self.plan)
        entries = tuple(one.entry for one in shared.own)
        return RankHead(
            format=VERSION,
            rank=rank,
            world=self.layout.world,
            entries=entries,
            kernels=(),
            software={},
            peers=shared.peers,
        )


def _shards(places: Places) -> Iterator[Shard]:
    return (Shard(TensorSpec(fqn, GRAD, "float32", shape), box) for fqn, shape, box in places)


def stepped_of(places: Places) -> list[Stepped]:
    """Return the tensors that an optimizer steps, one a parameter, without memory."""
    by_name: dict[str, Places] = {}
    for one in places:
        by_name.setdefault(one[0], []).append(one)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    found = []
    for fqn, some in by_name.items():
        key = torch.empty(sum(box.volume for *_, box in some), device="meta")
        found.append(Stepped(optimizer, key, 0, (fqn,), _viewer(some), optimizer))
    return found


def _viewer(places: Places) -> Callable[[torch.Tensor], Iterator[tuple[str, tuple[int, ...], Box, torch.Tensor]]]:
    def views(flat: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], Box, torch.Tensor]]:
        at = 0
        for fqn, shape, box in places:
            yield fqn, shape, box, flat[at : at + box.volume].view(box.sizes)
            at += box.volume

    return views


@dataclass
class Cost:
    """What a load takes of one rank before it reads records."""

    requests: int = 0
    nbytes: int = 0
    heads: int = 0
    ranks: int = 0
    seconds: float = 0.0


def cost_of(job: _Logged, here: Layout, rank: int) -> Cost:
    """Return what a rank of a job does to find its part of a log."""
    stepped, store, world = stepped_of(here.places(rank)), job.store, job.layout.world
    for _ in range(2):  # the heads are made in the first
        store.requests = store.nbytes = 0
        began = time.process_time()
        own = read_rank_head(store, NUMBER, rank % world, run_of(store, NUMBER))
        heads = read_heads(store, NUMBER, own, world, stepped, same=here == job.layout)
        check_logged(stepped, heads.of)
        ranks = needed_ranks(stepped, heads.of) | {own.rank}
        seconds = time.process_time() - began
    return Cost(store.requests, store.nbytes, len(heads.of), len(ranks), seconds)


def worst_of(costs: Sequence[Cost]) -> list[str]:
    """Return the most of each, as it is printed."""
    nbytes, seconds = max(one.nbytes for one in costs), max(one.seconds for one in costs)
    counts = [max(getattr(one, name) for one in costs) for name in ("requests", "heads", "ranks")]
    return [f"{counts[0]:,}", f"{nbytes / 1e3:,.1f}", f"{counts[1]:,}", f"{counts[2]:,}", f"{1e3 * seconds:,.1f}"]


def simulate(worlds: Sequence[int] = WORLDS) -> Table:
    """Return the table."""
    title = f"{len(MODEL.stage(0, 1))} parameter tensors; of each rank"
    table = Table("layout", title=title, title_justify="left")
    for name in ("ranks", "sent, kB", "head, kB", "directory, kB", "read by"):
        table.add_column(name, justify="right")
    for name in ("requests", "kB", "heads", "records of", "CPU ms"):
        table.add_column(name, justify="right")
    for name, make in LAYOUTS.items():
        for world in worlds:
            job = _Logged(make(world))
            head = f"{rank_prefix(log_key(NUMBER), world // 2)}/{RANK_HEAD}"
            sizes = (job.sent, len(job.store.get(head)), job.directory)
            row = [name, f"{world:,}", *(f"{size / 1e3:,.1f}" for size in sizes)]
            for ranks, here in (("n", job.layout), ("n/2", make(world // 2))):
                tried = sorted({0, here.world // 2, here.world // 3, here.world - 1})
                table.add_row(*row, ranks, *worst_of([cost_of(job, here, rank) for rank in tried]))
                row = [""] * len(row)
        table.add_section()
    return table
