"""What the Megatron adapter works out by itself, on stand-ins for Megatron's objects; tests/e2e has the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt.engine.base import Context
from ckpt.engine.find import adapter_for
from ckpt.engine.megatron import MegatronAdapter, is_megatron
from ckpt.engine.megatron_model import survey
from ckpt.engine.megatron_optimizer import inner_optimizer, wrappers_of
from ckpt.errors import UnsupportedLayout
from ckpt.layout.box import Box
from ckpt.layout.rules import Rules


class ShardedTensor(SimpleNamespace):
    """Of Megatron's name, which is what it is known by."""


class ShardedTensorFactory(SimpleNamespace):
    pass


class ShardedObject(SimpleNamespace):
    pass


class MegatronOptimizer(SimpleNamespace):
    pass


class ChainedOptimizer(MegatronOptimizer):
    pass


def sharded(key: str, data: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], stacked: int = 0) -> Any:
    return ShardedTensor(
        key=key, data=data, local_shape=tuple(data.shape), global_shape=shape, global_offset=offset,
        prepend_axis_num=stacked,
    )  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self, entries: list[Any], **parameters: torch.Tensor) -> None:
        super().__init__()
        self.entries = entries
        for name, p in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(p) if not isinstance(p, torch.nn.Parameter) else p)

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        assert metadata["non_homogeneous_layers"]
        return {f"local{i}": entry for i, entry in enumerate(self.entries)}


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape))


def test_gate_and_up_are_two_tiles() -> None:
    p = parameter(4, 3)
    gate, up = p.detach().chunk(2)
    halves = [sharded("fc1", gate, (8, 3), (2, 0)), sharded("fc1", up, (8, 3), (6, 0))]
    found = survey([Model([ShardedTensorFactory(key="fc1", data=p, build=lambda: halves)], p=p)], Context())
    (named,) = found.named.values()
    assert named.shape == (8, 3)
    assert [(tile.box, tile.at) for tile in named.tiling.tiles] == [
        (Box((2, 0), (2, 3)), (0, 0)),
        (Box((6, 0), (2, 3)), (2, 0)),
    ]


def test_a_stacked_expert_has_its_number_in_its_name() -> None:
    p = parameter(2, 3)
    entry = sharded("layers.0.mlp.experts.experts.fc.weight", p, (4, 2, 6), (3, 0, 3), stacked=1)
    (named,) = survey([Model([entry], p=p)], Context()).named.values()
    assert named.fqn == "layers.0.mlp.experts.experts.3.fc.weight"
    assert named.shape == (2, 6)
    assert [tile.box for tile in named.tiling.tiles] == [Box((0, 3), (2, 3))]


def test_rules_rename_and_tie_and_the_second_name_becomes_an_alias() -> None:
    p, q = parameter(2), parameter(2)
    rules = Rules.of({"names": [{"match": "a(.*)", "name": "x{1}"}], "tied": {"head": "x1", "neck": "x1"}})
    names = {"a1": p, "a2": p, "head": p, "b": q}
    found = survey([Model([sharded(n, t, (2,), (0,)) for n, t in names.items()], p=p, q=q)], Context(rules))
    assert [named.fqn for named in found.named.values()] == ["x1", "b"]
    assert found.aliases == {"x2": "x1", "head": "x1"}
    assert found.unused == {"tied: neck"}


def test_buffers_and_extra_state_are_told_apart_from_parameters() -> None:
    p = parameter(2)
    model = Model([], p=p)
    model.entries = [
        sharded("p", p, (2,), (0,)),
        sharded("count", torch.zeros(2), (2,), (0,)),
        ShardedObject(key="p._extra_state", data=None, global_shape=(1,), global_offset=(0,)),
        ShardedObject(key="q._extra_state", data={"amax": 1.0}, global_shape=(1,), global_offset=(0,)),
    ]
    model.add_module("local3", torch.nn.Identity())
    found = survey([model], Context())
    assert [buffer.fqn for buffer in found.buffers] == ["count"]
    assert found.extras == {"q": (model.local3, {"amax": 1.0})}


def test_a_rule_may_be_of_extra_state_alone() -> None:
    entry = ShardedObject(key="q._extra_state", data=None, global_shape=(1,), global_offset=(0,))
    rules = Rules.of({"names": [{"match": r"q\._extra_state", "name": "x._extra_state"}]})
    assert survey([Model([entry])], Context(rules)).unused == set()


