"""What a torch loop may consist of, on one process: every kind of tensor, several optimizers, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.engine.find import adapter_for
from ckpt.engine.torch_engine import TorchAdapter
from ckpt.engine.torch_names import modules_of
from ckpt.engine.torch_parts import parts_of

if TYPE_CHECKING:
    from pathlib import Path


class Odd(nn.Module):
    """One of every kind of tensor that a module may have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.plain = nn.Linear(3, 4)
        self.twin = nn.Linear(3, 4, bias=False)
        self.twin.weight = self.plain.weight
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        both = torch.randn(6)
        self.left, self.right = nn.Parameter(both[:4]), nn.Parameter(both[2:])  # two parameters share two elements
        self.aside = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("cache", torch.randn(9), persistent=False)
        self.note: Any = seed

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def step_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if name not in ("aside", "frozen")]


def run(model: Odd, optimizers: list[Any], steps: int) -> None:
    for step in range(steps):
        for p in model.step_parameters():
            generator = torch.Generator().manual_seed(step * 100 + p.numel())
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def contents(engine: object) -> dict[Any, list[Any]]:
    shards = adapter_for(engine).describe().shards
    return {
        (s.spec.fqn, s.spec.role, s.box): torch.view_as_real(s.tensor).tolist()
        if s.tensor.is_complex()
        else s.tensor.tolist()
        for s in shards
    }


def adam(model: Odd) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.step_parameters(), lr=0.1)


def test_every_kind_of_tensor_comes_back_into_its_own_memory(tmp_path: Path) -> None:
    first, second = Odd(1), Odd(2)
    one, two = adam(first), adam(second)
    run(first, [one], 2)
    ckpt.save((first, one), tmp_path, step=1)
    places = [p.data_ptr() for p in second.parameters()]
    report = ckpt.load((second, two), tmp_path)
    assert (report.missing, report.unexpected, report.notes) == ((), (), ())
    assert contents((second, two)) == contents((first, one))
    assert places == [p.data_ptr() for p in second.parameters()]
    assert (second.turned.stride(), second.note) == ((1, 6), 1)
    run(first, [one], 2)
    run(second, [two], 2)
    assert contents((second, two)) == contents((first, one))
    state = adapter_for((first, one)).describe()
    assert state.aliases == {"twin.weight": "plain.weight"}
    assert {s.spec.fqn for s in state.shards} >= {"frozen", "aside", "scalar", "empty", "count", "left", "right"}
    assert "cache" not in {s.spec.fqn for s in state.shards}


def test_a_module_alone_is_parameters_and_buffers(tmp_path: Path) -> None:
    first, second = Odd(1), Odd(2)
    ckpt.save(first, tmp_path)
    ckpt.load(second, tmp_path)
    assert contents(second) == contents(first)
    assert {role for _, role, _ in contents(first)} == {"param", "buffer"}
    assert ckpt.steps(tmp_path) == [0]
    optimizer = adam(first)
    run(first, [optimizer], 1)
    ckpt.save((first, optimizer), tmp_path)
    with pytest.raises(ckpt.MissingState, match="exp_avg"):
        ckpt.load(second, tmp_path)
    assert ckpt.load(second, tmp_path, strict=False).missing == ()
    assert contents(second) == contents(first)


def test_optimizers_and_schedulers_come_in_any_number_and_order(tmp_path: Path) -> None:
    def job(seed: int) -> Any:
        model = Odd(seed)
        parameters = model.step_parameters()
        matrices = torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.5, momentum=0.9)
        vectors = torch.optim.AdamW([p for p in parameters if p.dim() <= 1], lr=0.25)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.1 * seed) for o in (matrices, vectors)]
        return model, matrices, vectors, schedulers

    model, matrices, vectors, schedulers = job(1)
    run(model, [matrices, vectors], 3)
    for scheduler in schedulers * 3:
        scheduler.step()
    engine = {"model": model, "optimizers": [matrices, vectors], "schedulers": schedulers}
    ckpt.save(engine, tmp_path)
    assert ckpt.steps(tmp_path) == [3]
    other = job(2)
    # Optimizers are found again by what they step, schedulers by the optimizer that they drive.
    assert ckpt.load((other[3], other[2], other[0], None, other[1]), tmp_path).notes == ()
    assert contents(other[:3]) == contents((model, matrices, vectors))
    assert [o.param_groups[0]["lr"] for o in other[1:3]] == pytest.approx([0.05, 0.025])
    assert [s.state_dict() for s in other[3]] == [s.state_dict() for s in schedulers]
    alone = adam(Odd(3))
    assert TorchAdapter((Odd(3), alone)).step() == 0


