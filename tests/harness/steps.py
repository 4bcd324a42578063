"""Small whole checkpoints, written by hand through the format: no engine, no ranks, any store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ckpt.format.codec import codec_of, encode
from ckpt.format.digest import digest
from ckpt.format.manifest import VERSION, BlobEntry, ChunkEntry, CommitBody, IndexPart, IndexRoot, ObjectEntry, PackRef
from ckpt.format.pack import PackItem, lay_out
from ckpt.repo.repository import Repository, attempt_marker, attempt_prefix
from ckpt.store.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.store.base import Store

SPECS = (
    ("emb", "param", "float32", (4, 16)),  # frozen: its bytes are in the first step's pack
    ("small", "buffer", "float32", (3,)),
    ("w", "param", "float32", (8, 16)),  # half of it on each rank; the second half is encoded
)
CODEC = codec_of(4)


def new_attempt(age: float = 0.0, nonce: str = "00000001") -> str:
    """The name that a save of ``age`` seconds ago would have given."""
    return f"{int(time.time() - age):x}-{nonce}"


def values(step: int) -> dict[str, np.ndarray]:
    """What the tensors hold at a step."""
    return {
        "emb": np.arange(64, dtype="f4").reshape(4, 16),
        "small": np.full(3, step, "f4"),
        "w": (np.arange(128, dtype="f4") + 1000 * step).reshape(8, 16),
    }


class Pack:
    """A pack being filled."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.items: list[PackItem] = []
        self.data: list[bytes] = []

    def add(self, name: str, data: bytes) -> int:
        """Append bytes; return their number in the pack."""
        self.items.append(PackItem(name, "uint8", (len(data),), len(data)))
        self.data.append(data)
        return len(self.items) - 1

    def write(self, store: Store) -> tuple[PackRef, tuple[int, ...]]:
        """Store it; return its reference, and where each of the bytes begin."""
        layout = lay_out(self.items)
        with store.writer(self.key) as out:
            out.write(layout.header + b"".join(self.data))
            out.finish()
        return PackRef(key=self.key, nbytes=layout.nbytes, header=digest(layout.header)), layout.starts


def write_step(
    store: Store,
    step: int,
    *,
    attempt: str | None = None,
    parent: int | None = None,
    age: float = 0.0,
    commit: bool = True,
    overwrite: bool = False,
    seed: int | None = None,
) -> str:
    """Save a step of two ranks and return the folder of its attempt.

    ``parent``: the step whose frozen tensor is referenced (default: it is written). ``age``: how long ago. ``seed``:
    which step's values it holds (default: its own).
    """
    repo = Repository(store)
    repo.initialise()
    name = new_attempt(age) if attempt is None else attempt
    prefix = attempt_prefix(step, name)
    created = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age))
    store.put(attempt_marker(step, name), msgspec.json.encode({"world": 2, "created": created}))
    held = values(step if seed is None else seed)
    refs = []
    for rank in (0, 1):
        pack = Pack(f"{prefix}/packs/rank{rank:05d}-000.safetensors")
        half = held["w"][4 * rank : 4 * rank + 4].tobytes()
        stored = encode(half, CODEC, 4) if rank else half
        pack.add("w", stored)
        document, small = b'{"position": %d}' % step, held["small"].tobytes()
        pack.add("doc" if rank else "small", document if rank else small)
        if rank == 0 and parent is None:
            pack.add("emb", held["emb"].tobytes())
        ref, starts = pack.write(store)
        packs, chunks = [ref], []
        if rank:
            chunks.append(ChunkEntry(2, (4, 0), (4, 16), digest(half), 0, starts[0], 256, (), 1, len(stored)))
        else:
            chunks += [
                ChunkEntry(2, (0, 0), (4, 16), digest(half), 0, starts[0], 256),
                ChunkEntry(1, (0,), (3,), digest(small), 0, starts[1], 12),
            ]
            if parent is None:
                chunks.append(ChunkEntry(0, (0, 0), (4, 16), digest(held["emb"].tobytes()), 0, starts[2], 256))
            else:
                older = repo.read_index(parent).parts[0]
                emb = next(c for c in older.chunks if c.spec == 0)
                packs.append(older.packs[emb.pack])
                chunks.append(msgspec.structs.replace(emb, pack=1))
        blob = BlobEntry(digest(document), 0, starts[1], len(document))
        objects = (ObjectEntry(name="loader", kind="extra", ranks=(0, 1), document=blob),) if rank else ()
        part = IndexPart(
            rank=rank, packs=tuple(packs), chunks=tuple(chunks), objects=objects, codecs=(CODEC,) if rank else ()
        )
        refs.append(repo.write_index(f"{prefix}/index/part-{rank:05d}.json.zst", part))
    root = IndexRoot(
        format=VERSION, step=step, attempt=name, world=2, layout=digest(b"layout"), specs=SPECS, derived=(),
        aliases={}, parts=tuple(refs),
    )  # fmt: skip
    index = repo.write_index(f"{prefix}/index/root.json.zst", root)
    if commit:
        repo.commit(
            CommitBody(
                format=VERSION, features=("codec",), step=step, attempt=name, world=2, engine="none", created=created,
                software={"ckpt": "0.1.0"}, totals={"bytes_unique": 780}, index=index,
            ),
            overwrite=overwrite,
        )  # fmt: skip
    return prefix


def three_steps(root: Path) -> Path:
    """Write steps 1, 2 and 10, the later ones referring to step 1's pack; return ``root``."""
    store = LocalStore(str(root))
    write_step(store, 1, age=7000)
    for step in (2, 10):
        write_step(store, step, parent=1)
    return root
