"""A small valid repository, and a forger who knows the format and makes every digest up to the commit right again."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ckpt
from ckpt.format.codec import compress, decompress
from ckpt.format.digest import digest
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.memory import MemoryStore
from tests.property.fake import FakeEngine, engines, small_model, zero1

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMIT = "steps/1/commit.json"
EXTRA = {"value": {"a": [1, 2.5], "t": (1,)}}


def job(*, filled: bool) -> FakeEngine:
    model = small_model(1)
    return engines(model, zero1(model, 1), 1, filled=filled)[0]


def valid() -> dict[str, bytes]:
    """The files of a repository of one rank and one step."""
    store = MemoryStore()
    ckpt.save(job(filled=True), store, extra=EXTRA)
    return store.objects


def with_objects(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    store.objects = dict(objects)
    return store


def survives(store: Any) -> bool:
    """Load and verify: right data, or a :class:`CkptError`. Returns whether the load succeeded."""
    with suppress(ckpt.CkptError):
        verify(Repository(store))
    target = job(filled=False)
    try:
        report = ckpt.load(target, store)
    except ckpt.CkptError:
        return False
    assert target.differences() == []
    assert report.extra.get("value", EXTRA["value"]) == EXTRA["value"]
    return True


class Forger:
    """``commit``, ``root`` and ``part``: the metadata as plain JSON, to be changed; :meth:`store` signs it all."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = dict(objects)
        self.commit = json.loads(objects[COMMIT])["body"]
        self.root_key = self.commit["index"]["key"]
        self.root = self._read(self.root_key)
        self.part_key = self.root["parts"][0]["key"]
        self.part = self._read(self.part_key)

    def _read(self, key: str) -> Any:
        return json.loads(decompress(self.objects[key], limit=1 << 24, where=key))

    def documents(self) -> dict[str, Any]:
        return {"commit": self.commit, "root": self.root, "part": self.part}

    def changed(self, name: str, path: tuple[Any, ...], value: Any) -> MemoryStore:
        """The repository with one value of one document replaced."""
        other = copy.deepcopy(self)
        node = other.documents()[name]
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value
        return other.store(keep=(name, path))

    def store(self, keep: tuple[str, tuple[Any, ...]] = ("", ())) -> MemoryStore:
        """Sign from the part up to the commit; what ``keep`` names is left as the forger wrote it."""
        self._sign(self.part_key, self._encode(self.part), self.root, ("parts", 0), "root", keep)
        self._sign(self.root_key, self._encode(self.root), self.commit, ("index",), "commit", keep)
        self.objects[COMMIT] = sealed(json.dumps(self.commit).encode())
        return with_objects(self.objects)

    def _encode(self, document: Any) -> bytes:
        return compress(json.dumps(document).encode())

    def _sign(self, key: str, data: bytes, above: Any, at: tuple[Any, ...], name: str, keep: Any) -> None:
        self.objects[key] = data
        try:
            ref = above
            for step in at:
                ref = ref[step]
            for field, value in (("digest", digest(data)), ("nbytes", len(data))):
                if keep != (name, (*at, field)):
                    ref[field] = value
        except (KeyError, IndexError, TypeError):
            pass  # the forger has removed the reference itself


def sealed(body: bytes) -> bytes:
    """A commit file around a body, with the right digest."""
    return b'{"body": ' + body + b', "digest": "' + digest(body).encode() + b'"}'


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document, containers included."""
    if path:
        yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))