def test_a_scheduler_for_each_part_and_one_for_the_whole_continue_each_other(tmp_path: Path) -> None:
    def job(whole: bool, lr: float) -> Any:
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        groups = [{"params": list(part.parameters()), "lr": lr * (i + 1)} for i, part in enumerate(model)]
        optimizers = [torch.optim.SGD(g) for g in ([groups] if whole else [[group] for group in groups])]
        chain = [(torch.optim.lr_scheduler.StepLR, 2), (torch.optim.lr_scheduler.ExponentialLR, 0.5)]
        return model, optimizers, [kind(one, value) for one in optimizers for kind, value in chain]

    def rates(engine: Any) -> list[Any]:
        optimizers, schedulers = engine[1:]
        return [
            [group["lr"] for one in optimizers for group in one.param_groups],
            [group["initial_lr"] for one in optimizers for group in one.param_groups],
            *[[lr for one in schedulers[n::2] for lr in one.base_lrs] for n in (0, 1)],
            *[{(one.last_epoch, one._step_count) for one in schedulers[n::2]} for n in (0, 1)],
        ]

    whole = job(True, 1.0)
    for _ in range(3):
        whole[1][0].step()
        for scheduler in whole[2]:
            scheduler.step()
    ckpt.save(whole, tmp_path / "whole", step=3)
    parts, again = job(False, 7.0), job(True, 9.0)
    assert ckpt.load(parts, tmp_path / "whole").notes == ()
    assert rates(parts) == rates(whole)
    ckpt.save(parts, tmp_path / "parts", step=3)
    assert ckpt.load(again, tmp_path / "parts").notes == ()
    assert rates(again) == rates(whole)
    fewer, _, _ = job(True, 1.0)
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in fewer])
    first = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    notes = ckpt.load((fewer, optimizer, first), tmp_path / "parts").notes
    assert ["ExponentialLR was saved, this engine has none" in note for note in notes] == [True]


def test_parameters_without_a_gradient_have_no_state_before_or_behind_a_load(tmp_path: Path) -> None:
    model, other = Odd(1), Odd(2)
    optimizer, trained = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, other))
    run(model, [optimizer], 1)
    other.aside.grad = torch.ones(3)
    run(other, [trained], 2)
    ckpt.save((model, optimizer), tmp_path)
    assert other.aside in trained.state
    assert ckpt.load((other, trained), tmp_path).notes == ()
    assert other.aside not in trained.state
    assert contents((other, trained)) == contents((model, optimizer))


def test_a_parameter_that_was_frozen_later_keeps_its_state(tmp_path: Path) -> None:
    model, other = Odd(1), Odd(2)
    optimizer, fresh = (torch.optim.Adam(m.step_parameters(), lr=0.1) for m in (model, other))
    run(model, [optimizer], 2)
    for m in (model, other):
        m.plain.requires_grad_(False)
    ckpt.save((model, optimizer), tmp_path)
    assert ckpt.load((other, fresh), tmp_path).notes == ()
    assert contents((other, fresh)) == contents((model, optimizer))
    assert other.plain.bias in fresh.state