def test_the_groups_that_the_user_names_place_what_rules_cut() -> None:
    p, q = parameter(2), parameter(2)
    q.allreduce = False  # an expert
    model = Model([sharded("cut", p, (2,), (0,)), sharded("whole", q, (2,), (0,))], p=p, q=q)
    rules = Rules.of({"tensors": [{"match": "cut", "dim": 0}, {"match": "whole"}]})
    found = survey([model], Context(rules, {"tp": (4, 0)}))
    (tile,) = found.named[id(p)].tiling.tiles
    assert (found.named[id(p)].shape, tile.box) == ((4,), Box((2,), (2,)))
    assert found.assumed == {"whole"}
    with pytest.raises(UnsupportedLayout, match=r"axis 'tp': the group .* lacks this rank \(0\)"):
        survey([model], Context(rules, {"tp": (1, 2)}))


def test_a_rule_that_cuts_needs_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    p = parameter(2)
    model = Model([sharded("cut", p, (2,), (0,))], p=p)
    rules = Rules.of({"tensors": [{"match": "cut", "dim": 0}]})
    with pytest.raises(UnsupportedLayout, match="rule 'cut' cuts it, but nobody says with whom"):
        survey([model], Context(rules))
    assert survey([model], Context(rules, {"tp": (0,)})).named[id(p)].shape == (2,)


def test_all_that_cannot_be_expressed_is_listed_at_once() -> None:
    p, q, r, twice = parameter(2, 2), parameter(2), parameter(2), parameter(2)
    entries = [
        sharded("stacked", p, (4, 2, 2), (1, 0, 0), stacked=1),
        ShardedTensorFactory(key="copied", data=q, build=lambda: [sharded("copied", torch.zeros(2), (4,), (0,))]),
        sharded("same", r, (2,), (0,)),
        sharded("same", twice, (2,), (0,)),
        SimpleNamespace(),
    ]
    with pytest.raises(UnsupportedLayout) as caught:
        survey([Model(entries, p=p, q=q, r=r, twice=twice)], Context())
    text = str(caught.value)
    for words in (
        "tensor 'stacked' is stacked",
        "tensor 'copied': the parts that it is stored as are no views",
        "tensor 'same' is held twice",
        "state 'local4' is a SimpleNamespace",
        "parameter 'twice' is not in the model's sharded_state_dict()",
    ):
        assert words in text


def chain() -> tuple[Any, list[torch.optim.Adam]]:
    inners = [torch.optim.Adam([{"params": [parameter(2)], "lr": 0.1 * i}]) for i in (1, 2)]
    wrappers = [MegatronOptimizer(optimizer=inner, is_stub_optimizer=False) for inner in inners]
    stub = MegatronOptimizer(optimizer=None, is_stub_optimizer=True)
    return ChainedOptimizer(chained_optimizers=[wrappers[0], stub, wrappers[1]]), inners


def test_a_chain_looks_like_one_optimizer_and_writes_through() -> None:
    optimizer, inners = chain()
    assert len(wrappers_of(optimizer)) == 3
    joined = inner_optimizer(optimizer)
    assert type(joined) is torch.optim.Adam
    assert [group["lr"] for group in joined.param_groups] == [0.1, 0.2]
    joined.param_groups[1]["lr"] = 0.5
    assert inners[1].param_groups[0]["lr"] == 0.5
    first, second = (inner.param_groups[0]["params"][0] for inner in inners)
    assert joined.state.get(second) is None
    assert second not in joined.state
    assert len(joined.state) == 0, "looking must not make an entry"
    joined.state[second]["step"] = 3
    joined.state[first] = {"step": 4}
    assert inners[1].state[second] == {"step": 3}
    assert list(joined.state) == [first, second]
    del joined.state[second]
    assert not inners[1].state


def test_a_rank_that_steps_nothing_has_no_inner_optimizer() -> None:
    assert inner_optimizer(MegatronOptimizer(optimizer=None, is_stub_optimizer=True)) is None


def test_an_engine_is_recognized_by_its_optimizer() -> None:
    model, (optimizer, inners) = torch.nn.Linear(1, 1), chain()
    assert isinstance(adapter_for((model, optimizer)), MegatronAdapter)
    assert is_megatron(([model], optimizer, object()))
    assert not is_megatron((model, inners[0]))
    assert not is_megatron((model,))
    assert not is_megatron(optimizer)
