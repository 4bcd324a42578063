from __future__ import annotations

import pytest

from ckpt.errors import MalformedData
from ckpt.format.digest import SIZE, check_form, digest, from_raw, raw_digest

# From xxHash's own sanity checks (XXH3_128bits, seed 0): the empty input, and widely published values of short texts.
KNOWN = {b"": "99aa06d3014798d86001c324468d497f", b"a": "a96faf705af16834e6c632b61e964e1f"}


@pytest.mark.parametrize("data", KNOWN)
def test_known_vectors(data):
    """Another hash, seed or byte order would make every existing checkpoint 'damaged'."""
    assert digest(data) == f"xxh3-128:{KNOWN[data]}"
    assert raw_digest(data) == bytes.fromhex(KNOWN[data])
    assert from_raw(raw_digest(data)) == digest(data)
    assert len(raw_digest(data)) == SIZE


def test_every_kind_of_buffer_gives_the_same():
    data = bytes(range(256))
    assert digest(bytearray(data)) == digest(memoryview(data)) == digest(data)
    assert digest(memoryview(data)[10:20]) == digest(data[10:20])


@pytest.mark.parametrize(
    "text",
    ["", "xxh3-128:", "xxh3-128:" + "0" * 31, "xxh3-128:" + "0" * 33, "md5:" + "0" * 32, "0" * 32,
     "xxh3-128:" + "0" * 31 + "G", "xxh3-128:" + "A" * 32, "xxh3-128:" + "0" * 31 + "\n", "xxh3-64:" + "0" * 16],
)  # fmt: skip
def test_what_this_release_cannot_verify_is_refused(text):
    with pytest.raises(MalformedData, match=r"file\.json: digest"):
        check_form(text, "file.json")


def test_a_good_form_is_returned():
    assert check_form(digest(b"x"), "f") == digest(b"x")
