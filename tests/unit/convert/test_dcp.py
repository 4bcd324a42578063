"""State dicts in every form that scripts give to ``dcp.save``: read as our adapter names the same job, and written."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ckpt
from ckpt.convert.compare import compare
from ckpt.convert.dcp import optimizer as dcp_optimizer
from ckpt.convert.dcp import read as read_dcp
from ckpt.convert.dcp.read import is_dcp, open_dcp
from ckpt.convert.dcp.write import write_dcp
from ckpt.convert.find import open_source
from ckpt.convert.job import Conversion, Result, convert
from ckpt.convert.options import WEIGHTS, ReadOptions, WriteOptions
from ckpt.convert.ours.read import open_ours
from ckpt.convert.target import target_of
from ckpt.errors import ConfigError, MalformedData, NoSuchCheckpoint, UnsupportedFeature
from ckpt.layout.rules import Rules
from ckpt.layout.spec import BUFFER, PARAM
from ckpt.store.memory import MemoryStore
from ckpt.store.open import open_store
from tests.unit.convert.contents import contents
from tests.unit.convert.logical import content, objects
from tests.unit.convert.sources import ADAM, Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.convert.opened import Opened


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant


class Net(nn.Module):
    """Tied, frozen, scalar, transposed and empty parameters; buffers; state beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.frozen = nn.Linear(4, 2)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.note = "kept"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def run(self) -> torch.Tensor:
        x = self.norm(self.words(torch.arange(7)))
        for layer in self.layers:
            x = layer(x)
        return (self.scale * self.head(x) ** 2).sum() + (self.turned**2).sum() + self.frozen(x).sum()


def trained(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = Net()
    made = optimizer([p for p in model.parameters() if p.requires_grad], **options)
    schedule = torch.optim.lr_scheduler.StepLR(made, 2)
    for _ in range(3):
        made.zero_grad()
        model.run().backward()
        made.step()
        schedule.step()
    return model, made, schedule


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, checkpoint_id=str(path), no_dist=True, **options)


def opened(path: Path, **options: Any) -> Opened:
    return open_dcp(open_store(str(path)), "it", options=ReadOptions(**options))


def imported(source: Path, destination: Path, **asked: Any) -> Result:
    return convert(
        Conversion(source=str(source), destination=str(destination), **asked),
        lambda _: nullcontext(lambda _done, _total: None),
    )


def of_functions(model: Net, optimizer: Any) -> dict[str, Any]:
    a, b = get_state_dict(model, optimizer)
    return {"model": a, "optim": b}


def flattened(model: Net, optimizer: Any) -> dict[str, Any]:
    a, b = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {"state": {"app": {"model": a, "optim": b}}}


def top(model: Net, optimizer: Any) -> dict[str, Any]:
    a, b = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {**a, "optimizer": b}


def by_number(model: Net, optimizer: Any) -> dict[str, Any]:
    return {"net": {f"module.{k}": v for k, v in model.state_dict().items()}, "opt": optimizer.state_dict()}


