"""DeepSpeed itself loads experts that we wrote for other numbers of ranks, experts a rank and stages, and trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckpt.convert.deepspeed.read import open_deepspeed
from ckpt.convert.deepspeed.write import write_deepspeed
from ckpt.convert.options import WriteOptions
from ckpt.convert.ours.read import open_ours
from ckpt.convert.target import target_of
from ckpt.store.local import LocalStore
from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.deepspeed_moe_cases"
STEPS = 3


class Source:
    """What a job saved; and what it did afterwards."""

    def __init__(self, root: Path, world: int, more: int, **engine: Any) -> None:
        self.root, self.engine, self.more = str(root), engine, more
        saved = ranks(world, f"{CASES}:save", root=self.root, steps=STEPS, more=more, engine=engine, timeout=120)
        self.settings, self.losses = (saved.values()[0][key] for key in ("settings", "losses"))

    def loaded(self, dp: int, *targets: tuple[str, int, int], **layout: Any) -> list[dict[str, Any]]:
        """Write for ``dp`` ranks from (ours or theirs, for this ep and stage), and let DeepSpeed load them all."""
        cases = []
        for name, ep, zero in targets:
            store, path = LocalStore(f"{self.root}/{name}"), f"{self.root}/{name}-{dp}-{ep}-{zero}"
            opened = open_ours(store, "ours") if name == "ours" else open_deepspeed(store, "theirs")
            target = target_of(opened, dp=dp, ep=ep, zero=zero, engine="deepspeed", **layout)
            write_deepspeed(opened, LocalStore(path), target, WriteOptions())
            cases.append({"path": path, "engine": {**self.engine, "ep": ep, "stage": zero}})
        found = ranks(
            dp * layout.get("pp", 1),
            f"{CASES}:load",
            root=self.root,
            start=STEPS,
            more=self.more,
            cases=cases,
            timeout=120,
        ).values()
        reports = [{**of[0], "wrong": [w for one in of for w in one["wrong"]]} for of in zip(*found, strict=True)]
        for report, (_, ep, _) in zip(reports, targets, strict=True):
            assert report["wrong"] == []
            assert report["settings"] == self.settings
            dense = [["matrices", False], ["vectors", False]]
            assert report["labels"] == [*dense, [f"ep_size_{ep}", True], [f"ep_size_{ep}", True]]
        return reports


def test_experts_of_two_ranks_go_to_four_and_to_one(tmp_path) -> None:
    source = Source(tmp_path, 2, 10, ep=2, stage=1, dtype="fp32")
    # Stage 0 with the largest ep of the process: there DeepSpeed looks for files of that one.
    targets = [(4, ("theirs", 2, 2), ("ours", 4, 1), ("theirs", 4, 0)), (1, ("ours", 1, 2), ("theirs", 1, 0))]
    for dp, *cases in targets:
        for report in source.loaded(dp, *cases):
            assert report["losses"] == pytest.approx(source.losses, rel=1e-6)


def test_low_precision_without_zero_goes_to_zero_and_back(tmp_path) -> None:
    source = Source(tmp_path, 2, 2, ep=2, stage=0, dtype="bf16")
    for report in source.loaded(2, ("ours", 1, 2), ("theirs", 2, 1), ("ours", 2, 0)):
        assert report["losses"] == pytest.approx(source.losses, rel=1e-2)


def test_flat_groups_that_were_dealt_like_cards_are_dealt_anew(tmp_path) -> None:
    source = Source(tmp_path, 2, 2, ep=1, stage=2, dtype="fp32", zero={"round_robin_gradients": True})
    (report,) = source.loaded(2, ("ours", 2, 1))
    assert report["losses"] == pytest.approx(source.losses, rel=1e-6)


def test_stages_of_a_pipeline_have_experts(tmp_path) -> None:
    source = Source(tmp_path, 4, 2, ep=2, stage=1, dtype="fp32", pipeline=True)
    for report in source.loaded(2, ("theirs", 1, 0), ("ours", 1, 1), pp=2, stages=(3, 2)):
        assert report["losses"] == pytest.approx(source.losses, rel=1e-6)
