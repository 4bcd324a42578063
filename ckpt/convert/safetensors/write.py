"""Weights as Hugging Face has them: safetensors files of bounded size, an index, and what belongs to the model beside.

``from_pretrained`` and ``safetensors.torch.load_file`` read it. Tied weights are there once; the other names stand in
the metadata, as ``safetensors.torch.save_model`` writes them. A file is written from front to back in bounded memory;
the index comes last, and without it nobody takes the files of several for a model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt.convert.casting import cast_lines, origins
from ckpt.convert.file_writing import write_files
from ckpt.convert.loose import names_of
from ckpt.convert.naming import natural
from ckpt.convert.safetensors.file import BUFFERS, header
from ckpt.convert.torchfile.state_dict import role_of
from ckpt.errors import ConfigError
from ckpt.format.digest import raw_digest
from ckpt.layout.box import Box
from ckpt.layout.spec import BUFFER, MASTER, PARAM, Shard, TensorSpec
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpt.convert.opened import Opened
    from ckpt.convert.options import WriteOptions, Written
    from ckpt.convert.target import Target
    from ckpt.convert.torchfile.write import Feed
    from ckpt.store.base import Buffer, Store

SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in a file at most, if nobody says; a tensor that is larger has a file of its own."""
MAX_TENSORS = 65_536
"""Tensors in a file, so that its header stays far below what readers take."""
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_BESIDE = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip
"""Files of a model and its tokenizer that come along if the source has them."""
MAX_BESIDE = 256 << 20
"""Bytes of one of them."""
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""What ``config.json`` calls the weights' dtype: transformers 5, and before. ``from_pretrained`` casts to it."""


@dataclass(frozen=True, slots=True)
class File:
    """One safetensors file. ``head``: its bytes before the data."""

    key: str
    specs: tuple[TensorSpec, ...]
    head: bytes

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return len(self.head) + sum(spec.nbytes for spec in self.specs)

    @property
    def identity(self) -> bytes:
        """Equal for files that will be filled alike."""
        return raw_digest(self.head)

    @property
    def wants(self) -> list[Shard]:
        """What of the source goes into it, in the order of the file."""
        return [Shard(spec, Box.whole(spec.shape)) for spec in self.specs if spec.nbytes]

    def write(self, write: Callable[[Buffer], None], feed: Feed) -> None:
        """Hand the file's bytes to ``write``, front to back."""
        write(self.head)
        for data in feed(self.wants):
            write(data)


