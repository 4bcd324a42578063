from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from ckpt.errors import ReplayError
from ckpt.format.codec import compress, decompress
from ckpt.repo.repository import Repository
from ckpt.repo.verify import DAMAGE, GARBAGE, verify
from tests.harness.logged_jobs import changed_record, frames_in, loaded, on_two_ranks, two_logs, with_objects

if TYPE_CHECKING:
    from ckpt.store.memory import MemoryStore

RANK = "log/000001/rank00000"


def findings(objects: dict[str, bytes]):
    return verify(Repository(with_objects(objects))).findings


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def without_runs(objects: dict[str, bytes]) -> dict[str, bytes]:
    """Logs as they were written before they had ids."""
    found = {}
    for key, data in objects.items():
        if key.startswith("log/") and key.endswith(".json"):
            data = json.dumps({k: v for k, v in json.loads(data).items() if k != "run"}).encode()
        elif key.endswith(".log"):
            data = changed_record(data, lambda record: msgspec.structs.replace(record, run=""))
        if not key.endswith("directory.json.zst"):
            found[key] = data
    return found


def without_checkpoints(objects: dict[str, bytes], *steps: int) -> MemoryStore:
    return with_objects({k: v for k, v in objects.items() if k not in {f"steps/{s}/commit.json" for s in steps}})


def test_every_record_of_a_sound_history_is_read() -> None:
    objects = two_logs()
    found = verify(Repository(with_objects(objects)))
    files = [data for key, data in objects.items() if key.endswith(".log")]
    assert found.findings == []
    assert (found.logs, found.records) == ([1, 2], 15)
    assert found.log_bytes == sum(len(payload) for data in files for _, payload in frames_in(data))
    only = verify(Repository(with_objects(objects)), 5)
    assert (only.logs, only.records, only.log_bytes) == ([], 0, 0)


@pytest.mark.parametrize("at", [64, 200, -9])
def test_a_flipped_byte_in_the_middle_is_damage_behind_the_checkpoint_that_it_harms(at: int) -> None:
    objects, key = two_logs(), f"{RANK}/000000000007.log"
    objects[key] = flipped(objects[key], at % len(objects[key]))
    (one,) = findings(objects)
    assert (one.severity, one.key, one.step) == (DAMAGE, key, 5)
    assert "the record of step 7 is not what was written" in one.message


def test_every_damaged_record_is_named() -> None:
    objects = on_two_ranks(two_logs())
    bad = [f"{RANK}/000000000002.log", "log/000001/rank00001/000000000003.log", f"{RANK}/000000000009.log"]
    for key in bad:
        objects[key] = flipped(objects[key], 500)
    assert sorted(one.key for one in findings(objects) if one.severity == DAMAGE) == sorted(bad)


def test_a_record_that_is_missing_is_a_gap() -> None:
    objects = two_logs()
    del objects[f"{RANK}/000000000007.log"]
    (one,) = findings(objects)
    assert (one.severity, one.step) == (DAMAGE, 5)
    assert "behind step 6 comes step 8: a gap" in one.message


@pytest.mark.parametrize("cut", [1, 30, 64, 100])
def test_a_torn_end_is_garbage(cut: int) -> None:
    objects, key = two_logs(), "log/000002/rank00000/000000000015.log"
    objects[key] = objects[key][:cut]
    (one,) = findings(objects)
    assert (one.severity, one.key) == (GARBAGE, key)
    assert "its writer was killed" in one.message


def test_records_that_the_next_log_counts_on_are_missed_on_each_rank() -> None:
    objects = on_two_ranks(two_logs())
    del objects["log/000001/rank00001/000000000012.log"]
    (one,) = findings(objects)
    assert (one.severity, one.key, one.step) == (DAMAGE, "log/000001", 10)
    assert one.message == "rank 1: sound records to step 11, and the next log begins behind step 12"


def test_a_rank_without_its_part_is_missed() -> None:
    objects = {k: v for k, v in on_two_ranks(two_logs()).items() if "000001/rank00001" not in k}
    (one,) = findings(objects)
    assert (one.severity, one.message[:30]) == (DAMAGE, "rank 1: sound records to step ")


