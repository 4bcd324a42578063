"""Torch layouts at their edges: uneven sizes, sub-meshes, shared heads, interleaved stages; and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness.pool import ranks

if TYPE_CHECKING:
    from pathlib import Path

CASES = "tests.e2e.torch_layout_cases"


@pytest.mark.parametrize("world", [2, 4, 6])
def test_sizes_that_nothing_divides_are_found_where_they_are(world: int) -> None:
    assert ranks(world, f"{CASES}:uneven").values() == [[]] * world


def test_columns_and_ranks_outside_of_a_mesh(tmp_path: Path) -> None:
    found = ranks(4, f"{CASES}:columns_and_sub_meshes", root=str(tmp_path)).values()
    for rank, one in enumerate(found):
        assert one["wrong"] == []
        assert one["loaded"] == []
        assert one["strays"] == []
        assert one["columns"] == [[3, 2]]
        assert (one["few"] > 0) == (rank < 2)


def test_gathered_parameters_are_neither_saved_nor_left_behind_a_load(tmp_path: Path) -> None:
    for one in ranks(2, f"{CASES}:unsharded", root=str(tmp_path)).values():
        assert one["gathered"]
        assert one["wrong"] == []
        assert one["losses"][0] == one["losses"][1]


@pytest.mark.parametrize("world", [2, 4])
def test_fused_weights_are_cut_for_ranks_that_share_a_head(world: int, tmp_path: Path) -> None:
    assert ranks(world, f"{CASES}:shared_heads", root=str(tmp_path)).values() == [[]] * world


def test_several_stages_of_one_rank(tmp_path: Path) -> None:
    for one in ranks(2, f"{CASES}:interleaved", root=str(tmp_path)).values():
        assert one == {"groups": {"pp": [0, 1]}, "strays": [], "wrong": [], "steps": [1.0]}


def test_bad_input_is_one_error_that_lists_everything(tmp_path: Path) -> None:
    found = ranks(3, f"{CASES}:refused", root=str(tmp_path)).values()
    for name in found[0]:
        assert len({one[name] for one in found}) == 1, name  # the same error on every rank
    errors = found[0]

    def lists(name: str, *texts: str) -> None:
        missing = [text for text in texts if text not in errors[name]]
        assert not missing, errors[name]

    lists(
        "placements",
        "UnsupportedLayout",
        "'sums' (param) has placement Partial(sum)",
        "'short' (param) has a local tensor of",
    )
    assert "fine" not in errors["placements"]
    lists("unexplained", "'blocks.0.q.weight': no rule explains it", "'running'", "cuts dimension 3")
    lists("no rules", "LayoutError", "there is a tensor-parallel group, but on no rank does a rule")
    lists("with whom", "UnsupportedLayout", "'weight': it is marked as tensor parallel, but nobody says with whom")
    for case in ("with whom, by rule", "with whom, inside of a mesh"):
        lists(case, "UnsupportedLayout", "'weight': rule 'weight' cuts it, but nobody says with whom")
    lists("groups", "LayoutError", "axis 'dp'", "rule 'tensors: nothing.like.this' fits nothing", "tied: tail.weight")
    lists("shapes", "LayoutError", "'weight' (param): ranks disagree", "float32[3, 4] on rank(s) 0", "float32[3, 6]")
    lists("overlap", "overlap_with_ddp=True")
    lists(
        "state",
        "UnsupportedLayout",
        "'exp_avg' of 'weight'",
        "'exp_avg' of 'bias' is a tensor of shape [3] placed (Replicate(),)",
    )
