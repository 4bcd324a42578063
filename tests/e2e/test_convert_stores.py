"""Conversions between a disk, an S3 server and fsspec: every place is a URL, a single file in a bucket too."""

from __future__ import annotations

import io
import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save

from ckpt.cli.main import cli
from ckpt.store.open import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.servers import S3Server

pytestmark = pytest.mark.usefixtures("s3_environment")


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def test_from_a_file_in_a_bucket_through_every_store(moto: S3Server, tmp_path: Path) -> None:
    name, prefix = moto.place()
    bucket = f"s3://{name}/{prefix}{{}}?endpoint={moto.url}"
    weights = {f"layers.{n}.weight": np.arange(12, dtype="f4").reshape(3, 4) + n for n in range(3)}
    open_store(bucket.format("")).put("model.safetensors", save(weights))
    places = [
        (bucket.format("/model.safetensors"), None),
        (bucket.format("/ours"), "ckpt"),
        (f"memory://converted/{tmp_path.name}", "dcp"),
        (tmp_path / "disk", "ckpt"),
        (bucket.format("/folder"), "safetensors"),
    ]
    for (src, _), (dst, to) in itertools.pairwise(places):
        done = run("reshard", src, dst, "--to", to, "--dp", "2", "--verify")
        assert done["verified"] == {"equal": True, "tensors": 3, "unequal": [], "overflowed": 0}
        assert run("diff", src, dst)["equal"]


def test_a_file_of_torch_in_a_bucket_is_compared_with_its_checksums(moto: S3Server, tmp_path: Path) -> None:
    name, prefix = moto.place()
    bucket = f"s3://{name}/{prefix}{{}}?endpoint={moto.url}"
    data = io.BytesIO()
    torch.save({f"layers.{n}.weight": torch.arange(12.0).reshape(3, 4) + n for n in range(3)}, data)
    raw = bytearray(data.getvalue())
    file = bucket.format("/model.pt")
    open_store(bucket.format("")).put("model.pt", raw)
    assert run("import", file, tmp_path / "good", "--check-source")["checked"]["files"] == 1
    error = run("import", file, file, code=2)["error"]
    assert error["message"] == f"SRC and DST are the same, {file}"
    raw[raw.index(torch.tensor([9.0, 10.0, 11.0, 12.0]).numpy().tobytes())] ^= 1
    open_store(bucket.format("")).put("model.pt", raw, overwrite=True)
    error = run("import", file, tmp_path / "dst", "--check-source", code=3)["error"]
    assert f"{file}: record 'data/1'" in error["message"]
    assert not (tmp_path / "dst").exists()
