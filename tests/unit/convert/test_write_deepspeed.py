"""DeepSpeed's files without DeepSpeed: which elements lie where, what is refused, what an interrupted run leaves."""

from __future__ import annotations

import itertools
import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckpt.convert import file_bands
from ckpt.convert.compare import compare_written
from ckpt.convert.deepspeed.read import open_deepspeed
from ckpt.convert.deepspeed.read_universal import open_universal
from ckpt.convert.deepspeed.write import write_deepspeed
from ckpt.convert.deepspeed.write_slice import Member, dealt, gathered, partition_of, pieces_of, sub_groups_of
from ckpt.convert.deepspeed.write_universal import write_universal
from ckpt.convert.mark import MARK
from ckpt.convert.opened import Builder, Loose, Opened
from ckpt.convert.options import WEIGHTS, ReadOptions, WriteOptions
from ckpt.convert.safetensors.write import write_safetensors
from ckpt.convert.target import target_of
from ckpt.convert.torchfile.file import read_tree
from ckpt.errors import ConfigError, LayoutError, MalformedData, StoreError, UnsupportedLayout
from ckpt.layout.box import Box
from ckpt.layout.rules import Rules
from ckpt.layout.spec import Shard, TensorSpec
from ckpt.layout.tiling import Tiling, fused
from ckpt.runtime.staging import tensor_bytes
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore
from tests.unit.convert.sources import ADAM, Source

# ------------------------------------------------------------------------------------------------------------ geometry


