"""A plain ``torch.save`` of a training loop, in the shapes that people give it, is read whole or says what it left."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec
import pytest
import torch

import ckpt
from ckpt.convert.assemble import LEAST_MEMORY, Assembler
from ckpt.convert.options import ReadOptions, WriteOptions
from ckpt.convert.ours.plan import plan_ours
from ckpt.convert.ours.workers import Work
from ckpt.convert.ours.write import write_ours
from ckpt.convert.target import target_of
from ckpt.convert.torchfile.read import is_torch, open_torch
from ckpt.errors import ConfigError, MalformedData, MissingChunk, NoSuchCheckpoint, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.rules import Rules
from ckpt.layout.spec import Shard
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.unit.convert.contents import MEMORY, contents
from tests.unit.convert.torch_files import Watched, same, saved, store_of


class Net(torch.nn.Module):
    """Tied weights that are not first, a batch norm, a scalar parameter, a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 5)
        self.embed = torch.nn.Embedding(7, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x))) * self.scale + self.nothing.sum()


def trained(optimizer=torch.optim.AdamW, steps: int = 2, seed: int = 0, **options: Any):
    torch.manual_seed(seed)
    model = Net()
    made = optimizer(model.parameters(), **{"lr": 0.1, **options})
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
    for _ in range(steps):
        model(torch.randn(4, 6)).square().sum().backward()
        made.step()
        made.zero_grad()
        scheduler.step()
    return model, made, scheduler


def opened(store: MemoryStore, **options: Any):
    return open_torch(store, "there", options=ReadOptions(**options))


def names_of(model: torch.nn.Module) -> dict[int, str]:
    return dict(enumerate(name for name, _ in model.named_parameters()))


def check_state(found, model, optimizer) -> None:
    """Every tensor of the optimizer's state is there under the name of its parameter, bit for bit."""
    wanted = {}
    by_param = {p: name for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        wanted |= {(by_param[p], role): value for role, value in state.items() if isinstance(value, torch.Tensor)}
    have = contents(found)
    state = {key for key in have if key[1] not in ("param", "buffer")}
    assert state == wanted.keys()
    assert all(same(have[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}], ids=str)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_state_dict(how, prefix) -> None:
    model, _, _ = trained()
    data = saved({prefix + name: value for name, value in model.state_dict().items()}, **how)
    found = opened(store_of(model__pt=data))
    have = contents(found)
    buffers = dict(model.named_buffers())
    params = dict(model.named_parameters())
    assert have.keys() == {(n, "param") for n in params} | {(n, "buffer") for n in buffers}
    assert all(same(value, params.get(name, buffers.get(name))) for (name, _), value in have.items())
    assert found.aliases == {"head.weight": "embed.weight"}
    assert (found.format, found.step, found.objects, found.notes) == ("torch", 0, (), ())


SHAPES = {
    "accelerate-like": ("model", "optimizer", "step"),
    "tutorial": ("model_state_dict", "optimizer_state_dict", "iteration"),
    "lightning": ("state_dict", "optimizer_states", "global_step"),
    "deepspeed-like": ("module", "optim", "global_steps"),
    "own": ("my_net", "my_opt", "iter"),
}


@pytest.mark.parametrize("words", SHAPES.values(), ids=SHAPES)
def test_a_loop_in_the_words_that_people_use(words) -> None:
    model, optimizer, scheduler = trained()
    state, lr = optimizer.state_dict(), scheduler.state_dict()
    lists = words[1] == "optimizer_states"
    tree = {
        words[0]: model.state_dict(),
        words[1]: [state] if lists else state,
        words[2]: 17,
        "lr_schedulers" if lists else "lr_scheduler": [lr] if lists else lr,
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1),
        "rng_state": torch.get_rng_state(),
        "best": {"loss": torch.tensor(0.5)},
    }
    found = opened(store_of(x__pt=tree))
    assert found.step == 17
    assert found.notes == ()
    check_state(found, model, optimizer)
    objects = {one.name: (one.kind, one.tree) for one in found.objects}
    (group,) = objects["optimizer"][1]["groups"]
    assert group["params"] == [name for name, _ in model.named_parameters()]
    assert group["options"] == {k: v for k, v in state["param_groups"][0].items() if k != "params"}
    assert objects["scheduler"] == ("engine", {"class": "", "state": lr})
    assert objects["engine"] == ("engine", {"global_steps": 17})
    assert objects["epoch"] == ("value", 3)
    assert objects["args"] == ("extra", {"lr": 0.1})
    assert float(objects["best"][1]["loss"]) == 0.5
    assert same(objects["rng_state"][1], torch.get_rng_state())


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta]
)
def test_optimizers_with_keys_of_their_own(optimizer) -> None:
    model, made, _ = trained(optimizer)
    found = opened(store_of(x__pt={"model": model.state_dict(), "optimizer": made.state_dict()}))
    assert found.notes == ()
    check_state(found, model, made)


