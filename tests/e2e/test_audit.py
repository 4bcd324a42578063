"""Claims of real engines put to the test: each fault is named to the element, a sound engine gives no finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.audit_cases:"


def run(world: int, case: str, **kwargs: Any) -> Any:
    """Run a case and return its result, which must be the same on every rank."""
    first, *others = ranks(world, CASES + case, timeout=120, **kwargs).values()
    assert all(other == first for other in others)
    return first


def findings(report: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the findings by (kind, fqn, role); of each there must be one."""
    found = {(f["kind"], f["fqn"], f["role"]): f for f in report["findings"]}
    assert len(found) == len(report["findings"])
    return found


RUNNING = ("buffer", "running", "buffer")
"""The model's own running mean, which nobody synchronises, like BatchNorm's statistics."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_sound_engine_has_no_finding_but_its_unsynchronised_buffer(stage, dtype):
    report = run(2, "audited", engine={"stage": stage, "dtype": dtype}, steps=2, faults=[])
    assert set(findings(report)) == {RUNNING}
    (buffer,) = report["findings"]
    assert buffer["sides"] == [[0], [1]]
    assert buffer["box"] == {"offsets": [0, 0], "sizes": [3, 24]}
    assert buffer["elements"] == 72
    assert 0 < buffer["max_abs"] < 10
    unproved = {c["role"] for c in report["claims"] if c["unproved"]}
    assert unproved <= {"step", "buffer", "param"}, "numbers, and weights that are constant"
    assert report["bytes"]["proved"] > 20 * report["bytes"]["unproved"]


def test_one_flipped_bit_in_a_moment():
    report = run(3, "audited", engine={"stage": 0, "dtype": "bf16"}, steps=2, faults=["moment"])
    found = findings(report)
    assert set(found) == {RUNNING, ("replica", "blocks.0.up.weight", "exp_avg")}
    one = found["replica", "blocks.0.up.weight", "exp_avg"]
    assert one["sides"] == [[0, 2], [1]]
    assert one["box"] == {"offsets": [2, 3], "sizes": [1, 1]}
    assert one["elements"] == 1
    assert one["max_abs"] > 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_norm_weight_that_drifted_on_one_rank(stage):
    """Its master tells which side is wrong, though with two ranks there is no majority."""
    report = run(2, "audited", engine={"stage": stage, "dtype": "bf16"}, steps=2, faults=["norm"])
    found = findings(report)
    assert set(found) == {RUNNING, ("replica", "norm.weight", "param"), ("derivation", "norm.weight", "param")}
    for one in (found["replica", "norm.weight", "param"], found["derivation", "norm.weight", "param"]):
        assert one["box"] == {"offsets": [4], "sizes": [3]}
        assert one["elements"] == 3
        assert one["max_abs"] == pytest.approx(0.5, abs=0.01)
    assert found["derivation", "norm.weight", "param"]["sides"][1] == [1]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_param_that_left_its_master_behind(stage):
    report = run(2, "audited", engine={"stage": stage, "dtype": "bf16"}, steps=2, faults=["param"])
    keys = [key for key in findings(report) if key != RUNNING]
    assert keys == [("derivation", "blocks.1.proj.bias", "param")]
    one = findings(report)[keys[0]]
    assert one["elements"] == 1
    assert one["max_abs"] == pytest.approx(1.0, abs=0.01)


def test_everything_at_once_is_told_apart():
    faults = ["moment", "norm", "param"]
    found = findings(run(4, "audited", engine={"stage": 0, "dtype": "bf16"}, steps=2, faults=faults))
    assert set(found) == {
        RUNNING,
        ("replica", "blocks.0.up.weight", "exp_avg"),
        ("replica", "norm.weight", "param"),
        ("derivation", "norm.weight", "param"),
        ("derivation", "blocks.1.proj.bias", "param"),
    }
    assert found["replica", "norm.weight", "param"]["sides"] == [[0, 2, 3], [1]]
    assert found[RUNNING]["sides"] == [[0], [1], [2], [3]]


def test_zero_moments_prove_nothing_until_they_move():
    """And they stay proved: the probe in which all were zero is no evidence against it either."""
    reports = run(2, "probes", engine={"stage": 0, "dtype": "bf16"})

    def moments(name: str, state: str) -> int:
        return sum(c[state] for c in reports[name]["claims"] if c["role"].startswith("exp_avg"))

    assert moments("before", "proved") == 0
    assert moments("before", "unproved") > 90_000, "almost all of both"
    assert moments("after", "unproved") < 0.01 * moments("before", "unproved")
    assert moments("both", "proved") == moments("after", "proved")
    assert reports["both"]["probes"] == 2


def test_a_save_tells_the_same_for_free(tmp_path: Path):
    found = run(2, "saved_with_faults", root=str(tmp_path), engine={"stage": 1, "dtype": "bf16"})
    norm = [line for line in found["divergences"] if "'norm.weight' (param)" in line]
    assert len(norm) == 1
    assert "replicas differ in 3 elements in [4:7], by at most 0.5" in norm[0]
    assert any("'blocks.1.proj.bias' (param): param is not cast(master)" in line for line in found["underived"])
    assert found["n"] >= 48


def test_a_rank_that_has_no_engine_fails_all():
    for text in ranks(3, CASES + "wrong_engine", timeout=60).values():
        assert text.startswith("RankFailure: step 'describe' failed on 1 rank(s)")
        assert "rank 1: ConfigError: no adapter for an engine of type builtins.object" in text


def test_the_largest_chunks_can_be_compared():
    report = run(2, "large_chunks")
    boxes = [(f["box"]["offsets"], f["elements"], f["max_abs"]) for f in report["findings"]]
    assert boxes == [([5, 7], 1, 3.0), ([17407, 1023], 1, 4.0)]
    assert report["findings"][0]["compared"] == {"offsets": [0, 0], "sizes": [1024, 1024]}


def test_a_plain_state_dict_shows_its_copies_by_itself():
    report = run(2, "content", engine={"stage": 1, "dtype": "bf16"})
    same = {(s["rank"], s["name"], s["as"]) for s in report["same_memory"]}
    assert same == {(0, "head.weight", "embed.weight"), (1, "head.weight", "embed.weight")}
    whole = {p["name"]: p["ranks"] for g in report["duplicates"] if g["whole"] for p in g["places"]}
    assert whole["embed.weight"] == "0-1"
    assert "running" not in whole, "each rank has statistics of its own"
    sizes = report["bytes"]
    assert sizes["across"] == sizes["unique"] - 2 * 3 * 24 * 4, "all but both ranks' own statistics"
    assert sizes["within"] == sizes["derivable"] == 0


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_checkpoint_gives_the_report_of_the_live_engine(stage, tmp_path: Path):
    found = run(4, "live_and_stored", root=str(tmp_path), engine={"stage": stage, "dtype": "bf16"})
    assert found["live"] == found["stored"]
    assert found["hosts"] == ["node0", "node0", "node1", "node1"]
    assert found["domains"] == 2


@pytest.mark.parametrize("stage", [0, 1])
def test_what_was_refuted_is_not_redundant_live_or_stored(stage, tmp_path: Path):
    found = run(3, "refuted", root=str(tmp_path), engine={"stage": stage, "dtype": "bf16"})
    claimed, audited = found["claimed"], found["audited"]
    numbers = audited["redundancy"]
    assert claimed["redundancy"] is None
    assert numbers["claimed"] == claimed["total"]["bytes_held"] - claimed["total"]["bytes_unique"]
    assert numbers["claimed"] - numbers["refuted"] == audited["total"]["bytes_held"] - audited["total"]["bytes_unique"]
    assert numbers["proved"] > 20 * numbers["unproved"] > 0
    # The param that left its master behind, and two more copies of the statistics, are state that nothing gives back.
    roles = {name: {one["role"]: one for one in found[name]["roles"]} for name in ("claimed", "audited")}
    assert roles["audited"]["buffer"]["bytes_unique"] - roles["claimed"]["buffer"]["bytes_unique"] == 2 * 72 * 4
    assert roles["claimed"]["param"]["bytes_unique"] == 0
    assert 48 <= roles["audited"]["param"]["bytes_unique"] < roles["audited"]["param"]["bytes_derivable"]
    assert any(one["kind"] == "trained" and not one["derived"] for one in audited["classes"])
    # Rank 0 has its statistics alone.
    gone = {one["fqn"]: one["elements"] for one in audited["loss"]["tensors"] if one["bytes"]}
    assert gone["running"] == 72
    assert "running" not in {one["fqn"] for one in claimed["loss"]["tensors"] if one["bytes"]}

    def comparable(report: dict[str, Any]) -> dict[str, Any]:
        numbers = {key: report["redundancy"][key] for key in ("claimed", "refuted")}
        return {key: value for key, value in report.items() if key != "audit"} | {"redundancy": numbers}

    assert comparable(found["stored"]) == comparable(audited)
    assert comparable(found["combined"]) == comparable(audited)
    assert found["combined"]["audit"]["probes"] == 2
