from __future__ import annotations

import json

import msgspec
import pytest

from ckpt.errors import DigestMismatch, MalformedData, UnsupportedFeature, UnsupportedVersion
from ckpt.format.codec import compress
from ckpt.format.digest import digest
from ckpt.format.manifest import (
    DERIVED,
    MAX_CHUNK,
    MAX_COMMIT,
    MAX_INDEX,
    BlobEntry,
    ChunkEntry,
    CommitBody,
    Divergence,
    FileRef,
    IndexPart,
    IndexRoot,
    ObjectEntry,
    ObjectTensor,
    PackRef,
    decode_commit,
    decode_root,
    encode_commit,
    encode_index,
    plain,
    specs_of,
)
from ckpt.format.parts import decode_part

D = digest(b"x")
INDEX = FileRef(key="steps/3/a-1/index/root.json.zst", digest=D, nbytes=10)
BODY = CommitBody(
    format=1,
    features=(),
    step=3,
    attempt="a-1",
    world=2,
    engine="fake",
    created="now",
    software={"ckpt": "ü"},
    totals={"bytes_held": 1},
    index=INDEX,
)
ROOT = IndexRoot(
    format=1,
    step=3,
    attempt="a-1",
    world=2,
    layout=D,
    specs=(("b", "param", "float32", (2, 3)), ("a", "step", "float32", ())),
    derived=("b",),
    aliases={"c": "b"},
    parts=(FileRef(key="steps/3/a-1/index/part-0.json.zst", digest=D, nbytes=5),),
    divergences=(Divergence(fqn="b", role="param", offsets=(0, 0), sizes=(2, 3), copies={D: (0,)}, kept=D),),
)
PACK = PackRef(key="steps/3/a-1/packs/p.safetensors", nbytes=1000, header=D)
CHUNK = ChunkEntry(0, (0, 0), (1, 3), D, 0, 100, 12)
BLOB = BlobEntry(D, 0, 200, 4)
OBJECT = ObjectEntry(
    name="o",
    kind="value",
    ranks=(0,),
    document=BLOB,
    tensors=(ObjectTensor(dtype="float32", shape=(1,), blobs=(BLOB,)),),
)
PART = IndexPart(
    rank=0,
    packs=(PACK,),
    chunks=(CHUNK, ChunkEntry(0, (1, 0), (1, 3), D, DERIVED, 0, 12), ChunkEntry(1, (), (), D, 0, 8, 4, (1, 2))),
    objects=(OBJECT,),
)
SPECS = specs_of(ROOT, "f")


def changed(thing, **fields):
    return msgspec.structs.replace(thing, **fields)


def test_round_trips():
    assert decode_commit(encode_commit(BODY), "f") == BODY
    assert decode_root(encode_index(ROOT), "f") == ROOT
    assert decode_part(encode_index(PART), SPECS, "f") == PART


def test_a_commit_is_readable_json_whose_digest_is_over_the_bytes_of_the_body():
    data = encode_commit(BODY)
    assert json.loads(data)["body"]["step"] == 3
    body = data.partition(b'"body": ')[2].rpartition(b',\n"digest"')[0]
    assert json.loads(data)["digest"] == digest(body)


def test_any_changed_byte_of_a_commit_is_refused_or_changes_nothing():
    data = encode_commit(BODY)
    for at in range(len(data)):
        for bit in range(8):
            spoiled = bytearray(data)
            spoiled[at] ^= 1 << bit
            with pytest.raises((MalformedData, DigestMismatch), match=r"^f: "):
                decode_commit(bytes(spoiled), "f")


def test_unknown_fields_are_ignored_and_unknown_features_are_not():
    body = {**plain(BODY), "new": {"x": 1}}
    raw = json.dumps(body).encode()
    assert decode_commit(b'{"more":1,"body":' + raw + b',"digest":"' + digest(raw).encode() + b'"}', "f") == BODY
    with pytest.raises(UnsupportedFeature, match=r"f: .*'gradlog'"):
        decode_commit(encode_commit(changed(BODY, features=("gradlog",))), "f")


def test_a_newer_version_is_named_even_if_its_fields_are_others():
    for decode, data in (
        (decode_commit, encode_commit(changed(BODY, format=2))),
        (decode_root, encode_index(changed(ROOT, format=2))),
        (decode_root, compress(b'{"format": 2}')),
    ):
        with pytest.raises(UnsupportedVersion, match="f: format 2, this release reads 1"):
            decode(data, "f")


