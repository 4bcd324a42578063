"""Megatron-core models that train, on CPU: saved, loaded and carried on, in the same layout and in others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.megatron_shim import PRELOAD
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

PARAMETERS, TENSORS = 36_512, 43
"""Of the tied model: 4 layers of 7,968; final norm 32; 128 rows for words and 16 for positions, of 32."""

NO_BIAS = {"add_bias_linear": False}
"""Megatron's experts have no bias under tensor parallelism."""


def run(world: int, case: str, **kwargs: Any) -> list[Any]:
    """Run a case of megatron_cases.py."""
    return ranks(world, f"tests.e2e.megatron_cases:{case}", timeout=90, preload=PRELOAD, **kwargs).values()


def continued(found: list[dict[str, Any]]) -> None:
    """Check what :func:`megatron_cases.continuation` returned."""
    assert any(one["losses"] for one in found)
    for one in found:
        assert one["moved"], "the training that is compared has changed nothing"
        assert not one["report"]["divergences"]
        for label in ("fresh", "same"):
            assert one[label]["notes"] == [], label
            assert one[label]["state"] == [], label
            assert one[label]["losses"], label
            assert one[label]["final"] == [], label
            assert one[label]["divergences"] == [], label


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"tp": 2}], ids=["tp2 pp2", "tp2 dp2"])
def test_training_goes_on_bit_by_bit(tmp_path: Path, layout: dict[str, int], dtype: str, distributed: bool) -> None:
    engine = {"dtype": dtype, "distributed": distributed}
    found = run(4, "continuation", root=str(tmp_path / "root"), layout=layout, engine=engine)
    continued(found)
    report = found[0]["report"]
    assert report["bytes_unique"] == 12 * PARAMETERS + 4 * TENSORS  # weight and two moments; a step for each tensor
    assert 12 * PARAMETERS <= report["bytes_written"] <= report["bytes_unique"]
    assert report["bytes_derived"] == (0 if dtype == "float32" else 2 * PARAMETERS)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "virtual stages": ({"tp": 2, "pp": 2, "virtual": 2}, {"dtype": "bfloat16", "distributed": True}),
    "untied": ({"pp": 2}, {"tied": False, "distributed": True}),
    "fp16 with its loss scale": ({"tp": 2}, {"dtype": "float16", "distributed": True}),
    "experts": ({"ep": 2}, {"experts": 4, "dtype": "bfloat16", "distributed": True, "config": NO_BIAS}),
    "overlapped gather": ({}, {"dtype": "bfloat16", "distributed": True, "overlap": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_goes_on_in(tmp_path: Path, variant: str) -> None:
    layout, engine = VARIANTS[variant]
    found = run(4, "continuation", root=str(tmp_path / "root"), layout=layout, engine=engine)
    continued(found)
    report = found[0]["report"]
    assert report["bytes_written"] <= report["bytes_unique"]
    if "overlap" in engine:
        assert all("start_param_sync(force_sync=True)" in one["refused"] for one in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_content_is_the_same_in_every_layout(tmp_path: Path, dtype: str) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run(4, "leave", root=first, layout={"tp": 2, "pp": 2}, engine={"dtype": dtype})
    passed = run(
        4, "pass_on", source=first, into=second, layout={"tp": 2}, engine={"dtype": dtype, "distributed": True}
    )
    assert all(one["notes"] == [] and one["divergences"] == [] for one in passed)
    for root, engine in ((first, {"dtype": dtype}), (second, {"dtype": dtype}), (second, {"dtype": "float32"})):
        (found,) = run(1, "compare", root=root, oracle=first, ranks=4, engine=engine)
        assert found["wrong"] == []
        assert found["names"]
        assert found["losses"][0] < 5


def test_experts_keep_their_numbers(tmp_path: Path) -> None:
    root, engine = str(tmp_path / "root"), {"experts": 4, "config": NO_BIAS}
    run(4, "leave", root=root, layout={"ep": 2}, engine=engine)
    (found,) = run(1, "compare", root=root, oracle=root, ranks=4, engine=engine)
    assert found["wrong"] == []
    assert found["names"]


def test_what_a_rank_declares() -> None:
    layout = {"tp": 2, "pp": 2}
    found = run(4, "declare", layout=layout, engine={"dtype": "bfloat16", "distributed": True})
    assert [one["groups"] for one in found] == [
        {"tp": [0, 1], "dp": [0], "pp": [0, 2]},
        {"tp": [0, 1], "dp": [1], "pp": [1, 3]},
        {"tp": [2, 3], "dp": [2], "pp": [0, 2]},
        {"tp": [2, 3], "dp": [3], "pp": [1, 3]},
    ]
    word = "embedding.word_embeddings.weight"
    for rank, one in enumerate(found):
        assert one["step"] == 2
        assert one["aliases"] == {"output_layer.weight": word}
        boxes = {fqn: box for fqn, role, _, box in one["shards"] if role == "param"}
        assert boxes[word] == [[64 * (rank % 2), 0], [64, 32]]  # on the first stage and, tied to it, on the last
        names = {fqn for fqn, *_ in one["shards"]}
        stages = {name.split(".")[2] for name in names if name.startswith("decoder.layers.")}
        assert stages == ({"0", "1"} if rank < 2 else {"2", "3"})
        assert sorted(one["derived"]) == sorted({fqn for fqn, role, *_ in one["shards"] if role == "master"})
        gates = [box for fqn, role, _, box in one["shards"] if role == "param" and fqn.endswith("linear_fc1.weight")]
        first = 24 * (rank % 2)
        assert gates == [[[first, 0], [24, 32]], [[48 + first, 0], [24, 32]]] * 2


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vocabulary_is_stored_without_its_padding_and_loaded_with_zeros(
    tmp_path: Path, dtype: str, distributed: bool
) -> None:
    engine = {"dtype": dtype, "distributed": distributed}
    found = run(2, "padding", root=str(tmp_path / "root"), source={"tp": 2}, engine=engine)
    assert [one["rows"] for one in found] == [64, 36]
    assert all(one["shapes"] == [[100, 32]] and one["equal"] for one in found)
    before, after = found[1]["padding"]
    assert before.keys() == after.keys() == {"param", "master", "exp_avg", "exp_avg_sq"}
    assert all(value > 0 for value in before.values())
    assert not any(after.values())
    assert all(value > 0 for value in found[0]["padding"][1].values())  # the first rank's last row is a real one


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_a_checkpoint_from_before_the_first_step(tmp_path: Path, distributed: bool) -> None:
    engine = {"dtype": "bfloat16", "distributed": distributed}
    for one in run(2, "before_first_step", root=str(tmp_path / "root"), engine=engine):
        assert one == {"notes": [], "state": [], "losses": True}


def test_generators_return_to_the_position_that_they_are_of(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, "generators", root=root, tp=2, save=True)
    same = run(2, "generators", root=root, tp=2, save=False)
    assert same == [{"notes": [], "state": [0]}, {"notes": [], "state": [1]}]
    for one in run(2, "generators", root=root, tp=1, save=False):
        assert one["state"] == [99]
        assert "generators of tensor-parallel regions" in one["notes"][0]


def test_a_schedule_of_other_settings(tmp_path: Path) -> None:
    (found,) = run(1, "schedules", root=str(tmp_path / "root"))
    assert "max_lr is 0.05, was 0.01" in found["neither"]
    assert found["checkpoint"] == "0.01 3"
    assert found["override"] == "0.05 3"


def test_what_is_refused() -> None:
    for found in run(2, "refusals"):
        assert found.pop("fine") == "accepted"
        expected = {
            "precision aware": "use_precision_aware_optimizer",
            "offload": "HybridDeviceOptimizer",
            "fsdp": "Megatron's FSDP",
            "gradients": "gradients are being reduced",
            "gather": "start_param_sync",
            "wrapper": "LayerWiseDistributedOptimizer: expected DistributedOptimizer",
            "stray": "parameter 'stray' is not in the model's sharded_state_dict()",
        }
        assert found.keys() == expected.keys()
        for label, words in expected.items():
            assert words in found[label]
