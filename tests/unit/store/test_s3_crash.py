"""A client that is killed in the middle of an upload, and a server that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckpt.errors import StoreUnavailable
from ckpt.store.s3 import S3Store
from tests.harness.servers import running_weed

pytestmark = pytest.mark.usefixtures("s3_environment")
BODY = os.urandom(1 << 20) * 30

WRITER = """
import sys
from ckpt.store.open import open_store
with open_store(sys.argv[1]).writer("p/x", head=8, size=64 << 20) as out:
    for _ in range(40):
        out.write(bytes(1 << 20))
    with out.changed:
        out.changed.wait_for(lambda: len(out.sent) >= 3)
    print("three parts are there", flush=True)
    sys.stdin.read()
"""


def place_on(server, **options: object) -> S3Store:
    bucket, prefix = server.place()
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return S3Store.from_url(f"s3://{bucket}/{prefix}?endpoint={server.url}{more}")


def test_a_client_that_is_killed_leaves_no_object_and_an_orphan_that_is_found(weed):
    store = place_on(weed)
    store.put("before", b"1")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", WRITER, store.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"three parts are there\n"
        process.send_signal(signal.SIGKILL)
    assert store.size("p/x") is None
    assert [info.key for info in store.walk("")] == ["before"]
    (orphan,) = store.orphans()
    assert orphan.key == "p/x"
    assert orphan.nbytes >= 3 * (8 << 20)
    assert store.orphans(older_than_s=3600) == []
    store.abort(orphan)
    assert store.orphans() == []
    assert [info.key for info in store.walk("")] == ["before"]


@pytest.fixture
def own_weed(tmp_path):
    yield from running_weed(tmp_path / "weed")


def write_until(out, parts: int) -> None:
    """Write, and wait until so many parts have been acknowledged."""
    out.write(BODY)
    with out.changed:
        assert out.changed.wait_for(lambda: len(out.sent) >= parts, timeout=120)


def test_a_server_that_is_killed_loses_nothing_that_it_acknowledged(own_weed):
    store = place_on(own_weed, retry_s=0.5)
    acknowledged = {f"k{n}": os.urandom(1000 * n) for n in range(5)}
    for key, data in acknowledged.items():
        store.put(key, data)
    with ExitStack() as stack:
        out = stack.enter_context(store.writer("p/x", size=2 * len(BODY)))
        write_until(out, 3)
        own_weed.kill()
        with pytest.raises(StoreUnavailable):
            out.finish()
    with pytest.raises(StoreUnavailable):
        store.size("k1")
    own_weed.start()
    assert {key: store.get(key) for key in acknowledged} == acknowledged
    assert store.size("p/x") is None
    assert sorted(store.children("")) == sorted(acknowledged)
    assert [orphan.key for orphan in store.orphans()] == ["p/x"]


def test_a_server_that_comes_back_within_the_budget_is_not_noticed(own_weed):
    store = place_on(own_weed, retry_s=100)
    errors: list[BaseException] = []

    def finish() -> None:
        try:
            out.write(BODY)
            out.finish(b"head")
        except BaseException as error:  # an exception in a thread is not seen
            errors.append(error)

    with store.writer("p/x", head=4, size=2 * len(BODY)) as out:
        write_until(out, 2)
        own_weed.kill()
        thread = threading.Thread(target=finish)
        thread.start()
        own_weed.start()
        thread.join()
    assert errors == []
    assert store.get("p/x") == b"head" + BODY + BODY
