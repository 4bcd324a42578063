"""Which format a checkpoint has, told by the names of its files, and who reads and writes each format."""

from __future__ import annotations

import importlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.convert.mark import refuse_unfinished
from ckpt.errors import (
    AccessDenied,
    ConfigError,
    FormatError,
    MissingChunk,
    NoSuchCheckpoint,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from ckpt.store.forward import Forward
from ckpt.store.local import LocalStore
from ckpt.store.open import open_store, url_below
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.convert.opened import Opened
    from ckpt.convert.options import ReadOptions, WriteOptions, Written
    from ckpt.convert.target import Target
    from ckpt.store.base import ObjectInfo, Store

    Writer = Callable[[Opened, Store, Target, WriteOptions], Written]


@dataclass(frozen=True, slots=True)
class Format:
    """A format by name.

    ``shows``: the names that it is known by. ``reader``, ``writer``: a module of this folder, and the format's name in
    its functions (``open_<name>`` and ``is_<name>``; ``write_<name>``); empty if it is not read or written. ``engine``:
    what alone can cut an optimizer as this format stores it. ``before``: formats whose names are there too, of files
    that belong to this one. ``weights``: it holds nothing but parameters and buffers. ``whole``: its tensors are whole,
    and which rank holds what of a model is not in it.
    """

    name: str
    title: str
    shows: str
    reader: str = ""
    writer: str = ""
    engine: str | None = None
    before: tuple[str, ...] = ()
    weights: bool = False
    whole: bool = False


FORMATS = {
    one.name: one
    for one in (
        Format("ckpt", "a repository of this library", "ckpt.json", "ours.read:ours", "ours.write:ours"),
        Format(
            "deepspeed", "DeepSpeed", "mp_rank_*_model_states.pt or zero_pp_rank_*_model_states.pt, in a folder or in "
            "global_step*/", "deepspeed.read:deepspeed", "deepspeed.write:deepspeed", "deepspeed", ("torch",),
        ),
        Format(
            "universal", "DeepSpeed universal", "mp_rank_*_model_states.pt beside zero/, in a folder or *_universal/",
            "deepspeed.read_universal:universal", "deepspeed.write_universal:universal", "deepspeed", ("torch",),
        ),
        Format(
            "dcp", "torch.distributed.checkpoint", ".metadata", "dcp.read:dcp", "dcp.write:dcp",
            before=("torch",), whole=True,
        ),
        Format(
            "megatron", "Megatron-core", ".metadata and common.pt", "megatron.read:megatron", before=("dcp", "torch"),
        ),
        Format(
            "safetensors", "as Hugging Face has them", "*.safetensors",
            "safetensors.read:safetensors", "safetensors.write:safetensors",
            before=("torch",), weights=True, whole=True,
        ),
        Format("torch", "a state dict by torch.save", "*.pt, *.pth or *.bin", "torchfile.read:torch"),
    )
}  # fmt: skip
"""Name -> format, in the order in which they are told."""

READABLE = tuple(one.name for one in FORMATS.values() if one.reader)
WRITABLE = tuple(one.name for one in FORMATS.values() if one.writer)
_OF_ONE_FILE = ("safetensors", "torch")
"""Formats of which a file may be a checkpoint by itself."""


def open_source(url: str, *, step: int | None = None, options: ReadOptions, format: str | None = None) -> Opened:
    """Open the checkpoint at a path or URL, which may also be that of a single file.

    Args:
        url: anything that ``ckpt.store.open`` opens.
        step: which one, where there are several; None: the newest.
        options: how it is read.
        format: a name of :data:`READABLE`; None: found by looking.

    Raises:
        NoSuchCheckpoint: nothing there has the names of any format.
        ConfigError: several formats are there, or an unknown one was asked for, or it is one file of a checkpoint, or
            a FIFO or device.
        DigestMismatch: with ``options.seen``, what could not be read is damaged.
        MissingChunk: a file of the checkpoint is gone, or it is a conversion that was not finished.
        CkptError: whatever the reader finds.
    """
    if format is not None and format not in READABLE:
        raise ConfigError(f"format {format!r} is not read, expected one of {', '.join(READABLE)}")
    store = _store_of(url)
    if isinstance(store, LocalStore) and not os.path.lexists(store.root):
        raise NoSuchCheckpoint(f"no such path: {store.url}")
    try:
        return _open(store, format if format is not None else format_of(store), step, options)
    except NoSuchCheckpoint:
        refuse_unfinished(store, store.children(""))
        raise
    except ObjectNotFound as error:
        raise MissingChunk(f"{store.url}: {error.key or error} is missing") from error


def _open(store: Store, chosen: str, step: int | None, options: ReadOptions) -> Opened:
    if isinstance(store, OneFile) and chosen not in _OF_ONE_FILE:
        other = ", or take it as what it is by itself (--from torch)" if store.key.endswith(".pt") else ""
        raise ConfigError(
            f"{store.url} is one file of a checkpoint ({FORMATS[chosen].title}): give the folder that it is in{other}"
        )
    if options.optimizer_step is not None and chosen != "deepspeed":
        raise ConfigError(f"an optimizer step is only said of files of DeepSpeed, {store.url} is {chosen}")
    try:
        opened: Opened = _function(FORMATS[chosen].reader, "open")(store, store.url, step=step, options=options)
    except FormatError:
        if options.seen:  # what does not fit together may be damaged: that says more
            from ckpt.convert.checking import check_archives  # seldom needed, and brings torch along

            check_archives(store, options.seen)
        raise
    return opened


def open_target(url: str) -> Store:
    """Open the place that is to be written.

    Raises:
        ConfigError: a file (or FIFO, or device) is there, or in place of a folder on the way to it, or a link to
            what is not there.
    """
    store = open_store(url)
    if isinstance(store, LocalStore):
        _refuse_dangling(str(url))
        there = store.root
        while not os.path.lexists(there) and os.path.dirname(there) != there:
            there = os.path.dirname(there)
        if not os.path.isdir(there):
            shown = LocalStore(there).url
            raise ConfigError(f"cannot write into {store.url}: {shown} is there, and is no folder")
    return store


def _refuse_dangling(place: str) -> None:
    """Refuse a path with a link to what does not exist: a store follows it, and would make that somewhere else."""
    place = os.path.abspath(os.path.expanduser(place)) if "://" not in place else ""
    while place and not os.path.exists(place):
        if os.path.islink(place):
            raise ConfigError(f"cannot write into {place}: it is a link to {os.readlink(place)}, which is not there")
        place = os.path.dirname(place)


def format_of(store: Store) -> str:
    """Return the name of the format of what is in a store, told by the names of its files.

    Raises:
        NoSuchCheckpoint: of none.
        ConfigError: of several.
    """
    found = [one for one in FORMATS.values() if one.reader and _is(one, store)]
    inner = {name for one in found for name in one.before}
    found = [one for one in found if one.name not in inner]
    if len(found) == 1:
        return found[0].name
    if found:
        several = " and ".join(f"{one.name} ({one.shows})" for one in found)
        raise ConfigError(f"{store.url} has the names of {several}: say which one is meant (--from, or its own folder)")
    there = sorted(store.children(""))
    if not there:
        raise NoSuchCheckpoint(f"nothing is in {store.url}")
    looked = [f"{one.name} ({one.title}): {one.shows}" for one in FORMATS.values() if one.reader]
    problem = f"no checkpoint of a known format in {store.url}: found {some(there)}, and nothing of this"
    raise NoSuchCheckpoint("\n  - ".join([problem, *looked]))


def writer_of(format: str) -> Writer:
    """Return the function that writes a format.

    Raises:
        ConfigError: it is not written, or no such format; the message lists those that are.
    """
    if format not in WRITABLE:
        raise ConfigError(f"format {format!r} is not written, expected one of {', '.join(WRITABLE)}")
    found: Writer = _function(FORMATS[format].writer, "write")
    return found


def _is(format: Format, store: Store) -> bool:
    return bool(_function(format.reader, "is")(store))


def _function(place: str, verb: str) -> Any:
    """Return ``<verb>_<format>`` of a module, imported only now: one format must not need what another one needs."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"ckpt.convert.{module}"), f"{verb}_{name}")


# ------------------------------------------------------------------------------------------------- a file by itself


class OneFile(Forward):
    """A store of which only one object is seen, and that is all of the source."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(store)
        self.key = key
        self.url = url_below(store.url, key)
        if isinstance(store, LocalStore):  # this store's place is the file, not the folder around it
            self.root = f"{store.root.rstrip('/')}/{key}"

    def children(self, prefix: str) -> list[str]:
        """See :class:`~ckpt.store.base.Store`."""
        return [] if prefix else [self.key]

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`~ckpt.store.base.Store`."""
        return (info for info in self.inner.walk(prefix) if info.key == self.key)


def _store_of(url: str) -> Store:
    """Return the store of a source; of a single file, one that has nothing else."""
    place, mark, query = str(url).partition("?")
    parent, slash, name = place.rstrip("/").rpartition("/")
    if "." in name and name.strip(".") and not parent.endswith(":/"):
        root = parent + "/" if parent.endswith("//") else parent or ("/" if slash else ".")
        store = open_store(root + mark + query)
        try:
            store.get(name, 0, 1)
            return OneFile(store, name)
        except (AccessDenied, StoreUnavailable):
            raise
        except StoreError:  # nothing is there, or a folder
            pass
    store = open_store(url)
    return _unless_folder(store) if isinstance(store, LocalStore) else store


def _unless_folder(store: LocalStore) -> Store:
    """Return the store of a folder, or of a file whose name has no dot."""
    try:
        mode = os.stat(store.root).st_mode
    except OSError:  # said by whoever reads
        return store
    if stat.S_ISREG(mode):
        return OneFile(LocalStore(os.path.dirname(store.root)), os.path.basename(store.root))
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{store.url} is neither a folder nor a file: a FIFO, a socket or a device")
    return store
