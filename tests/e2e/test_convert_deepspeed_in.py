"""What DeepSpeed itself writes goes in, and is the state of the live engine: name by name, bit for bit.

The witness is ``ckpt.save`` of the same engine at the same moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckpt.convert.deepspeed.read import is_deepspeed, open_deepspeed
from ckpt.convert.deepspeed.read_universal import is_universal, open_universal
from ckpt.convert.options import ReadOptions
from ckpt.convert.ours.read import open_ours
from ckpt.layout.rules import Rules
from ckpt.store.open import open_store
from tests.e2e.convert_deepspeed_cases import CLIENT
from tests.harness import ranks
from tests.harness.conversions import differences
from tests.harness.foreign import arrays_of, objects_of
from tests.harness.parallel_engines import CUT, STAGES

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.convert.opened import Opened

CASES = "tests.e2e.convert_deepspeed_cases:"
Layout = dict[str, Any]


def gpt(stage: int, dtype: str = "bf16", **more: Any) -> Layout:
    return {"kind": "gpt", "stage": stage, "dtype": dtype, **more}


def pp(stage: int = 1, dtype: str = "bf16", **more: Any) -> Layout:
    return {"kind": "pp", "pp": 2, "stage": stage, "dtype": dtype, "gas": 2, **more}


def moe(ep: int, stage: int, dtype: str = "bf16", **more: Any) -> Layout:
    return {"kind": "moe", "ep": ep, "stage": stage, "dtype": dtype, **more}


RANKS_OWN = "tensor 'running' (buffer)"
"""A buffer that differs from rank to rank: DeepSpeed saves that of the first one."""
FROZEN = {"frozen_blocks": 1, "tiny": 3}

JOBS: dict[str, tuple[int, dict[str, Layout], dict[str, Any]]] = {
    # one launch each: ranks, engines, rules
    "one rank": (1, {"zero 2, one rank": gpt(2, "fp16")}, {}),
    "two ranks": (
        2,
        {
            "zero 0, fp32": gpt(0, "fp32"),
            "zero 0, bf16": gpt(0),
            "zero 0, frozen": gpt(0, model=FROZEN, scheduler=False),  # no warm-up: norms differ in 16 bits
            "zero 1, frozen": gpt(1, model=FROZEN),
            "zero 1, BF16_Optimizer": gpt(1, grad_accum_dtype="fp32"),
            "zero 2, fp16": gpt(2, "fp16"),
            "zero 2, Lion": gpt(2, "fp32", optimizer="Lion"),
            "zero 2, round robin, aligned": gpt(2, zero={"round_robin_gradients": True, "parameter_alignment": True}),
            "zero 1, elastic": gpt(1, zero={"elastic_checkpoint": True}),
        },
        {},
    ),
    "three ranks": (
        3,
        {
            "zero 2, tiny": gpt(2, model={"tiny": 2}),
            "zero 3, sub-groups": gpt(3, zero={"sub_group_size": 3000}),
            "zero 3, frozen": gpt(3, "fp32", model=FROZEN, optimizer="SGD"),
        },
        {},
    ),
    "pipelines": (
        4,
        {
            "pipeline": pp(),
            "pipeline, shared": pp(positions=True),
            "pipeline, zero 0, bf16": pp(0),
            "pipeline, zero 0, fp32": pp(0, "fp32"),
        },
        # Without ZeRO no file has the name of a shared module.
        {"names": [{"match": r"0\.weight", "name": "embed.weight"}, *STAGES]},
    ),
    "3d": (8, {"3d": pp(tp=2)}, {"names": STAGES, "tensors": CUT}),
    "tp": (4, {"tp, zero 3": {"kind": "tp", "tp": 2, "stage": 3, "dtype": "bf16"}}, {"tensors": CUT}),
    "AutoTP": (4, {"AutoTP": {"kind": "autotp", "tp": 2, "stage": 1, "dtype": "bf16", "scheduler": False}}, {}),
    "experts": (4, {"experts": moe(2, 1), "experts, zero 0": moe(2, 0, "fp32")}, {}),
}
UNIVERSAL = {
    "two ranks": ["zero 1, frozen", "zero 1, BF16_Optimizer"],
    "three ranks": ["zero 2, tiny", "zero 3, sub-groups"],
}
ALL = [(job, name) for job, (_, layouts, _) in JOBS.items() for name in layouts]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a job, whose engines are run the first time that it is asked for."""
    folders: dict[str, Path] = {}

    def folder(job: str) -> Path:
        if job not in folders:
            world, layouts, _ = JOBS[job]
            folders[job] = root = tmp_path_factory.mktemp("ds")
            ranks(world, f"{CASES}write", timeout=120, root=str(root), layouts=layouts).values()
            if job in UNIVERSAL:
                ranks(1, f"{CASES}universal", root=str(root), names=UNIVERSAL[job]).values()
        return folders[job]

    return folder