def test_a_state_that_has_not_the_shape_of_its_parameter_is_carried_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    made = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    found = opened(store_of(x__pt={"model": model.state_dict(), "optimizer": made.state_dict()}))
    check_state(found, model, made)
    assert {"row_var", "col_var"} <= {spec.role for spec in found.specs}


def test_an_optimizer_without_state_has_its_groups() -> None:
    model, made, _ = trained(torch.optim.SGD)
    found = opened(store_of(x__pt={"model": model.state_dict(), "optimizer": made.state_dict()}))
    assert {spec.role for spec in found.specs} == {"param", "buffer"}
    (group,) = next(one.tree for one in found.objects if one.name == "optimizer")["groups"]
    assert group["options"]["lr"] == made.param_groups[0]["lr"]


def decay_groups(model, *, named: bool = False):
    params = dict(model.named_parameters())
    split = [{n: p for n, p in params.items() if (p.ndim > 1) is decay} for decay in (True, False)]
    return [
        {"params": list(one.items()) if named else list(one.values()), "weight_decay": wd}
        for one, wd in zip(split, (0.1, 0.0), strict=True)
    ]


@pytest.mark.parametrize("named", [False, True])
def test_two_groups_that_no_shape_is_in_twice(named) -> None:
    model, _, _ = trained()
    made = torch.optim.AdamW(decay_groups(model, named=named))
    model(torch.ones(4, 6)).sum().backward()
    made.step()
    found = opened(store_of(x__pt={"model": model.state_dict(), "optimizer": made.state_dict()}))
    assert found.notes == ()
    check_state(found, model, made)
    groups = next(one.tree for one in found.objects if one.name == "optimizer")["groups"]
    assert [group["options"]["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all("param_names" not in group["options"] for group in groups)


def test_the_full_state_that_fsdp_writes_has_names() -> None:
    model, made, _ = trained()
    names, state = names_of(model), made.state_dict()
    full = {
        "state": {"module." + names[n]: one for n, one in state["state"].items()},
        "param_groups": [{**g, "params": ["module." + names[n] for n in g["params"]]} for g in state["param_groups"]],
    }
    module = {"module." + name: value for name, value in model.state_dict().items()}
    found = opened(store_of(x__pt={"model": module, "optimizer": full}))
    assert found.notes == ()
    check_state(found, model, made)


def _two_groups_of_one_shape(state):
    first, *rest = state["param_groups"][0]["params"]
    return [{**state["param_groups"][0], "params": one} for one in ([first], rest)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda s: s["param_groups"].append({**s["param_groups"][0], "params": [99]}),
            "7 parameters, the model 6|it has",
        ),
        (lambda s: s["state"].update({0: s["state"][2]}), "would be 'scale'|its parameter 0 would be"),
        (lambda s: s.update(param_groups=[{"params": "all"}]), "by number"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "two groups"),
    ],
    ids=["count", "shape", "words", "twice"],
)
def test_an_optimizer_that_does_not_fit_is_left_out_and_it_is_said(change, why) -> None:
    model, made, _ = trained()
    state = made.state_dict()
    change(state)
    found = opened(store_of(x__pt={"model": model.state_dict(), "optimizer": state}))
    assert {spec.role for spec in found.specs} == {"param", "buffer"}
    assert found.notes == ()
    assert next(one.tree for one in found.objects if one.name == "optimizer") is None  # a strict load misses it
    (note,) = found.lost
    assert note.startswith("the optimizer's state is left out, nothing tells which parameter is whose: ")
    assert any(part in note for part in why.split("|")), note


def test_groups_that_share_a_shape_are_not_guessed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    made = torch.optim.Adam([{"params": model[1].parameters(), "lr": 0.1}, {"params": model[0].parameters()}])
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    found = opened(store_of(x__pt={"model": model.state_dict(), "optimizer": made.state_dict()}))
    assert "two of them have parameters of shape [3, 3]" in found.lost[0]


