"""The metadata files of one checkpoint: commit, index root, index parts. Typed, bounded, validated.

::

    commit.json ──digest──▶ index/root.json.zst ──digest──▶ index/part-<rank>.json.zst ──digest──▶ chunks in packs

Each file carries the digest and the size of the next, so that a reader who starts at the commit can trust what it
finds or name the file that is not what was written. Parts are written by the ranks that own the chunks: no rank's
work grows with the world. Unknown fields are ignored; a change that a reader must not ignore is a feature or a version.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from ckpt.errors import CkptError, DigestMismatch, MalformedData, UnsupportedFeature, UnsupportedVersion
from ckpt.format.codec import compress, decompress
from ckpt.format.digest import check_form, digest
from ckpt.format.holders import HolderTable
from ckpt.layout.box import Box
from ckpt.layout.spec import TensorSpec
from ckpt.words import count

VERSION = 1
CODEC = "codec"
"""The feature of a step that has encoded chunks."""
FEATURES: frozenset[str] = frozenset({CODEC})
"""Optional features that this release can read. A file that names another is refused, never half read."""

MAX_COMMIT = 1 << 20
MAX_INDEX = 1 << 30
"""Bytes of one index file, and of what it holds decompressed."""
MAX_CHUNK = 1 << 28
"""Bytes of one chunk or blob; readers allocate what an entry says, so it must not say too much."""

PACK_KEY = re.compile(r"steps/\d{1,18}/[0-9a-z-]{1,64}/packs/[0-9A-Za-z._-]{1,128}\.safetensors")
INDEX_KEY = re.compile(r"steps/\d{1,18}/[0-9a-z-]{1,64}/index/[0-9A-Za-z._-]{1,128}\.json\.zst")

T = TypeVar("T")


class FileRef(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the repository, pinned by digest and size."""

    key: str
    digest: str
    nbytes: int


class PackRef(msgspec.Struct, frozen=True, kw_only=True):
    """A pack that a part's chunks point into; it may belong to an earlier step. ``header``: digest of the bytes before
    the data (length field and safetensors header), so that every byte of the file is under a digest.
    """

    key: str
    nbytes: int
    header: str = ""


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True):
    """One chunk: which box of which tensor, its digest, and where its bytes are.

    ``pack``: position in the part's ``packs``, or ``DERIVED``: not stored, equal to cast(master) of the same box.
    ``start``: byte offset in the pack file. ``ranks``: empty for the copy that everybody gets; else the ranks whose
    diverging copy this is. ``codec``: 0 for a chunk whose own bytes are in the pack; n if they are encoded with the
    part's ``codecs[n - 1]``, in ``stored`` bytes. ``digest`` and ``nbytes`` are those of the chunk's own bytes.
    """

    spec: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digest: str
    pack: int
    start: int
    nbytes: int
    ranks: tuple[int, ...] = ()
    codec: int = 0
    stored: int = 0

    @property
    def length(self) -> int:
        """Bytes in the pack."""
        return self.stored if self.codec else self.nbytes

    @property
    def box(self) -> Box:
        """The elements that this chunk holds."""
        return Box(self.offsets, self.sizes)


DERIVED = -1


class BlobEntry(msgspec.Struct, frozen=True, array_like=True):
    """Bytes without geometry: an object's document, or a piece of a tensor inside an object."""

    digest: str
    pack: int
    start: int
    nbytes: int

    @property
    def length(self) -> int:
        """Bytes in the pack."""
        return self.nbytes


class ObjectTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor inside an object's tree, stored as consecutive blobs of its row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    blobs: tuple[BlobEntry, ...]


class ObjectEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A named tree of plain values (scheduler, RNG, a user's loader) and the ranks that had exactly this one.

    ``kind``: ``engine`` | ``rng`` | ``extra`` (has ``load_state_dict``) | ``value`` (plain JSON-able value).
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    document: BlobEntry
    tensors: tuple[ObjectTensor, ...] = ()


class IndexPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank owns of this checkpoint."""

    rank: int
    packs: tuple[PackRef, ...]
    chunks: tuple[ChunkEntry, ...]
    objects: tuple[ObjectEntry, ...] = ()
    codecs: tuple[str, ...] = ()
    """names of the codecs that ``chunks`` refer to"""

    def codec_of(self, chunk: ChunkEntry) -> str | None:
        """Return the name of a chunk's codec, None if its own bytes are in the pack."""
        return self.codecs[chunk.codec - 1] if chunk.codec else None


class DivergingElements(msgspec.Struct, frozen=True, kw_only=True):
    """What exactly differs in a diverging chunk (:class:`ckpt.analysis.claims.Difference` says what each field is)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    elements: int
    unordered: int
    max_abs: float | None
    compared: int | None = None
    """how many of the copies; None if an earlier release wrote this, which did not say"""

    def __str__(self) -> str:
        by = "" if self.max_abs is None else f", by at most {self.max_abs:.6g}"
        odd = f", {self.unordered} of them NaN or infinite" if self.unordered else ""
        return f"{count(self.elements, 'element')} in {Box(self.offsets, self.sizes)}{by}{odd}"


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that declared to hold the same box and whose bytes differed at this save."""

    fqn: str
    role: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: dict[str, tuple[int, ...]]
    """digest -> ranks that held these bytes"""
    kept: str
    """digest of the copy that a load gives to everybody else"""
    differing: DivergingElements | None = None
    """None if the chunk was not looked at element by element"""

    def __str__(self) -> str:
        sides = "; ".join(f"{d} on rank(s) {', '.join(map(str, r))}" for d, r in self.copies.items())
        what = "" if self.differing is None else f" in {self.differing}"
        if self.differing is not None and (self.differing.compared or len(self.copies)) < len(self.copies):
            what += f" ({self.differing.compared} of {len(self.copies)} copies compared)"
        return f"tensor {self.fqn!r} ({self.role}) box {Box(self.offsets, self.sizes)}: replicas differ{what}: {sides}"


class IndexRoot(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint holds as a whole; ``specs`` gives the numbers that chunks refer to."""

    format: int
    step: int
    attempt: str
    world: int
    layout: str
    """digest over all ranks' layouts"""
    specs: tuple[tuple[str, str, str, tuple[int, ...]], ...]
    """(fqn, role, dtype, shape), sorted"""
    derived: tuple[str, ...]
    aliases: dict[str, str]
    parts: tuple[FileRef, ...]
    divergences: tuple[Divergence, ...] = ()
    holders: HolderTable | None = None
    """who held what; None if it was not recorded. Only analyses read it, and check it then: ``repo/holders.py``."""


class RoleCodec(msgspec.Struct, frozen=True, kw_only=True):
    """How the chunks of one role are stored, derived ones left out. ``codec``: names, or ``none``; ``why`` it was so
    decided. ``raw``, ``stored``: bytes of the chunks and bytes in packs; ``ratio``: the first by the second.
    """

    codec: str
    raw: int
    stored: int
    ratio: float
    why: str


class CommitBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The readable summary that stands in ``commit.json``."""

    format: int
    features: tuple[str, ...]
    step: int
    attempt: str
    world: int
    engine: str
    created: str
    """UTC, ISO 8601"""
    software: dict[str, str]
    totals: dict[str, int]
    """bytes_held, bytes_unique, bytes_written (tensors), bytes_reused, chunks, divergences"""
    index: FileRef
    codecs: dict[str, RoleCodec] = {}
    """per role; for people, and not needed to read the step"""
    degrees: dict[str, int] = {}
    """dp, tp, pp, ep and zero of the layout that a conversion arranged the step for; empty after a save"""
    log: int | None = None
    """number of the gradient log that passes through this state; 0: a checkpointer saved it that keeps no log; None: of
    none
    """


class _CommitFile(msgspec.Struct, frozen=True, kw_only=True):
    body: msgspec.Raw
    digest: str


def encode_commit(body: CommitBody) -> bytes:
    """Return the bytes of ``commit.json``: the body, indented, and the digest of the body's own bytes."""
    text = msgspec.json.format(msgspec.json.encode(body), indent=2)
    return b'{\n"body": ' + text + b',\n"digest": ' + msgspec.json.encode(digest(text)) + b"\n}\n"


def decode_commit(data: bytes, where: str) -> CommitBody:
    """Return the body of a commit.

    Raises:
        MalformedData, DigestMismatch, UnsupportedVersion, UnsupportedFeature: ``where`` names the file.
    """
    if len(data) > MAX_COMMIT:
        raise MalformedData(f"{where}: {len(data)} bytes, expected at most {MAX_COMMIT}")
    outer = parse(data, _CommitFile, where)
    raw = bytes(outer.body)
    if digest(raw) != check_form(outer.digest, where):
        raise DigestMismatch(f"{where}: body has digest {digest(raw)}, the file says {outer.digest}")
    _check_version(parse(raw, _Versioned, where), where)
    body = parse(raw, CommitBody, where)
    _check_ref(body.index, INDEX_KEY, where)
    return body


class _Versioned(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    features: tuple[str, ...] = ()


def _check_version(found: _Versioned, where: str) -> None:
    if found.format != VERSION:
        raise UnsupportedVersion(f"{where}: format {found.format}, this release reads {VERSION}")
    unknown = set(found.features) - FEATURES
    if unknown:
        raise UnsupportedFeature(f"{where}: needs feature(s) {sorted(unknown)}, which this release does not know")


def encode_index(part: IndexPart | IndexRoot) -> bytes:
    """Return the bytes of an index file: JSON, compressed."""
    if isinstance(part, IndexRoot) or part.codecs:
        return compress(msgspec.json.encode(part))
    # What has nothing encoded is written as the first releases wrote it, byte for byte.
    chunks = [msgspec.structs.astuple(chunk)[:_PLAIN] for chunk in part.chunks]
    plain_part = {"rank": part.rank, "packs": part.packs, "chunks": chunks, "objects": part.objects}
    return compress(msgspec.json.encode(plain_part))


_PLAIN = ChunkEntry.__struct_fields__.index("codec")
"""Fields of a chunk that is not encoded."""


def decode_root(data: bytes, where: str) -> IndexRoot:
    """Return the index root after checking every number and name in it.

    Raises:
        MalformedData, UnsupportedVersion: ``where`` names the file.
    """
    text = decompress(data, limit=MAX_INDEX, where=where)
    _check_version(parse(text, _Versioned, where), where)
    root = parse(text, IndexRoot, where)
    for ref in root.parts:
        _check_ref(ref, INDEX_KEY, where)
    specs_of(root, where)
    if root.world < 1 or root.step < 0:
        raise MalformedData(f"{where}: world {root.world}, step {root.step}")
    return root


def specs_of(root: IndexRoot, where: str) -> tuple[TensorSpec, ...]:
    """Return the specs of a root, checked: known dtypes, no negative sizes, no name twice."""
    specs = []
    for fqn, role, dtype, shape in root.specs:
        if any(n < 0 for n in shape):
            raise MalformedData(f"{where}: tensor {fqn!r} ({role}) has shape {list(shape)}")
        try:
            specs.append(TensorSpec(fqn, role, dtype, shape))
        except CkptError as error:
            raise MalformedData(f"{where}: {error}") from error
    if len({s.key for s in specs}) != len(specs):
        raise MalformedData(f"{where}: a tensor is listed twice")
    return tuple(specs)


def _check_ref(ref: FileRef, pattern: re.Pattern[str], where: str) -> None:
    if not pattern.fullmatch(ref.key) or not 0 <= ref.nbytes <= MAX_INDEX:
        raise MalformedData(f"{where}: reference to {ref.key[:200]!r} of {ref.nbytes} bytes")
    check_form(ref.digest, where)


def parse(data: bytes, kind: type[T], where: str) -> T:
    """Return JSON as a structure.

    Raises:
        MalformedData: ``where`` names the file.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise MalformedData(f"{where}: {error}") from error


def plain(value: Any) -> Any:
    """Return a manifest structure as plain dicts and lists (for ``--json``)."""
    return msgspec.to_builtins(value)