def test_a_huge_commit_is_refused_unread():
    with pytest.raises(MalformedData, match="expected at most"):
        decode_commit(b" " * (MAX_COMMIT + 1), "f")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\xff",
        b"[" * 100_000,
        b'{"body":' * 10_000,
        b'{"body":1}',
        b'{"body":{},"digest":5}',
        b'{"body":{},"digest":"xxh3-128:0"}',
        b"\x80\x04\x95",
    ],
    ids=lambda d: repr(d[:20]),
)
def test_what_is_no_json_of_the_right_form_is_malformed(data):
    with pytest.raises(MalformedData, match=r"^f: "):
        decode_commit(data, "f")
    with pytest.raises(MalformedData, match=r"^f: "):
        decode_root(compress(data), "f")
    with pytest.raises(MalformedData, match=r"^f: "):
        decode_part(compress(data), SPECS, "f")
    with pytest.raises(MalformedData, match=r"^f: "):
        decode_root(data, "f")


BAD_KEYS = [
    "",
    "/etc/passwd",
    "../x",
    "steps/3/a-1/index/../../../../etc/x.json.zst",
    "steps/3/a-1/packs/../p.safetensors",
    "steps/-1/a/index/x.json.zst",
    "steps/3/A/index/x.json.zst",
    "steps/3/a-1/index/x.json.zst\n",
    "steps/3//index/x.json.zst",
    "steps/3/a-1/index/x/y.json.zst",
    "steps/3/a-1/index/x\0.json.zst",
    "file:///etc/passwd",
    "ckpt.json",
]


@pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
def test_a_name_that_is_none_of_this_repository_is_refused(key):
    for ref in (changed(INDEX, key=key), changed(INDEX, key=key, nbytes=0)):
        with pytest.raises(MalformedData, match="reference to"):
            decode_commit(encode_commit(changed(BODY, index=ref)), "f")
        with pytest.raises(MalformedData, match="reference to"):
            decode_root(encode_index(changed(ROOT, parts=(ref,))), "f")
    with pytest.raises(MalformedData, match="not a pack of this repository"):
        decode_part(encode_index(changed(PART, packs=(changed(PACK, key=key),))), SPECS, "f")


@pytest.mark.parametrize(
    "fields",
    [
        {"specs": (("a", "param", "float32", (-1,)),)},
        {"specs": (("a", "param", "float99", (1,)),)},
        {"specs": (("a", "param", "float32", (1,)), ("a", "param", "int8", (2,)))},
        {"parts": (changed(INDEX, nbytes=-1),)},
        {"parts": (changed(INDEX, digest="md5:0"),)},
        {"world": 0},
        {"step": -1},
    ],
    ids=str,
)
def test_a_root_with_an_impossible_value_is_refused(fields):
    with pytest.raises(MalformedData, match=r"^f: "):
        decode_root(encode_index(changed(ROOT, **fields)), "f")


@pytest.mark.parametrize(
    "fields",
    [
        {"spec": 2},
        {"spec": -1},
        {"spec": 2**70},
        {"offsets": (-1, 0)},
        {"sizes": (1, -3)},
        {"offsets": (0,)},
        {"offsets": (0, 0, 0), "sizes": (1, 3, 1)},
        {"offsets": (2, 0)},
        {"offsets": (0, 1)},
        {"sizes": (1, 2)},
        {"sizes": (3, 3)},
        {"offsets": (2**65, 0)},
        {"nbytes": 11},
        {"nbytes": -12},
        {"nbytes": 2**64},
        {"digest": ""},
        {"digest": "xxh3-128:zz"},
        {"digest": "sha1:" + "0" * 40},
        {"pack": 1},
        {"pack": -2},
        {"pack": 2**70},
        {"start": -1},
        {"start": 0},
        {"start": 7},
        {"start": 989},
        {"start": 2**70},
        {"pack": DERIVED, "digest": "x"},
    ],
    ids=str,
)
def test_a_chunk_that_does_not_fit_its_tensor_or_pack_is_refused(fields):
    with pytest.raises(MalformedData, match=r"^f: "):
        decode_part(encode_index(changed(PART, chunks=(changed(CHUNK, **fields),))), SPECS, "f")


