"""Digests of what a rank holds, and of the casts that are to prove its low-precision parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from ckpt.errors import MalformedData
from ckpt.format.digest import SIZE, raw_digest
from ckpt.runtime.capture import capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckpt.plan.save_plan import SavePlan
    from ckpt.runtime.capture import Source
    from ckpt.runtime.pieces import PieceTable


@dataclass(slots=True)
class Digests:
    """Raw digests of one rank: ``held`` of the chunks in its memory, ``casts`` of the params that it can rebuild."""

    held: dict[int, bytes] = field(default_factory=dict)
    casts: dict[int, bytes] = field(default_factory=dict)

    seconds: float = 0.0
    """spent on digesting what lay in host memory"""

    def of(self, data: memoryview) -> bytes:
        """Return the raw digest of ``data``."""
        start = perf_counter()
        found = raw_digest(data)
        self.seconds += perf_counter() - start
        return found

    def shared(self, plan: SavePlan, rank: int) -> bytes:
        """Return what the other ranks need to know: 16 bytes for each digest of a chunk with several holders."""
        held = (self.held[int(i)] for i in plan.shared[rank])
        return b"".join((*held, *(self.casts[i] for i in plan.proving[rank])))


def digest_chunks(
    out: Digests,
    plan: SavePlan,
    rank: int,
    pieces: PieceTable,
    beat: Callable[[], None],
    look: Callable[[int, memoryview], None] | None = None,
) -> None:
    """Fill ``out``: digest every chunk that this rank holds, and the cast of every master that is to prove a param.

    ``look`` is shown each held chunk's number and bytes.
    """
    for i, data, cast in views(plan, plan.held(rank), rank, pieces):
        out.held[i] = out.of(data)
        if look is not None:
            look(i, data)
        if cast is not None:
            out.casts[i] = out.of(cast())
        beat()


def views(
    plan: SavePlan,
    numbers: Iterable[int],
    rank: int,
    pieces: PieceTable,
    *,
    behind: bool = False,
    keep: bool = False,
) -> Iterator[tuple[int, memoryview, Callable[[], memoryview] | None]]:
    """Yield each chunk's number and bytes and, if this rank is to prove it, a function that brings its master's cast.

    The bytes are valid until the cast is asked for, which has to be before the next chunk. ``behind``, ``keep``: see
    :func:`ckpt.runtime.capture.capture`.
    """
    chosen = [(i, i in plan.proofs and plan.owners[i] == rank) for i in numbers]
    sources = (source for i, proves in chosen for source in _sources(plan, i, pieces, proves))
    streamed = capture(sources, behind=behind, keep=keep)
    for i, proves in chosen:
        yield i, next(streamed), partial(next, streamed) if proves else None


def _sources(plan: SavePlan, i: int, pieces: PieceTable, proves: bool) -> Iterator[Source]:
    chunk = plan.chunks[i]
    view = pieces.view(chunk.spec, chunk.box)
    yield view.device, lambda: view
    if proves:
        master = pieces.view(plan.chunks[plan.proofs[i]].spec, chunk.box)
        yield master.device, lambda: master.detach().to(view.dtype)


class Exchanged:
    """What the ranks have told each other of their digests. ``held``: for each rank those of ``plan.shared``.

    Raises:
        MalformedData: a rank has sent another number of digests than the plan asks of it.
    """

    def __init__(self, plan: SavePlan, payloads: list[bytes]) -> None:
        self._plan, self._payloads = plan, payloads
        self._cuts = [SIZE * len(numbers) for numbers in plan.shared]
        for peer, (payload, cut) in enumerate(zip(payloads, self._cuts, strict=True)):
            if len(payload) != cut + SIZE * len(plan.proving[peer]):
                raise MalformedData(f"digests of rank {peer}: {len(payload)} bytes, expected {cut} and the casts")
        self.held = [payload[:cut] for payload, cut in zip(payloads, self._cuts, strict=True)]

    def cast(self, i: int) -> bytes:
        """Return the digest of the cast that is to prove a param chunk with several holders."""
        peer = self._plan.owners[i]
        at = self._cuts[peer] + SIZE * self._plan.proving[peer].index(i)
        return self._payloads[peer][at : at + SIZE]
