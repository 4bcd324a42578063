"""What tools for checkpoints get wrong most often, one test each: the values are those of files that no code of ours
wrote, or are cut for each rank by the plainest means there are.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ckpt.convert.job import Conversion, convert
from ckpt.convert.options import ReadOptions, WriteOptions
from ckpt.convert.ours.plan import plan_ours
from ckpt.convert.ours.write import write_ours
from ckpt.convert.target import target_of
from ckpt.layout.rules import Rules
from ckpt.layout.spec import MASTER, TensorSpec
from ckpt.store.memory import MemoryStore
from tests.harness.conversions import again, described, differences, held_by, one_file, specs_of, values_of
from tests.harness.conversions import convert as rewritten
from tests.harness.conversions import whole as everywhere
from tests.harness.deepspeed_files import Model, numbered, write_zero12
from tests.harness.descriptions import NET
from tests.harness.descriptions import described as job
from tests.unit.convert.sources import Source

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.deepspeed_files import Tensors

QUERIES = {"size": 16, "heads": 8}
RULES = Rules.of({
    "tensors": [
        {"match": "embed", "dim": 0, "size": 65},
        {"match": "qkv", "dim": 0, "fused": [QUERIES, {"size": 8, "heads": 4}, {"size": 8, "heads": 4}]},
        {"match": "few", "dim": 0, "fused": [QUERIES, {"size": 4, "heads": 2}, {"size": 4, "heads": 2}]},
        {"match": "gate_up", "dim": 0, "stride": 2},
        {"match": "down", "dim": 1},
        {"match": "norm|frozen"},
    ]
})  # fmt: skip
STATES = ("lion_avg", "of_its_own")
TAG = "global_step5"


def model() -> Tensors:
    """One fused matrix has as many key heads as the largest degree, one fewer; the tied weight is not the first."""
    return {
        "norm": numbered((5,), 1), "qkv": numbered((32, 3), 2), "embed": numbered((65, 4), 3),
        "few": numbered((24, 3), 4), "gate_up": numbered((16, 3), 5), "down": numbered((3, 8), 6),
    }  # fmt: skip


def slice_of(held: Tensors, tp: int, rank: int, padding: float = 0.0) -> Tensors:
    """What a rank of tensor parallelism holds."""
    padded = torch.cat([held["embed"], torch.full((-65 % tp, 4), padding)])
    q, k, v = held["qkv"].split([16, 8, 8])
    many, few_k, few_v = held["few"].split([16, 4, 4])
    kept, turn = min(tp, 2), rank * min(tp, 2) // tp  # two key heads: four ranks hold each of them twice
    gate, up = held["gate_up"].chunk(2)
    return {
        "norm": held["norm"],
        "qkv": torch.cat([one.chunk(tp)[rank] for one in (q, k, v)]),
        "embed": padded.chunk(tp)[rank],
        "few": torch.cat([many.chunk(tp)[rank], few_k.chunk(kept)[turn], few_v.chunk(kept)[turn]]),
        "gate_up": torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]),
        "down": held["down"].chunk(tp, dim=1)[rank].contiguous(),
    }


def of_rank(tp: int, rank: int, padding: float = 0.0) -> Model:
    frozen = {"frozen": numbered((3,), 9)}
    made = slice_of(model(), tp, rank, padding)
    return Model([made], states=STATES, tied={"head": "embed"}, frozen=frozen)


def write(folder: Path, tp: int, dp: int) -> Path:
    for rank in range(tp):
        one = of_rank(tp, rank, -9.0)
        shapes = {name: tensor.shape for name, tensor in one.frozen.items()}
        fragments = {name: tensor.to(one.low) for name, tensor in one.frozen.items()}
        more = {"frozen_param_shapes": shapes, "frozen_param_fragments": fragments}
        write_zero12(folder / TAG, one, dp, mp=rank, mp_world_size=tp, **more)
    return folder


def go(source: Path, there: Path, to: str = "deepspeed", **degrees: int) -> Path:
    asked = Conversion(
        source=str(source), destination=str(there), to=to, reading=ReadOptions(rules=RULES), verify=True, **degrees
    )
    result = convert(asked, lambda _: nullcontext(lambda _done, _total: None))
    assert result.unequal == ()
    return there


def check(folder: Path, tp: int, dp: int) -> None:
    """Check files of DeepSpeed, ZeRO-1 or 2, against what each rank should hold."""
    for rank in range(tp):
        wanted = of_rank(tp, rank)
        path = folder / TAG / f"mp_rank_{rank:02d}_model_states.pt"
        tree = torch.load(path, weights_only=False)
        module = wanted.module()
        assert tree["module"].keys() == module.keys()
        assert all(torch.equal(tree["module"][name], tensor) for name, tensor in module.items())
        assert tree["shared_params"] == {"head": "embed"}
        assert list(tree["frozen_param_shapes"]) == ["frozen"]
        found: dict[str, list[torch.Tensor]] = {MASTER: [], **{role: [] for role in STATES}}
        for number in range(dp):
            (path,) = (folder / TAG).glob(f"*zero_pp_rank_{number}_mp_rank_{rank:02d}_optim_states.pt")
            held = torch.load(path, weights_only=False)["optimizer_state_dict"]
            (part,), state = held["single_partition_of_fp32_groups"], held["base_optimizer_state"]["state"][0]
            found[MASTER].append(part)
            for role in STATES:
                found[role].append(state[role])
        whole = Model([model()], states=STATES)
        for role, parts in found.items():
            held = {name: whole.state(name, role) if role != MASTER else m for name, m in model().items()}
            flat, got = (torch.cat([t.reshape(-1) for t in one]) for one in (slice_of(held, tp, rank).values(), parts))
            assert torch.equal(got[: len(flat)], flat)
            assert not got[len(flat) :].any()


@pytest.mark.parametrize("through", ["", "ckpt"])
def test_tensor_parallelism_2_to_4_to_1(through: str, tmp_path: Path) -> None:
    """65 rows of a vocabulary, fused QKV with few key heads, gate and up interleaved, tied, frozen, keys not Adam's."""
    source = write(tmp_path / "two", 2, 3)
    if through:
        source = go(source, tmp_path / "ours", through, dp=1, tp=4, zero=3)
    four = go(source, tmp_path / "four", dp=2, tp=4, zero=1)
    check(four, 4, 2)
    check(go(four, tmp_path / "one", dp=3, tp=1, zero=2), 1, 3)


