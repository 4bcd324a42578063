"""Safetensors files as Hugging Face has them: one, or several with an index. Weights only: the format has no more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckpt.convert.dcp.safetensors import SHARDING, PartFile, add_parts
from ckpt.convert.opened import Builder
from ckpt.convert.safetensors.file import BUFFERS, SUFFIX, Entry, files_of, read_header
from ckpt.convert.torchfile.state_dict import clean_names, role_of
from ckpt.errors import MalformedData
from ckpt.layout.box import Box
from ckpt.words import some

if TYPE_CHECKING:
    from ckpt.convert.opened import Opened
    from ckpt.convert.options import ReadOptions
    from ckpt.store.base import Store

BESIDE = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin")
"""What a trainer puts beside a model."""


def is_safetensors(store: Store) -> bool:
    """Is there a safetensors file at the root of ``store``? Looks at names only."""
    return any(name.endswith(SUFFIX) for name in store.children(""))


def open_safetensors(store: Store, where: str, *, step: int | None = None, options: ReadOptions) -> Opened:
    """Return the model of a folder (:func:`~ckpt.convert.safetensors.file.files_of`), or of a single file.

    Tensors that are no floating-point numbers, and those with names that only buffers have, are buffers, all others
    parameters, unless the files were written by us, who note it. Names of tied tensors come from the metadata, where
    ``safetensors.torch.save_model``, Hugging Face and we put them.

    Args:
        store: the folder.
        where: what messages call it.
        step: of no use here: the format has no steps; it becomes that of the checkpoint.
        options: of no use here: nothing in the files is ambiguous.

    Raises:
        MalformedData: a file is missing, cut off, or damaged, or not what the index says.
        UnsupportedFeature: a dtype of less than a byte.
    """
    builder = Builder("safetensors", where, store)
    builder.step = step or 0
    keys, weight_map = files_of(store)
    tensors: dict[str, tuple[str, Entry]] = {}
    tied: dict[str, str] = {}
    buffers: set[str] = set()
    parts: list[PartFile] = []
    for key in keys:
        entries, metadata = read_header(store, key)
        if weight_map is None and SHARDING in metadata:
            parts.append(PartFile(key, entries, metadata))
            continue
        for name, entry in entries.items():
            if weight_map is not None and weight_map.get(name, key) != key:
                continue  # another model's, or a copy: the index decides
            if name in tensors:
                raise MalformedData(f"{where}: tensor {name!r} is in {tensors[name][0]!r} and in {key!r}")
            tensors[name] = key, entry
        tied |= {name: target for name, target in metadata.items() if name != "format"}
        buffers |= _listed(metadata, f"{key!r} in {where}")
    if parts:
        add_parts(builder, parts)
    missing = [name for name in weight_map or () if name not in tensors]
    if missing:
        raise MalformedData(f"{where}: {some(missing)} of the index is in no file")
    names = clean_names(tensors, where)
    for name, (key, entry) in tensors.items():
        role = role_of(name, entry.dtype, listed=buffers)
        spec = builder.spec(names[name], role, entry.dtype, entry.shape)
        builder.add(spec, Box.whole(spec.shape), key, entry.start)
    builder.aliases |= {alias: names[name] for alias, name in tied.items() if name in names and alias not in names}
    extra = [name for name in tensors if weight_map is not None and name not in weight_map]
    if extra:
        builder.notes.append(f"{some(extra)}: in a file, and not in the index")
    beside = sorted(set(BESIDE) & set(store.children("")))
    if beside:
        builder.lost.append(
            f"{some(beside)} left out: safetensors files do not keep the order of the model's parameters, by which an "
            "optimizer's state finds them"
        )
    return builder.build()


def _listed(metadata: dict[str, str], where: str) -> set[str]:
    try:
        found = json.loads(metadata.get(BUFFERS, "[]"))
        return {str(name) for name in found}
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedData(f"{where}: {BUFFERS} in its metadata is no list of names") from error
