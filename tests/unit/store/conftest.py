"""What the tests of S3 share."""

from __future__ import annotations

import pytest

from tests.harness.faultproxy import FaultProxy


@pytest.fixture
def proxy(weed):
    with FaultProxy(weed.port) as one:
        yield one
