"""The data path of a save: digest every held chunk, settle replicas and derivations, write what is owned.

One chunk is in flight at a time: extra memory is bounded by the chunk size, and on a CPU nothing is copied at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.analysis.audit import Verdict, elect, find_diverging, judge
from ckpt.errors import MalformedData
from ckpt.format.digest import SIZE, digest, from_raw, raw_digest
from ckpt.format.manifest import DERIVED, ChunkEntry, PackRef
from ckpt.format.pack import PackItem, plan_packs
from ckpt.layout.spec import BUFFER
from ckpt.runtime.staging import cast_bytes, tensor_bytes
from ckpt.store.base import Buffer

if TYPE_CHECKING:
    import torch

    from ckpt.layout.spec import TensorSpec
    from ckpt.plan.save_plan import SavePlan
    from ckpt.runtime.pieces import PieceTable
    from ckpt.store.base import Store


@dataclass(slots=True)
class Digests:
    """Raw digests of one rank: ``held`` of the chunks in its memory, ``casts`` of the params that it can rebuild."""

    held: dict[int, bytes] = field(default_factory=dict)
    casts: dict[int, bytes] = field(default_factory=dict)

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
    for i in plan.held(rank):
        chunk = plan.chunks[i]
        view = pieces.view(chunk.spec, chunk.box)
        data = tensor_bytes(view)
        out.held[i] = raw_digest(data)
        if look is not None:
            look(i, data)
        if i in plan.proofs and plan.owners[i] == rank:
            master = plan.chunks[plan.proofs[i]].spec
            out.casts[i] = raw_digest(cast_bytes(pieces.view(master, chunk.box), view.dtype))
        beat()


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


@dataclass(slots=True)
class Settled:
    """What all ranks agree on. ``verdicts``: of the chunks whose holders do *not* agree. ``proved``: params that this
    rank has to do with and that were proved derivable.
    """

    verdicts: dict[int, Verdict]
    proved: set[int]


def settle(plan: SavePlan, mine: Digests, payloads: list[bytes]) -> Settled:
    """Combine the exchanged digests. Every rank comes to the same verdicts."""
    exchanged = Exchanged(plan, payloads)
    diverging = find_diverging(len(plan.chunks), plan.shared, exchanged.held)
    keep = _kept_as_a_whole(plan, diverging)
    verdicts = {i: judge(digests, plan.owners[i], keep.get(i)) for i, digests in diverging.items()}
    # A diverging param may now be written by another rank than the one that proves it.
    casts = mine.casts | {i: exchanged.cast(i) for i in verdicts.keys() & plan.proofs.keys()}
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


@dataclass(frozen=True, slots=True)
class Output:
    """One thing to be stored: its identity, its bytes when asked, and what its index entry needs."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    read: Callable[[], Buffer]
    state: bool = True
    """part of the tensor state (counted in reports), not of an object"""


@dataclass(slots=True)
class Written:
    """Places of the outputs, in the order given: (pack number, start). The first ``new_packs`` packs were made now;
    ``new_bytes`` and ``reused_bytes`` count tensor state only, ``file_bytes`` whole files.
    """

    packs: list[PackRef]
    places: list[tuple[int, int]]
    new_packs: int = 0
    new_bytes: int = 0
    reused_bytes: int = 0
    file_bytes: int = 0


def write_outputs(
    store: Store,
    outputs: list[Output],
    known: Callable[[str, int], tuple[PackRef, int] | None],
    pack_key: Callable[[int], str],
    beat: Callable[[], None],
) -> Written:
    """Store every output once: not at all if an earlier step has its bytes, once if several agree.

    Args:
        store: where packs go.
        outputs: what this rank owns.
        known: digest, nbytes -> where an earlier step has these bytes, or None.
        pack_key: number -> key of a new pack of this attempt.
        beat: called after every chunk.
    """
    fresh: dict[tuple[str, int], int] = {}
    reused: dict[tuple[str, int], tuple[PackRef, int]] = {}
    for k, output in enumerate(outputs):
        identity = (output.digest, output.nbytes)
        if identity in fresh or identity in reused:
            continue
        place_before = known(*identity)
        if place_before is None:
            fresh[identity] = k
        else:
            reused[identity] = place_before
    items = [
        (k, PackItem(outputs[k].name, outputs[k].dtype, outputs[k].shape, outputs[k].nbytes)) for k in fresh.values()
    ]
    result = Written([], [])
    place: dict[tuple[str, int], tuple[int, int]] = {}
    for number, (keys, layout) in enumerate(plan_packs(items)):
        key = pack_key(number)
        with store.writer(key) as out:
            out.write(layout.header)
            for k, start in zip(keys, layout.starts, strict=True):
                out.write(outputs[k].read())
                place[outputs[k].digest, outputs[k].nbytes] = (number, start)
                result.new_bytes += outputs[k].nbytes if outputs[k].state else 0
                beat()
            out.finish()
        result.packs.append(PackRef(key=key, nbytes=layout.nbytes, header=digest(layout.header)))
        result.file_bytes += layout.nbytes
    result.new_packs = len(result.packs)
    pack_number = {ref: i for i, ref in enumerate(result.packs)}
    for identity, (ref, start) in reused.items():
        if ref not in pack_number:
            pack_number[ref] = len(result.packs)
            result.packs.append(ref)
        place[identity] = (pack_number[ref], start)
    result.places = [place[o.digest, o.nbytes] for o in outputs]
    result.reused_bytes = sum(n for _, n in {(o.digest, o.nbytes) for o in outputs if o.state} & reused.keys())
    return result


def outputs_of(
    plan: SavePlan,
    rank: int,
    mine: Digests,
    settled: Settled,
    pieces: PieceTable,
    keep_all: Callable[[int], bool],
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
            name = chunk.name if not ranks else f"{chunk.name}#rank{rank}"
            view = pieces.view(chunk.spec, chunk.box)
            outputs.append(
                Output(name, chunk.spec.dtype, chunk.box.sizes, chunk.nbytes, from_raw(value), _reader(view))
            )
    return outputs, entries


def _reader(view: torch.Tensor) -> Callable[[], Buffer]:
    return lambda: tensor_bytes(view)
