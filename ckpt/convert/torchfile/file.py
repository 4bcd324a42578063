"""Files of ``torch.save``: the tree of values that one holds, with each tensor's place in the file in its stead.

Only the archive's directory and the pickle are read, never the data. The pickle's opcodes are interpreted here
(``pickle_machine``) and not by ``torch.load(weights_only=True)``: that one gives places only together
with private parts of torch that differ between releases, would take DeepSpeed's classes only with DeepSpeed imported,
and changes a global list for it.
"""

from __future__ import annotations

import io
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from ckpt.convert.torchfile.names import Inert, Names, Storage, Stored, dtype_of_storage
from ckpt.convert.torchfile.pickle_machine import run_pickle
from ckpt.convert.torchfile.zip_read import RangeFile, TorchZip
from ckpt.errors import MalformedData, ObjectNotFound, UnsupportedFeature
from ckpt.layout.spec import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.convert.options import Span
    from ckpt.store.base import Store

__all__ = ["Inert", "Stored", "is_torch_file", "read_pickle", "read_tree", "stored_in", "where_of"]

MAX_REPEATED = 64 << 20
"""Bytes that a tensor may have when the file is smaller, since it repeats its elements (stride 0)."""
_ZIP = b"PK\3\4"
_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The magic number as the pickle that a file of the format before 1.6 starts with."""
_LEGACY_VERSION = 1001


def is_torch_file(store: Store, key: str) -> bool:
    """Does an object start as the files of ``torch.save`` do?"""
    head = store.get(key, 0, len(_LEGACY))
    return head.startswith(_ZIP) or head == _LEGACY


def read_tree(
    store: Store,
    key: str,
    *,
    trust_pickle: bool = False,
    start: int = 0,
    nbytes: int | None = None,
    inert: tuple[str, ...] = (),
    seen: set[Span] | None = None,
) -> Any:
    """Return what ``torch.save`` wrote to an object: plain values, and :class:`Stored` where a tensor was.

    Tied tensors are equal ones; several may lie in one storage. Dictionaries of every kind come as ``dict``. Objects of
    classes that need not be loaded to be read (DeepSpeed's, Megatron's, ``argparse.Namespace``) come as
    :class:`Inert`.

    Args:
        store: where the object is.
        key: the object.
        trust_pickle: import and call what the pickle names, which runs code from the file.
        start: byte at which what ``torch.save`` wrote starts in the object.
        nbytes: how many bytes it has; None: all to the end.
        inert: full names of further classes that come as :class:`Inert`; what ends in a dot is a package.
        seen: gets the place of what is read, if it is an archive, which has checksums.

    Raises:
        ObjectNotFound: no such object.
        DigestMismatch: the pickle is not the one that was written.
        UnsupportedFeature: it needs a class that is not on the list, or holds a sparse, quantized or meta tensor.
        MalformedData: no such file, or one that is cut off or damaged.
    """
    file = _open(store, key, start, nbytes)
    names = Names(inert)
    head = file.read(len(_LEGACY))
    file.seek(0)
    if not head:
        raise MalformedData(f"{file.where}: is empty, no file of torch.save")
    if head.startswith(_ZIP):
        if seen is not None:
            seen.add((key, file.start, file.nbytes))
        return _read_zip(file, names, trust_pickle)
    if head == _LEGACY:
        return _read_legacy(file, names, trust_pickle)
    raise MalformedData(f"{file.where}: starts with {head!r}, which is no file of torch.save (or one before 0.1.10)")


def read_pickle(store: Store, key: str, *, trust_pickle: bool = False, inert: tuple[str, ...] = ()) -> Any:
    """Return what a file holds that is nothing but a pickle, as :func:`read_tree` does; it can have no tensors."""
    file = _open(store, key, 0, None)
    return run_pickle(io.BytesIO(file.read()), file.where, Names(inert), trust=trust_pickle)


def stored_in(tree: Any) -> Iterator[tuple[tuple[Any, ...], Stored]]:
    """Yield the path of keys and the place of every tensor of a tree, in its order."""
    if isinstance(tree, Stored):
        yield (), tree
        return
    children: Any = ()
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    elif isinstance(tree, Inert):
        children = tree.attributes.items()
    for key, child in children:
        for path, stored in stored_in(child):
            yield (key, *path), stored


def where_of(store: Store, key: str, start: int = 0) -> str:
    """Return what messages call a part of an object."""
    # The store of a single file has its name already (:class:`ckpt.convert.find.OneFile`).
    where = store.url if store.url.partition("?")[0].endswith(f"/{key}") else f"{key!r} in {store.url}"
    return where + (f" at byte {start}" if start else "")


def _open(store: Store, key: str, start: int, nbytes: int | None) -> RangeFile:
    where = where_of(store, key, start)
    size = store.size(key)
    if size is None:
        raise ObjectNotFound(f"read {where}: no such object", key)
    if not size:
        store.get(key, 0, 1)  # what is no file (a FIFO, a device) has no size either, and says here what it is
    count = size - start if nbytes is None else nbytes
    if not 0 <= start <= start + count <= size:
        raise MalformedData(f"{where}: {count} bytes from byte {start}, the file has {size}")
    return RangeFile(store, key, where, start, count)


def _read_zip(file: RangeFile, names: Names, trust: bool) -> Any:
    archive = TorchZip(file)
    order = archive.read("byteorder") if archive.has("byteorder") else b"little"
    if order != b"little":
        raise UnsupportedFeature(f"{file.where}: numbers in byte order {order!r:.20}, expected little")
    places: dict[str, tuple[int, int]] = {}

    def storage(record: str, dtype: str, nbytes: int) -> Storage:
        if record not in places:
            places[record] = archive.place(f"data/{record}")
        start, held = places[record]
        if nbytes != held:
            raise MalformedData(f"storage {record!r:.80} has {held} bytes in the archive, {nbytes} in the pickle")
        return Storage(dtype, file.key, start, nbytes, max(file.nbytes, MAX_REPEATED))

    return run_pickle(io.BytesIO(archive.read("data.pkl")), file.where, names, _persistent(storage), trust=trust)


def _persistent(storage: Callable[[str, str, int], Storage]) -> Callable[[Any], Storage]:
    """Return what reads the words that a pickle has for a storage: its record, dtype, and number of bytes."""

    def read(words: Any) -> Storage:
        if not isinstance(words, tuple) or len(words) < 5 or words[0] != "storage" or any(words[5:]):
            raise MalformedData(f"the pickle refers to {short(words)}, expected a storage")
        kind, record, _, count = words[1:5]
        if not isinstance(record, str) or type(count) is not int or count < 0:
            raise MalformedData(f"a storage {short(record)} of {short(count)} elements")
        dtype = dtype_of_storage(kind)
        return storage(record, dtype, count * ITEMSIZE[dtype])

    return read


def _read_legacy(file: RangeFile, names: Names, trust: bool) -> Any:
    """The format before torch 1.6: pickles one behind the other, then the storages in the order of a list."""
    magic, version, system = (_next(file, names) for _ in range(3))
    if magic != _MAGIC or version != _LEGACY_VERSION or not isinstance(system, dict):
        raise MalformedData(f"{file.where}: no file of torch.save (version {short(version)})")
    if system.get("little_endian") is not True:
        raise UnsupportedFeature(f"{file.where}: numbers in big byte order, expected little")
    at = file.tell()
    sizes: dict[str, int] = {}
    starts: dict[str, int] = {}

    def storage(record: str, dtype: str, nbytes: int) -> Storage:
        if sizes.setdefault(record, nbytes) != nbytes:
            raise MalformedData(f"storage {record!r:.80} has {sizes[record]} bytes, and elsewhere {nbytes}")
        return Storage(dtype, file.key, starts.get(record, 0), nbytes, max(file.nbytes, MAX_REPEATED))

    def tree(trusted: bool) -> Any:
        file.seek(at)
        return run_pickle(file, file.where, names, _persistent(storage), trust=trusted)  # type: ignore[arg-type]

    # Where the storages are is known behind the pickle that refers to them: it is read again then.
    tree(trust)
    order = _next(file, names)
    if not isinstance(order, list) or not all(isinstance(r, str) for r in order) or sorted(order) != sorted(sizes):
        raise MalformedData(f"{file.where}: the list of storages is not that of the tensors")
    position = file.tell()
    for record in order:
        file.seek(position)
        count = int.from_bytes(file.read(8), "little")
        starts[record] = file.start + position + 8
        position += 8 + sizes[record]
        if position > file.nbytes or count > sizes[record]:
            raise MalformedData(
                f"{file.where}: storage {record!r:.80} of {count} elements ends at byte {position}, the file has "
                f"{file.nbytes}"
            )
    return tree(trust)


def _next(file: RangeFile, names: Names) -> Any:
    return run_pickle(file, file.where, names)  # type: ignore[arg-type]  # has what the machine reads with