def filled(pieces: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return what pieces give if the source holds ``whole``; 0 where they say zeros."""
    parts = []
    for piece in pieces:
        if isinstance(piece, Shard):
            parts.append(whole[piece.box.relative_to(Box.whole(tuple(whole.shape)))].reshape(-1))
        else:
            assert piece % whole.element_size() == 0
            parts.append(torch.zeros(piece // whole.element_size(), dtype=whole.dtype))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=whole.dtype)


def local_of(tiling: Tiling, whole: torch.Tensor) -> torch.Tensor:
    local = torch.zeros(tiling.local, dtype=whole.dtype)
    for tile in tiling.tiles:
        local[tile.local.relative_to(Box.whole(tiling.local))] = whole[tile.box.relative_to(Box.whole(tiling.shape))]
    return local


TILINGS = {
    "whole": Tiling.whole((3, 4, 5)),
    "scalar": Tiling.whole(()),
    "rows": Tiling.of_runs((8, 5), {0: ((2, 3),)}),
    "fused rows": Tiling.of_runs((12, 5), {0: fused([(6, 6), (6, 6)], 3, 1)}),
    "columns": Tiling.of_runs((4, 12, 2), {1: ((6, 3),)}),
    "fused columns": Tiling.of_runs((4, 12), {1: fused([(6, 6), (6, 6)], 3, 2)}),
    "padded rows": Tiling.of_runs((7, 3), {0: ((6, 1),)}, (4, 3)),
    "padded columns": Tiling.of_runs((3, 7), {1: ((4, 3),)}, (3, 5)),
    "nothing but padding": Tiling.of_runs((7, 3), {0: ()}, (4, 3)),
}


@pytest.mark.parametrize("name", TILINGS)
def test_any_range_of_a_local_tensor_is_filled_with_its_elements(name) -> None:
    tiling = TILINGS[name]
    whole = torch.arange(1, 1 + torch.Size(tiling.shape).numel(), dtype=torch.float32).view(tiling.shape)
    spec = TensorSpec("w", "master", "float32", tiling.shape)
    flat = local_of(tiling, whole).reshape(-1)
    for start, stop in itertools.combinations_with_replacement(range(tiling.numel + 1), 2):
        assert torch.equal(filled(pieces_of(tiling, spec, start, stop), whole), flat[start:stop]), (start, stop)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 12, 40])
def test_partitions_of_zero_1_and_2_are_equal_and_padded_at_the_end(ranks) -> None:
    members = [Member(f"{n}", Tiling.whole((n, 3))) for n in (1, 4, 2)]
    parts = [partition_of(members, ranks, rank) for rank in range(ranks)]
    sizes = {part.stop - part.start + part.padding for part in parts}
    assert len(sizes) == 1
    assert (sizes.pop() * ranks) % (2 * ranks) == 0
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, 21)
    assert sum(part.padding for part in parts) == -21 % (2 * ranks)


def test_sub_groups_close_with_the_member_that_reaches_the_size() -> None:
    members = [Member(f"{n}", Tiling.whole((n,))) for n in (10, 1, 7, 30, 2)]
    names = lambda size: ["".join(m.fqn + " " for m in one) for one in sub_groups_of(members, 2, size)]  # noqa: E731
    assert names(10) == ["10 1 7 ", "30 ", "2 "]  # 5 + 1 + 4, 15, 1 elements on each of two ranks
    assert names(9) == ["10 1 7 ", "30 ", "2 "]
    assert names(6) == ["10 1 ", "7 30 ", "2 "]
    assert names(26) == names(10**9) == ["10 1 7 30 2 "]
    assert names(25) == ["10 1 7 30 ", "2 "]


# -------------------------------------------------------------------------------------------------------------- sources

SHAPES = {
    "embed.weight": (13, 6), "layers.0.up.weight": (10, 6), "layers.0.up.bias": (10,), "layers.0.down.weight": (6, 10),
    "layers.1.up.weight": (10, 6), "layers.1.up.bias": (10,), "layers.1.down.weight": (6, 10), "norm.weight": (6,),
    "scale": (),
}  # fmt: skip
RULES = Rules.of({
    "tensors": [
        {"match": "embed.weight", "dim": 0, "size": 13},
        {"match": r".*up\.(weight|bias)", "dim": 0},
        {"match": r".*down\.weight", "dim": 1},
        {"match": "norm.weight|scale|seen|nothing"},
    ]
})  # fmt: skip
FROZEN = "layers.0.up.bias"
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def source(low: str = "bfloat16", masters: bool = True, moments: bool = True, **changes: Any) -> Opened:
    """Return a source of which every element is a different number, and parameters the rounding of their masters.

    ``changes``: shape of first moments by name, and ``steps``.
    """
    store = MemoryStore()
    builder = Builder("test", "source", store)
    builder.step, builder.world, builder.engine = 7, 2, "deepspeed"
    number = [0]
    data = bytearray()

    def add(fqn: str, role: str, dtype: str, shape: tuple[int, ...], value: float | None = None) -> None:
        spec = builder.spec(fqn, role, dtype, shape)
        first = number[0] = number[0] + (role != "master")
        tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1000 * first
        tensor = (tensor if value is None else torch.full(shape, value)).to(getattr(torch, dtype))
        builder.add(spec, Box.whole(shape), "data", len(data))
        data.extend(tensor_bytes(tensor))

    for fqn, shape in SHAPES.items():
        add(fqn, "param", low, shape)
        if fqn == FROZEN:
            continue
        if masters:
            add(fqn, "master", "float32", shape)
        if moments:
            add(fqn, "exp_avg", "float32", changes.get(fqn, shape))
            add(fqn, "exp_avg_sq", "float32", shape)
            add(fqn, "step", "float32", (), changes.get("steps", {}).get(fqn, 7.0))
    add("seen", "buffer", "int64", (2,))
    builder.spec("nothing", "param", low, (0, 3))
    builder.aliases = {"head.weight": "embed.weight"}
    store.objects["data"] = bytes(data)
    if moments:
        builder.objects = objects()
    return builder.build()


def objects() -> list[Loose]:
    plain = [fqn for fqn, shape in SHAPES.items() if len(shape) < 2 and fqn != FROZEN]
    groups = [
        {"params": [fqn for fqn in reversed(SHAPES) if fqn not in plain and fqn != FROZEN], "options": OPTIONS},
        {"params": plain, "options": {**OPTIONS, "weight_decay": 0.0}},
    ]
    return [
        Loose("optimizer", "engine", (0, 1), {"class": "torch.optim.adamw.AdamW", "groups": groups}),
        Loose("engine", "engine", (0, 1), {"global_steps": 7, "global_samples": 70, "skipped_steps": 1}),
        Loose("scheduler", "engine", (0, 1), {"class": "x.Y", "state": {"last_batch_iteration": 6}}),
        Loose("cursor", "value", (0,), 1),
        Loose("cursor", "value", (1,), 2),
        Loose("epoch", "value", (0, 1), {"n": 3}),
        Loose("module", "value", (0, 1), 3),
        Loose("chosen", "value", (0, 1), {1, 2}),
        Loose("rng", "rng", (0, 1), {}),
    ]


LAYOUTS = [
    *({"dp": dp, "zero": zero} for zero in (1, 2, 3) for dp in (1, 3, 13)),
    *({"dp": 2, "tp": 2, "zero": zero} for zero in (1, 3)),
    {"dp": 1, "tp": 5, "zero": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_written_is_read_back_equal(layout) -> None:
    opened, store = source(), MemoryStore()
    target = target_of(opened, engine="deepspeed", rules=RULES, **layout)
    written = write_deepspeed(opened, store, target, WriteOptions(), sub_group_size=random.Random(1).randint(20, 40))
    assert sorted(store.objects) == sorted([*written.files, MARK])
    assert written.bytes_written == sum(len(store.objects[key]) for key in written.files)
    back = open_deepspeed(store, "back", options=ReadOptions(rules=RULES))
    assert back.step == written.step == 7
    rows = compare_written(opened, back, target.specs)
    assert [row for row in rows if row.status != "equal"] == []
    assert len(rows) == len(target.specs)
    assert dict(back.aliases) == {"head.weight": "embed.weight"}
    groups = next(o.tree for o in back.objects if o.name == "optimizer")["groups"]
    saved = objects()[0].tree["groups"]
    assert [[g["params"], g["options"]["weight_decay"]] for g in groups] == [
        [g["params"], g["options"]["weight_decay"]] for g in saved
    ]
    told = "\n".join(written.lost)
    assert all(word in told for word in ("'cursor'", "'module'", "'chosen'", "random generators"))


def tree_of(store: MemoryStore, name: str) -> Any:
    (key,) = [key for key in store.objects if key.endswith(name)]
    return read_tree(store, key)


def test_model_states_say_what_load_checkpoint_asks_for() -> None:
    opened, store = source(), MemoryStore()
    write_deepspeed(opened, store, target_of(opened, dp=3, zero=2, engine="deepspeed"), WriteOptions(step=9))
    assert store.objects["latest"] == b"global_step9"
    tree = tree_of(store, "mp_rank_00_model_states.pt")
    assert [tree[k] for k in ("global_steps", "global_samples", "skipped_steps")] == [7, 70, 1]
    assert (tree["dp_world_size"], tree["mp_world_size"]) == (3, 1)
    assert tree["lr_scheduler"] == {"last_batch_iteration": 6}
    assert tree["buffer_names"] == ["seen"]
    assert tree["shared_params"] == {"head.weight": "embed.weight"}
    assert tree["module"]["head.weight"] == tree["module"]["embed.weight"]  # one storage
    assert set(tree["frozen_param_shapes"]) == {FROZEN, "nothing"}
    assert tree["param_shapes"][0]["embed.weight"] == torch.Size((13, 6))
    assert [list(one) for one in tree["param_shapes"]] == [group["params"] for group in objects()[0].tree["groups"]]
    assert tree["epoch"] == {"n": 3}
    assert "cursor" not in tree


def test_a_pipeline_has_a_file_for_each_layer() -> None:
    names = {"embed.weight": "tied_modules.e.weight", "norm.weight": "3.weight", "scale": "3.scale", "seen": "1.seen"}

    def renamed(name: str) -> str:
        number = name.split(".")[1] if name.startswith("layers.") else ""
        return names.get(name) or f"{int(number) + 1}." + name.partition(f"{number}.")[2]

    opened = source()
    specs = tuple(replace(s, fqn="1.none" if s.fqn == "nothing" else renamed(s.fqn)) for s in opened.specs)
    tree = {"class": "", "groups": [{"params": [], "options": OPTIONS}]}
    tree["groups"][0]["params"] = [renamed(f) for f in SHAPES if f != FROZEN]
    optimizer = Loose("optimizer", "engine", (0, 1), tree)
    opened = replace(opened, specs=specs, objects=(optimizer,), aliases={})
    target = target_of(opened, dp=2, pp=2, zero=1, stages=(2, 2), engine="deepspeed")
    store = MemoryStore()
    written = write_deepspeed(opened, store, target, WriteOptions())
    layers = [key for key in written.files if "layer_" in key]
    assert [key[len("global_step7/layer_") :][:2] for key in layers] == ["00", "01", "02", "03"]
    assert list(tree_of(store, "layer_00-model_00-model_states.pt")) == ["weight"]
    assert set(tree_of(store, "layer_03-model_00-model_states.pt")) == {"weight", "scale"}
    assert tree_of(store, "mp_rank_01_model_states.pt")["module"] is None
    rows = compare_written(opened, open_deepspeed(store, "back"), target.specs)
    assert [row for row in rows if row.status != "equal"] == []


def test_universal_files_hold_each_parameter_whole() -> None:
    opened, store = source(), MemoryStore()
    written = write_universal(opened, store, target_of(opened, dp=4, zero=3, engine="deepspeed"), WriteOptions())
    assert store.objects["latest_universal"] == b"global_step7_universal"
    found = tree_of(store, "zero/layers.0.down.weight/exp_avg.pt")["param"]
    assert (found.shape, found.dtype) == ((6, 10), "float32")
    assert len(written.files) == 4 * (len(SHAPES) - 1) + 4
    rows = compare_written(opened, open_universal(store, "back"), target_of(opened, engine="deepspeed").specs)
    assert [row for row in rows if row.status != "equal"] == []
    common = tree_of(store, "zero/optimizer_state.pt")
    assert [group["weight_decay"] for group in common["param_groups"]] == [0.1, 0.0]
    assert any("ZeRO-3 gives those of the first group to all" in line for line in written.lost)
    with pytest.raises(ConfigError, match="weights alone"):
        write_universal(opened, MemoryStore(), target_of(opened, roles=WEIGHTS), WriteOptions(roles=WEIGHTS))


@pytest.mark.parametrize("name", [".", "..", "a/../b", "x" * 256])
def test_a_name_that_cannot_be_a_folder_is_refused_before_anything_is_written(name: str) -> None:
    opened = Source().weights({name: (2, 3), "w": (2, 3)}, ADAM).groups([name, "w"]).open()
    store = MemoryStore()
    with pytest.raises(ConfigError, match=rf"no names of one.*\n.*tensor '{re.escape(name)}'"):
        write_universal(opened, store, target_of(opened, engine="deepspeed"), WriteOptions())
    assert store.objects == {}


# ------------------------------------------------------------------------------------------------ what cannot be, fails


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weights_alone_are_read_back(zero) -> None:
    opened, store = source(), MemoryStore()
    target = target_of(opened, dp=2, zero=zero, engine="deepspeed", roles=WEIGHTS)
    write_deepspeed(opened, store, target, WriteOptions(roles=WEIGHTS))
    again = open_deepspeed(store, "there", options=ReadOptions(rules=RULES))
    assert {row.status for row in compare_written(opened, again, target.specs)} == {"equal"}
    assert any("no file *_optim_states.pt" in note for note in again.notes) == (zero in (1, 2))


def test_files_of_two_conversions_are_told_apart() -> None:
    stores = [MemoryStore(), MemoryStore()]
    for steps, store in enumerate(stores):
        opened = source()
        counters = {"global_steps": 7 + steps, "global_samples": 70, "skipped_steps": 1}
        kept = [replace(one, tree=counters) if one.name == "engine" else one for one in opened.objects]
        opened = replace(opened, objects=tuple(kept))
        write_deepspeed(opened, store, target_of(opened, dp=2, zero=3, engine="deepspeed"), WriteOptions())
    for key, data in stores[1].objects.items():
        if key.endswith("optim_states.pt"):
            stores[0].objects[key] = data
    open_deepspeed(stores[1], "good", options=ReadOptions(rules=RULES))
    with pytest.raises(MalformedData, match=r"several steps: .*model_states.pt is of 6 .*optim_states.pt of 7"):
        open_deepspeed(stores[0], "mixed", options=ReadOptions(rules=RULES))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_weights_alone(zero) -> None:
    options = WriteOptions(roles=WEIGHTS, dtype="float16")
    opened, store = source(), MemoryStore()
    target = target_of(opened, dp=2, zero=zero, engine="deepspeed", roles=WEIGHTS, dtype="float16")
    written = write_deepspeed(opened, store, target, options)
    how = "load_optimizer_states=False" if zero else "load_module_only=True"  # else the first step undoes the load
    assert any(line.startswith(f"no optimizer state: load it with {how}") for line in written.made)
    assert any("optim_states" in key for key in written.files) == (zero == 3)
    assert any(line.startswith("exp_avg of") for line in written.lost)
    module_tree = tree_of(store, "mp_rank_00_model_states.pt" if zero < 3 else "rank_0_mp_rank_00_model_states.pt")
    assert module_tree["module"]["norm.weight"].dtype == "float16"
    if zero in (1, 2):  # whatever is frozen in the engine
        assert set(module_tree["frozen_param_fragments"].values()) == set(module_tree["module"].values())


def refused(opened: Opened, kind: type[Exception], words: str, zero: int = 1, **layout: Any) -> None:
    store = MemoryStore()
    with pytest.raises(kind, match=words):
        write_deepspeed(opened, store, target_of(opened, zero=zero, engine="deepspeed", **layout), WriteOptions())
    assert store.objects == {}


def test_parameters_of_a_group_must_agree_on_their_step() -> None:
    steps = {"steps": {"norm.weight": 6.0}}
    for zero in (1, 3):
        refused(source(**steps), LayoutError, "'step' is 7.0 for 'layers.1.up.bias' and 6.0 for 'norm.weight'", zero)
    target = target_of(source(**steps), zero=0, engine="deepspeed")  # nothing is flat there
    write_deepspeed(source(**steps), MemoryStore(), target, WriteOptions())


def test_state_of_another_shape_is_refused_by_name() -> None:
    factors = source(**{"layers.0.up.weight": (10,)})
    refused(factors, UnsupportedLayout, r"'layers.0.up.weight' \(exp_avg\) float32\[10\]: its parameter has shape")
    factors, store = source("float32", masters=False, **{"layers.0.up.weight": (10,)}), MemoryStore()
    write_deepspeed(factors, store, target_of(factors, dp=2, zero=0, engine="deepspeed"), WriteOptions())
    state = tree_of(store, "mp_rank_00_model_states.pt")["optimizer"]["state"]
    assert [one["exp_avg"].shape for one in state.values()].count((10,)) == 2  # and the bias of the second layer


def test_optimizer_state_without_settings_is_refused() -> None:
    refused(replace(source(), objects=()), ConfigError, "does not say with which settings")


def test_names_that_are_no_pipelines_are_refused() -> None:
    refused(source(), UnsupportedLayout, "the number of its layer", pp=2)


def test_a_place_that_is_not_empty_is_refused() -> None:
    opened, store = source(), MemoryStore()
    store.put("precious", b"1")
    target = target_of(opened, zero=1, engine="deepspeed")
    with pytest.raises(ConfigError, match=r"not empty \(precious\)"):
        write_deepspeed(opened, store, target, WriteOptions())
    assert list(store.objects) == ["precious"]


class Failing(MemoryStore):
    """A store that fails after so many files."""

    left = 3

    def writer(self, key: str, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise StoreError("no more", key)
        return super().writer(key, **options)


@pytest.mark.parametrize(("workers", "width"), [(1, 1), (3, 1), (1, 2), (1, 8)])
def test_an_interrupted_run_goes_on_where_it_was(workers, width, monkeypatch) -> None:
    monkeypatch.setattr(file_bands, "MOST", width)
    opened, store, whole = source(), Failing(), MemoryStore()
    target = target_of(opened, dp=4, zero=1, engine="deepspeed")
    options = WriteOptions(workers=workers, memory=1 << 30)
    complete = write_deepspeed(opened, whole, target, options)
    with pytest.raises(StoreError, match="no more"):
        write_deepspeed(opened, store, target, options)
    assert "latest" not in store.objects
    kept = {key: data for key, data in store.objects.items() if key != MARK}
    assert kept or width == 8  # of files that are written side by side maybe none is finished yet
    store.left = 100
    other = target_of(opened, dp=2, zero=1, engine="deepspeed")
    with pytest.raises(ConfigError, match="another conversion"):
        write_deepspeed(opened, store, other, options)
    with pytest.raises(ConfigError, match="another conversion"):
        write_deepspeed(opened, store, target, replace(options, resume=False))
    again = write_deepspeed(opened, store, target, options)
    assert store.left == 100 - (len(complete.files) - 1 - len(kept))
    assert store.objects == whole.objects
    assert again.bytes_present == sum(map(len, kept.values()))
    assert again.bytes_present + again.bytes_written == complete.bytes_written


@pytest.mark.parametrize("zero", [1, 3])
def test_files_side_by_side_read_each_chunk_once(zero, monkeypatch) -> None:
    opened, together, alone = source(), MemoryStore(), MemoryStore()
    target = target_of(opened, dp=7, zero=zero, engine="deepspeed")
    few = write_deepspeed(opened, together, target, WriteOptions())
    monkeypatch.setattr(file_bands, "MOST", 1)
    many = write_deepspeed(opened, alone, target, WriteOptions())
    assert together.objects == alone.objects
    assert few.bytes_read < many.bytes_read
    size = len(opened.store.get("data"))
    assert few.bytes_read <= 2 * size + 100  # and the scalars once more
    said = write_deepspeed(opened, MemoryStore(), target, WriteOptions(dry_run=True))
    assert said.bytes_read == many.bytes_read


def test_a_source_that_breaks_off_leaves_no_file_of_a_band(monkeypatch) -> None:
    opened, store = source(), MemoryStore()
    target = target_of(opened, dp=4, zero=3, engine="deepspeed")
    read, left = opened.store.read_into, [1]

    def breaks(key: str, start: int, buffer: memoryview) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise StoreError("gone", key)
        return read(key, start, buffer)

    monkeypatch.setattr(opened.store, "read_into", breaks)
    with pytest.raises(StoreError, match="gone"):
        write_deepspeed(opened, store, target, WriteOptions())
    assert not [key for key in store.objects if key.endswith("optim_states.pt")]


def test_temporary_files_of_killed_runs_are_removed_and_nothing_else(tmp_path) -> None:
    opened, store = source(), LocalStore(str(tmp_path))
    target = target_of(opened, dp=1)
    done = write_safetensors(opened, store, target, WriteOptions(roles=WEIGHTS))
    names = set(os.listdir(tmp_path))
    (model,) = (key for key in done.files if key.endswith(".safetensors"))
    number = "0123456789abcdef"
    gone = {f".tmp-{number}-{model}", f".tmp-{number}-{MARK}"}
    kept = {".tmp-mine", f".tmp-{number}-other.safetensors", f".tmp-{number}"}
    for name in gone | kept:
        (tmp_path / name).touch()
    write_safetensors(opened, store, target, WriteOptions(roles=WEIGHTS))
    assert set(os.listdir(tmp_path)) == names | kept


def test_memory_that_can_be_needed_is_told_not_the_budget() -> None:
    opened = source()
    target = target_of(opened, dp=2, zero=3, engine="deepspeed")
    said = [
        write_deepspeed(opened, MemoryStore(), target, WriteOptions(dry_run=True, workers=workers, memory=memory))
        for workers, memory in ((1, 2 << 30), (1, 8 << 30), (64, 8 << 30), (1, 100 << 20))
    ]
    assert said[0].memory == said[1].memory < 1 << 30
    assert said[2].memory <= said[1].memory  # all files are of one band
    assert said[3].memory <= 100 << 20


def test_a_dry_run_writes_nothing_and_says_everything() -> None:
    opened, store = source(), MemoryStore()
    target = target_of(opened, dp=4, zero=3, engine="deepspeed")
    said = write_deepspeed(opened, store, target, WriteOptions(dry_run=True))
    assert store.objects == {}
    told: list[tuple[int, int]] = []
    done = write_deepspeed(opened, store, target, WriteOptions(progress=lambda *numbers: told.append(numbers)))
    assert replace(said, bytes_read=0) == replace(done, bytes_read=0)
    assert 0 < said.bytes_read <= done.bytes_read
    assert told[-1] == (done.bytes_written, done.bytes_written)


def test_cards_that_were_dealt_are_gathered() -> None:
    for count, ranks in itertools.product(range(8), (1, 2, 3, 9)):
        cards = list(range(count))
        assert gathered(dealt(cards, ranks), ranks) == cards
