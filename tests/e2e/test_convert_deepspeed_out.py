"""DeepSpeed itself loads what we wrote for other numbers of ranks and other stages, and trains on as before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from ckpt.convert.deepspeed.read import open_deepspeed
from ckpt.convert.deepspeed.write import write_deepspeed
from ckpt.convert.deepspeed.write_universal import write_universal
from ckpt.convert.find import open_source
from ckpt.convert.options import WEIGHTS, ReadOptions, WriteOptions
from ckpt.convert.ours.read import open_ours
from ckpt.convert.safetensors.write import write_safetensors
from ckpt.convert.target import target_of
from ckpt.layout.rules import Rules
from ckpt.store.local import LocalStore
from tests.harness.parallel_engines import CUT
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.convert.opened import Opened

CASES = "tests.e2e.deepspeed_out_cases"
STEPS, MORE = 3, 10
MODEL = {"frozen_blocks": 1, "layers": 3, "tiny": 1}
SUB_GROUP = 2000
"""elements; three sub-groups in the first of two groups on four ranks"""


class Source:
    """What a job of two ranks saved, opened; and what it did afterwards."""

    def __init__(self, root: str, **engine: Any) -> None:
        self.root, self.engine = root, {"model": MODEL, **engine}
        saved = ranks(
            2, f"{CASES}:save_source", root=root, steps=STEPS, more=MORE, engine=self.engine, timeout=120
        ).values()
        self.settings, self.losses = saved[0]["settings"], saved[0]["losses"]
        self.ours = open_ours(LocalStore(f"{root}/ours"), "ours")

    def theirs(self) -> Opened:
        return open_deepspeed(LocalStore(f"{self.root}/theirs"), "theirs")

    def native(self, name: str, opened: Opened, dp: int, zero: int, **options: Any) -> dict[str, Any]:
        """Write for this many ranks and this stage; return the case of an engine that loads it."""
        target = target_of(opened, dp=dp, zero=zero, engine="deepspeed")
        write_deepspeed(opened, LocalStore(f"{self.root}/{name}"), target, WriteOptions(), **options)
        section = options if zero == 3 else self.engine.get("zero", {})
        return {"path": f"{self.root}/{name}", "engine": {**self.engine, "stage": zero, "zero": section}}

    def load(self, dp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Let DeepSpeed load the cases; what all ranks say of one case is put together."""
        found = ranks(
            dp, f"{CASES}:load_targets", root=self.root, start=STEPS, more=MORE, cases=cases, timeout=120
        ).values()
        for reports in zip(*found, strict=True):
            assert all(r["losses"] == reports[0]["losses"] for r in reports)
        return [
            {**reports[0], "wrong": [w for r in reports for w in r["wrong"]]} for reports in zip(*found, strict=True)
        ]

    def check(self, report: dict[str, Any]) -> None:
        assert report["wrong"] == []
        assert report["settings"] == self.settings
        assert report["client"] == {"tokens": 5}
        assert report["losses"] == pytest.approx(self.losses, rel=1e-6)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(str(tmp_path_factory.mktemp("fp32")), stage=2, dtype="fp32")


@pytest.mark.parametrize("format", ["ours", "theirs"])
def test_one_rank_loads_zero_0_and_2(source, format) -> None:
    opened = source.ours if format == "ours" else source.theirs()
    for report in source.load(1, [source.native(f"{format}-1-{zero}", opened, 1, zero) for zero in (0, 2)]):
        source.check(report)


