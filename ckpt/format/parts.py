"""Index parts, read: every number and name in one is checked before anybody uses it.

Readers allocate what an entry says and read where it points, so an entry must fit its tensor and its pack.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ckpt.errors import MalformedData
from ckpt.format.codec import CODECS, decompress, stored_least, stored_most
from ckpt.format.digest import check_form, has_form
from ckpt.format.manifest import DERIVED, MAX_CHUNK, MAX_INDEX, PACK_KEY, IndexPart, parse
from ckpt.layout.spec import ITEMSIZE

if TYPE_CHECKING:
    from ckpt.format.manifest import BlobEntry, ChunkEntry, ObjectTensor, PackRef
    from ckpt.layout.spec import TensorSpec


def decode_part(data: bytes, specs: tuple[TensorSpec, ...], where: str) -> IndexPart:
    """Return one index part after checking every chunk against its spec and its pack.

    Raises:
        MalformedData: ``where`` names the file.
    """
    part = parse(decompress(data, limit=MAX_INDEX, where=where), IndexPart, where)
    for pack in part.packs:
        if not PACK_KEY.fullmatch(pack.key) or pack.nbytes < 8:
            raise MalformedData(
                f"{where}: pack {pack.key[:200]!r} of {pack.nbytes} bytes is not a pack of this repository"
            )
        if pack.header:
            check_form(pack.header, where)
    for name in part.codecs:
        if name not in CODECS:
            raise MalformedData(f"{where}: codec {name[:200]!r}, this release knows {', '.join(CODECS)}")
    for chunk in part.chunks:
        if not _is_plain_and_sound(chunk, specs, part.packs):
            _check_chunk(chunk, specs, part, where)
    for entry in part.objects:
        what = f"{where}: object {entry.name!r}"
        _check_place(entry.document, part.packs, what)
        for tensor in entry.tensors:
            _check_object_tensor(tensor, part.packs, what)
    return part


def _is_plain_and_sound(chunk: ChunkEntry, specs: tuple[TensorSpec, ...], packs: tuple[PackRef, ...]) -> bool:
    """Is there certainly nothing wrong with a chunk that is not encoded? If not, the thorough check says what.

    There are many of them, and all ranks wait while they are looked at: no names and boxes are made for messages here.
    """
    if not (0 <= chunk.spec < len(specs) and 0 <= chunk.pack < len(packs)) or chunk.codec or chunk.stored:
        return False
    spec = specs[chunk.spec]
    if not len(chunk.offsets) == len(chunk.sizes) == len(spec.shape):
        return False
    nbytes = spec.itemsize
    for offset, size, whole in zip(chunk.offsets, chunk.sizes, spec.shape, strict=True):
        if offset < 0 or size < 0 or offset + size > whole:
            return False
        nbytes *= size
    start, stop = chunk.start, chunk.start + nbytes
    fits = nbytes == chunk.nbytes <= MAX_CHUNK and start >= 8 and stop <= packs[chunk.pack].nbytes
    return fits and has_form(chunk.digest)


def _check_chunk(chunk: ChunkEntry, specs: tuple[TensorSpec, ...], part: IndexPart, where: str) -> None:
    if not 0 <= chunk.spec < len(specs):
        raise MalformedData(f"{where}: chunk of tensor number {chunk.spec}, there are {len(specs)}")
    spec = specs[chunk.spec]
    if len(chunk.offsets) != len(chunk.sizes) or min((*chunk.offsets, *chunk.sizes), default=0) < 0:
        raise MalformedData(f"{where}: {spec}: chunk box {chunk.offsets}+{chunk.sizes}")
    if not chunk.box.within(spec.shape) or chunk.box.volume * spec.itemsize != chunk.nbytes:
        raise MalformedData(f"{where}: {spec}: chunk {chunk.box} of {chunk.nbytes} bytes does not fit")
    where = f"{where}: {spec} chunk {chunk.box}"
    if chunk.codec or chunk.stored:
        _check_encoded(chunk, part.codecs, where)
    if chunk.pack == DERIVED:
        check_form(chunk.digest, where)
    else:
        _check_place(chunk, part.packs, where)


def _check_encoded(chunk: ChunkEntry, codecs: tuple[str, ...], where: str) -> None:
    if not 0 < chunk.codec <= len(codecs) or chunk.pack == DERIVED:
        raise MalformedData(f"{where}: {chunk.stored} bytes stored, codec number {chunk.codec} of {len(codecs)}")
    if chunk.nbytes == 0 or chunk.nbytes % CODECS[codecs[chunk.codec - 1]]:
        raise MalformedData(f"{where}: {chunk.nbytes} bytes cannot be encoded with {codecs[chunk.codec - 1]}")
    least, most = stored_least(chunk.nbytes), stored_most(chunk.nbytes)
    if not least <= chunk.stored <= most:
        raise MalformedData(f"{where}: {chunk.stored} bytes encoded, expected {least} to {most} for {chunk.nbytes}")


def _check_object_tensor(tensor: ObjectTensor, packs: tuple[PackRef, ...], where: str) -> None:
    for blob in tensor.blobs:
        _check_place(blob, packs, where)
    if tensor.dtype not in ITEMSIZE or any(n < 0 for n in tensor.shape):
        raise MalformedData(f"{where}: a tensor of dtype {tensor.dtype[:200]!r} and shape {list(tensor.shape)}")
    # Before a byte is read: blobs may share a place, so a list of them can ask for far more memory than the packs have.
    held, wanted = sum(blob.nbytes for blob in tensor.blobs), prod(tensor.shape) * ITEMSIZE[tensor.dtype]
    if held != wanted:
        raise MalformedData(
            f"{where}: blobs of {held} bytes for a tensor {tensor.dtype}{list(tensor.shape)} of {wanted} bytes"
        )


def _check_place(entry: ChunkEntry | BlobEntry, packs: tuple[PackRef, ...], where: str) -> None:
    check_form(entry.digest, where)
    if not 0 <= entry.pack < len(packs):
        raise MalformedData(f"{where}: in pack number {entry.pack}, there are {len(packs)}")
    if not 0 <= entry.nbytes <= MAX_CHUNK:
        raise MalformedData(f"{where}: {entry.nbytes} bytes, expected at most {MAX_CHUNK}")
    if entry.start < 8 or entry.start + entry.length > packs[entry.pack].nbytes:
        raise MalformedData(f"{where}: bytes [{entry.start}, +{entry.length}) are not in {packs[entry.pack].key}")