def test_what_a_rank_says_of_its_part_is_needed() -> None:
    objects = two_logs()
    del objects[f"{RANK}/head.json"]
    (one,) = findings(objects)
    assert (one.severity, one.key) == (DAMAGE, f"{RANK}/head.json")
    objects[f"{RANK}/head.json"] = json.dumps({"format": 1, "rank": 3, "world": 1}).encode()
    (one,) = findings(objects)
    assert "rank 3 of 1, expected 1 and 0 of 1" in one.message


@pytest.mark.parametrize("number", [1, 2])
def test_a_log_that_cannot_be_read_is_damage_and_the_rest_is_checked_all_the_same(number: int) -> None:
    objects = two_logs()
    key = f"log/{number:06d}/log.json"
    objects[key] = b'{"format": 1'
    found = verify(Repository(with_objects(objects)))
    assert [(one.severity, one.key) for one in found.findings] == [(DAMAGE, key)]
    assert (found.steps, found.tensors) == ([0, 5, 10], 18)
    assert (found.logs, found.records) == (([1], 12) if number == 2 else ([], 0))  # log 2 follows log 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "0" * 32}, f"of run {'0' * 32}, expected "),
        ({"run": ""}, "of run unknown, expected "),
        ({"rank": 4}, "says step 7 and rank 4, expected 7 and 0"),
        ({"step": 8}, "says step 8 and rank 0, expected 7 and 0"),
    ],
)
def test_a_record_of_another_log_is_damage(changes: dict[str, Any], message: str) -> None:
    objects, key = two_logs(), f"{RANK}/000000000007.log"
    objects[key] = changed_record(objects[key], lambda record: msgspec.structs.replace(record, **changes))
    (one,) = findings(objects)
    assert (one.severity, one.key, one.step) == (DAMAGE, key, 5)
    assert message in one.message


def test_a_head_of_another_log_is_damage() -> None:
    objects, key = two_logs(), f"{RANK}/head.json"
    objects[key] = json.dumps({**json.loads(objects[key]), "run": "0" * 32}).encode()
    (one,) = findings(objects)
    assert (one.severity, one.key) == (DAMAGE, key)
    assert f"of run {'0' * 32}, expected {json.loads(objects['log/000001/log.json'])['run']}" in one.message


def test_records_that_were_written_before_runs_had_ids_are_sound() -> None:
    objects = without_runs(two_logs())
    assert findings(objects) == []
    assert loaded(with_objects(objects))[0] == 15


def test_a_record_that_comes_twice_or_again_is_no_gap() -> None:
    objects, key = two_logs(), f"{RANK}/000000000007.log"
    twice = {**objects, key: objects[key] * 2}
    again = {**objects, key: objects[key] + objects[f"{RANK}/000000000006.log"]}
    for changed, message in ((twice, "the record of step 7 comes twice"), (again, "behind step 7 comes step 6 again")):
        found = findings(changed)
        assert (found[0].severity, found[0].key, found[0].message) == (DAMAGE, key, f"{key}: {message}")
        with pytest.raises(ReplayError, match=message):
            loaded(without_checkpoints(changed, 10))


def test_what_leads_nowhere_is_garbage_even_if_it_is_damaged() -> None:
    objects = two_logs()
    for step in (0, 5, 10):
        del objects[f"steps/{step}/commit.json"]
    found = [one for one in findings(objects) if one.key.startswith("log/")]
    assert [(one.severity, one.key) for one in found] == [(GARBAGE, "log/000001"), (GARBAGE, "log/000002")]
    assert found[0].message.startswith("no checkpoint leads to it (")


@pytest.mark.parametrize("harm", ["flip", "cut", "other world", "other run"])
def test_a_directory_that_cannot_be_what_was_written_is_named(harm: str) -> None:
    objects, key = two_logs(), "log/000001/directory.json.zst"
    said = json.loads(decompress(objects[key], limit=1 << 20, where=key))
    objects[key] = {
        "flip": flipped(objects[key], 9),
        "cut": objects[key][:-3],
        "other world": compress(json.dumps({**said, "world": 7}).encode()),
        "other run": compress(json.dumps({**said, "run": "0" * 32}).encode()),
    }[harm]
    assert [(one.severity, one.key) for one in findings(objects)] == [(DAMAGE, key)]