def test_three_ranks_load_zero_1_from_ours_and_theirs_and_universal(source) -> None:
    cases = [source.native("ours-3-1", source.ours, 3, 1), source.native("theirs-3-1", source.theirs(), 3, 1)]
    target = target_of(source.ours, engine="deepspeed")
    written = write_universal(source.ours, LocalStore(f"{source.root}/universal"), target, WriteOptions())
    assert [line for line in written.lost if "frozen parameters and buffers" in line]
    universal = {"checkpoint": {"load_universal": True}}
    engine = {**source.engine, "stage": 1, "extra": universal}
    cases.append({"path": f"{source.root}/universal", "engine": engine})
    first, second, third = source.load(3, cases)
    source.check(first)
    source.check(second)
    # DeepSpeed does not read frozen parameters and buffers back from a universal checkpoint, so losses differ.
    frozen = [line for line in third["wrong"] if "(buffer)" not in line and "'blocks.0." not in line]
    assert frozen == []
    assert third["settings"] == source.settings


def test_four_ranks_load_zero_3_in_several_sub_groups(source) -> None:
    (report,) = source.load(4, [source.native("ours-4-3", source.ours, 4, 3, sub_group_size=SUB_GROUP)])
    source.check(report)


def test_universal_serves_zero_3_and_weights_go_alone(source) -> None:
    opened = source.ours
    one_group = target_of(opened, engine="deepspeed")
    write_universal(opened, LocalStore(f"{source.root}/universal-3"), one_group, WriteOptions())
    engine = {**source.engine, "stage": 3, "extra": {"checkpoint": {"load_universal": True}}}
    (report,) = source.load(2, [{"path": f"{source.root}/universal-3", "engine": engine}])
    assert [line for line in report["wrong"] if "(buffer)" not in line and "'blocks.0." not in line] == []

    cases = []
    for zero, options in ((1, WriteOptions()), (1, WriteOptions(roles=WEIGHTS)), (3, WriteOptions(roles=WEIGHTS))):
        path = f"{source.root}/weights-{len(cases)}"
        target = target_of(opened, dp=2, zero=zero, engine="deepspeed", roles=options.roles)
        write_deepspeed(opened, LocalStore(path), target, options)
        script = zero == 3 or options.roles != WEIGHTS
        cases.append({"path": path, "engine": {**source.engine, "stage": zero}, "script": script})
    # A file of weights does not say what is frozen in the engine, nor what is a buffer.
    store = LocalStore(f"{source.root}/weights")
    write_safetensors(opened, store, target_of(opened, roles=WEIGHTS), WriteOptions(roles=WEIGHTS))
    kept = (f"{source.root}/weights/model.safetensors", f"{source.root}/plain.safetensors")
    held = load_file(kept[0])
    save_file({**held, **{name: held[listed].clone() for name, listed in opened.aliases.items()}}, kept[1])
    for zero in (0, 1, 3):
        path = f"{source.root}/weights-{len(cases)}"
        plain = open_source(kept[1], options=ReadOptions())
        target = target_of(plain, dp=2, zero=zero, engine="deepspeed")
        write_deepspeed(plain, LocalStore(path), target, WriteOptions())
        flag = {} if zero else {"flag": "load_module_only=True"}
        cases.append({"path": path, "engine": {**source.engine, "stage": zero}, "script": False, **flag})
    found = ranks(2, f"{CASES}:load_weights", root=source.root, cases=cases, timeout=120).values()
    assert found == [[[] for _ in cases]] * 2


@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 3), ("fp16", 1)])
def test_low_precision_with_masters(tmp_path, dtype, stage) -> None:
    shuffled = {"zero": {"round_robin_gradients": True}} if stage == 1 else {}  # flat groups in an order of their own
    source = Source(str(tmp_path), stage=stage, dtype=dtype, **shuffled)
    opened, zero = (source.theirs(), 3) if dtype == "bf16" else (source.ours, 2)
    (report,) = source.load(3, [source.native("three", opened, 3, zero)])
    assert report["wrong"] == []
    assert report["settings"] == source.settings
    assert report["losses"] == pytest.approx(source.losses, rel=1e-2)
    if dtype == "bf16":  # fp16 has another loss scaler there
        (report,) = source.load(1, [source.native("none", source.ours, 1, 0)])
        assert report["wrong"] == []
        assert report["settings"] == source.settings
        cases = []
        for zero in (0, 2):
            path = f"{tmp_path}/weights-{zero}"
            target = target_of(source.ours, dp=1, zero=zero, engine="deepspeed", roles=WEIGHTS)
            written = write_deepspeed(source.ours, LocalStore(path), target, WriteOptions(roles=WEIGHTS))
            said = next(line for line in written.made if "load it with" in line)
            case = {"path": path, "engine": {**source.engine, "stage": zero}, "script": False, "masters": True}
            cases.append({**case, "flag": "load_module_only=True"} if "load_module_only=True" in said else case)
        assert ["flag" in case for case in cases] == [True, False]
        found = ranks(1, f"{CASES}:load_weights", root=source.root, cases=cases, timeout=120).values()
        assert found == [[[], []]]


