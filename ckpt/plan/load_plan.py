"""LoadPlan: which stored chunks a rank reads to fill its pieces, whatever layout, stage or dtype wrote them. Pure.

Sources are found by name: ``(fqn, role)``, through the aliases of tied weights. A weight is one thing that can be held
at two precisions, so ``master`` may be filled from a ``param`` of the same dtype and the reverse (an fp32 engine has no
master, a bf16 engine has one). A weight may also be a ``param`` here and a ``buffer`` there: a state dict does not say
which, nor does every job hold a frozen tensor as the same. Where the exact role is absent the other one stands in, and
that is told. Nothing else is converted without being asked for, except whole numbers (``step``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.errors import LayoutError, MalformedData, MissingChunk, MissingState
from ckpt.format.manifest import DERIVED, ChunkEntry, IndexPart
from ckpt.layout.box import Box, Overlaps, first_overlap
from ckpt.layout.spec import BUFFER, MASTER, PARAM, Shard, TensorSpec
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Use:
    """Elements ``box`` of a chunk go into target piece number ``target``."""

    target: int
    box: Box


@dataclass(slots=True)
class ChunkRead:
    """One chunk to be read once, and everything that it is read for."""

    key: str
    """pack"""
    spec: TensorSpec
    """what the bytes are (for a derived param: its master)"""
    entry: ChunkEntry
    turn: int
    """0: stands in for a derived param, 1: everybody's copy, 2: this rank's own diverging copy; later ones overwrite"""
    uses: list[Use] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Difference:
    """How what one rank wants differs from what the checkpoint holds. Only the ranks together can tell what is
    ``unused``: under ZeRO-1 each wants the moments of its own partition.
    """

    missing: tuple[str, ...]
    dtypes: tuple[str, ...]
    unused: frozenset[int]
    """numbers of the checkpoint's specs that this rank does not want"""
    late: bool
    """has this rank something to read behind the rebuilding of derived params?"""
    unexpected: tuple[str, ...] = ()
    """what the checkpoint holds beside tensors and this rank's engine has no place for"""
    conflicts: tuple[str, ...] = ()
    """what both hold, but arranged so that it cannot be carried over as it was"""
    swapped: tuple[str, ...] = ()
    """names of parameters that are filled from the checkpoint's buffers, and the reverse"""


def swap_notes(ranks: Sequence[Difference]) -> list[str]:
    """Return what a load says of parameters that any rank fills from buffers, and the reverse."""
    names = list(dict.fromkeys(name for one in ranks for name in one.swapped))
    if not names:
        return []
    return [f"parameters here and buffers in the checkpoint, or the reverse, are one by name and shape: {some(names)}"]


