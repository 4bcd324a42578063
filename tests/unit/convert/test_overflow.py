"""What a cast makes infinite is counted as it is cast, once for each element, whoever writes what how often."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.convert.assemble import LEAST_MEMORY, Assembler
from ckpt.convert.options import WriteOptions
from ckpt.convert.ours.write import write_ours
from ckpt.convert.overflow import lines
from ckpt.convert.target import target_of
from ckpt.layout.box import Box
from ckpt.layout.spec import Shard, TensorSpec
from ckpt.store.local import LocalStore
from tests.unit.convert.sources import Source

if TYPE_CHECKING:
    from pathlib import Path

RULES = """
tensors:
  - {match: '.*up.weight', dim: 0}
  - {match: '.*norm.*|seen'}
"""
SHAPES = {f"layers.{n}.{name}": size for n in range(2) for name, size in (("up.weight", (8, 4)), ("norm", (4,)))}
LARGE = {"layers.0.up.weight": 3, "layers.1.norm": 2}
"""How many elements of a tensor are finite and too large for float16."""


def values(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    found = np.arange(np.prod(shape), dtype="f4")
    large = LARGE.get(name, 0)
    found[:large] = np.array([1e6, -1e5, 3e38], "f4")[:large]
    found[-1] = np.inf if large else found[-1]
    return found


def low(raw: np.ndarray[Any, Any]) -> bytes:
    return torch.from_numpy(raw.copy()).bfloat16().view(torch.uint8).numpy().tobytes()


def source(*, master: bool, param: bool) -> Source:
    """A model of two layers with Adam: with masters, parameters that are stored, or both."""
    found = Source().add("seen", "buffer", (), "int64")
    for name, shape in SHAPES.items():
        raw = values(name, shape)
        if master:
            found.put(name, "master", shape, "float32", raw.tobytes())
            found.builder.spec(name, "param", "bfloat16", shape)
            found.builder.derived.add(name)
        if param:
            kind = ("bfloat16", low(raw)) if master else ("float32", raw.tobytes())
            found.put(name, "param", shape, *kind)
        found.add(name, "exp_avg", shape).add(name, "step", ())
    return found.groups([*SHAPES])


SOURCES = {
    "masters": {"master": True, "param": False},
    "both": {"master": True, "param": True},
    "params": {"master": False, "param": True},
}


@pytest.fixture(params=SOURCES)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    opened = source(**SOURCES[request.param]).open()
    write_ours(opened, LocalStore(str(tmp_path / "src")), target_of(opened), WriteOptions())
    return tmp_path / "src"


def run(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def told(done: dict[str, Any]) -> list[str]:
    return [line for line in done["lost"] if "infinite in DST" in line]


EXPECTED = lines(
    [(name, "param", large) for name, large in sorted(LARGE.items())],
    {(name, "param"): "float16" for name in LARGE},
)


@pytest.mark.parametrize(
    "flags",
    [
        ("--dp", "3", "--zero", "1"),
        ("--dp", "2", "--tp", "2", "--rules", "rules.yaml", "--zero", "1"),
        ("--to", "safetensors"),
        ("--to", "deepspeed", "--dp", "2", "--zero", "1", "--tp", "2", "--rules", "rules.yaml"),
        ("--to", "deepspeed", "--dp", "3", "--zero", "3"),
        ("--to", "universal"),
    ],
    ids=" ".join,
)
def test_it_is_told_without_reading_anything_back_and_the_same_as_then(
    root: Path, tmp_path: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.yaml").write_text(RULES)
    cast = (*flags, "--dtype", "fp16")
    assert told(run("reshard", root, "a", *cast)) == EXPECTED
    again = run("reshard", root, "b", *cast, "--verify")
    assert told(again) == EXPECTED
    assert again["verified"]["overflowed"] == sum(LARGE.values())
    assert not told(run("reshard", root, "bf16", *flags, "--dtype", "bf16"))


def test_what_stays_in_the_precision_of_its_master_loses_nothing(root: Path, tmp_path: Path) -> None:
    masters = any(t["role"] == "master" for t in run("show", root)["tensors"])
    for name, flags in (("a", ()), ("b", ("--verify",))):
        done = run("reshard", root, tmp_path / name, "--to", "dcp", "--dtype", "fp16", *flags)
        assert told(done) == ([] if masters else EXPECTED)


def test_what_several_workers_count_is_one_sum(tmp_path: Path) -> None:
    held = {f"layers.{n}.w": torch.full((64, 8), 1e5 if n % 2 else 1.0) for n in range(12)}
    torch.save(held, tmp_path / "m.pt")
    cast = ("--dtype", "fp16", "--dp", "4", "--zero", "3", "--memory", "128MiB")
    one = told(run("import", tmp_path / "m.pt", tmp_path / "plain", "--dtype", "fp16"))
    assert one == [
        f"layers.{n}.w (param): 512 finite elements of SRC too large for float16, infinite in DST"
        for n in (1, 11, 3, 5, 7, 9)
    ]
    for to in ("ckpt", "deepspeed"):
        assert told(run("reshard", tmp_path / "m.pt", tmp_path / to, "--to", to, *cast, "--workers", "2")) == one


def test_many_tensors_are_told_in_few_lines(tmp_path: Path) -> None:
    torch.save({f"layers.{n:02}.w": torch.full((3,), 1e5) for n in range(20)}, tmp_path / "m.pt")
    found = told(run("import", tmp_path / "m.pt", tmp_path / "dst", "--dtype", "fp16"))
    assert len(found) == 9
    assert found[-1] == "12 more tensors: 36 finite elements of SRC too large, infinite in DST"


def test_what_an_earlier_run_has_written_is_said_to_be_unknown(tmp_path: Path) -> None:
    torch.save({"layers.0.w": torch.full((3,), 1e5)}, tmp_path / "m.pt")
    command = ("import", tmp_path / "m.pt", tmp_path / "dst", "--dtype", "fp16")
    first = run(*command)
    again = run(*command)
    assert (len(told(first)), told(again)) == (1, [])
    assert any("earlier run" in line for line in again["lost"])
    assert told(run(*command, "--verify")) == told(first)
    plain = ("import", tmp_path / "m.pt", tmp_path / "same")
    run(*plain)
    assert run(*plain)["lost"] == []


def test_what_another_copy_is_laid_over_does_not_count() -> None:
    """Of a derived parameter some chunks are stored, and its master stands in for the others."""
    made = source(master=True, param=False)
    spec = made.builder.spec("p", "param", "bfloat16", (4, 2))
    master = np.array([[1e6, 1], [1e6, 1], [1e6, 1e6], [1, 1]], "f4")
    made.put("p", "master", (4, 2), "float32", master.tobytes())
    made._store.put("own", low(np.array([[1, 1], [1e5, 1]], "f4")))
    for n in range(4):  # the upper half has bytes of its own
        made.builder.add(spec, Box((n, 0), (1, 2)), "own", 4 * n)
    made.builder.derived.add("p")
    opened = made.open()
    (part,) = opened.parts
    number = opened.specs.index(spec)
    kept = tuple(c for c in part.chunks if c.spec != number or c.offsets[0] < 2)
    opened = replace(opened, parts=(msgspec.structs.replace(part, chunks=kept),))
    assembler = Assembler(opened, memory=LEAST_MEMORY, cast=True)
    wanted = TensorSpec("p", "param", "float16", (4, 2))
    (piece,) = [bytes(piece.data) for piece in assembler.pieces([Shard(wanted, Box.whole((4, 2)))])]
    assert np.isinf(np.frombuffer(piece, "f2")).nonzero()[0].tolist() == [2, 4, 5]
    assert assembler.overflow.take() == [("p", "param", 3)]
    assert assembler.overflow.take() == []
