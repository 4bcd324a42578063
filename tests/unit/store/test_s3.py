"""The S3 store against real servers: rights, missing things, listings, processes, and every fault of the proxy."""

from __future__ import annotations

import http.server
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.errors import AccessDenied, ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from ckpt.store.base import HasOrphans, ObjectInfo
from ckpt.store.open import open_store
from ckpt.store.s3 import S3Store
from tests.harness.faultproxy import FaultProxy
from tests.harness.servers import SECRET
from tests.unit.store.places import at

pytestmark = pytest.mark.usefixtures("s3_environment")
ALWAYS = 10**9
DATA = bytes(range(256)) * 40


def every_operation(store):
    return {
        "put": lambda: store.put("new", b"x"),
        "overwrite": lambda: store.put("k", b"x", overwrite=True),
        "get": lambda: store.get("k"),
        "range": lambda: store.get("k", 5, 7),
        "nothing": lambda: store.get("k", 0, 0),
        "read_into": lambda: store.read_into("k", 0, memoryview(bytearray(9))),
        "size": lambda: store.size("k"),
        "walk": lambda: list(store.walk("")),
        "children": lambda: store.children(""),
        "delete": lambda: store.delete("k"),
        "orphans": lambda: store.orphans(),
        "writer": lambda: write(store, "w", DATA),
    }


OPERATIONS = list(every_operation(None))


def write(store, key: str, data: bytes, head: bytes = b"") -> None:
    with store.writer(key, head=len(head), size=len(head) + len(data)) as out:
        out.write(data)
        out.finish(head)


# ------------------------------------------------------------------------------------------- rights and missing things


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("name", "value"), [("AWS_ACCESS_KEY_ID", "stranger"), ("AWS_SECRET_ACCESS_KEY", "wrong")], ids=["key", "secret"]
)
def test_wrong_credentials_are_denied_at_once(proxy, weed, monkeypatch, operation, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(AccessDenied) as caught:
        every_operation(at(weed, proxy.url))[operation]()
    assert not caught.value.transient
    assert SECRET not in str(caught.value)
    assert len(proxy.seen) == 1, "a refusal is not tried again"


def test_a_reader_may_read_and_not_write(weed, monkeypatch):
    owner = at(weed)
    owner.put("k", DATA)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "readonly0")
    reader = S3Store.from_url(owner.url)
    assert reader.get("k") == DATA
    assert reader.size("absent") is None
    for call in (lambda: reader.put("new", b""), lambda: reader.delete("k"), lambda: write(reader, "w", DATA)):
        with pytest.raises(AccessDenied):
            call()
    assert owner.get("k") == DATA
    assert owner.children("") == ["k"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_credentials_at_all(weed, monkeypatch, operation):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDenied, match="no usable credentials"):
        every_operation(at(weed))[operation]()


@pytest.mark.parametrize(
    ("server", "operation"),
    # SeaweedFS makes a bucket when something is put into it.
    [("moto", name) for name in OPERATIONS]
    + [("weed", name) for name in OPERATIONS if name not in ("put", "overwrite", "writer")],
)
def test_a_missing_bucket_is_an_error_and_never_an_empty_place(request, server, operation):
    endpoint = request.getfixturevalue(server).url
    store = S3Store.from_url(f"s3://no-such-bucket-{operation.replace('_', '-')}/p?endpoint={endpoint}")
    with pytest.raises(StoreError, match="no such bucket") as caught:
        every_operation(store)[operation]()
    assert not isinstance(caught.value, ObjectNotFound)
    assert not caught.value.transient


class NotS3(http.server.BaseHTTPRequestHandler):
    """A web server that somebody has taken for an S3 endpoint."""

    status, body = 404, b""

    def _any(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _any

    def log_message(self, *args: object) -> None:
        """Nothing on standard error."""


WORDS = {"page": b"<html><body>hello</body></html>", "text": b"hello", "nothing": b"", "json": b'{"IsTruncated": 0}'}


@pytest.mark.parametrize("body", WORDS)
@pytest.mark.parametrize("status", [404, 200])
def test_an_endpoint_that_is_not_s3_is_not_an_empty_store(weed, status, body):
    handler = type("Handler", (NotS3,), {"status": status, "body": WORDS[body]})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        store = at(weed, f"http://127.0.0.1:{server.server_port}", retry_s=0)
        calls = every_operation(store)
        for name in ("get", "range", "read_into", "nothing", "size", "delete") if status == 200 else ():
            del calls[name]  # whatever it says is taken for the object: our own digests find what it is
        for call in calls.values():
            with pytest.raises(StoreError) as caught:
                call()
            assert not isinstance(caught.value, ObjectNotFound)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_nobody_listens(weed):
    store = at(weed, "http://127.0.0.1:9", retry_s=0.3)
    for call in every_operation(store).values():
        with pytest.raises(StoreUnavailable, match="Could not connect"):
            call()


# ------------------------------------------------------------------------------------------------------------ listings


@pytest.mark.parametrize("server", ["weed", "moto"])
def test_a_listing_of_many_pages(request, server):
    store = at(request.getfixturevalue(server), concurrency=16)
    keys = [f"d/{n:04}/x" for n in range(1200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, key.encode(), overwrite=True), keys))
    assert sorted(info.key for info in store.walk("")) == keys
    assert sorted(info.key for info in store.walk("d")) == keys
    assert {info.nbytes for info in store.walk("d")} == {8}
    found = store.children("d")
    assert len(found) == 1200
    assert sorted(found) == [f"{n:04}" for n in range(1200)]
    assert store.children("") == ["d"]


