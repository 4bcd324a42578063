"""What several folders of tests share: servers, started when the first test asks for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness.servers import environment, running_moto, running_weed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.servers import Moto, Weed


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """SeaweedFS for all tests of a run: each makes a bucket of its own."""
    yield from running_weed(tmp_path_factory.mktemp("weed") / "one")


@pytest.fixture(scope="session")
def moto() -> Iterator[Moto]:
    """The same with moto, in this process."""
    yield from running_moto()


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers' credentials in the environment, and nothing of the user's own."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
