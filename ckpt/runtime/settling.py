"""Whether the replicas of a chunk agree, settled by the rank that owns it.

Every holder tells the owner its digest, 16 bytes a chunk and nothing else, in one collective of the ranks that share
something. Only what does not agree is told to all: normally nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ckpt.analysis.audit import Verdict, elect, judge
from ckpt.errors import MalformedData
from ckpt.format.digest import SIZE, from_raw
from ckpt.format.manifest import DERIVED, ChunkEntry
from ckpt.layout.spec import BUFFER
from ckpt.runtime.stage import chunk_output, own_name, read_again

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from ckpt.layout.spec import TensorSpec
    from ckpt.plan.save_plan import SavePlan
    from ckpt.runtime.digesting import Digests
    from ckpt.runtime.packing import Output
    from ckpt.runtime.pieces import PieceTable


@dataclass(frozen=True, slots=True)
class Routes:
    """Whose digests go where, for one rank, chunks ascending. ``sends``: owner -> this rank's chunks that it owns.
    ``receives``: holder -> the chunks owned by this rank that it holds too.
    """

    sends: Mapping[int, Sequence[int]]
    receives: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, plan: SavePlan, rank: int) -> Routes:
        """Return the routes of a rank; its peers are those that it shares chunks with, however many ranks there are."""
        sends: dict[int, list[int]] = {}
        receives: dict[int, list[int]] = {}
        for i in plan.shared[rank].tolist():
            owner = plan.owners[i]
            if owner != rank:
                sends.setdefault(owner, []).append(i)
                continue
            for peer in plan.chunks[i].ranks:
                if peer != rank:
                    receives.setdefault(peer, []).append(i)
        return cls(sends, receives)

    def payloads(self, mine: Digests) -> dict[int, bytes]:
        """Return what this rank has to tell each owner."""
        return {owner: b"".join([mine.held[i] for i in numbers]) for owner, numbers in self.sends.items()}

    def sizes(self) -> dict[int, int]:
        """Return how many bytes will come from each holder."""
        return {peer: SIZE * len(numbers) for peer, numbers in self.receives.items()}


class Found(msgspec.Struct, array_like=True):
    """A chunk whose holders differ, as its owner tells all. ``cast``: digest of the cast that was to prove it."""

    chunk: int
    digests: dict[int, bytes]
    cast: bytes | None


def compare(plan: SavePlan, rank: int, routes: Routes, mine: Digests, received: Mapping[int, bytes]) -> list[Found]:
    """Return the chunks of this rank whose holders do not all have its bytes, ascending.

    Raises:
        MalformedData: a rank has sent another number of digests than the plan asks of it.
    """
    theirs: dict[int, npt.NDArray[np.void]] = {}
    differing: set[int] = set()
    for peer, numbers in routes.receives.items():
        payload = received.get(peer, b"")
        if len(payload) != SIZE * len(numbers):
            raise MalformedData(f"digests of rank {peer}: {len(payload)} bytes, expected {SIZE * len(numbers)}")
        theirs[peer] = np.frombuffer(payload, f"V{SIZE}")
        own = np.frombuffer(b"".join([mine.held[i] for i in numbers]), f"V{SIZE}")
        differing.update(numbers[k] for k in np.flatnonzero(own != theirs[peer]).tolist())
    found = {i: Found(i, {rank: mine.held[i]}, mine.casts.get(i)) for i in sorted(differing)}
    for peer, numbers in routes.receives.items() if found else ():
        for k, i in enumerate(numbers):
            if i in found:
                found[i].digests[peer] = theirs[peer][k].tobytes()
    return list(found.values())


@dataclass(slots=True)
class Settled:
    """What all ranks agree on. ``verdicts``: of the chunks whose holders do *not* agree. ``proved``: params that this
    rank has to do with and that were proved derivable.
    """

    verdicts: dict[int, Verdict]
    proved: set[int]


def settle(plan: SavePlan, mine: Digests, found: Sequence[Found]) -> Settled:
    """Judge what differs. Every rank comes to the same verdicts."""
    diverging = {one.chunk: one.digests for one in sorted(found, key=lambda one: one.chunk)}
    keep = _kept_as_a_whole(plan, diverging)
    verdicts = {i: judge(digests, plan.owners[i], keep.get(i)) for i, digests in diverging.items()}
    # A diverging param may now be written by another rank than the one that proves it.
    casts = mine.casts | {one.chunk: one.cast for one in found if one.cast is not None}
    proved = set()
    for i, value in casts.items():
        kept = verdicts[i].kept if i in verdicts else mine.held[i]
        master = verdicts.get(plan.proofs[i])
        # The proof was made with the param owner's own master; it says nothing about a master that outvoted it.
        if value == kept and (master is None or plan.owners[i] in master.copies[master.kept]):
            proved.add(i)
    return Settled(verdicts, proved)


def _kept_as_a_whole(plan: SavePlan, diverging: dict[int, dict[int, bytes]]) -> dict[int, int]:
    """Return, for diverging chunks of buffers, whose copy is kept: the same rank's for all chunks of one buffer.

    Buffers differ by right, and a mixture of several ranks' would be a state that nobody ever had. In all other roles a
    difference is a fault, and each chunk's own majority is the best guess at what was right.
    """
    groups: dict[tuple[TensorSpec, tuple[int, ...]], list[int]] = {}
    for i in diverging:
        chunk = plan.chunks[i]
        if chunk.spec.role == BUFFER:
            groups.setdefault((chunk.spec, chunk.ranks), []).append(i)
    keep = {}
    for (_, ranks), numbers in groups.items():
        chosen = elect({rank: tuple(diverging[i][rank] for i in numbers) for rank in ranks})
        keep.update(dict.fromkeys(numbers, chosen))
    return keep


def outputs_of(
    plan: SavePlan,
    rank: int,
    mine: Digests,
    settled: Settled,
    pieces: PieceTable,
    keep_all: Callable[[int], bool],
    *,
    behind: bool = False,
) -> tuple[list[Output], list[ChunkEntry]]:
    """Return what this rank stores of the plan, with index entries that lack only their place.

    An entry of a proved param has no output: it is marked ``DERIVED`` and carries the digest of the param.
    """
    outputs: list[Output] = []
    entries: list[ChunkEntry] = []
    for i in plan.held(rank):
        chunk = plan.chunks[i]
        verdict = settled.verdicts.get(i)
        value = mine.held[i]
        ranks: tuple[int, ...] = ()
        if verdict is None:
            writes = plan.owners[i] == rank
        elif value == verdict.kept:
            writes = verdict.owner == rank
        else:
            ranks = verdict.copies[value]
            writes = keep_all(i) and ranks[0] == rank
        if not writes:
            continue
        derived = i in settled.proved and not ranks
        spec_id, pack, box = plan.spec_ids[chunk.spec], DERIVED if derived else 0, chunk.box
        entries.append(ChunkEntry(spec_id, box.offsets, box.sizes, from_raw(value), pack, 0, chunk.nbytes, ranks))
        if not derived:
            # The planned owner may have stored a copy under the chunk's name before it lost the vote.
            name = chunk.name if not ranks and plan.owners[i] == rank else own_name(chunk, rank)
            read = partial(read_again, pieces, chunk, value, behind=behind)
            outputs.append(chunk_output(chunk, name, from_raw(value), read))
    return outputs, entries
