"""Metadata by somebody who can write the root and recompute every digest. See README.md."""

from __future__ import annotations

import copy
import json

import pytest

import ckpt
from ckpt.format.codec import compress
from ckpt.format.digest import digest
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.local import LocalStore
from tests.attacks.forge import COMMIT, Forger, job, leaves, sealed, survives, valid, with_objects

HOSTILE = [
    None,
    True,
    -1,
    2**31,
    2**63,
    2**70,
    0.5,
    "",
    "x",
    "../../../etc/passwd",
    "\0",
    [],
    [-1],
    [2**70],
    {},
    {"a": 1},
]


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    return valid()


@pytest.fixture
def forger(objects) -> Forger:
    return Forger(objects)


def refused(store, *texts: str) -> str:
    """The load raises one of our errors with these texts, and places nothing."""
    target = job(filled=False)
    fresh = [bytes(b.numpy().data) for b in target.buffers]
    with pytest.raises(ckpt.CkptError) as caught:
        ckpt.load(target, store)
    for text in texts:
        assert text in str(caught.value)
    assert [bytes(b.numpy().data) for b in target.buffers] == fresh
    return str(caught.value)


def test_the_forger_can_sign(forger):
    """Otherwise every attack below would be stopped by a digest, and say nothing."""
    assert survives(forger.store())


@pytest.mark.parametrize("name", ["commit", "root", "part"])
def test_wrong_types_and_numbers_everywhere(forger, name):
    """Each value of each document by each of the hostile ones: the right data or one of our errors."""
    succeeded = tried = 0
    for path in leaves(forger.documents()[name]):
        for value in HOSTILE:
            tried += 1
            succeeded += survives(forger.changed(name, path, value))
    assert tried > 200
    assert succeeded < tried / 2, "most of these must be noticed"


@pytest.mark.parametrize("name", ["commit", "root", "part"])
def test_fields_left_out_or_repeated(forger, name):
    for path in leaves(forger.documents()[name]):
        other = copy.deepcopy(forger)
        node = other.documents()[name]
        for step in path[:-1]:
            node = node[step]
        if isinstance(node, list):
            node.append(copy.deepcopy(node[path[-1]]))
        else:
            del node[path[-1]]
        survives(other.store())