@pytest.mark.parametrize("form", [of_functions, flattened, top, by_number])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.NAdam, {"lr": 0.1}),
    ],
)
def test_every_form_of_a_state_dict_is_the_same_state(
    form: Callable[..., Any], optimizer: Any, options: Any, tmp_path: Path
) -> None:
    model, made, schedule = trained(optimizer, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ckpt.save((model, made, schedule, scaler), str(tmp_path / "ours"), step=3)
    save({**form(model, made), "sched": schedule.state_dict(), "amp": scaler.state_dict()}, tmp_path / "theirs")
    theirs, mine = opened(tmp_path / "theirs"), open_ours(open_store(str(tmp_path / "ours")), "ours")
    assert content(theirs) == content(mine)
    assert theirs.aliases == mine.aliases == {"head.weight": "words.weight"}
    assert theirs.step == (3 if optimizer is not torch.optim.SGD else schedule.last_epoch)
    assert objects(theirs) == objects(mine)
    assert any(note.startswith("not stepped, param by name: frozen.weight, frozen.bias") for note in theirs.notes)
    assert any(note.startswith("not stepped, buffer by name: norm.running_mean") for note in theirs.notes)


def test_the_options_of_torchs_optimizers_are_those_of_their_signatures() -> None:
    for name, (options, defaults) in dcp_optimizer._torch_optimizers().items():
        kind = getattr(torch.optim, name.rpartition(".")[2])
        (group,) = kind([torch.zeros(1, 1, requires_grad=True)]).param_groups
        assert options == group.keys() - {"params"}, name
        assert all(group[k] == v or v is None or isinstance(v, torch.Tensor) for k, v in defaults.items()), name


def test_several_optimizers_are_one_list_of_groups(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    one, two = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    one.step()
    two.step()
    ckpt.save((model, [one, two]), str(tmp_path / "ours"), step=1)
    save({"model": model.state_dict(), "o1": one.state_dict(), "o2": two.state_dict()}, tmp_path / "theirs")
    theirs, mine = opened(tmp_path / "theirs"), open_ours(open_store(str(tmp_path / "ours")), "ours")
    assert content(theirs) == content(mine)
    assert objects(theirs) == objects(mine)


def test_factors_of_parameters_by_number_find_their_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    made = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    made.step()
    state = {"model": model.state_dict(), "optimizer": made.state_dict()}
    save(state, tmp_path / "theirs")
    torch.save(state, tmp_path / "theirs.pt")
    found = opened(tmp_path / "theirs")
    assert found.lost == ()
    assert {spec.role for spec in found.specs} == {PARAM, "row_var", "col_var", "variance", "step"}
    plain = open_source(str(tmp_path / "theirs.pt"), options=ReadOptions())
    assert [row for row in compare(found, plain) if row.status != "equal"] == []


def test_of_numbers_that_fit_two_ways_the_weights_are_read(tmp_path: Path) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2, 2)) for name in "abc"})
    made = torch.optim.Adam([model["a"], model["b"]])  # or c?
    (model["a"] + model["b"]).sum().backward()
    made.step()
    save({"model": model.state_dict(), "optimizer": made.state_dict()}, tmp_path / "theirs")
    found = opened(tmp_path / "theirs")
    assert {spec.key for spec in found.specs} == {(name, PARAM) for name in "abc"}
    (line,) = found.lost
    assert line.startswith("the state of optimizer 'optimizer' is left out: it knows its parameters by number (0, 1)")
    assert line.endswith("get_state_dict returns")
    assert (found.step, objects(found)["optimizer"]) == (1, None)
    assert line in imported(tmp_path / "theirs", tmp_path / "ours").written.lost
    assert line in imported(tmp_path / "theirs", tmp_path / "dry", writing=WriteOptions(dry_run=True)).written.lost


def test_a_model_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for n, state in enumerate([model.state_dict(), {"state_dict": model.state_dict(), "arg": [1, {"x": (2,)}]}]):
        save(state, tmp_path / str(n))
        found = opened(tmp_path / str(n))
        roles = {spec.fqn: spec.role for spec in found.specs}
        assert roles.keys() == model.state_dict().keys()
        assert {roles[name] for name, _ in model.named_parameters()} == {PARAM}
        assert {roles[name] for name, _ in model.named_buffers()} == {BUFFER}
    assert objects(found)["arg"] == [1, {"x": (2,)}]
    assert objects(found)["optimizer"] is None


class Positions(nn.Module):
    """A buffer and a frozen parameter that no name tells apart."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("scale", torch.randn(4))
        self.places = nn.Parameter(torch.randn(1, 4), requires_grad=False)
        self.line = nn.Linear(4, 2)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])


def test_what_was_taken_for_a_buffer_fills_a_parameter_and_the_reverse(tmp_path: Path) -> None:
    """Nothing records the difference: a weights file has no buffers, a job's whole state no frozen parameters."""
    model = Positions(1)
    made = model.optimizer()
    model.line(model.scale + model.places).sum().backward()
    made.step()
    save(model.state_dict(), tmp_path / "weights")
    save(of_functions(model, made), tmp_path / "whole")  # type: ignore[arg-type]
    ckpt.save((model, made), str(tmp_path / "ours"), step=1)
    imported(tmp_path / "ours", tmp_path / "out", to="dcp")
    for source, kind in (("weights", PARAM), ("whole", BUFFER), ("out", BUFFER)):
        destination = str(tmp_path / f"{source}-again")
        assert imported(tmp_path / source, Path(destination), verify=True).unequal == ()
        catalog = open_ours(open_store(destination), "again").catalog()
        assert catalog.find("scale", kind)
        assert catalog.find("places", kind)
        for strict in (True, False):
            other = Positions(2)
            whole = source != "weights" and strict
            report = ckpt.load((other, other.optimizer()) if whole else other, destination, strict=strict)
            assert report.missing == ()
            swapped = "scale" if kind == PARAM else "places"
            assert [note for note in report.notes if "or the reverse" in note and note.endswith(f": {swapped}")]
            for name, value in model.state_dict().items():
                assert torch.equal(other.state_dict()[name], value), (source, name)