def crossed(root: Path, layout: dict[str, Any], world: int, targets: list[tuple[str, int, Any, Any]]) -> None:
    """Save a layout, write it for others from what we and what DeepSpeed saved, and let DeepSpeed load each of them."""
    root.mkdir(exist_ok=True)
    ranks(world, f"{CASES}:save_parallel", root=str(root), layout=layout, timeout=100).values()
    rules = Rules.of({"tensors": CUT})
    for n, (source, size, other, degrees) in enumerate(targets):
        store, options = LocalStore(f"{root}/{source}"), ReadOptions(rules=rules)
        opened = open_ours(store, "ours") if source == "ours" else open_deepspeed(store, "theirs", options=options)
        target = target_of(opened, engine="deepspeed", zero=other["stage"], rules=rules, **degrees)
        write_deepspeed(opened, LocalStore(f"{root}/{n}"), target, WriteOptions())
        cases = [{"layout": other, "path": f"{root}/{n}"}]
        for reports in ranks(size, f"{CASES}:load_parallel", root=str(root), cases=cases, timeout=100).values():
            assert reports == [{"names": [], "differ": [], "trains": True}]


def test_tensor_parallelism_with_fused_weights_and_a_padded_vocabulary(tmp_path) -> None:
    plain = {"kind": "dp", "dtype": "bf16"}
    cut = {"kind": "tp", "dtype": "bf16"}
    targets: list[tuple[str, int, Any, Any]] = [
        ("ours", 4, {**cut, "stage": 3, "tp": 4}, {"dp": 1, "tp": 4}),
        ("theirs", 2, {**plain, "stage": 2}, {"dp": 2, "tp": 1}),
    ]
    crossed(tmp_path, {**cut, "stage": 1, "tp": 2}, 2, targets)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_pipeline_without_zero_has_no_names_and_loses_nothing(tmp_path, stages) -> None:
    """With three stages the last begins with a layer that has no buffer: no file says where it is."""
    layout = {"kind": "pp", "dtype": "fp32", "gas": 2, "rules": {}, "untied": True, "stage": 0}
    targets: list[tuple[str, int, Any, Any]] = [
        ("theirs", 1, {**layout, "pp": 1}, {"dp": 1, "pp": 1}),
        ("theirs" if stages > 1 else "ours", 1, {**layout, "pp": 1, "stage": 1}, {"dp": 1, "pp": 1}),
    ]
    crossed(tmp_path, {**layout, "pp": stages}, stages, targets)


def test_stages_of_a_pipeline_are_moved(tmp_path) -> None:
    layout = {"kind": "pp", "dtype": "fp32", "gas": 2, "rules": {}}
    targets: list[tuple[str, int, Any, Any]] = [
        ("theirs", 3, {**layout, "pp": 3, "stage": 1}, {"dp": 1, "pp": 3, "stages": (2, 2, 1)}),
        ("ours", 2, {**layout, "pp": 2, "stage": 0}, {"dp": 1, "pp": 2, "stages": (3, 2)}),
    ]
    crossed(tmp_path, {**layout, "pp": 2, "stage": 1}, 2, targets)