def test_an_optimizer_of_the_adapters_alone_finds_them_by_their_shapes() -> None:
    """As every LoRA job saves: the whole model, and an optimizer of a few of its tensors."""

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(6))
            self.base = torch.nn.Linear(6, 6).requires_grad_(False)
            self.a, self.b = torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 6, bias=False)

        def forward(self, x):
            return (self.base(x) + self.b(self.a(x))) * self.scale

    model = torch.nn.Sequential(Adapted(), Adapted())
    for groups in (
        [p for p in model.parameters() if p.requires_grad],
        [{"params": [one.a.weight for one in model]}, {"params": [one.b.weight for one in model], "lr": 0.1}],
    ):
        made = torch.optim.AdamW(groups)
        model(torch.ones(1, 6)).sum().backward()
        made.step()
        found = opened(store_of(x__pt={"model": model.state_dict(), "optimizer": made.state_dict()}))
        assert (found.notes, found.lost) == ((), ())
        check_state(found, model, made)
    made = torch.optim.AdamW([model[0].a.weight])  # or model[1]'s?
    made.step()
    found = opened(store_of(x__pt={"model": model.state_dict(), "optimizer": made.state_dict()}))
    assert "it has 1 parameters, the model 10, and shapes do not tell in one way which" in found.lost[0]


def test_copies_of_tied_weights_are_tied_if_the_rules_say_so() -> None:
    model, made, _ = trained()
    tree = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": made.state_dict()}
    alone = opened(store_of(x__pt={"model": tree["model"]}))
    assert (alone.aliases, {"embed.weight", "head.weight"} - {spec.fqn for spec in alone.specs}) == ({}, set())
    told = opened(store_of(x__pt=tree))  # by the optimizer, which steps one of them only
    assert (told.aliases, told.lost) == ({"head.weight": "embed.weight"}, ())
    assert told.notes == ("head.weight is embed.weight, byte for byte, and not stepped: taken as tied",)
    check_state(told, model, made)
    rules = Rules(tied={"head.weight": "embed.weight"})
    found = opened(store_of(x__pt=tree), rules=rules)
    assert found.aliases == {"head.weight": "embed.weight"}
    check_state(found, model, made)
    tree["model"]["head.weight"][3, 2] += 1
    with pytest.raises(MalformedData, match=r"'head\.weight' and 'embed\.weight' are not the same"):
        opened(store_of(x__pt=tree), rules=rules)


def test_several_optimizers_are_kept_as_they_are() -> None:
    model, made, _ = trained()
    tree = {"model": model.state_dict(), "opt_a": made.state_dict(), "opt_b": made.state_dict()}
    found = opened(store_of(x__pt=tree))
    assert "the optimizers opt_a, opt_b are kept as objects" in found.notes[0]
    assert {one.name for one in found.objects} == {"opt_a", "opt_b"}


def test_what_cannot_be_kept_is_told() -> None:
    tree = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(20 << 20)}, "scaler": argparse.Namespace(f={1: 2})}
    found = opened(store_of(x__pt=tree))
    assert found.lost == ("'ema' is left out: tensors of more than 67108864 bytes among plain values",)
    assert found.objects[0].tree == {"f": {1: 2}}


def test_nested_models_and_extra_states() -> None:
    tree = {
        "model": {"language_model": {"w": torch.ones(2), "norm": {"weight": torch.ones(3)}}, "a._extra_state": {"n": 1}}
    }
    found = opened(store_of(x__pt=tree))
    assert {spec.fqn for spec in found.specs} == {"language_model.w", "language_model.norm.weight"}
    assert found.objects[0].name == "modules"
    assert found.objects[0].tree == {"a": {"n": 1}}


def test_several_models_have_their_words_in_front() -> None:
    tree = {"netG": {"w": torch.ones(2)}, "netD": {"w": torch.ones(3)}, "loss": torch.tensor(1.0)}
    found = opened(store_of(x__pt=tree))
    assert {spec.fqn for spec in found.specs} == {"netG.w", "netD.w"}
    assert float(found.objects[0].tree) == 1.0


