from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt.errors import ConfigError
from ckpt.layout.box import Box
from ckpt.layout.spec import TensorSpec
from ckpt.plan.read_plan import Unit
from ckpt.runtime.collective import _Pool
from ckpt.runtime.groups import (
    AUTO,
    COLLECTIVE_GLOO,
    GLOO,
    NCCL,
    Facts,
    decide,
    device_of,
    facts_of,
    sets_of,
    wished_fabric,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def unit(*chain: int) -> Unit:
    return Unit(0, 0, "pack", 0, 1, 1, (), False, chain)


def needs(*held: tuple[torch.device, int]) -> tuple[Any, Any]:
    """What a rank reads into tensors of so many elements on these devices."""
    targets = [SimpleNamespace(spec=TensorSpec("w", "param", "float32", (n,)), tensor=SimpleNamespace(device=device))
               for device, n in held]  # fmt: skip
    uses = [SimpleNamespace(target=k, box=Box.whole((n,))) for k, (_, n) in enumerate(held)]
    return [SimpleNamespace(uses=[use]) for use in uses], targets


@pytest.mark.parametrize(
    ("held", "device"),
    [
        ([], None),
        ([(CUDA, 0)], None),
        ([(CPU, 4)], CPU),
        ([(CUDA, 4)], CUDA),
        ([(CUDA, 700), (CPU, 100)], CUDA),  # an optimizer's step counters
        ([(CUDA, 699), (CPU, 101)], CPU),  # an offloaded optimizer
        ([(CUDA, 4), (torch.device("cuda", 1), 4)], CPU),
        ([(CUDA, 4), (torch.device("mps", 0), 0)], CPU),
    ],
)
def test_a_ranks_device_is_where_nearly_all_of_its_bytes_go(held, device):
    assert device_of(*needs(*held)) == device


def test_ranks_decide_for_nccl_only_where_each_has_a_device_of_its_own():
    on = [Facts(AUTO, device=f"host {n}") for n in range(3)]
    idle = Facts(AUTO, needs=False)
    assert decide(on) == decide([*on, idle]) == NCCL
    assert decide([idle]) is None
    assert decide([*on, Facts(AUTO, lack="why")]) is None
    assert decide([*on, Facts(AUTO, device="host 1")]) is None
    assert decide([*on, Facts(AUTO, device="host 7", many=True)]) is None


def test_a_wish_is_granted_or_refused_by_all():
    on = {"device": "host 0"}
    assert decide([Facts(GLOO, **on), Facts(GLOO, needs=False)]) is None
    assert decide([Facts(COLLECTIVE_GLOO, lack="no device")]) == GLOO
    assert decide([Facts(COLLECTIVE_GLOO, many=True)]) is None
    assert decide([Facts(NCCL, **on)]) == NCCL
    assert decide([Facts(NCCL, needs=False)]) is None
    with pytest.raises(ConfigError, match="rank 1 cannot: its torch has no NCCL"):
        decide([Facts(NCCL, **on), Facts(NCCL, lack="its torch has no NCCL")])
    with pytest.raises(ConfigError, match="rank 1 cannot: it shares its device with rank 0"):
        decide([Facts(NCCL, **on), Facts(NCCL, **on)])
    with pytest.raises(ConfigError, match="different ways: auto, gloo"):
        decide([Facts(AUTO), Facts(GLOO)])


def test_each_set_is_told_once_by_its_first_member():
    units = [unit(2, 0), unit(1), unit(0, 2), unit(1, 2, 3), unit(0, 1)]
    assert sets_of(units) == [(0, 1), (0, 2), (1, 2, 3)]
    assert [len(facts_of(AUTO, "", rank, "host", CPU, units).sets) for rank in range(4)] == [2, 1, 0, 0]
    crowd = [unit(0, n) for n in range(1, 18)]
    facts = facts_of(AUTO, "", 0, "host", CPU, crowd)
    assert (facts.many, facts.sets, facts.lack) == (True, [], "its tensors are not on one CUDA device")
    assert not facts_of(AUTO, "", 0, "host", CPU, crowd[1:]).many


def test_a_torch_without_nccl_is_no_way(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert facts_of(AUTO, "", 0, "host", CUDA, []).lack == "its torch has no NCCL"


def test_devices_are_told_apart_by_what_they_are(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
    assert facts_of(AUTO, "", 0, "host", CUDA, []).device == "host GPU-cuda:0"


@pytest.mark.parametrize("wish", [AUTO, GLOO, NCCL, COLLECTIVE_GLOO])
def test_the_environment_wishes(wish, monkeypatch):
    monkeypatch.setenv("CKPT_FABRIC", wish)
    assert wished_fabric() == wish


def test_a_wish_that_is_no_way_is_refused(monkeypatch):
    monkeypatch.delenv("CKPT_FABRIC", raising=False)
    assert wished_fabric() == AUTO
    for wish in ("", "NCCL", "ib"):
        monkeypatch.setenv("CKPT_FABRIC", wish)
        with pytest.raises(ConfigError, match="CKPT_FABRIC="):
            wished_fabric()


def test_a_pool_holds_no_more_than_its_buffers_or_one_larger():
    pool = _Pool(2, 8, lambda n: torch.empty(n, dtype=torch.uint8))
    first, second = pool.take(1), pool.take(8)
    assert first is not None
    assert second is not None
    assert (len(first), len(second)) == (8, 8)
    assert pool.take(1) is None
    pool.give(first)
    assert pool.take(9) is None  # a larger one comes alone
    again = pool.take(3)
    assert again is first
    pool.give(first)
    pool.give(second)
    large = pool.take(9)
    assert large is not None
    assert len(large) == 9
    assert pool.take(1) is None
    pool.give(large)
    assert pool.take(1) is not None
