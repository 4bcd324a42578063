"""Repositories written by each released format version load, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt
from ckpt.format.codec import decompress
from ckpt.format.manifest import VERSION, encode_commit, encode_index
from ckpt.repo.repository import Repository, commit_key
from ckpt.repo.verify import verify
from ckpt.store.open import open_store
from tests.compat.golden import STEPS, golden_model
from tests.property.fake import cut, engines, load_all, zero1

HERE = Path(__file__).parent
VERSIONS = sorted(HERE.glob("v*"))


def test_the_present_version_has_a_golden_repository() -> None:
    assert HERE / f"v{VERSION}" in VERSIONS


@pytest.mark.parametrize("root", VERSIONS, ids=lambda path: path.name)
def test_a_golden_repository_is_whole(root: Path) -> None:
    assert ckpt.steps(root) == list(STEPS)
    found = verify(Repository(open_store(root)))
    assert found.findings == []
    assert found.chunks > 20


@pytest.mark.parametrize("root", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("step", STEPS)
def test_what_needs_no_new_feature_is_written_as_ever(root: Path, step: int) -> None:
    """An index without encoded chunks and a commit of raw chunks: the same bytes, so that old releases read them."""
    store = open_store(root)
    index = Repository(store).read_index(step)
    for ref, part in zip(index.root.parts, index.parts, strict=True):
        written = (decompress(data, limit=1 << 24, where="") for data in (store.get(ref.key), encode_index(part)))
        assert len(set(written)) == 1
    assert encode_commit(index.commit) == store.get(commit_key(step))


@pytest.mark.parametrize("root", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_golden_repository_loads_bit_for_bit(root: Path, step: int, world: int) -> None:
    model = golden_model(step)
    layout = zero1(model, world)
    layout["table", "param"] = cut("columns", (20, 30), world)
    made = engines(model, layout, world, filled=False)
    for report in load_all(made, root, step=step):
        assert report.step == step
        assert report.extra == {"epoch": step, "shape": (step, 2.5)}
    assert [line for engine in made for line in engine.differences()] == []
    assert made[0].finished == {"scheduler": {"last": step, "lr": [0.1]}}
