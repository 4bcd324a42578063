"""A source against the CRC-32 of its own archives: every record of every format that torch.save is in."""

from __future__ import annotations

import json
import shutil
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file

from ckpt.cli.main import cli
from ckpt.convert import checking
from ckpt.convert.checking import Checked, check_source
from ckpt.convert.find import open_source
from ckpt.convert.options import ReadOptions
from ckpt.errors import DigestMismatch, MalformedData
from tests.harness.deepspeed_files import Model, numbered, write_zero3, write_zero12
from tests.harness.steps import three_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant


def model() -> Model:
    return Model([{"a.weight": numbered((7, 5), 1), "a.bias": numbered((5,), 2)}, {"b.weight": numbered((3,), 3)}])


def tensors() -> dict[str, torch.Tensor]:
    return {f"layers.{n}.weight": torch.arange(1000.0 * n, 1000.0 * n + 300).reshape(3, 100) for n in range(3)}


def write_dcp(folder: Path) -> None:
    dcp.save({"model": tensors(), "epoch": 3}, checkpoint_id=folder)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "zero3": lambda folder: write_zero3(folder, model(), 2),
    "zero1": lambda folder: write_zero12(folder, model(), 2),
    "dcp": write_dcp,
    "torch": lambda folder: torch.save({"model": tensors(), "step": 5}, folder / "model.pt"),
}