@pytest.mark.parametrize(("dp", "other"), [(3, 2), (8, 5), (1, 13)])
def test_data_parallelism_of_any_degree_to_any_other(dp: int, other: int, tmp_path: Path) -> None:
    source = write(tmp_path / "a", 1, dp)
    check(go(source, tmp_path / "b", dp=other, zero=1), 1, other)
    ours = go(source, tmp_path / "c", "ckpt", dp=other, zero=3)
    check(go(ours, tmp_path / "d", dp=dp, zero=2), 1, dp)


MIXTURE = """
name: Mixture
experts: 4
layers: 4
tensors:
  embed.weight: {shape: [13, 8], kind: embedding, tp: {dim: 0, size: 13}}
  layers.{layer}.norm.weight: {shape: [8]}
  layers.{layer}.experts.{expert}.up.weight: {shape: [8, 6], tp: {dim: 0, stride: 2}}
  layers.{layer}.experts.{expert}.down.weight: {shape: [6, 4], tp: {dim: 1}}
"""
MOVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dp 3 -> 2": (NET, {"dp": 3, "zero": 1}, {"dp": 2, "zero": 2}),
    "dp 8 -> 5": (NET, {"dp": 8, "zero": 3}, {"dp": 5, "zero": 3}),
    "dp 13 -> 12": (NET, {"dp": 13, "zero": 2}, {"dp": 12, "zero": 3}),
    "stages moved, uneven": (NET, {"pp": 2, "stages": [2, 1], "zero": 1}, {"pp": 3, "stages": [0, 2, 1], "zero": 1}),
    "pp -> tp": (NET, {"pp": 3, "dp": 2, "zero": 1}, {"tp": 4, "zero": 3}),
    "tp -> pp": (NET, {"tp": 4, "zero": 2}, {"pp": 3, "zero": 1}),
    "ep 4 -> 2": (MIXTURE, {"dp": 4, "ep": 4, "zero": 1}, {"dp": 2, "ep": 2, "zero": 2}),
    "ep -> tp": (MIXTURE, {"dp": 4, "ep": 4, "zero": 1}, {"tp": 2, "zero": 1}),
    "all at once": (MIXTURE, {"dp": 4, "ep": 2, "pp": 2, "zero": 1}, {"dp": 3, "tp": 2, "pp": 4, "zero": 1}),
}


@pytest.mark.parametrize("move", MOVES)
def test_there_and_back(move: str) -> None:
    model, *ways = MOVES[move]
    one, other = (described(job(model, **way)) for way in ways)
    specs = specs_of(one.layouts)
    assert specs == specs_of(other.layouts)
    derived = {fqn for layout in one.layouts for fqn in layout.derived}
    values = values_of(specs, derived)
    first = rewritten(one_file(specs, values, world=len(one.layouts), derived=derived), one)
    there = rewritten(again(first), other)
    assert differences(held_by(there), values) == []
    assert differences(held_by(rewritten(again(there), one)), values) == []


@pytest.mark.parametrize("zero", [1, 3])
def test_factors_of_adafactor_stay_whole(zero: int) -> None:
    roles = ("param", "master", "step")
    source = Source().weights({"w": (6, 4), "v": (9,)}, roles)
    source.add("w", "row_var", (6, 1), first=300).add("w", "col_var", (1, 4), first=400).add("v", "variance", (9,))
    opened, there, back = source.open(), MemoryStore(), MemoryStore()
    write_ours(opened, there, target_of(opened, dp=3, zero=zero), WriteOptions())
    write_ours(again(there), back, target_of(again(there), dp=2, zero=0), WriteOptions())
    for store in (there, back):
        held = held_by(store)
        assert held.keys() == {spec.key for spec in opened.specs}
        for (fqn, role), shape, first in ((("w", "row_var"), 6, 300), (("w", "col_var"), 4, 400)):
            assert held[fqn, role].view("f4").tolist() == np.arange(first, first + shape).tolist()


def test_a_tensor_larger_than_the_memory_that_is_allowed() -> None:
    spec = TensorSpec("w", "param", "float32", (11 << 10, 1 << 10))
    values = {spec.key: np.random.default_rng(0).integers(0, 256, spec.nbytes, np.uint8)}
    options = WriteOptions(memory=40 << 20)
    assert spec.nbytes > options.memory
    made = plan_ours(one_file([spec], values), everywhere([spec], 2), options)  # type: ignore[arg-type]  # layouts suffice
    assert made.memory <= options.memory
    store = rewritten(one_file([spec], values), everywhere([spec], 2), options=options)
    assert differences(held_by(store), values) == []
