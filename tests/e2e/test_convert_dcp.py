"""Checkpoints of DCP and of Megatron-core go in and are what the job held; DCP and our engines load what comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckpt.convert.dcp.read import is_dcp, open_dcp
from ckpt.convert.dcp.write import write_dcp
from ckpt.convert.megatron.read import is_megatron, open_megatron
from ckpt.convert.options import ReadOptions, WriteOptions
from ckpt.convert.ours.read import open_ours
from ckpt.convert.ours.write import write_ours
from ckpt.convert.target import target_of
from ckpt.store.open import open_store
from tests.harness.megatron_shim import PRELOAD
from tests.harness.pool import ranks
from tests.unit.convert.logical import content, objects

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt.convert.opened import Opened

CASES = "tests.e2e.convert_dcp_cases"
OPTIONS = ReadOptions()


def ours(opened: Opened, root: Path, **degrees: Any) -> str:
    """Convert to our own format."""
    write_ours(opened, open_store(str(root)), target_of(opened, **degrees), WriteOptions())
    return str(root)


JOBS: list[tuple[str, int, str, dict[str, Any]]] = [
    ("fsdp2", 3, "get_state_dict", {}),  # 61 rows on 3 ranks, 24 elements on 3
    ("hsdp", 4, "flattened", {}),
    ("fsdp2 x tp", 4, "model at the top", {}),
    ("fsdp2", 2, "state_dict()", {"optimizer": "SGD"}),
]


@pytest.mark.parametrize(("layout", "world", "style", "options"), JOBS)
def test_what_dcp_wrote_is_what_the_job_held(
    layout: str, world: int, style: str, options: dict[str, Any], tmp_path: Path
) -> None:
    saved = ranks(
        world, f"{CASES}:save_both", timeout=90, root=str(tmp_path), layout=layout, style=style, **options
    ).values()
    assert is_dcp(open_store(str(tmp_path / "theirs")))
    theirs = open_dcp(open_store(str(tmp_path / "theirs")), "theirs", options=OPTIONS)
    mine = open_ours(open_store(str(tmp_path / "ours")), "ours")
    assert content(theirs) == content(mine)
    assert theirs.aliases == mine.aliases
    assert (theirs.step, theirs.world, theirs.engine) == (mine.step, mine.world, mine.engine)
    found = objects(theirs)
    user = {"train_state": {"epoch": 3}} if style == "model at the top" else {"epoch": 3}
    assert {name: found.pop(name) for name in user} == user
    assert found == objects(mine)
    if world == 3:  # and the job goes on with it as if it had saved with us, on other ranks too
        root = ours(theirs, tmp_path / "imported", dp=2)
        loaded = ranks(world, f"{CASES}:load_imported", timeout=90, root=root, layout=layout, **options).values()
        for before, after in zip(saved, loaded, strict=True):
            assert after["strays"] == []
            assert after["state"] == before["state"]
            assert after["losses"] == before["losses"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Opened, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("trained")
    saved = ranks(2, f"{CASES}:save_both", timeout=90, root=str(root), layout="fsdp2", style="get_state_dict").values()
    return open_ours(open_store(str(root / "ours")), "ours"), saved


@pytest.mark.parametrize(("layout", "world", "flat"), [("fsdp2", 2, False), ("fsdp2 x tp", 4, True)])
def test_dcp_loads_what_we_wrote(
    layout: str, world: int, flat: bool, trained: tuple[Opened, list[dict[str, Any]]], tmp_path: Path
) -> None:
    opened, saved = trained
    store = open_store(str(tmp_path))
    written = write_dcp(opened, store, target_of(opened, dp=3, engine="fsdp2"), WriteOptions())
    assert sorted(written.files) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(3))]
    assert content(open_dcp(store, "again")) == content(opened)
    loaded = ranks(world, f"{CASES}:load_theirs", timeout=90, root=str(tmp_path), layout=layout, flat=flat).values()
    for rank, after in enumerate(loaded):
        assert after["state"] == saved[0]["state"]
        if world == 2:
            assert after["losses"] == saved[rank]["losses"]


MEGATRONS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tp 2 x dp 2, 16-bit": (4, {"tp": 2}, {"dtype": "bfloat16"}, {}),
    "experts": (2, {"ep": 2}, {"experts": 4, "layers": 2, "config": {"add_bias_linear": False}}, {}),
    "virtual stages, distributed optimizer, layers apart": (
        2,
        {"pp": 2, "virtual": 2},
        {"dtype": "bfloat16", "distributed": True, "tied": False},
        {
            "distrib_optim_sharding_type": "fully_reshardable",
            "non_homogeneous_layers": True,
            "singleton_local_shards": False,
        },
    ),
    "tp 2 x pp 2, tied, buckets": (
        4,
        {"tp": 2, "pp": 2},
        {"dtype": "bfloat16", "distributed": True},
        {"distrib_optim_sharding_type": "dp_reshardable"},
    ),
    "experts, small buckets": (
        2,
        {"ep": 2},
        {"experts": 4, "layers": 2, "distributed": True, "overlap": True, "config": {"add_bias_linear": False}},
        {"distrib_optim_sharding_type": "dp_reshardable"},
    ),
    "virtual stages, joined buckets": (
        2,
        {"pp": 2, "virtual": 2},
        {"dtype": "float16", "distributed": True, "tied": False},
        {"distrib_optim_sharding_type": "dp_zero_gather_scatter"},
    ),
}


def save_megatron(root: Path, world: int, layout: Any, engine: Any, metadata: Any) -> list[dict[str, Any]]:
    return ranks(
        world,
        f"{CASES}:save_megatron",
        timeout=90,
        preload=(*PRELOAD, "megatron.core.dist_checkpointing"),
        root=str(root),
        layout=layout,
        engine=engine,
        metadata=metadata,
    ).values()


@pytest.mark.parametrize("name", MEGATRONS)
def test_what_megatron_wrote_is_what_the_job_held(name: str, tmp_path: Path) -> None:
    world, layout, engine, metadata = MEGATRONS[name]
    saved = save_megatron(tmp_path, world, layout, engine, metadata)
    store = open_store(str(tmp_path / "theirs"))
    assert is_megatron(store)
    theirs = open_megatron(store, "theirs", options=OPTIONS)
    mine = open_ours(open_store(str(tmp_path / "ours")), "ours")
    assert content(theirs) == content(mine)
    assert (theirs.aliases, theirs.derived, theirs.step) == (mine.aliases, mine.derived, mine.step)
    found = objects(theirs)
    assert found.pop("megatron") == {"checkpoint_version": 3.0, "iteration": 2}
    assert found == objects(mine)
    if name.startswith("tp"):
        root = ours(theirs, tmp_path / "imported", dp=2)
        case, preload = f"{CASES}:load_megatron", PRELOAD
        loaded = ranks(world, case, timeout=90, preload=preload, root=root, layout=layout, engine=engine).values()
        for before, after in zip(saved, loaded, strict=True):
            assert after["strays"] == []
            assert after["losses"] == before["losses"]
