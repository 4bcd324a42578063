"""Each refusal of an S3 endpoint becomes the right error of ours, with words that say what to look at."""

from __future__ import annotations

import pytest

from ckpt.errors import (
    AccessDenied,
    ConfigError,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ckpt.store.s3_errors import Fault, Kind, of_answer, to_error


@pytest.mark.parametrize(
    ("status", "code", "expected", "match"),
    [
        (503, "SlowDown", StoreUnavailable, "503 SlowDown"),
        (200, "InternalError", StoreUnavailable, "InternalError"),
        (500, "", StoreUnavailable, "500"),
        (502, "502", StoreUnavailable, "502"),
        (520, "", StoreUnavailable, "520"),
        (429, "TooManyRequests", StoreUnavailable, "429"),
        (400, "RequestTimeout", StoreUnavailable, "RequestTimeout"),
        (409, "ConditionalRequestConflict", StoreUnavailable, "409"),
        (403, "AccessDenied", AccessDenied, "403 AccessDenied"),
        (500, "AccessDenied", AccessDenied, "AccessDenied"),
        (401, "", AccessDenied, "401"),
        (403, "SignatureDoesNotMatch", AccessDenied, "credentials are wrong"),
        (403, "RequestTimeTooSkewed", AccessDenied, "clock of this host"),
        (400, "ExpiredToken", AccessDenied, "credentials have expired"),
        (403, "InvalidObjectState", StoreError, "InvalidObjectState"),
        (403, "QuotaExceeded", StoreFull, "QuotaExceeded"),
        (507, "", StoreFull, "507"),
        (404, "NoSuchKey", ObjectNotFound, "NoSuchKey"),
        (404, "NoSuchBucket", StoreError, "no such bucket"),
        (404, "404", StoreError, "is this an S3 endpoint"),
        (404, "NoSuchUpload", StoreError, "was it aborted"),
        (412, "PreconditionFailed", ObjectExists, "412"),
        (301, "PermanentRedirect", StoreError, "another region"),
        (400, "InvalidArgument", StoreError, "InvalidArgument"),
        (501, "NotImplemented", StoreError, "NotImplemented"),
        (400, "BadDigest", StoreError, "BadDigest"),
    ],
)
def test_an_answer_becomes_an_error(status, code, expected, match):
    error = to_error(of_answer(status, code, "words"), "read", "a/k", "s3://bucket", " (tried 2 times in 3 s)")
    assert type(error) is expected
    assert error.key == "a/k"
    assert error.transient is (expected is StoreUnavailable)
    text = str(error)
    assert text.startswith("read 'a/k' in s3://bucket: ")
    assert "tried 2 times" in text
    assert "words" in text
    with pytest.raises(expected, match=match):
        raise error


def test_what_is_refused_here_is_a_config_error():
    assert isinstance(to_error(Fault(Kind.CONFIG, "no region"), "open", "", "s3://bucket"), ConfigError)