@pytest.fixture(params=WRITERS)
def src(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    WRITERS[request.param](folder)
    return folder


def checked(place: Path, **more: Any) -> Checked:
    seen: set[tuple[str, int, int]] = set()
    return check_source(open_source(str(place), options=ReadOptions(seen=seen)), seen, **more)


def records(path: Path) -> list[tuple[int, int, str]]:
    """Return (first byte, bytes, name) of the records of all archives of a file."""
    data = path.read_bytes()
    found, start = [], 0
    while start < len(data):  # a .distcp file is several archives, one behind the other
        end = data.index(b"PK\5\6", start) + 22
        piece = path.with_name("piece")
        piece.write_bytes(data[start:end])
        with zipfile.ZipFile(piece) as archive:
            for info in archive.infolist():
                with archive.open(info):
                    at = archive.fp.tell()  # type: ignore[union-attr]
                found.append((start + at, info.file_size, info.filename.partition("/")[2]))
        piece.unlink()
        start = end
    return found


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def test_what_is_whole_is_right_and_counted_to_its_end(src: Path) -> None:
    told: list[tuple[int, int]] = []
    found = checked(src, progress=lambda *now: told.append(now))
    files = sorted(src.rglob("*.pt")) + sorted(src.rglob("*.distcp"))
    held = [record for path in files for record in records(path)]
    assert (found.files, found.records, found.unsaid) == (len(files), len(held), ())
    assert found.nbytes == sum(nbytes for _, nbytes, _ in held)
    assert told[-1] == (sum(path.stat().st_size for path in files),) * 2
    assert told == sorted(told)


def test_a_byte_of_any_record_of_any_file_is_seen_and_named(src: Path) -> None:
    for path in (*src.rglob("*.pt"), *src.rglob("*.distcp")):
        whole = path.read_bytes()
        for at, nbytes, name in records(path):
            if not nbytes:
                continue
            flip(path, at + nbytes // 2)
            with pytest.raises(DigestMismatch, match=f"{path.name}.*record '{name}': expected CRC-32 0x"):
                checked(src)
            path.write_bytes(whole)
    checked(src)


def test_all_that_is_damaged_is_told_at_once_and_the_last_byte_of_a_large_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checking, "BLOCK", 100)
    path = tmp_path / "m.pt"
    torch.save(tensors(), path)
    places = [(at + nbytes - 1, name) for at, nbytes, name in records(path) if name.startswith("data/")]
    for at, _ in places:
        flip(path, at)
    with pytest.raises(DigestMismatch) as caught:
        checked(path)
    assert all(f"record '{name}'" in str(caught.value) for _, name in places)


def test_what_has_no_checksums_is_told(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors(), tmp_path / "none.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    found = checked(tmp_path / "none.pt")
    silent = len(records(tmp_path / "none.pt"))
    assert found == Checked(1, 0, 0, (f"{silent} records of torch.save without checksums: not checked",))
    torch.save(tensors(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert checked(tmp_path / "old.pt").unsaid == ("1 file without checksums (torch): not checked",)
    save_file(tensors(), tmp_path / "m.safetensors")
    assert checked(tmp_path / "m.safetensors").unsaid == ("1 file without checksums (safetensors): not checked",)
    assert "have digests" in checked(three_steps(tmp_path / "ours")).unsaid[0]


def test_a_file_that_is_cut_off_meanwhile_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(tensors(), path)
    seen: set[tuple[str, int, int]] = set()
    opened = open_source(str(path), options=ReadOptions(seen=seen))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(MalformedData, match=r"m\.pt"):
        check_source(opened, seen)


def test_other_steps_than_the_one_that_is_read_do_not_count(tmp_path: Path) -> None:
    for n in (7, 9):
        write_zero3(tmp_path / f"global_step{n}", Model([{"a": numbered((6,), n)}], step=n - 5.0), 2, global_steps=n)
    (tmp_path / "latest").write_text("global_step9")
    assert checked(tmp_path).files == 4
    other = tmp_path / "global_step7" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for at, nbytes, _ in records(other):
        flip(other, at + nbytes // 2)
    assert checked(tmp_path).files == 4


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_a_damaged_source_is_code_3_and_nothing_is_written(tmp_path: Path, dry: tuple[str, ...]) -> None:
    src = tmp_path / "src"
    write_zero3(src, model(), 2)
    good = run("reshard", src, tmp_path / "good", "--dp", "3", "--check-source", *dry)
    assert (good["checked"]["files"], good["checked"]["unsaid"], good["dry_run"]) == (4, [], bool(dry))
    shutil.rmtree(tmp_path / "good", ignore_errors=True)
    path = src / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    at, nbytes, name = max(records(path), key=lambda record: record[1] if record[2].startswith("data/") else 0)
    flip(path, at + nbytes - 1)
    before = {p.name: p.read_bytes() for p in src.iterdir()}
    for to in ("ckpt", "deepspeed", "safetensors"):
        error = run("reshard", src, tmp_path / "dst", "--dp", "3", "--to", to, "--check-source", *dry, code=3)["error"]
        assert error["type"] == "DigestMismatch"
        assert path.name in error["message"]
        assert f"record '{name}'" in error["message"]
        assert not (tmp_path / "dst").exists()
    assert {p.name: p.read_bytes() for p in src.iterdir()} == before
    run("reshard", src, tmp_path / "unseen", "--dp", "3")


def test_what_cannot_be_written_is_told_before_anything_is_compared(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "m.pt")
    at, nbytes, _ = records(tmp_path / "m.pt")[-1]
    flip(tmp_path / "m.pt", at + nbytes - 1)
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "mine.txt").touch()
    assert (
        "not empty" in run("import", tmp_path / "m.pt", tmp_path / "dst", "--check-source", code=2)["error"]["message"]
    )


def test_a_diff_compares_both_sides(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "a.pt")
    save_file(tensors(), tmp_path / "b.safetensors")
    sides = ("diff", tmp_path / "a.pt", tmp_path / "b.safetensors", "--check-source")
    found = run(*sides)
    assert found["a"]["checked"]["records"] == len(records(tmp_path / "a.pt"))
    assert found["b"]["checked"]["unsaid"] == ["1 file without checksums (safetensors): not checked"]
    text = CliRunner().invoke(cli, [*map(str, sides)]).stdout
    assert "of 1 file (" in text
    assert "have their checksums" in text
    at, _, name = next(record for record in records(tmp_path / "a.pt") if record[2].startswith("data/"))
    flip(tmp_path / "a.pt", at)
    assert f"'{name}'" in run(*sides, code=3)["error"]["message"]