def test_a_writer_that_tells_no_paths(tmp_path: Path) -> None:
    model, made, _ = trained(torch.optim.AdamW)
    a, b = get_state_dict(model, made, options=StateDictOptions(flatten_optimizer_state_dict=True))
    flat = {**{f"model.{k}": v for k, v in a.items()}, **{f"optim.{k}": v for k, v in b.items()}}
    save(flat, tmp_path / "flat", planner=DefaultSavePlanner(flatten_state_dict=False))
    save({"model": a, "optim": b}, tmp_path / "nested")
    found, wanted = opened(tmp_path / "flat"), opened(tmp_path / "nested")
    assert content(found) == content(wanted)
    assert objects(found) == objects(wanted)


def test_groups_in_one_value_as_torch_before_2_4_left_them(tmp_path: Path) -> None:
    model, made, schedule = trained(torch.optim.AdamW)
    state = of_functions(model, made)
    old = {f"model.{k}": v for k, v in state["model"].items() if k != "_extra_state"}
    old |= {f"optim.state.{name}.{k}": v for name, one in state["optim"]["state"].items() for k, v in one.items()}
    old |= {"optim.param_groups": state["optim"]["param_groups"], "sched": schedule.state_dict()}
    save(old, tmp_path / "old", planner=DefaultSavePlanner(flatten_state_dict=False))
    del state["model"]["_extra_state"]
    save({**state, "sched": schedule.state_dict()}, tmp_path / "new")
    found, wanted = opened(tmp_path / "old"), opened(tmp_path / "new")
    assert content(found) == content(wanted)
    assert objects(found) == objects(wanted)


class Thing:
    """A class of a script's own."""


def test_objects_of_unknown_classes_need_trust_and_are_named(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}, "cursor": {"it": Thing()}}, tmp_path)
    with pytest.raises(UnsupportedFeature, match=r"cursor\.it: .*test_dcp\.Thing.*--trust-pickle"):
        opened(tmp_path)
    trusted = opened(tmp_path, trust_pickle=True)
    assert next(line for line in trusted.lost if "cursor" in line).endswith("left out")
    assert ("w", PARAM) in content(trusted)


def test_which_model_it_is_must_be_clear(tmp_path: Path) -> None:
    a, b = nn.Linear(2, 2).state_dict(), nn.Linear(3, 3).state_dict()
    save({"actor": {"x": {f"m.{k}": v for k, v in a.items()}}, "critic": {f"m.{k}": v for k, v in b.items()}}, tmp_path)
    with pytest.raises(UnsupportedFeature, match=r"cannot tell.*'actor.x' \(2 tensors, 'm\.weight', …\), 'critic'"):
        opened(tmp_path)
    save({"n": 3}, tmp_path / "none")
    with pytest.raises(UnsupportedFeature, match=r"holds no tensor of a model: found n"):
        opened(tmp_path / "none")


def test_state_of_a_parameter_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    model, made, _ = trained(torch.optim.AdamW)
    state = of_functions(model, made)
    del state["model"]["scale"]
    save(state, tmp_path)
    with pytest.raises(UnsupportedFeature, match=r"'optim' has state of param.*scale.*--roles weights"):
        opened(tmp_path)
    found = opened(tmp_path, roles=WEIGHTS)
    assert {spec.fqn for spec in found.specs} == state["model"].keys() - {"_extra_state"}
    assert "has state of parameters that the model lacks: optim.state.scale" in found.lost[0]