def test_a_cast_load_leaves_moments_that_the_optimizer_can_step(tmp_path: Path) -> None:
    model, low = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()
    optimizer, fresh = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, low))
    for one, stepped in ((model, optimizer), (low, fresh)):
        if stepped is fresh:
            with pytest.raises(ckpt.MissingState, match=r"exp_avg.*bfloat16"):
                ckpt.load((low, fresh), tmp_path)
            assert not fresh.state
            assert any("exp_avg" in cast for cast in ckpt.load((low, fresh), tmp_path, cast=True).casts)
            assert torch.equal(fresh.state[low.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"].bfloat16())
        one(torch.ones(1, 2, dtype=one.weight.dtype)).sum().backward()
        stepped.step()
        if stepped is optimizer:
            ckpt.save((model, optimizer), tmp_path)


def test_a_count_that_is_a_number_stays_one_where_no_trial_step_is_possible(tmp_path: Path) -> None:
    def job(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Embedding(5, 2, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters())

    model, optimizer = job(1)
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    ckpt.save((model, optimizer), tmp_path)
    other, fresh = job(2)
    ckpt.load((other, fresh), tmp_path)
    state = fresh.state[other.weight]
    assert type(state["step"]) is int
    assert contents((other, fresh)) == contents((model, optimizer))


def test_a_gradient_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    model, scaler = Odd(1), torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.ones(()))
    ckpt.save((model, scaler), tmp_path, step=1)
    other = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert ckpt.load((Odd(2), other), tmp_path).notes == ()
    assert other.state_dict() == scaler.state_dict()
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert "another kind or disabled" in ckpt.load((Odd(2), off), tmp_path).notes[0]
    assert "only the checkpoint has a gradient scaler" in ckpt.load(Odd(2), tmp_path).notes[0]


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        (lambda m: (m, 3), r"engine\[1\] is a builtins.int"),
        (lambda m: (m, Odd(2)), r"engine\[1\] is a second model"),
        (lambda m: {"model": m, "optimiser": adam(m)}, r"engine\['optimiser'\] is a .*Adam, expected: a key of"),
        (lambda m: {"model": m, "optimizer": m}, r"engine\['optimizer'\] is a .*Odd, expected: optimizer"),
        (lambda m: (adam(m),), "there is no module"),
        (lambda m: (m, *[torch.amp.GradScaler("cpu")] * 2), "2 gradient scalers"),
        (lambda m: [type("DeepSpeedEngine", (), {})(), 4], r"engine\[0\].*passed alone; engine\[1\] is a builtins.int"),
    ],
)
def test_a_wrong_tuple_says_what_was_found(engine: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(ckpt.ConfigError, match=found) as error:
        ckpt.save(engine(Odd(1)), tmp_path)
    assert "expected (model, optimizer)" in str(error.value)


def test_everything_that_cannot_be_expressed_is_listed_at_once() -> None:
    model = Odd(1)
    model.register_buffer("wide", torch.ones(1).expand(4))
    model.register_buffer("nowhere", torch.ones(2, device="meta"))
    model.later = nn.LazyLinear(3)
    optimizer = torch.optim.SGD([model.aside, nn.Parameter(torch.ones(7))])
    with pytest.raises(ckpt.UnsupportedLayout) as error:
        adapter_for((model, optimizer)).describe()
    problems = error.value.problems
    wanted = ("'wide'", "'nowhere'", "'later.weight'", "'later.bias'", "shape [7] that the module lacks")
    assert len(problems) == len(wanted)
    for name in wanted:
        assert sum(name in problem for problem in problems) == 1, (name, problems)


def test_state_that_is_not_elementwise_is_named() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ckpt.UnsupportedLayout, match=r"'row_var' of 'weight' is a tensor of shape \[4, 1\]"):
        adapter_for((model, optimizer)).describe()


def test_names_do_not_depend_on_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)), nn.DataParallel(nn.Linear(1, 1)))

    model = torch.compile(nn.DataParallel(Mine()), backend="eager")
    names = {name for name, child in modules_of(model) if isinstance(child, nn.Linear)}
    assert names == {"module.0", "module.1"}  # a user's own .module stays


def test_stages_of_one_rank_need_names_of_their_own() -> None:
    parts = [nn.Linear(1, 1), nn.Linear(2, 2)]
    with pytest.raises(ckpt.UnsupportedLayout, match="'weight': two different tensors") as error:
        adapter_for(([*parts],)).describe()
    assert len(error.value.problems) == 2
    model = [nn.ModuleDict({"a": parts[0]}), nn.ModuleDict({"b": parts[1]})]
    state = adapter_for((model, torch.optim.SGD(parts[1].parameters()))).describe()
    assert [s.spec.fqn for s in state.shards] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert len(parts_of((model,)).models) == 2