def test_views_of_one_storage_and_tensors_by_columns() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tree = {"q": base[:2], "kv": base[1:], "t": base.t(), "e": torch.ones(1).expand(3, 2)}
    found = opened(store_of(x__pt=tree))
    have = contents(found)
    assert all(same(have[name, "param"], value) for name, value in tree.items())
    assert found.aliases == {}


BIG = torch.arange(3 * 500 * 900, dtype=torch.int32)


@pytest.mark.parametrize(
    ("value", "times"),
    [
        (BIG.reshape(3, 500, 900).permute(2, 0, 1), 1.2),
        (BIG.reshape(1500, 900).t(), 1.2),
        (BIG.reshape(1500, 900)[:, ::3], 3.2),
        (BIG.reshape(1500, 900)[::2, :400], 4.7),
        (BIG[:1350].expand(1000, 1350), 1.2),
        (BIG.reshape(1, -1).t(), 1.2),
        (BIG.reshape(2, 675_000).t(), 1.2),
    ],
    ids=["permuted", "transposed", "every third", "slice", "expanded", "a column", "two columns"],
)
def test_a_large_tensor_that_does_not_lie_by_rows_is_put_together_in_parts(value, times) -> None:
    store = Watched()
    store.put("x.pt", saved({"w": value}))
    assert same(contents(opened(store))["w", "buffer"], value)
    assert store.read < times * value.numel() * 4 + (200 << 10)


def test_a_tensor_by_columns_is_read_once_however_little_memory_there_is(tmp_path) -> None:
    """Parts that went through all rows would be read anew for each window of rows."""
    value = torch.arange(10_000_000, dtype=torch.int32).reshape(1000, 10_000).t()
    torch.save({"w": value}, tmp_path / "x.pt")
    found = opened(LocalStore(tmp_path))
    assembler = Assembler(found, memory=LEAST_MEMORY)
    parts = [bytes(piece.data) for piece in assembler.pieces([Shard(found.specs[0], Box.whole(value.shape))])]
    assert len(parts) > 4
    assert b"".join(parts) == value.numpy().tobytes()
    assert assembler.bytes_read < 1.1 * value.nbytes


@pytest.mark.parametrize("words", [{"\ud800": torch.ones(2)}, {"w": torch.ones(2), "x\udfff": 1}])
def test_a_name_that_is_no_text_is_refused(words) -> None:
    with pytest.raises(MalformedData, match=r"(tensor|object) '\S+': its name is no text"):
        opened(store_of(x__pt={"model": {"v": torch.ones(2)}, **words} if "w" in words else words))


def test_a_file_of_one_tensor_is_called_that() -> None:
    with pytest.raises(MalformedData, match="holds a tensor, expected a dictionary"):
        opened(store_of(x__pt=torch.ones(2)))


def test_of_several_models_the_one_that_counts_is_told() -> None:
    found = opened(store_of(x__pt={"model": {"w": torch.ones(2)}, "state_dict": {"w": torch.zeros(2)}}))
    assert found.notes == ("the model is what stands under 'model'; objects beside it: state_dict",)
    assert same(contents(found)["w", "param"], torch.ones(2))


@pytest.mark.parametrize("nested", [False, True])
def test_a_whole_module_needs_trust(nested) -> None:
    model, _, _ = trained()
    store = store_of(x__pt={"model": model, "step": 3} if nested else model)
    with pytest.raises(UnsupportedFeature, match=rf"needs {Net.__module__}\.Net,"):
        opened(store)
    found = opened(store, trust_pickle=True)
    plain = opened(store_of(x__pt=model.state_dict()))
    assert (found.specs, found.aliases, found.step) == (plain.specs, plain.aliases, 3 if nested else 0)
    there = contents(plain)
    assert all(same(value, there[key]) for key, value in contents(found).items())


def test_a_worker_finds_them_too(tmp_path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"t": base.t(), "e": torch.ones(1).expand(3, 2), "w": base}, tmp_path / "x.pt")
    found = opened(LocalStore(tmp_path))
    made = plan_ours(found, target_of(found), WriteOptions(memory=MEMORY))
    work = Work.of(made, LocalStore(tmp_path), "")
    there = contents(msgspec.msgpack.decode(msgspec.msgpack.encode(work), type=Work).opened())
    assert all(same(there[key], value) for key, value in contents(found).items())
    assert len(msgspec.msgpack.encode(work)) < 2000


# --------------------------------------------------------------------------------------------------------------- files


