"""What a DeepSpeed engine is surveyed as, on stand-ins for it and its groups; tests/e2e has the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.engine.base import Context
from ckpt.engine.deepspeed_mesh import mesh_of
from ckpt.engine.deepspeed_naming import Naming
from ckpt.layout.mesh import UNEXPLAINED
from ckpt.layout.rules import Rules


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", tuple)


def engine(module: torch.nn.Module, **more: Any) -> Any:
    return SimpleNamespace(module=module, mpu=None, **more)


class Counting(torch.nn.Linear):
    """Has state beside its tensors."""

    def get_extra_state(self) -> Any:
        return {"calls": 0}

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""


def test_a_rule_that_cuts_needs_a_group_where_there_is_no_mpu() -> None:
    rules = Rules.of({"tensors": [{"match": "weight", "dim": 0}, {"match": "bias"}]})
    layer = torch.nn.Linear(2, 2)
    (problem,) = Naming.of(engine(layer), Context(rules)).problems
    assert problem.startswith("tensor 'weight': rule 'weight' cuts it, but nobody says with whom")
    found = Naming.of(engine(layer), Context(rules, {"tp": (0,)}))
    assert (found.problems, found.tiler.assumed) == ([], set())


def test_a_stage_of_norms_is_no_problem_of_its_own() -> None:
    stage = engine(torch.nn.LayerNorm(2), seq_data_parallel_group=[0])
    found = Naming.of(stage, Context(groups={"tp": (0, 1)}))
    assert found.problems == []
    assert found.tiler.unused() == {UNEXPLAINED}


def test_a_rule_may_be_of_extra_state_alone() -> None:
    rules = Rules.of({"names": [{"match": r"0\._extra_state", "name": "first._extra_state"}]})
    found = Naming.of(engine(torch.nn.Sequential(Counting(1, 1))), Context(rules))
    assert [*found.stateful] == ["first"]
    assert found.tiler.unused() == set()


def test_expert_groups_go_by_their_names() -> None:
    expert = torch.nn.Linear(1, 1)
    for p in expert.parameters():
        p.allreduce, p.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    found = mesh_of(engine(expert, expert_parallel_group={"ep_size_2": [0, 1]}), Context())
    assert found.groups == {"dp": (0, 1), "ep ep_size_2": (0, 1)}
    assert mesh_of(engine(torch.nn.Linear(1, 1)), Context()).groups == {"dp": (0, 1)}
