"""Gradient logs that are not what was written: right state or a CkptError, and nobody else's error anywhere."""

from __future__ import annotations

import functools
import json
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import ckpt
from ckpt.cli.log_document import document_of
from ckpt.format.frames import HEADER, frame_of
from ckpt.gradlog.history import history_of
from ckpt.repo.copying import copy_steps
from ckpt.repo.gc import collect
from ckpt.repo.lineage import heads_of
from ckpt.repo.log_reach import reaches
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.memory import MemoryStore
from tests.harness.logged_jobs import frames_in, loaded, logged, parts_of, two_logs, with_objects

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD = "log/000002/rank00000/000000000014.log"
HEAD = "log/000002/rank00000/head.json"
LOG = "log/000002/log.json"
DEEP = b"[" * 100_000


@functools.cache
def right() -> dict[int, list[float]]:
    """What the weights are behind each step."""
    return {step: loaded(with_objects(two_logs()), step=step)[1] for step in range(16)}


def survives(objects: dict[str, bytes]) -> bool:
    """Everything that reads logs ends well or in a :class:`ckpt.CkptError`. Returns whether a load succeeded."""
    for look in (
        lambda store: verify(Repository(store)),
        lambda store: collect(store, 0, dry_run=True),
        lambda store: json.dumps(document_of("", history_of(store), None, None), allow_nan=False),
        lambda store: history_of(store, whole=False),
        reaches,
        lambda store: copy_steps(store, MemoryStore(), [0, 10]),
    ):
        with suppress(ckpt.CkptError):
            look(with_objects(objects))
    done = False
    for options in ({}, {"fallback": True}):
        with suppress(ckpt.CkptError):
            step, weights = loaded(with_objects(objects), **options)
            assert weights == right()[step]
            done = True
    return done


def forged(change: Callable[[dict[str, Any]], None], key: str = RECORD) -> dict[str, bytes]:
    """Change what a record says, and make its digest right again."""
    objects, out = two_logs(), b""
    for step, payload in frames_in(objects[key]):
        said = json.loads(parts_of(payload)["record"])
        change(said)
        out += repacked(step, payload, json.dumps(said).encode())
    return {**objects, key: out}


def repacked(step: int, payload: bytes, document: bytes) -> bytes:
    length = int.from_bytes(payload[:8], "little")
    table = json.loads(payload[8 : 8 + length])
    start, stop = table["record"]["data_offsets"]
    assert stop == len(payload) - 8 - length, "the words come last"
    table["record"].update(shape=[len(document)], data_offsets=[start, start + len(document)])
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return b"".join(map(bytes, frame_of(step, [head, payload[8 + length : 8 + length + start], document])))


def test_records_and_heads_of_another_job_are_never_taken_for_the_own() -> None:
    """The same training logged twice: every byte of a record is sound, and its step is the right one."""
    mine, store = two_logs(), MemoryStore()
    logged(store, 12, full_every=5)
    logged(store, 3)
    for key in (RECORD, HEAD, "log/000001/rank00000/000000000012.log", "log/000001/rank00000/head.json"):
        with_one = {**mine, key: store.objects[key]}
        with pytest.raises(ckpt.ReplayError, match=rf"{key}.*of run [0-9a-f]{{32}}, expected"):
            loaded(with_objects(with_one))
        assert survives(with_one)
        assert key in {one.key for one in verify(Repository(with_objects(with_one))).findings}


def test_what_the_attacks_begin_with_is_sound() -> None:
    assert survives(two_logs())
    assert survives(forged(lambda _said: None))
    assert loaded(with_objects(forged(lambda _said: None)))[0] == 15