def same(imported: Opened, root: Path, *, but: tuple[str, ...] = ()) -> None:
    """Check that an imported checkpoint is what ``ckpt.save`` of the live engine is; ``but``: objects left out."""
    ours = open_ours(open_store(str(root / "ckpt")), "ours")
    assert differences(arrays_of(imported), arrays_of(ours)) == []
    assert imported.specs == ours.specs
    assert imported.derived == ours.derived
    assert dict(imported.aliases) == dict(ours.aliases)
    assert (imported.step, imported.world, imported.engine) == (ours.step, ours.world, ours.engine)
    client = tuple(CLIENT)
    assert objects_of(imported, but=(*client, *but)) == objects_of(ours, but=but)
    values = {one.name: one.tree for one in imported.objects if one.kind == "value"}
    assert values == CLIENT


@pytest.mark.parametrize(("job", "name"), ALL)
def test_an_import_is_the_state_of_the_live_engine(job: str, name: str, written: Any) -> None:
    root = written(job) / name
    store = open_store(str(root / "ds"))
    rules = Rules.of(JOBS[job][2])
    assert is_deepspeed(store)
    assert not is_universal(store)
    imported = open_deepspeed(store, store.url, options=ReadOptions(rules=rules))
    # DeepSpeed names neither the optimizer's class nor, with elastic_checkpoint, its groups.
    same(imported, root, but=("optimizer",) if "Lion" in name or "elastic" in name else ())
    assert any("random generators" in note for note in imported.usual)


@pytest.mark.parametrize(("job", "name"), [(job, name) for job, names in UNIVERSAL.items() for name in names])
def test_a_universal_checkpoint_is_the_state_of_the_live_engine(job: str, name: str, written: Any) -> None:
    root = written(job) / name
    store = open_store(str(root / "universal"))
    assert is_universal(store)
    assert not is_deepspeed(store)
    same(open_universal(store, store.url), root)
    assert open_universal(store, store.url, step=2).step == 2


GO_ON: dict[str, tuple[int, dict[str, Layout]]] = {
    "zero": (
        2,
        {
            "zero 0, fp16": gpt(0, "fp16"),
            "zero 2, fp16, gas": gpt(2, "fp16", gas=2, model=FROZEN),
            "zero 3": gpt(3, zero={"sub_group_size": 3000}),
        },
    ),
    "pipeline": (4, {"pipeline": pp(import_rules={"names": STAGES})}),
}


@pytest.mark.parametrize("job", GO_ON)
def test_an_engine_goes_on_from_an_import_bit_for_bit(job: str, tmp_path: Path) -> None:
    world, layouts = GO_ON[job]
    for found in ranks(world, f"{CASES}go_on", timeout=120, root=str(tmp_path), layouts=layouts).values():
        for name in layouts:
            one = found[name]
            assert one["strays"] == [], name
            assert one["notes"] == ["the checkpoint has no random generator state"], name
            assert one["extra"] == CLIENT["epoch"], name
            assert [line for line in one["state"] if RANKS_OWN not in line] == [], name
            assert one["losses"][0] == one["losses"][1], name
            assert [line for line in one["final"] if RANKS_OWN not in line] == [], name