@pytest.mark.parametrize("server", ["weed", "moto"])
def test_neighbours_in_the_order_of_names(request, server):
    store = at(request.getfixturevalue(server))
    keys = {"x/1", "x/2", "x-1/a", "x.1", "x0", "y", "x/1.b", "x/1-b"}
    for key in keys:
        store.put(key, b"1")
    assert {info.key for info in store.walk("")} == keys
    assert {info.key for info in store.walk("x")} == {"x/1", "x/2", "x/1.b", "x/1-b"}
    assert sorted(store.children("")) == ["x", "x-1", "x.1", "x0", "y"]
    assert sorted(store.children("x")) == ["1", "1-b", "1.b", "2"]
    assert store.children("x/1") == []


def test_a_placeholder_of_a_folder_is_no_object(moto):
    store = at(moto)
    moto.client.put_object(Bucket=store.bucket, Key=f"{store.prefix}/steps/", Body=b"")
    store.put("steps/1", b"1")
    assert list(store.walk("")) == [ObjectInfo("steps/1", 1)]
    assert store.children("steps") == ["1"]
    assert store.children("") == ["steps"]


def test_the_whole_bucket_may_be_the_root(moto):
    bucket, prefix = moto.place()
    store = S3Store.from_url(f"s3://{bucket}?endpoint={moto.url}")
    store.put(f"{prefix}/k", b"1")
    assert S3Store.from_url(f"s3://{bucket}/{prefix}?endpoint={moto.url}").get("k") == b"1"
    assert list(store.walk(prefix)) == [ObjectInfo(f"{prefix}/k", 1)]
    assert prefix.split("/")[0] in store.children("")


# --------------------------------------------------------------------------------------------------- processes, threads


def test_one_instance_serves_several_threads(weed):
    store = at(weed)
    bodies = {f"k{n}": bytes([n]) * 300_000 for n in range(16)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: store.put(*item), bodies.items()))
        assert list(pool.map(store.get, bodies)) == list(bodies.values())