@pytest.mark.parametrize("key", [RECORD, LOG, HEAD, "log/000001/log.json"])
def test_flipped_bytes_and_cut_files(key: str) -> None:
    objects = two_logs()
    data = objects[key]
    places = [*range(0, min(HEADER, len(data)), 9), *range(HEADER, len(data), max(1, len(data) // 7))]
    for at in places:
        survives({**objects, key: data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]})
        survives({**objects, key: data[:at]})


@pytest.mark.parametrize("name", ["magic", "step", "nbytes"])
@pytest.mark.parametrize("value", [0, 15, (1 << 40) + 1, (1 << 63) - 1, (1 << 64) - 1])
def test_numbers_in_the_header_of_a_frame(name: str, value: int) -> None:
    objects = two_logs()
    data = bytearray(objects[RECORD])
    struct.pack_into("<Q", data, {"magic": 0, "step": 8, "nbytes": 16}[name], value)
    survives({**objects, RECORD: bytes(data)})


def test_frames_that_come_again_go_back_or_are_of_another_step() -> None:
    objects = two_logs()
    first, other = (objects[f"log/000002/rank00000/{n:012d}.log"] for n in (13, 15))
    for data in (first, objects[RECORD] * 2, other + objects[RECORD], objects[RECORD] + first, b"", bytes(4096)):
        survives({**objects, RECORD: data})


def test_names_that_lie() -> None:
    objects = two_logs()
    for name in ("000000000099.log", "999999999999999999.log", f"{'9' * 200}.log", "x.log", "-1.log", ".log", "13.log"):
        moved = {key: data for key, data in objects.items() if key != RECORD}
        survives({**moved, f"log/000002/rank00000/{name}": objects[RECORD]})
    for folder in ("rank", "rank1", "rankx", f"rank{'9' * 300}", "rank00001"):
        survives({**objects, f"log/000002/{folder}/000000000013.log": objects[RECORD]})


@pytest.mark.parametrize("key", [LOG, HEAD])
@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", DEEP, b'{"format":' + DEEP, b"\xff\xfe", b'{"format": 2}']
)
def test_heads_that_are_none(key: str, data: bytes) -> None:
    survives({**two_logs(), key: data})


@pytest.mark.parametrize("follows", [{1: 1}, {1: 2, 2: 1}, {2: 2}, {1: 2}, {2: -1}, {2: 1 << 70}, {2: 7}])
def test_logs_that_follow_each_other_in_a_circle(follows: dict[int, int]) -> None:
    objects = two_logs()
    for number, before in follows.items():
        key = f"log/{number:06d}/log.json"
        objects[key] = json.dumps({**json.loads(objects[key]), "follows": before}).encode()
    survives(objects)
    if follows != {2: 7}:  # that log is gone, as retention leaves it
        with pytest.raises(ckpt.FormatError):
            heads_of(with_objects(objects))


@pytest.mark.parametrize("name", ["start", "world", "number", "attempt", "created", "follows", "run"])
@pytest.mark.parametrize("value", [-1, 3, 1 << 20, 1 << 70, "../../x", [], None])
def test_each_value_of_a_log_replaced(name: str, value: Any) -> None:
    objects = two_logs()
    objects[LOG] = json.dumps({**json.loads(objects[LOG]), name: value}).encode()
    survives(objects)


def _entry(said: dict[str, Any], **changes: Any) -> None:
    said["entries"][0].update(changes)


HEADS = {
    "negative sizes": lambda said: said["entries"][0]["parts"].__setitem__(0, ["weight", [8, 8], [0, 0], [-8, -8]]),
    "negative offsets": lambda said: said["entries"][0]["parts"].__setitem__(0, ["weight", [8, 8], [-1, 0], [8, 8]]),
    "huge sizes": lambda said: said["entries"][0]["parts"].__setitem__(0, ["weight", [8, 8], [0, 0], [1 << 62, 4]]),
    "other ranks": lambda said: said["entries"][0]["parts"].__setitem__(0, ["weight", [8, 8], [0], [8, 8, 8]]),
    "no parts": lambda said: _entry(said, parts=[]),
    "a part twice": lambda said: _entry(said, parts=2 * said["entries"][0]["parts"]),
    "another dtype": lambda said: _entry(said, dtype="float7"),
    "another optimizer": lambda said: _entry(said, optimizer=-5, group=1 << 40),
    "no entries": lambda said: said.update(entries=[]),
    "no kernels": lambda said: said.update(kernels=[]),
    "strange kernels": lambda said: said.update(kernels=[{"class": 3}]),
    "another world": lambda said: said.update(world=1 << 40),
    "another run": lambda said: said.update(run="0" * 32),
    "a run that is none": lambda said: said.update(run={"x": 1}),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_a_rank_says_of_its_part(name: str) -> None:
    objects = two_logs()
    said = json.loads(objects[HEAD])
    HEADS[name](said)
    survives({**objects, HEAD: json.dumps(said).encode()})


def _gradient(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda said: said["calls"][0]["gradients"][0].update(changes)


def _options(text: str) -> Callable[[dict[str, Any]], None]:
    def change(said: dict[str, Any]) -> None:
        for one in (*said["options"], *said["calls"][0]["options"]):
            one["document"] = text

    return change


RECORDS = {
    "another tensor": _gradient(name="nothing"),
    "its own words": _gradient(name="record"),
    "entries beyond": _gradient(entries=[0, 99]),
    "entries before": _gradient(entries=[-1]),
    "no entries": _gradient(entries=[]),
    "an entry twice": _gradient(entries=[0, 0, 1]),
    "another dtype": _gradient(dtype="bfloat16"),
    "no dtype": _gradient(dtype="pickle"),
    "a scale that is none": _gradient(scale="__import__"),
    "a scale too large": _gradient(scale="0x1p+99999"),
    "a scale of nan": _gradient(scale="nan"),
    "an infinite scale": _gradient(scale="-inf"),
    "a codec": _gradient(codec="zstd", block=4, blocks=[1, 2]),
    "no codec": _gradient(codec="pickle", block=4, blocks=[1, 2]),
    "negative blocks": _gradient(codec="planes4+zstd", block=-4, blocks=[-1, -2]),
    "huge blocks": _gradient(codec="planes4+zstd", block=1 << 60, blocks=[1 << 60]),
    "deep options": _options("[" * 100_000),
    "options that are none": _options("[1]"),
    "options of a strange lr": _options('{"lr": {"$float": "nan"}, "betas": 3}'),
    "options with tags": _options('{"lr": {"$tensor": 7}}'),
    "no options": lambda said: said.update(options=[]),
    "a group beyond": lambda said: said["calls"][0]["options"][0].update(group=99, optimizer=-1),
    "no calls": lambda said: said.update(calls=[]),
    "two calls": lambda said: said.update(calls=2 * said["calls"]),
    "another rank": lambda said: said.update(rank=1),
    "another step": lambda said: said.update(step=3),
    "another version": lambda said: said.update(format=9),
    "another run": lambda said: said.update(run="0" * 32),
    "a run that is none": lambda said: said.update(run=[1]),
    "a square that is none": lambda said: said.update(square=-1.0),
    "a huge square": lambda said: said.update(square=1.7e308),
    "samples beyond": lambda said: said.update(samples=[[1 << 62, 1.0], [-5, 0.0]]),
    "negative seconds": lambda said: said.update(seconds=-1e300),
    "endless seconds": lambda said: said.update(seconds=1e308),
    "a deep object": lambda said: said["objects"][0].update(document="[" * 100_000),
    "an object of nothing": lambda said: said["objects"][0].update(tensors=[["nothing", "float32", [1 << 40]]]),
    "an object of negative shape": lambda said: said["objects"][-1].update(
        tensors=[[said["objects"][-1]["tensors"][0][0], "uint8", [-5056]]]
    ),
    "a scaler of strings": lambda said: said["objects"].append(
        {"name": "scaler", "kind": "engine", "document": '{"state": {"scale": "x"}}', "tensors": []}
    ),
    "a loose tensor": lambda said: said.update(
        loose=[{"name": "grad/0", "fqn": "weight", "role": "param", "dtype": "float32", "shape": [8, 8],
                "offsets": [0, 0], "sizes": [-8, 8]}]
    ),
}  # fmt: skip


OTHER_STATES = {
    "no entries",
    "no calls",
    "two calls",
    "no options",
    "an entry twice",
    "a group beyond",
    "another dtype",
    "a scale of nan",
    "an infinite scale",
}
"""Who can make digests right can write the log of another training; every error must be one of ours all the same."""


@pytest.mark.parametrize("name", RECORDS)
def test_what_a_record_says(name: str) -> None:
    objects = forged(RECORDS[name])
    try:
        survives(objects)
    except AssertionError:
        assert name in OTHER_STATES


def test_words_that_are_no_json() -> None:
    objects = two_logs()
    ((step, payload),) = frames_in(objects[RECORD])
    for document in (b"", b"{", DEEP, b"\xff", b"null", b'{"format":1}'):
        survives({**objects, RECORD: repacked(step, payload, document)})


@pytest.mark.parametrize("length", [0, 7, 1 << 20, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_payload_whose_own_header_lies(length: int) -> None:
    objects = two_logs()
    ((step, payload),) = frames_in(objects[RECORD])
    data = b"".join(map(bytes, frame_of(step, [length.to_bytes(8, "little"), payload[8:]])))
    survives({**objects, RECORD: data})
    for short in (b"", b"\0" * 7, payload[:9]):
        survives({**objects, RECORD: b"".join(map(bytes, frame_of(step, [short])))})