def test_options_by_parameter_as_megatrons_fsdp_leaves_them(tmp_path: Path) -> None:
    shapes = {"decoder.layers.0.mlp.linear_fc1.weight": (4, 3), "decoder.final_layernorm.weight": (3,)}
    options = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "is_expert_parallel": False}
    state, meta = {}, {}
    for n, (name, shape) in enumerate(shapes.items()):  # the optimizer's names have one wrapper more
        state[f"module.module.{name}"] = {"exp_avg": torch.full(shape, float(n)), "step": torch.tensor(2.0)}
        meta[f"module.module.{name}"] = {**options, "wd_mult": 1.0 - n}
    model = {f"module.{name}": torch.ones(shape) for name, shape in shapes.items()}
    model["module.decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    optimizer = {"state": state, "param_to_group_meta": meta}
    dcp.save({"model": model, "optimizer": optimizer, "iteration": 2}, checkpoint_id=tmp_path)
    opened = open_dcp(open_store(str(tmp_path)), "it")
    found = contents(opened)
    assert opened.step == 2
    assert {key[0] for key in found} == set(shapes)
    for n, (name, shape) in enumerate(shapes.items()):
        assert torch.equal(found[name, "exp_avg"], torch.full(shape, float(n)))
        assert found[name, "step"].item() == 2
    groups = objects(opened)["optimizer"]["groups"]
    assert groups == [{"params": [name], "options": {**options, "wd_mult": 1.0 - n}} for n, name in enumerate(shapes)]


def test_what_is_nobodys_is_carried_if_it_is_small_and_named_if_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, _ = trained(torch.optim.AdamW)
    ema = {name: torch.full_like(p, 2.0) for name, p in model.state_dict().items() if name.startswith("layers")}
    state = of_functions(model, made)
    save({**state, "ema": ema, "seen": torch.tensor(5), "rate": {"a": [0.5, None, "x"]}}, tmp_path)
    found = objects(opened(tmp_path))
    assert found["ema"]["layers.0.bias"] == [2.0] * 4
    assert (found["seen"], found["rate"]) == (5, {"a": [0.5, None, "x"]})
    monkeypatch.setattr(read_dcp, "SMALL", 100)
    left = opened(tmp_path)
    assert "ema" not in objects(left)
    assert any(line.startswith("ema.layers.0.weight") and line.endswith("left out") for line in left.lost)


def test_ties_that_a_user_states(tmp_path: Path) -> None:
    model = Net()
    save(model.state_dict(), tmp_path)
    assert opened(tmp_path).aliases == {}  # without an optimizer, equal tensors may be two
    stated = opened(tmp_path, rules=Rules.of({"tied": {"head.weight": "words.weight"}}))
    assert stated.aliases == {"head.weight": "words.weight"}
    assert ("head.weight", PARAM) not in content(stated)


def test_one_folder_for_each_step(tmp_path: Path) -> None:
    for step in (2, 10):
        save({"model": {"w": torch.full((2,), float(step))}}, tmp_path / f"step-{step}")
    (tmp_path / "step-11").mkdir()  # not finished: no .metadata
    store = open_store(str(tmp_path))
    assert is_dcp(store)
    assert not is_dcp(open_store(str(tmp_path / "step-11")))
    newest = open_dcp(store, "runs")
    assert (newest.where, newest.step) == ("runs/step-10", 10)
    assert content(newest)["w", PARAM][2] == torch.full((2,), 10.0).numpy().tobytes()
    assert content(open_dcp(store, "runs", step=2))["w", PARAM][2] == torch.full((2,), 2.0).numpy().tobytes()
    with pytest.raises(NoSuchCheckpoint, match=r"no checkpoint of step 11 in runs.*2, 10"):
        open_dcp(store, "runs", step=11)


def test_compressed_files_are_refused_by_name(tmp_path: Path) -> None:
    save({"w": torch.ones(4)}, tmp_path, storage_writer=FileSystemWriter(str(tmp_path), _extensions=[ZStandard()]))
    with pytest.raises(UnsupportedFeature, match=r"'w' was written through \['stream.zstd/1'\]"):
        opened(tmp_path)


def test_parts_in_safetensors_files_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    for rank, (first, stop) in enumerate([(0, 3), (3, 6)], start=1):
        said = {"m.w": {"saved_offsets": [first, 0]}, **({"m.b": {"saved_offsets": [0]}} if rank == 1 else {})}
        tensors = {"m.w": whole[first:stop].clone(), **({"m.b": torch.ones(2)} if rank == 1 else {})}
        metadata = {"DCP_SHARDING_INFO": json.dumps(said), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(tensors, tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors", metadata)
    found = contents(open_source(str(tmp_path), options=ReadOptions()))
    assert torch.equal(found["m.w", PARAM], whole)
    assert torch.equal(found["m.b", PARAM], torch.ones(2))
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(MalformedData, match=r"'m\.w'.*the files hold 12 of 24 elements"):
        open_source(str(tmp_path), options=ReadOptions())


def test_what_dcps_safetensors_writer_writes_is_read(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    for number, distributed in enumerate((False, True)):
        folder = tmp_path / str(number)
        save(
            model.state_dict(),
            folder,
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=distributed),
        )
        found = contents(open_source(str(folder), options=ReadOptions()))
        assert {name: torch.equal(t, model.state_dict()[name]) for (name, _), t in found.items()} == {
            "weight": True,
            "bias": True,
        }


# ------------------------------------------------------------------------------------------------------------- writing


def written(source: Opened, store: Any, *, options: WriteOptions | None = None, **degrees: Any) -> Any:
    return write_dcp(source, store, target_of(source, **{"dp": 2, **degrees}), options or WriteOptions())


@pytest.mark.parametrize("flat", [False, True])
def test_dcp_loads_what_we_wrote_into_a_plain_job(flat: bool, tmp_path: Path) -> None:
    model, made, schedule = trained(torch.optim.AdamW, lr=0.1)
    ckpt.save((model, made, schedule), str(tmp_path / "ours"), step=3)
    source = open_ours(open_store(str(tmp_path / "ours")), "ours")
    done = written(source, open_store(str(tmp_path / "dcp")), engine="ddp")
    assert done.lost == ("random generators: a state dict of DCP is one for all ranks",)
    assert sum(f.stat().st_size for f in (tmp_path / "dcp").glob("*.distcp")) < done.bytes_written
    other, theirs, again = Net(), None, None
    theirs = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.7)
    again = torch.optim.lr_scheduler.StepLR(theirs, 2)
    ways = StateDictOptions(flatten_optimizer_state_dict=flat)
    a, b = get_state_dict(other, theirs, options=ways)
    state = {"model": a, "optim": b, "scheduler": again.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    a, b = state["model"], state["optim"]
    set_state_dict(other, theirs, model_state_dict=a, optim_state_dict=b, options=ways)
    again.load_state_dict(state["scheduler"])
    ckpt.save((other, theirs, again), str(tmp_path / "again"), step=3)
    back = open_ours(open_store(str(tmp_path / "again")), "again")
    assert content(back) == content(source)
    assert objects(back) == objects(source)
    assert content(opened(tmp_path / "dcp")) == content(source)


def adam(*, steps: str = "int64") -> Source:
    source = Source().weights({"a.weight": (5, 3), "a.bias": (3,)}, ADAM[:-1]).add("empty.weight", "param", (0, 3))
    source.add("a.weight", "step", (), steps, 7).add("a.bias", "step", (), steps, 7)
    return source.groups(["a.weight"], ["a.bias"])


def test_masters_are_what_is_written_and_missing_options_are_torchs_own() -> None:
    source, store = adam().open(), MemoryStore()
    done = written(source, store, engine="deepspeed", zero=1)
    assert any("precision of their masters" in line for line in done.made)
    assert any("amsgrad" in line and "betas" in line for line in done.made)
    assert any(line.startswith("parameters that are not the rounding") for line in done.lost)  # nobody has claimed it
    found, wanted = content(open_dcp(store, "dcp")), content(source)
    assert found["a.weight", PARAM] == wanted["a.weight", "master"]
    assert found["a.bias", "exp_avg_sq"] == wanted["a.bias", "exp_avg_sq"]
    assert found["a.bias", "step"] == wanted["a.bias", "step"]
    assert found["empty.weight", PARAM][1] == (0, 3)
    assert not [key for key in found if key[1] == "master"]


def test_weights_alone_in_another_dtype() -> None:
    source, store = adam().open(), MemoryStore()
    options = WriteOptions(roles=WEIGHTS, dtype="bfloat16")
    target = target_of(source, dp=2, roles=WEIGHTS, dtype="bfloat16")
    write_dcp(source, store, target, options)
    found = content(open_dcp(store, "dcp"))
    assert set(found) == {("a.weight", PARAM), ("a.bias", PARAM), ("empty.weight", PARAM)}
    assert found["a.weight", PARAM][:2] == (torch.bfloat16, (5, 3))


def test_a_dry_run_writes_nothing_and_a_second_run_nothing_more() -> None:
    source, store = adam().open(), MemoryStore()
    dry = written(source, store, options=WriteOptions(dry_run=True))
    assert store.objects == {}
    done = written(source, store)
    assert (dry.bytes_written, dry.files, dry.lost) == (done.bytes_written, done.files, done.lost)
    assert done.bytes_written == sum(len(v) for k, v in store.objects.items() if k != "ckpt-reshard.json")
    before = dict(store.objects)
    again = written(source, store)
    assert again.bytes_present == done.bytes_written - len(before[".metadata"])
    assert store.objects == before
    with pytest.raises(ConfigError, match="holds another conversion"):
        written(source, store, dp=3)


def test_replicas_are_written_once_and_spread_over_the_ranks(tmp_path: Path) -> None:
    source = Source().weights({f"w{n}": (64, 64) for n in range(8)}).open()
    written(source, open_store(str(tmp_path)), dp=4)
    sizes = [(tmp_path / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) - min(sizes) < 64
    shutil.rmtree(tmp_path)