PROCESSES = """
import multiprocessing, sys
from ckpt.store.open import open_store

def child(store, n, results):
    store.put(f"child{n}", bytes([n]) * 1000)
    results.put(all(store.get("parent") == b"p" * 200_000 for _ in range(20)))

if __name__ == "__main__":
    store = open_store(sys.argv[1])
    store.put("parent", b"p" * 200_000)  # the parent's connection is open when it forks
    context = multiprocessing.get_context(sys.argv[2])
    results = context.Queue()
    children = [context.Process(target=child, args=(store, n, results)) for n in range(3)]
    for one in children:
        one.start()
    assert all(store.get("parent") == b"p" * 200_000 for _ in range(20))
    assert all(results.get(timeout=120) for _ in children)
    for one in children:
        one.join()
    print(sorted(store.children("")))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_store_works_in_the_processes_that_it_is_given_to(weed, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(PROCESSES)
    command = [sys.executable, str(script), at(weed).url, method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=child_environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['child0', 'child1', 'child2', 'parent']"


def child_environment() -> dict[str, str]:
    import os
    from pathlib import Path

    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}


def test_the_environment_names_the_endpoint(weed, monkeypatch):
    told = at(weed)
    told.put("k", DATA)
    monkeypatch.setenv("AWS_ENDPOINT_URL", weed.url)
    assert open_store(f"s3://{told.bucket}/{told.prefix}").get("k") == DATA
    assert isinstance(told, HasOrphans)


# -------------------------------------------------------------------------------------------------------------- faults

FAULTS = {
    "slow down, three times": {"act": "answer", "status": 503, "code": "SlowDown", "times": 3},
    "internal error": {"act": "answer", "status": 500, "code": "InternalError"},
    "internal error after success": {"act": "answer after", "status": 500, "code": "InternalError"},
    "bad gateway": {"act": "answer", "status": 502},
    "reset": {"act": "reset", "times": 2},
    "lost answer": {"act": "lose"},
    "stall": {"act": "stall"},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_passing_fault_is_not_noticed(weed, proxy, operation, fault):
    store = at(weed, proxy.url, read_s=1, retry_s=60)
    straight = S3Store.from_url(f"s3://{store.bucket}/{store.prefix}?endpoint={weed.url}")
    straight.put("k", DATA)
    rule = proxy.add(".", **FAULTS[fault])
    result = every_operation(store)[operation]()
    assert rule.hits == FAULTS[fault].get("times", 1)
    expected = {
        "get": DATA, "range": DATA[5:12], "nothing": b"", "read_into": 9, "size": len(DATA), "orphans": [],
        "walk": [ObjectInfo("k", len(DATA))], "children": ["k"],
    }  # fmt: skip
    assert result == expected.get(operation)
    left = {"put": {"k": DATA, "new": b"x"}, "overwrite": {"k": b"x"}, "delete": {}, "writer": {"k": DATA, "w": DATA}}
    assert {info.key: straight.get(info.key) for info in straight.walk("")} == left.get(operation, {"k": DATA})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_lasting_fault_ends_with_the_budget(weed, proxy, operation):
    store = at(weed, proxy.url, retry_s=0.4)
    rule = proxy.add(".", "answer", status=503, code="SlowDown", times=ALWAYS)
    with pytest.raises(StoreUnavailable, match=r"503.*tried \d+ times") as caught:
        every_operation(store)[operation]()
    assert caught.value.transient
    assert rule.hits >= 2


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_a_budget_everything_is_tried_once(weed, proxy, operation):
    store = at(weed, proxy.url, retry_s=0)
    proxy.add(".", "answer", status=503, code="SlowDown", times=ALWAYS)
    with pytest.raises(StoreUnavailable):
        every_operation(store)[operation]()
    # A writer whose put failed looks once whether it has arrived all the same.
    assert len(proxy.seen) == (2 if operation == "writer" else 1)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "AccessDenied", AccessDenied),
        (403, "RequestTimeTooSkewed", AccessDenied),
        (409, "InvalidBucketState", StoreError),
        (403, "QuotaExceeded", StoreError),
    ],
)
def test_what_will_not_pass_is_not_tried_again(weed, proxy, status, code, expected):
    store = at(weed, proxy.url)
    proxy.add(".", "answer", status=status, code=code, times=ALWAYS)
    for call in (lambda: store.put("k", b"x"), lambda: store.get("k"), lambda: list(store.walk(""))):
        before = len(proxy.seen)
        with pytest.raises(expected):
            call()
        assert len(proxy.seen) == before + 1


def test_a_put_that_finds_its_own_object_has_succeeded(weed, proxy):
    store = at(weed, proxy.url)
    rule = proxy.add("^PUT ", "lose")
    store.put("k", DATA)
    assert rule.hits == 1
    assert proxy.count("^PUT ") >= 2
    assert store.get("k") == DATA


@pytest.mark.parametrize("theirs", [b"other", DATA], ids=["other bytes", "the same bytes"])
def test_a_put_that_finds_a_rivals_object_has_not(weed, proxy, theirs):
    store = at(weed, proxy.url)
    S3Store.from_url(f"s3://{store.bucket}/{store.prefix}?endpoint={weed.url}").put("k", theirs)
    proxy.add("^PUT ", "answer", status=500, code="InternalError")
    with pytest.raises(ObjectExists):
        store.put("k", DATA)
    assert store.get("k") == theirs


def test_a_put_knows_its_bytes_where_metadata_is_not_kept(moto):
    with FaultProxy(moto.port) as proxy:
        store = at(moto, proxy.url)
        proxy.add("^PUT .*\n(.*\n)*x-amz-meta", "strip", code="x-amz-meta-ckpt-nonce", times=ALWAYS, skip=1)
        proxy.add("^PUT ", "lose")
        moto.client.put_object(Bucket=store.bucket, Key=f"{store.prefix}/k", Body=DATA)  # without metadata
        store.put("k", DATA)
        with pytest.raises(ObjectExists):
            store.put("k", b"other")


def test_an_endpoint_that_ignores_the_condition_is_found_at_the_first_put(moto):
    with FaultProxy(moto.port) as proxy:
        store = at(moto, proxy.url)
        proxy.add("^PUT ", "strip", code="If-None-Match", times=ALWAYS)
        with pytest.raises(StoreError, match="expected the endpoint to refuse a second put"):
            store.put("k", DATA)
        assert store.get("k") == DATA


@pytest.mark.parametrize("act", ["truncate", "reset mid"])
@pytest.mark.parametrize("where", [0, 1, 70_000])
def test_a_body_that_breaks_off_is_continued(weed, proxy, act, where):
    body = DATA * 20
    store = at(weed, proxy.url)
    if act == "reset mid":
        proxy.add("^PUT .*/k", act, at=where, times=2)
    store.put("k", body)
    if act == "truncate":
        proxy.add("^GET ", act, at=where, times=2)
    buffer = bytearray(150_000)
    assert store.read_into("k", 50_000, memoryview(buffer)) == 150_000
    assert bytes(buffer) == body[50_000:200_000]
    if act == "truncate" and where:
        assert proxy.count(rf"^Range: bytes={50_000 + 2 * where}-199999") == 1, "only the rest is asked for"
        proxy.add("^GET ", act, at=where, times=2)
    assert store.get("k") == body
    assert store.get("k", 7) == body[7:]
    assert store.get("k", 10, 100_000) == body[10:100_010]


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(weed, proxy):
    store = at(weed, proxy.url)
    store.put("k", DATA)
    proxy.add("^GET ", "truncate", at=1000)
    proxy.add("^If-Match: ", "answer", status=412, code="PreconditionFailed")
    with pytest.raises(StoreUnavailable, match="replaced meanwhile"):
        store.get("k", 1)


def test_a_byte_that_changes_on_the_way_down_is_found_in_a_whole_object(weed, proxy):
    store = at(weed, proxy.url)
    store.put("k", DATA)
    rule = proxy.add("^GET ", "corrupt", at=100)
    assert store.get("k") == DATA
    assert rule.hits == 1
    proxy.add("^GET ", "corrupt", at=100, times=ALWAYS)
    with pytest.raises(StoreError, match="did not match calculated checksum") as caught:
        store.get("k")
    assert not caught.value.transient


def test_a_byte_that_changes_on_the_way_up_is_refused_and_sent_again(weed, proxy):
    store = at(weed, proxy.url)
    rule = proxy.add("^PUT ", "corrupt up", at=100)
    store.put("k", DATA)
    assert rule.hits == 1
    assert store.get("k") == DATA


@pytest.mark.parametrize("status", [400, 501])
def test_an_endpoint_that_refuses_checksums_gets_none(weed, proxy, caplog, status):
    store = at(weed, proxy.url)
    proxy.add("^x-amz-(sdk-)?checksum-(crc32|algorithm)", "answer", status=status, code="NotImplemented", times=ALWAYS)
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        store.put("k", DATA)
        store.put("l", DATA)
    assert (store.get("k"), store.get("l")) == (DATA, DATA)
    assert len(caplog.records) == 1
    assert "refuses uploads with checksums" in caplog.text
    big = bytes(12 << 20)
    write(at(weed, proxy.url), "w", big)
    with pytest.raises(StoreError, match="NotImplemented"):
        at(weed, proxy.url, checksums="on").put("k", DATA)


def test_checksums_may_be_off(weed, proxy):
    store = at(weed, proxy.url, checksums="off")
    store.put("k", DATA)
    write(store, "w", bytes(12 << 20))
    assert proxy.count("^x-amz-checksum-crc32") == 0
    assert proxy.count("^x-amz-checksum-algorithm") == 0
    with_them = at(weed, proxy.url)
    with_them.put("k", DATA)
    assert proxy.count("^x-amz-checksum-crc32") >= 1


def test_payloads_are_signed_over_http_unless_told(weed, proxy):
    at(weed, proxy.url).put("k", DATA)
    assert proxy.count("^x-amz-content-sha256: UNSIGNED") == 0
    at(weed, proxy.url, sign="no").put("k", DATA)
    assert proxy.count("^x-amz-content-sha256: UNSIGNED") >= 1


def test_credentials_that_expire_are_looked_up_anew(weed, proxy, monkeypatch, tmp_path):
    file = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = " + SECRET + "\n"
    file.write_text(text.format("oldkey00"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    proxy.add("Credential=oldkey00", "answer", status=400, code="ExpiredToken", times=ALWAYS)
    store = at(weed, proxy.url)
    with pytest.raises(AccessDenied, match="credentials have expired"):
        store.put("k", DATA)
    assert len(proxy.seen) == 2
    file.write_text(text.format("testkey0"))
    store.put("k", DATA)
    assert store.get("k") == DATA


def test_a_slow_network_changes_nothing(weed, proxy):
    proxy.latency, proxy.bandwidth = 0.01, 4 << 20
    store = at(weed, proxy.url)
    store.put("k", DATA * 50)
    assert store.get("k") == DATA * 50
