"""Gradient logs in an object store: nothing can be appended there, so each group of records is an object of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import ckpt
from ckpt.store.open import open_store
from tests.unit.gradlog.test_checkpointer import Loop, equal

if TYPE_CHECKING:
    from tests.harness.servers import S3Server

pytestmark = pytest.mark.usefixtures("s3_environment")


@pytest.fixture(params=["weed", "moto"])
def server(request: pytest.FixtureRequest) -> S3Server:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("flush_every", [1, 3])
def test_a_job_comes_back_from_a_bucket(server: S3Server, flush_every: int) -> None:
    name, prefix = server.place()
    root = f"s3://{name}/{prefix}/run?endpoint={server.url}"
    loop = Loop()
    with ckpt.Checkpointer(loop.engine, root, full_every=4, keep=None, flush_every=flush_every) as keeper:
        loop.train(7, 0, keeper)
    logs = [info.key for info in open_store(root).walk("log") if info.key.endswith(".log")]
    assert sorted(int(key[-16:-4]) for key in logs) == {1: [1, 2, 3, 4, 5, 6, 7], 3: [1, 4, 5]}[flush_every]
    again = Loop(seed=9)
    report = ckpt.load(again.engine, root)
    assert (report.step, report.base, report.exact) == (7, 4, True)
    assert equal(again.state(), loop.state())