def test_which_folders_are_taken_for_one() -> None:
    data = saved({"w": torch.ones(1)})
    for names, expected in [
        (["model.pt"], True),
        (["a.ckpt", "readme.md"], True),
        (["pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng_state_0.pth"], True),
        (["mp_rank_00_model_states.pt"], False),
        (["model.safetensors", "optimizer.pt"], False),
        ([".metadata", "__0_0.distcp", "common.pt"], False),
        (["optimizer.pt"], False),
        ([], False),
    ]:
        store = MemoryStore()
        for name in names:
            store.put(name, data)
        assert is_torch(store) is expected, names


def test_a_folder_of_hugging_face() -> None:
    model, made, scheduler = trained()
    items = list(model.state_dict().items())
    shards = {"pytorch_model-00001-of-00002.bin": dict(items[:3]), "pytorch_model-00002-of-00002.bin": dict(items[3:])}
    index = {"weight_map": {name: file for file, one in shards.items() for name in one}}
    store = store_of(optimizer__pt=made.state_dict(), scheduler__pt=scheduler.state_dict())
    store.put("pytorch_model.bin.index.json", json.dumps(index).encode())
    for name, value in shards.items():
        store.put(name, saved(value))
    found = opened(store)
    check_state(found, model, made)
    assert next(one for one in found.objects if one.name == "scheduler").tree["state"] == scheduler.state_dict()
    store.delete("pytorch_model-00002-of-00002.bin")
    with pytest.raises(MissingChunk, match=r"pytorch_model-00002-of-00002\.bin is not there"):
        opened(store)


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        ({}, NoSuchCheckpoint, "no file"),
        ({"a__pt": {"w": torch.ones(1)}, "b__pt": {"w": torch.ones(1)}}, ConfigError, r"a\.pt, b\.pt may each be"),
        ({"a__pt": [1]}, MalformedData, "holds a list"),
        ({"a__pt": {"epoch": 1}}, MalformedData, "no tensors of a model, its keys are epoch"),
        ({"a__pt": b"junk" * 9}, MalformedData, "no file of torch.save"),
        ({"a__pt": {"module.w": torch.ones(1), "module._orig_mod.w": torch.ones(2)}}, MalformedData, "are both 'w'"),
        ({"a__pt": {"w": torch.ones(1), "f": print}}, UnsupportedFeature, r"builtins\.print"),
    ],
    ids=["nothing", "several", "list", "empty", "junk", "names", "class"],
)
def test_what_is_refused(files, error, text) -> None:
    with pytest.raises(error, match=text):
        opened(store_of(**files))


def test_another_step_than_the_files_own() -> None:
    store = store_of(x__pt={"model": {"w": torch.ones(1)}, "step": 5})
    assert open_torch(store, "there", step=5, options=ReadOptions()).step == 5
    with pytest.raises(NoSuchCheckpoint, match="is of step 5, asked for step 6"):
        open_torch(store, "there", step=6, options=ReadOptions())
    plain = store_of(x__pt={"w": torch.ones(1)})
    assert open_torch(plain, "there", step=6, options=ReadOptions()).step == 6


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_goes_on_from_an_imported_file_bit_for_bit(tmp_path, workers) -> None:
    model, optimizer, scheduler = trained()
    state = model.state_dict()
    transposed = {k: v.t().contiguous().t() if k == "inner.weight" else v for k, v in state.items()}
    (tmp_path / "a").mkdir()
    tree = {"model": transposed, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "step": 2}
    torch.save(tree, tmp_path / "a/x.pt")
    source = open_torch(LocalStore(tmp_path / "a"), "there", options=ReadOptions())
    options = WriteOptions(memory=256 << 20, workers=workers)
    write_ours(source, LocalStore(tmp_path / "b"), target_of(source), options)
    other = trained(steps=1, seed=5)
    ckpt.load(list(other), tmp_path / "b")
    for a, b in zip((model, optimizer, scheduler), other, strict=True):
        assert str(a.state_dict()) == str(b.state_dict())
    losses = []
    for net, made, _ in ((model, optimizer, scheduler), other):
        torch.manual_seed(3)
        loss = net(torch.randn(4, 6)).square().sum()
        loss.backward()
        made.step()
        losses.append((float(loss.detach()), str(net.state_dict())))
    assert losses[0] == losses[1]