KEYS = [
    "../../etc/passwd",
    "/etc/passwd",
    "steps/1/../../../etc/passwd",
    "steps/1/a/packs/../../../x.safetensors",
    "ckpt.json",
    "steps/1/commit.json",
    "steps/1/a/packs/.safetensors/x",
    "file:///etc/passwd",
    "steps/1/a\n/packs/x.safetensors",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_name_that_leaves_the_repository(forger, key, monkeypatch):
    asked: list[str] = []
    for document, path in (("part", ("packs", 0, "key")), ("root", ("parts", 0, "key")), ("commit", ("index", "key"))):
        store = forger.changed(document, path, key)
        for name in ("get", "read_into", "size"):
            real = getattr(type(store), name)
            monkeypatch.setattr(
                store,
                name,
                lambda k, *rest, real=real, store=store: asked.append(k) or real(store, k, *rest),
                raising=False,
            )
        refused(store)
        assert verify(Repository(store)).damaged
    assert key in ("ckpt.json", "steps/1/commit.json") or key not in asked, "it is refused before it is asked for"


def chunks_of(forger: Forger, fqn: str, role: str) -> list[list]:
    number = next(i for i, s in enumerate(forger.root["specs"]) if s[:2] == [fqn, role])
    return [c for c in forger.part["chunks"] if c[0] == number]


def test_overlapping_chunks_cannot_hide_a_hole(forger):
    """One chunk of half the tensor, listed twice, has as many elements as the whole."""
    (chunk,) = chunks_of(forger, "emb", "param")
    data = forger.objects[forger.part["packs"][0]["key"]][chunk[5] : chunk[5] + 24]
    chunk[2], chunk[6], chunk[3] = [3, 4], 24, digest(data)
    forger.part["chunks"].append(copy.deepcopy(chunk))
    store = forger.store()
    refused(store, "overlapping chunks", "'emb'")
    assert any("overlap" in f.message for f in verify(Repository(store)).findings)


def test_a_tensor_without_chunks_is_not_left_as_it_was(forger):
    (chunk,) = chunks_of(forger, "emb", "param")
    forger.part["chunks"].remove(chunk)
    refused(forger.store(), "'emb'", "covers 0 of 24")


def test_a_chunk_that_points_at_another_tensors_bytes_has_the_wrong_digest(forger):
    (emb,) = chunks_of(forger, "emb", "param")
    emb[5] = chunks_of(forger, "w", "exp_avg")[0][5]
    store = forger.store()
    with pytest.raises(ckpt.DigestMismatch, match="'emb'"):
        ckpt.load(job(filled=False), store)


def test_a_part_listed_twice(forger):
    forger.root["parts"] *= 2
    forger.objects[forger.part_key] = compress(json.dumps(forger.part).encode())
    for ref in forger.root["parts"]:
        ref.update(digest=digest(forger.objects[forger.part_key]), nbytes=len(forger.objects[forger.part_key]))
    store = forger.store()
    refused(store, "overlapping chunks")
    assert verify(Repository(store)).damaged


def test_aliases_in_a_circle_or_to_nowhere_end(forger):
    for aliases in ({"a": "b", "b": "a"}, {"a": "a"}, {"head": "nowhere"}, {"emb": "w"}, {"w": "emb"}):
        forger.root["aliases"] = aliases
        survives(forger.store())


def test_an_object_tensor_of_another_size_than_its_bytes(forger):
    """Without bytes, uninitialised memory was handed out as the saved tensor."""
    rng = next(o for o in forger.part["objects"] if o["kind"] == "rng")
    (tensor,) = rng["tensors"]
    for change in (
        {"blobs": []},
        {"shape": [10]},
        {"shape": [-1, -5056]},
        {"shape": [2**50], "blobs": []},
        {"dtype": "float64"},
        {"dtype": "load"},
        {"shape": [-1]},
    ):
        other = copy.deepcopy(forger)
        next(o for o in other.part["objects"] if o["kind"] == "rng")["tensors"] = [{**tensor, **change}]
        refused(other.store())


def test_a_blob_listed_a_million_times_is_not_read_once(forger, monkeypatch):
    """A small index asked for terabytes: blobs were joined before anybody compared them with the shape."""
    rng = next(o for o in forger.part["objects"] if o["kind"] == "rng")
    rng["tensors"][0]["blobs"] *= 1_000_000
    store = forger.store()
    read: list[str] = []
    monkeypatch.setattr(type(store), "read_into", lambda self, key, *_: read.append(key) or 0)
    refused(store, "object 'rng': blobs of", forger.part_key)
    assert verify(Repository(store)).damaged
    assert read == []


@pytest.mark.parametrize("nbytes", [2**40, 2**62, 2**63, 2**70])
def test_a_reference_of_a_huge_size_allocates_nothing(forger, nbytes, tmp_path):
    forger.commit["index"]["nbytes"] = nbytes
    store = forger.store(keep=("commit", ("index", "nbytes")))
    local = LocalStore(str(tmp_path))
    for key, data in store.objects.items():
        local.put(key, data)
    refused(local, "reference to")
    assert verify(Repository(local)).damaged


@pytest.mark.parametrize(
    "document",
    [
        b"[" * 50_000,
        b'{"$tensor": 7}',
        b'{"$dict": [[[], 1]]}',
        b'{"$device": "nowhere"}',
        b'{"$size": [1e999]}',
        b"\xff",
        b"",
        b'{"$x": 1}',
        b'{"$numpy": ["|O", [1], "AAAAAAAAAAA="]}',
        b'{"python": 1, "python": 2}',
        b"5",
        b"null",
    ],
    ids=lambda d: repr(d[:20]),
)
@pytest.mark.parametrize("kind", ["rng", "engine", "value"])
def test_a_forged_object_document(forger, kind, document):
    """The bytes of an object replaced, and its digest with them."""
    entry = next(o for o in forger.part["objects"] if o["kind"] == kind)
    key = "steps/1/evil/packs/e.safetensors"
    header = json.dumps({"d": {"dtype": "U8", "shape": [len(document)], "data_offsets": [0, len(document)]}}).encode()
    forger.objects[key] = len(header).to_bytes(8, "little") + header + document
    forger.part["packs"].append({"key": key, "nbytes": len(forger.objects[key])})
    entry["document"] = [digest(document), len(forger.part["packs"]) - 1, 8 + len(header), len(document)]
    target = job(filled=False)
    try:
        report = ckpt.load(target, forger.store())
    except ckpt.CkptError:
        return
    assert kind != "rng" or report.notes, "generators that are not restored are at least told of"
    assert target.differences() == []


def test_a_bomb_in_place_of_an_index(forger):
    for size in (1 << 28, (1 << 30) + 1):
        bomb = (
            compress(bytes(size))
            if size < 1 << 29
            else b"\x28\xb5\x2f\xfd\xa0" + size.to_bytes(4, "little") + b"\x01\0\0"
        )
        assert len(bomb) < 100_000
        for key, ref in ((forger.root_key, forger.commit["index"]),):
            other = copy.deepcopy(forger)
            other.commit["index"] = {**ref, "digest": digest(bomb), "nbytes": len(bomb)}
            objects = {**other.objects, key: bomb, COMMIT: sealed(json.dumps(other.commit).encode())}
            refused(with_objects(objects), key)


def test_keys_given_twice_in_a_commit(objects, forger):
    """A reader that checks one body and uses the other."""
    good = json.dumps(forger.commit).encode()
    evil = json.dumps({**forger.commit, "step": 7}).encode()
    for first, second in ((good, evil), (evil, good)):
        data = b'{"body": ' + first + b', "body": ' + second + b', "digest": "' + digest(good).encode() + b'"}'
        survives(with_objects({**objects, COMMIT: data}))
    twice = good[:-1] + b', "index": ' + json.dumps({**forger.commit["index"], "key": "../x"}).encode() + b"}"
    refused(with_objects({**objects, COMMIT: sealed(twice)}))


@pytest.mark.parametrize("features", [["gradlog"], ["a", "b"], [""]])
def test_an_unknown_feature_is_never_half_read(forger, features):
    forger.commit["features"] = features
    refused(forger.store(), "feature")


@pytest.mark.parametrize("length", [0, 7, 2**31, 2**63, 2**64 - 1])
def test_a_pack_whose_header_length_is_a_lie(objects, length):
    """verify says so; a load does not use the header, so it gives the right data."""
    key = next(k for k in objects if k.endswith(".safetensors"))
    store = with_objects({**objects, key: length.to_bytes(8, "little") + objects[key][8:]})
    assert verify(Repository(store)).damaged
    assert survives(store)
