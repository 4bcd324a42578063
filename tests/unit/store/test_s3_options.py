"""What may stand in an S3 URL, and what may not."""

from __future__ import annotations

import pytest

from ckpt.errors import ConfigError
from ckpt.store.open import open_store
from ckpt.store.s3 import S3Store
from ckpt.store.s3_options import MAX_PART, MIN_PART, S3Options, parse, tell


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", ("bucket", "", S3Options())),
        ("S3://bucket/", ("bucket", "", S3Options())),
        ("s3://b.u-c_ket/a/b/", ("b.u-c_ket", "a/b", S3Options())),
        ("s3://bucket/a%20b%3Fc", ("bucket", "a b?c", S3Options())),
        (
            "s3://bucket/p?endpoint=http://127.0.0.1:9000&region=eu-x",
            ("bucket", "p", S3Options("http://127.0.0.1:9000", "eu-x")),
        ),
        ("s3://bucket?endpoint=https%3A%2F%2Fh%3A1", ("bucket", "", S3Options("https://h:1"))),
        (
            "s3://bucket/p?concurrency=3&part_bytes=5242880&retry_s=0.5&checksums=off&sign=no&addressing=path",
            (
                "bucket",
                "p",
                S3Options(
                    concurrency=3, part_bytes=MIN_PART, retry_s=0.5, checksums="off", sign="no", addressing="path"
                ),
            ),
        ),
    ],
)
def test_a_url_says_where_and_how(url, expected):
    assert parse(url) == expected


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s3://", "expected s3://bucket/prefix"),
        ("s3:///prefix", "expected s3://bucket/prefix"),
        ("s3://ab/x", "found bucket 'ab'"),
        ("s3://bucket/a//b", "not a relative path"),
        ("s3://bucket/../b", "not a relative path"),
        ("s3://bucket/a#b", "%23"),
        ("s3://bucket?endpont=http://x", "'endpont' is not known; there are endpoint, region"),
        ("s3://bucket?region=a&region=b", "given twice"),
        ("s3://bucket?region", "expected name=value"),
        ("s3://bucket?endpoint=localhost:9000", r"expected http\(s\)://host"),
        ("s3://bucket?endpoint=http://h/?x=1", "expected|options"),
        ("s3://bucket?concurrency=many", "expected a number"),
        ("s3://bucket?concurrency=0", "positive concurrency"),
        ("s3://bucket?part_bytes=1000", f"expected {MIN_PART} to {MAX_PART}"),
        ("s3://bucket?retry_s=-1", "expected seconds"),
        ("s3://bucket?retry_s=nan", "expected seconds"),
        ("s3://bucket?read_s=0", "expected seconds"),
        ("s3://bucket?checksums=maybe", "one of auto, on, off"),
        ("s3://bucket?max_parts=10001", "10000"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(url, match):
    with pytest.raises(ConfigError, match=match):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/p", "s3://bucket?endpoint=http://key:hunter2@host"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="credentials come from the environment") as caught:
        S3Store.from_url(url)
    assert "hunter2" not in str(caught.value)


def test_a_password_in_the_environments_endpoint_does_not_get_into_messages(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://key:hunter2@host")
    with pytest.raises(ConfigError) as caught:
        S3Store("bucket")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "a/b", "a b/ü?#%", "100%"])
@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:9000", "https://[::1]:9000/base"])
def test_the_url_of_a_place_leads_back_to_it(prefix, endpoint):
    assert parse(tell("bucket", prefix, endpoint)) == ("bucket", prefix, S3Options(endpoint))
    store = open_store(tell("bucket", prefix, endpoint))
    assert isinstance(store, S3Store)
    assert store.url == tell("bucket", prefix, endpoint)


def test_the_url_tells_the_environments_endpoint(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a:1")
    assert S3Store("bucket").url == "s3://bucket?endpoint=http://a:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://b:1")
    assert S3Store("bucket").url == "s3://bucket?endpoint=http://b:1"
    assert S3Store.from_url("s3://bucket?endpoint=http://c:1").url == "s3://bucket?endpoint=http://c:1"
