from __future__ import annotations

import json

import pytest

from ckpt.repo.repository import Repository
from ckpt.repo.verify import DAMAGE, GARBAGE, verify
from tests.harness.logged_jobs import frames_in, on_two_ranks, two_logs, with_objects

RANK = "log/000001/rank00000"


def findings(objects: dict[str, bytes]):
    return verify(Repository(with_objects(objects))).findings


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


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


def test_a_log_that_cannot_be_read_is_damage_and_checkpoints_are_checked_all_the_same() -> None:
    objects = two_logs()
    objects["log/000001/log.json"] = b'{"format": 1'
    found = verify(Repository(with_objects(objects)))
    assert [(one.severity, one.key) for one in found.findings] == [(DAMAGE, "log/000001/log.json")]
    assert found.steps == [0, 5, 10]
    assert found.tensors == 18


def test_what_leads_nowhere_is_garbage_even_if_it_is_damaged() -> None:
    objects = two_logs()
    for step in (0, 5, 10):
        del objects[f"steps/{step}/commit.json"]
    found = [one for one in findings(objects) if one.key.startswith("log/")]
    assert [(one.severity, one.key) for one in found] == [(GARBAGE, "log/000001"), (GARBAGE, "log/000002")]
    assert found[0].message.startswith("no checkpoint leads to it (")
