"""Multipart uploads: sizes of parts, heads that come last, what each fault leaves behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import AccessDenied, StoreError, StoreUnavailable
from ckpt.store.blocks import Blocks
from ckpt.store.s3_options import MAX_OBJECT, MAX_PART, MAX_PARTS, MIN_PART
from ckpt.store.s3_writer import first_part_bytes, part_bytes_of
from tests.unit.store.places import at

pytestmark = pytest.mark.usefixtures("s3_environment")
MIB = 1 << 20
ALWAYS = 10**9
BODY = b"".join(bytes([n]) * 997 + bytes(range(256)) * 4096 for n in range(22))  # a good 22 MiB
PART = r"^PUT .*partNumber={}\b"
COMPLETE = r"^POST .*uploadId="
BEGIN = r"^POST .*\?uploads"


def write(store, head: bytes = b"head", size: int = len(BODY), body: bytes = BODY, **more: object) -> None:
    with store.writer("p/x", head=len(head), size=size, **more) as out:
        for start in range(0, len(body), 3_000_001):
            out.write(body[start : start + 3_000_001])
        out.finish(head)


def parts_of(server, store) -> int:
    """How many parts the object was uploaded in, by its ETag."""
    tag = server.client.head_object(Bucket=store.bucket, Key=f"{store.prefix}/p/x")["ETag"].strip('"')
    return int(tag.partition("-")[2] or 1)


def nothing_is_left(store) -> bool:
    return store.size("p/x") is None and store.orphans() == [] and list(store.walk("")) == []


# ------------------------------------------------------------------------------------------------------- sizes of parts


@given(size=st.integers(0, MAX_OBJECT), wanted=st.integers(MIN_PART, MAX_PART), told=st.integers(0, MAX_OBJECT))
def test_parts_keep_to_the_limits_and_reach_the_largest_object(size, wanted, told):
    first = first_part_bytes(told, wanted, MAX_PARTS)
    planned = -(-told // first)
    sizes = [part_bytes_of(number, first, planned, MAX_PARTS) for number in range(1, MAX_PARTS + 1)]
    assert min(sizes) >= MIN_PART
    assert max(sizes) <= MAX_PART
    assert sizes == sorted(sizes)
    assert sum(sizes) >= MAX_OBJECT, "whatever was told, any object can be written"
    assert set(sizes[:planned]) <= {first}, "and who told right gets equal parts"
    assert first >= wanted


def test_an_object_larger_than_s3_allows_is_refused_when_it_is_opened(moto):
    with pytest.raises(StoreError, match=f"an S3 object has {MAX_OBJECT} at most"):
        at(moto).writer("p/x", size=MAX_OBJECT + 1)


@pytest.mark.parametrize("server", ["weed", "moto"])
@pytest.mark.parametrize(
    ("head", "nbytes", "parts"),
    [
        (0, 1, 1),
        (10, 100, 1),
        (0, 8 * MIB, 1),
        (5, 8 * MIB - 5, 1),
        (5, 8 * MIB - 4, 2),
        (0, 8 * MIB + 1, 2),
        (4096, 20 * MIB, 3),
        (8 * MIB, 0, 1),
        (8 * MIB, 1, 2),
        (12 * MIB + 1, 9 * MIB, 3),
        (16 * MIB, 8 * MIB, 3),
        (17 * MIB, 0, 3),
    ],
)
def test_head_and_body_of_any_size(request, server, head, nbytes, parts):
    one = request.getfixturevalue(server)
    store, front, blocks = at(one), bytes(range(251)) * (head // 251 + 1), Blocks(24 * MIB)
    write(store, front[:head], head + nbytes, BODY[:nbytes], blocks=blocks)
    assert store.size("p/x") == head + nbytes
    assert store.get("p/x") == front[:head] + BODY[:nbytes]
    assert parts_of(one, store) == parts
    assert blocks.in_use == 0
    assert store.orphans() == []


def test_more_than_was_told_fits_into_few_parts_all_the_same(weed):
    store = at(weed, part_bytes=MIN_PART, max_parts=4)
    write(store, b"", size=0)
    assert store.get("p/x") == BODY
    assert parts_of(weed, store) <= 4


def test_more_than_all_parts_hold_is_refused_and_leaves_nothing(moto):
    store = at(moto, part_bytes=MIN_PART, max_parts=2, retry_s=0)
    with pytest.raises(StoreError, match="do not fit into 2 parts"):
        write(store, body=BODY * 10)
    assert nothing_is_left(store)


# -------------------------------------------------------------------------------------------------------------- faults

PASSING = {
    "a part is told to slow down": (PART.format(2), {"act": "answer", "code": "SlowDown", "times": 3}),
    "a part's connection breaks": (PART.format(2), {"act": "reset mid", "at": 3 * MIB}),
    "the first part's connection breaks": (PART.format(1), {"act": "reset mid", "at": 3}),
    "a part's answer is lost": (PART.format(3), {"act": "lose"}),
    "a part gets no answer": (PART.format(2), {"act": "stall"}),
    "a part's byte changes": (PART.format(2), {"act": "corrupt up", "at": 4_000_000}),
    "a part fails after success": (PART.format(2), {"act": "answer after", "status": 500, "code": "InternalError"}),
    "the beginning fails": (BEGIN, {"act": "answer", "status": 500, "code": "InternalError"}),
    "the beginning's answer is lost": (BEGIN, {"act": "lose"}),
    "the end is an error with status 200": (COMPLETE, {"act": "answer", "status": 200, "code": "InternalError"}),
    "the end is an error after success": (COMPLETE, {"act": "answer after", "status": 500, "code": "InternalError"}),
    "the end's answer is lost": (COMPLETE, {"act": "lose"}),
    "the end is reset": (COMPLETE, {"act": "reset"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_is_not_noticed(weed, proxy, fault):
    pattern, how = PASSING[fault]
    store = at(weed, proxy.url, read_s=2)
    rule = proxy.add(pattern, **how)
    write(store)
    assert rule.hits == how.get("times", 1)
    assert store.get("p/x") == b"head" + BODY
    lost = fault == "the beginning's answer is lost"
    assert len(store.orphans()) == lost, "an upload that nobody was told of is what gc is for"


def test_an_upload_that_is_gone_because_it_was_completed(weed, proxy):
    store = at(weed, proxy.url)
    proxy.add(COMPLETE, "lose")
    proxy.add(COMPLETE, "answer", status=404, code="NoSuchUpload")
    write(store)
    assert proxy.count(COMPLETE) == 2
    assert store.get("p/x") == b"head" + BODY


def test_an_upload_that_is_gone_because_it_was_aborted(weed, proxy):
    store = at(weed, proxy.url)
    with store.writer("p/x", size=len(BODY)) as out:
        out.write(BODY)
        for orphan in store.orphans():
            store.abort(orphan)
        with pytest.raises(StoreError, match="upload"):
            out.finish()
    assert nothing_is_left(store)


def test_an_object_of_somebody_else_is_not_taken_for_ours(weed, proxy):
    store = at(weed, proxy.url)
    store.put("p/x", b"head" + BODY)
    proxy.add(COMPLETE, "answer", status=404, code="NoSuchUpload")
    with pytest.raises(StoreError, match="somebody else has written"):
        write(store)
    assert store.get("p/x") == b"head" + BODY
    assert store.orphans() == []


LASTING = {
    "a part is denied": (PART.format(2), {"status": 403, "code": "AccessDenied"}, AccessDenied),
    "the first part is denied": (PART.format(1), {"status": 403, "code": "AccessDenied"}, AccessDenied),
    "a part is told to slow down": (PART.format(2), {"code": "SlowDown"}, StoreUnavailable),
    "the beginning is denied": (BEGIN, {"status": 403, "code": "AccessDenied"}, AccessDenied),
    "the end is an error with status 200": (COMPLETE, {"status": 200, "code": "InternalError"}, StoreUnavailable),
    "the end is denied with status 200": (COMPLETE, {"status": 200, "code": "AccessDenied"}, AccessDenied),
    "the end is refused": (COMPLETE, {"status": 400, "code": "InvalidPart"}, StoreError),
}  # fmt: skip


@pytest.mark.parametrize("fault", LASTING)
def test_a_lasting_fault_is_raised_and_nothing_is_left(weed, proxy, fault):
    pattern, how, expected = LASTING[fault]
    store, blocks = at(weed, proxy.url, retry_s=0.5), Blocks(16 * MIB)
    proxy.add(pattern, "answer", times=ALWAYS, **how)
    with pytest.raises(expected, match="p/x") as caught:
        write(store, blocks=blocks)
    assert type(caught.value) is expected
    assert caught.value.__cause__ is not None
    assert blocks.in_use == 0
    assert nothing_is_left(store)


def test_a_part_that_fails_is_raised_by_the_next_write(weed, proxy):
    store = at(weed, proxy.url, concurrency=1)
    proxy.add(PART.format(1), "answer", status=403, code="AccessDenied", times=ALWAYS)

    def write_on(out) -> None:
        while out.total < 40 * MIB:  # with one part at a time, it has failed when the third is full
            out.write(BODY[:MIB])

    with store.writer("p/x") as out, pytest.raises(AccessDenied, match="write part 1 of 'p/x'"):
        write_on(out)
    assert nothing_is_left(store)


def test_an_end_that_was_done_and_never_answered_is_taken_back(weed, proxy):
    store = at(weed, proxy.url, retry_s=0)
    proxy.add(COMPLETE, "lose", times=ALWAYS)
    with pytest.raises(StoreUnavailable):
        write(store)
    assert nothing_is_left(store)


def test_a_writer_that_cannot_reach_the_endpoint_any_more_leaves_an_orphan_for_gc(weed, proxy):
    store = at(weed, proxy.url, retry_s=0.2)
    proxy.add(PART.format(2), "reset", times=ALWAYS)
    proxy.add("^DELETE ", "reset", times=ALWAYS)
    with pytest.raises(StoreUnavailable):
        write(store)
    assert proxy.count("^DELETE ") == 1
    proxy.rules.clear()
    (orphan,) = store.orphans("p")
    assert orphan.key == "p/x"
    assert orphan.age_s >= 0
    assert store.orphans("p", older_than_s=3600) == []
    assert store.orphans("other") == []
    store.abort(orphan)
    store.abort(orphan)
    assert nothing_is_left(store)