@pytest.mark.parametrize(
    "fields",
    [{"start": 997}, {"start": -1}, {"nbytes": -1}, {"pack": 1}, {"pack": -1}, {"digest": "x"}, {"nbytes": 2**40}],
    ids=str,
)
@pytest.mark.parametrize("where", ["document", "tensor"])
def test_a_blob_outside_of_its_pack_is_refused(fields, where):
    blob = changed(BLOB, **fields)
    spoiled = (
        changed(OBJECT, document=blob)
        if where == "document"
        else changed(OBJECT, tensors=(ObjectTensor(dtype="float32", shape=(1,), blobs=(blob,)),))
    )
    with pytest.raises(MalformedData, match="'o'"):
        decode_part(encode_index(changed(PART, objects=(spoiled,))), SPECS, "f")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"blobs": (BLOB,) * 1000}, "blobs of 4000 bytes for a tensor float32[1] of 4 bytes"),
        ({"blobs": ()}, "blobs of 0 bytes for a tensor float32[1] of 4 bytes"),
        ({"shape": (2,)}, "blobs of 4 bytes for a tensor float32[2] of 8 bytes"),
        ({"shape": (2**40, 2**40)}, "blobs of 4 bytes"),
        ({"dtype": "float64"}, "blobs of 4 bytes for a tensor float64[1] of 8 bytes"),
        ({"shape": (-1, -1)}, "a tensor of dtype 'float32' and shape [-1, -1]"),
        ({"shape": (-1, 0), "blobs": ()}, "a tensor of dtype 'float32' and shape [-1, 0]"),
        ({"dtype": "load"}, "a tensor of dtype 'load' and shape [1]"),
        ({"dtype": ""}, "a tensor of dtype '' and shape [1]"),
    ],
    ids=str,
)
def test_an_object_tensor_has_exactly_the_bytes_of_its_shape(fields, text):
    """One blob listed a million times is a small index and a large allocation."""
    spoiled = changed(OBJECT, tensors=(changed(OBJECT.tensors[0], **fields),))
    with pytest.raises(MalformedData) as caught:
        decode_part(encode_index(changed(PART, objects=(spoiled,))), SPECS, "f")
    assert str(caught.value).startswith(f"f: object 'o': {text}")


@pytest.mark.parametrize(
    ("dtype", "shape", "blobs"),
    [("uint8", (8,), 2), ("float32", (), 1), ("float32", (0, 3), 0), ("complex64", (1,), 2), ("bool", (2, 2), 1)],
)
def test_an_object_tensor_may_share_places_between_its_blobs(dtype, shape, blobs):
    """Equal pieces are stored once."""
    tensor = ObjectTensor(dtype=dtype, shape=shape, blobs=(BLOB,) * blobs)
    part = changed(PART, objects=(changed(OBJECT, tensors=(tensor,)),))
    assert decode_part(encode_index(part), SPECS, "f") == part


def test_a_reference_to_more_than_an_index_can_be_is_refused():
    assert (
        decode_commit(encode_commit(changed(BODY, index=changed(INDEX, nbytes=MAX_INDEX))), "f").index.nbytes == 2**30
    )
    for nbytes in (MAX_INDEX + 1, 2**63 - 1, 2**70):
        with pytest.raises(MalformedData, match="reference to"):
            decode_commit(encode_commit(changed(BODY, index=changed(INDEX, nbytes=nbytes))), "f")


def test_an_entry_cannot_make_a_reader_allocate_more_than_a_chunk():
    huge = changed(PACK, nbytes=2**60)
    for part in (
        changed(PART, packs=(huge,), objects=(changed(OBJECT, document=changed(BLOB, nbytes=MAX_CHUNK + 1)),)),
        changed(PART, packs=(changed(PACK, nbytes=7),), chunks=(), objects=()),
        changed(PART, packs=(changed(PACK, header="md5:1"),)),
    ):
        with pytest.raises(MalformedData, match=r"^f: "):
            decode_part(encode_index(part), SPECS, "f")


def test_a_divergence_reads_as_a_sentence():
    assert str(ROOT.divergences[0]) == f"tensor 'b' (param) box [0:2, 0:3]: replicas differ: {D} on rank(s) 0"