def write_safetensors(
    opened: Opened,
    store: Store,
    target: Target | None,
    options: WriteOptions,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write the weights of ``opened``.

    Args:
        opened: the source. Of tensors of which it has only masters, the parameters are made by rounding.
        store: of the target, empty or with what an interrupted run of the same conversion left.
        target: of no use here: the files hold whole tensors.
        options: see :class:`~ckpt.convert.options.WriteOptions`.
        shard_bytes: of tensors in one file, at most.

    Raises:
        ConfigError: the target is not empty, or the source has no weights.
        UnsupportedFeature: a dtype that safetensors does not have.
        MissingState, IntegrityError, StoreError: reading or writing failed.
    """
    specs = weights_of(opened, options.dtype)
    files = files_for(opened, specs, shard_bytes)
    beside = _beside(opened, options.dtype)
    last = {**beside, **_index(files)}
    written = write_files(opened, store, options, [(file.key, _same(file)) for file in files], last)
    catalog = opened.catalog()
    made = origins(catalog, specs)
    lost = _lost(opened, beside, {source.key for spec, source in made.items() if source.dtype == spec.dtype})
    return replace(written, format="safetensors", lost=tuple(lost), made=tuple(cast_lines(catalog, made)))


def _same(file: File) -> Callable[[], File]:
    return lambda: file


def weights_of(opened: Opened, dtype: str | None) -> list[TensorSpec]:
    """Return the parameters and buffers of a source, in the order in which people count its layers.

    Raises:
        ConfigError: it has none.
    """
    held: dict[str, dict[str, TensorSpec]] = {}
    for spec in opened.specs:
        held.setdefault(spec.fqn, {})[spec.role] = spec
    found = []
    for fqn in sorted(held, key=natural):
        for spec in [held[fqn][role] for role in (PARAM, BUFFER, MASTER) if role in held[fqn]][:1]:
            cast = dtype if dtype is not None and spec.dtype.startswith(("float", "bfloat")) else spec.dtype
            found.append(TensorSpec(fqn, BUFFER if spec.role == BUFFER else PARAM, cast, spec.shape))
    if not found:
        raise ConfigError(f"{opened.where} has no weights")
    return found


def files_for(opened: Opened, specs: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES) -> list[File]:
    """Return the files: one if all fits, else numbered ones. In each, wide elements come first, so all are aligned."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and (filled + spec.nbytes > shard_bytes or len(shards[-1]) >= MAX_TENSORS):
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    files = []
    for n, shard in enumerate(shards, 1):
        key = "model.safetensors" if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        ordered = tuple(sorted(shard, key=lambda spec: -spec.itemsize))
        entries = [(spec.fqn, spec.dtype, spec.shape) for spec in ordered]
        files.append(File(key, ordered, header(entries, _metadata(opened, shard), opened.where)))
    return files


def _metadata(opened: Opened, shard: Sequence[TensorSpec]) -> dict[str, str]:
    names = {spec.fqn for spec in shard}
    tied = {alias: fqn for alias, fqn in sorted(opened.aliases.items()) if fqn in names and alias != "format"}
    # A reader of ours tells buffers by name and dtype; where that would be wrong, the file says it.
    odd = sorted(s.fqn for s in shard if s.role == BUFFER and role_of(s.fqn, s.dtype) != BUFFER)
    return {"format": "pt", **tied, **({BUFFERS: json.dumps(odd)} if odd else {})}


def _index(files: Sequence[File]) -> dict[str, bytes]:
    """Return the index by its key; nothing if there is only one file, which needs none."""
    if len(files) == 1:
        return {}
    size = sum(spec.nbytes for file in files for spec in file.specs)
    weight_map = {spec.fqn: file.key for file in files for spec in file.specs}
    return {INDEX: json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2).encode() + b"\n"}


# -------------------------------------------------------------------------------------------------- beside the weights


def _beside(opened: Opened, dtype: str | None) -> dict[str, bytes]:
    """Return the model's other files; a config says the dtype that the weights have now."""
    there = set(opened.store.children(""))
    found = {}
    for name in _BESIDE:
        if name in there:
            data = opened.store.get(name, 0, MAX_BESIDE + 1)
            if len(data) > MAX_BESIDE:
                raise ConfigError(f"{name!r} in {opened.where} has more than {MAX_BESIDE} bytes")
            found[name] = _with_dtype(data, dtype) if name == CONFIG and dtype is not None else data
    return found


def _with_dtype(data: bytes, dtype: str) -> bytes:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(config, dict):
        return data
    keys = [key for key in _DTYPE_KEYS if key in config] or [_DTYPE_KEYS[-1]]
    return json.dumps({**config, **dict.fromkeys(keys, dtype)}, indent=2, ensure_ascii=False).encode() + b"\n"


def _lost(opened: Opened, beside: dict[str, bytes], used: set[tuple[str, str]]) -> Iterator[str]:
    """``used``: what of the source is in the files."""
    roles: dict[str, int] = {}
    for spec in opened.specs:
        if spec.role not in (PARAM, BUFFER) and spec.key not in used:
            roles[spec.role] = roles.get(spec.role, 0) + 1
    if roles:
        listed = ", ".join(f"{role} of {count(number, 'tensor')}" for role, number in sorted(roles.items()))
        yield f"{listed}: the format has weights only"
    yield from (f"{names}: the format has weights only" for names in names_of(opened.objects))
    if CONFIG not in beside:
        yield f"{CONFIG}: the source has none, and from_pretrained needs one: put the model's own beside the weights"