def check_difference(
    catalog: Catalog, ranks: Sequence[Difference], *, strict: bool, cast: bool
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Combine the ranks' differences. Returns (missing, unexpected, dtypes) of the job.

    Raises:
        LayoutError: with ``strict``, if any rank has conflicts; it lists whatever else differs too.
        MissingState: with ``strict``; a dtype that differs raises without ``cast`` in any case.
    """
    missing = tuple(dict.fromkeys(name for one in ranks for name in one.missing))
    dtypes = tuple(dict.fromkeys(name for one in ranks for name in one.dtypes))
    numbers = frozenset.intersection(*(one.unused for one in ranks))
    unexpected = tuple(str(catalog.order[n]) for n in sorted(numbers))
    everywhere = set.intersection(*(set(one.unexpected) for one in ranks))
    unexpected += tuple(name for name in dict.fromkeys(ranks[0].unexpected) if name in everywhere)
    conflicts = tuple(dict.fromkeys(line for one in ranks for line in one.conflicts))
    if strict and conflicts:
        others = (("missing", missing), ("unexpected", unexpected), ("dtype differs", dtypes))
        raise LayoutError(
            "checkpoint and engine arrange the same state differently; pass strict=False to keep the engine's",
            (*conflicts, *(f"{what}: {line}" for what, lines in others for line in lines)),
        )
    if (strict and (missing or unexpected)) or (dtypes and not cast):
        hint = "; pass cast=True to convert" if dtypes and not cast else "; pass strict=False to go on without"
        raise MissingState(f"checkpoint and engine do not hold the same state{hint}", missing, unexpected, dtypes)
    return missing, unexpected, dtypes


_Reads = dict[tuple[tuple[str, str], Box, int], ChunkRead]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``first`` is read before the engine rebuilds derived params, ``after`` (stored, non-derivable params) behind it.

    ``sources``: target number -> spec that fills it; not in it: missing, left as it is.
    """

    first: tuple[ChunkRead, ...]
    after: tuple[ChunkRead, ...]
    sources: dict[int, TensorSpec]
    difference: Difference


class Stored:
    """Chunks of one tensor that have bytes, ready to be looked up by box. ``twice``: two that overlap, if there are."""

    def __init__(self, entries: list[tuple[str, ChunkEntry]]) -> None:
        self.entries = entries
        self.boxes = [entry.box for _, entry in entries]
        common = zip(entries, self.boxes, strict=True)
        self.twice = first_overlap([box for (_, entry), box in common if not entry.ranks])
        self.overlaps = Overlaps(self.boxes)


class Catalog:
    """What a checkpoint holds, by name: the index turned inside out.

    Args:
        specs: of the checkpoint, as its parts number them.
        parts: of the index.
        derived: FQNs whose param is the cast of the master.
        aliases: tied name -> name.
        keep: will it be asked for the same tensors many times? Then what was worked out for one is kept.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        parts: Iterable[IndexPart],
        derived: Iterable[str],
        aliases: Mapping[str, str],
        *,
        keep: bool = False,
    ) -> None:
        self._kept: dict[tuple[tuple[str, str], int | None], Stored] | None = {} if keep else None
        self.order = tuple(specs)
        self.specs = {spec.key: spec for spec in specs}
        self.derived = frozenset(derived)
        self.aliases = dict(aliases)
        self.chunks: dict[tuple[str, str], list[tuple[str, ChunkEntry]]] = {}
        for part in parts:
            for entry in part.chunks:
                key = part.packs[entry.pack].key if entry.pack != DERIVED else ""
                self.chunks.setdefault(specs[entry.spec].key, []).append((key, entry))

    def by_fqn(self) -> dict[str, dict[str, TensorSpec]]:
        """Return fqn -> role -> spec, tied names included."""
        found: dict[str, dict[str, TensorSpec]] = {}
        for (fqn, role), spec in self.specs.items():
            found.setdefault(fqn, {})[role] = spec
        for name, target in self.aliases.items():
            found.setdefault(name, found.get(target, {}))
        return found

    def find(self, fqn: str, role: str) -> TensorSpec | None:
        """Return the spec of this name or of the name that it is tied to."""
        return self.specs.get((fqn, role)) or self.specs.get((self.aliases.get(fqn, fqn), role))

    def stored(self, spec: TensorSpec, rank: int | None) -> list[tuple[str, ChunkEntry]]:
        """Return the chunks of ``spec`` that have bytes: everybody's copy, then ``rank``'s own diverging copies."""
        entries = [pair for pair in self.chunks.get(spec.key, ()) if pair[1].pack != DERIVED]
        common = [pair for pair in entries if not pair[1].ranks]
        return common + [pair for pair in entries if rank is not None and rank in pair[1].ranks]

    def look(self, spec: TensorSpec, rank: int | None) -> Stored:
        """Return the chunks of :meth:`stored`, ready to be looked up by box."""
        key = (spec.key, rank)
        if self._kept is None:
            return Stored(self.stored(spec, rank))
        if key not in self._kept:
            self._kept[key] = Stored(self.stored(spec, rank))
        return self._kept[key]


def build_load_plan(
    catalog: Catalog,
    targets: Sequence[Shard],
    derived: Iterable[str],
    *,
    own_copies_of: int | None,
) -> LoadPlan:
    """Plan how to fill ``targets``, the pieces of one rank.

    Args:
        catalog: what the checkpoint holds.
        targets: what this rank wants, padding excluded.
        derived: FQNs whose param the target engine rebuilds from its master.
        own_copies_of: this rank's number if the saved job had as many ranks, so that it gets its own copy back
            where replicas differed; else None.

    Raises:
        LayoutError: a tensor has another global shape; all of them at once.
        MissingChunk: the index does not cover what it claims to hold.
        MalformedData: chunks of one tensor overlap.
    """
    rebuilt = frozenset(derived)
    sources: dict[int, TensorSpec] = {}
    after: set[int] = set()
    used: set[tuple[str, str]] = set()
    missing: list[str] = []
    dtypes: list[str] = []
    shapes: list[str] = []
    swapped: list[str] = []
    pieces: dict[TensorSpec, list[int]] = {}
    for t, target in enumerate(targets):
        pieces.setdefault(target.spec, []).append(t)
    wanted = {spec.key for spec in pieces}
    for spec, numbers in pieces.items():
        optional = spec.role == PARAM and spec.fqn in rebuilt
        source = _source(catalog, spec)
        if source is None:
            source = _stand_in(catalog, spec, wanted)
            swapped += [spec.fqn] if source is not None else []
        if source is not None:
            used.update(_siblings(source))
        if optional:
            # Rebuilt from the master by the engine; only bytes that cannot be rebuilt are read.
            stored = source is not None and source.role == PARAM and source.fqn in catalog.derived
            if source is not None and stored and source.dtype == spec.dtype:
                sources.update(dict.fromkeys(numbers, source))
                after.update(numbers)
        elif source is None:
            missing.append(f"{spec}")
        elif source.shape != spec.shape:
            shapes.append(f"{spec}: the checkpoint has shape {list(source.shape)}")
        else:
            sources.update(dict.fromkeys(numbers, source))
            if source.dtype != spec.dtype and not is_count(source, spec):
                dtypes.append(f"{spec}: the checkpoint has {source.dtype} ({source.role})")
    if shapes:
        raise LayoutError("checkpoint and engine have tensors of different shape", tuple(shapes))
    sources = dict(sorted(sources.items()))
    unused = frozenset(n for n, spec in enumerate(catalog.order) if spec.key not in used)
    reads: _Reads = {}
    late: _Reads = {}
    for source, numbers in _by_source(sources).items():
        now, later = [t for t in numbers if t not in after], [t for t in numbers if t in after]
        if now:
            _add_reads(catalog, source, now, targets, own_copies_of, reads, may_lack=False)
        if later:
            _add_reads(catalog, source, later, targets, own_copies_of, late, may_lack=True)
    difference = Difference(tuple(missing), tuple(dtypes), unused, bool(late), swapped=tuple(swapped))
    return LoadPlan(_in_file_order(reads), _in_file_order(late), sources, difference)


def _source(catalog: Catalog, spec: TensorSpec) -> TensorSpec | None:
    if spec.role not in (PARAM, MASTER):
        return catalog.find(spec.fqn, spec.role)
    return _first_of(catalog, spec, (PARAM, MASTER) if spec.role == PARAM else (MASTER, PARAM))


def _first_of(catalog: Catalog, spec: TensorSpec, roles: Iterable[str]) -> TensorSpec | None:
    """Return what the checkpoint has of a tensor in one of these roles: of the wanted dtype, else the first."""
    found = [s for s in (catalog.find(spec.fqn, role) for role in roles) if s is not None]
    return next((s for s in found if s.dtype == spec.dtype), found[0] if found else None)


def _stand_in(catalog: Catalog, spec: TensorSpec, wanted: set[tuple[str, str]]) -> TensorSpec | None:
    """Return the buffer that a weight may be filled from, or the weight that a buffer may be.

    Of another shape it is another tensor. And what is ``wanted`` in its own role too is not lent to a second one.
    """
    others = {BUFFER: (PARAM, MASTER), PARAM: (BUFFER,), MASTER: (BUFFER,)}.get(spec.role, ())
    if any((spec.fqn, role) in wanted for role in others):
        return None
    found = _first_of(catalog, spec, others)
    return found if found is not None and found.shape == spec.shape else None


def _siblings(source: TensorSpec) -> tuple[tuple[str, str], ...]:
    if source.role in (PARAM, MASTER):
        return ((source.fqn, PARAM), (source.fqn, MASTER))
    return (source.key,)


def is_count(source: TensorSpec, target: TensorSpec) -> bool:
    """Is this one number that counts something (``step``), and so may change its dtype if that loses nothing?"""
    names = all(spec.dtype.startswith(("int", "uint", "float")) for spec in (source, target))
    return names and not target.shape and target.role not in (PARAM, MASTER)


def _by_source(sources: dict[int, TensorSpec]) -> dict[TensorSpec, list[int]]:
    grouped: dict[TensorSpec, list[int]] = {}
    for t, source in sources.items():
        grouped.setdefault(source, []).append(t)
    return grouped


def _add_reads(
    catalog: Catalog,
    source: TensorSpec,
    numbers: list[int],
    targets: Sequence[Shard],
    rank: int | None,
    into: _Reads,
    *,
    may_lack: bool,
) -> None:
    boxes = [targets[t].box for t in numbers]
    covered = _cover(source, catalog.look(source, rank), boxes, numbers, into)
    wanted = {t: box.volume for t, box in zip(numbers, boxes, strict=True)}
    short = [t for t in numbers if covered.get(t, 0) < wanted[t]]
    if short and source.role == PARAM and source.fqn in catalog.derived and not may_lack:
        master = catalog.specs.get((source.fqn, MASTER))
        if master is not None:
            # Not stored because it was proved to equal cast(master): read the master where no param bytes are.
            gaps = [targets[t].box for t in short]
            covered = _cover(master, catalog.look(master, rank), gaps, short, into, turn=0)
            short = [t for t in short if covered.get(t, 0) < wanted[t]]
    if short and not may_lack:
        t = short[0]
        raise MissingChunk(
            f"{source} box {targets[t].box}: the index covers {covered.get(t, 0)} of {wanted[t]} elements"
        )


def _cover(
    source: TensorSpec,
    held: Stored,
    boxes: list[Box],
    numbers: list[int],
    into: _Reads,
    turn: int = 1,
) -> dict[int, int]:
    covered: dict[int, int] = {}
    if held.twice is not None:  # would count as covered what is not
        raise MalformedData(f"{source}: the index lists overlapping chunks {held.twice[0]} and {held.twice[1]}")
    for e, b, common in held.overlaps.of(boxes):
        key, entry = held.entries[e]
        order = 2 if entry.ranks else turn
        # Not by place: equal content of two boxes is stored once, one place in a pack can be several chunks.
        identity = (source.key, held.boxes[e], order)
        read = into.get(identity)
        if read is None:
            read = into[identity] = ChunkRead(key, source, entry, order)
        read.uses.append(Use(numbers[b], common))
        if not entry.ranks:
            covered[numbers[b]] = covered.get(numbers[b], 0) + common.volume
    return covered


def _in_file_order(reads: _Reads) -> tuple[ChunkRead, ...]:
    """Packs in order, ascending within each, after what must be overwritten."""
    return tuple(sorted(reads.values(), key=lambda r: (r.turn, r.key, r.entry.start)))
