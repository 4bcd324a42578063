"""What an S3 endpoint's refusals mean, as plain data, and which error of ours each becomes.

Kept apart from the client so that it can be read, and tested, without one. Codes are those of the S3 API reference and
the ones that other implementations (Ceph, MinIO, SeaweedFS) have added.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ckpt.errors import (
    AccessDenied,
    CkptError,
    ConfigError,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreFull,
    StoreUnavailable,
)


class Kind(Enum):
    """What to do about a fault."""

    RETRY = "retry"  # busy, or the connection failed: the same call may succeed
    DAMAGED = "damaged"  # bytes changed on the way: the same call may succeed, but not often
    EXPIRED = "expired"  # credentials that were right once
    DENIED = "denied"
    NO_KEY = "no key"
    NO_BUCKET = "no bucket"
    NO_UPLOAD = "no upload"
    UNSURE = "unsure"  # a 404 that does not say what is missing: every HEAD, and every server that is not S3
    CONDITION = "condition"  # If-None-Match found an object, or If-Match another one
    RANGE = "range"  # nothing in that range
    FULL = "full"
    REFUSED = "refused"  # the request itself was not liked: perhaps a header that the endpoint does not know
    CONFIG = "config"  # refused here, before anything was sent
    OTHER = "other"


_BUSY = {
    "SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "InternalError", "InternalServerError",
    "RequestTimeout", "RequestTimeoutException", "Throttling", "ThrottlingException", "ThrottledException",
    "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded", "BandwidthLimitExceeded", "IncompleteBody",
    "OperationAborted", "ConditionalRequestConflict",  # 409: a rival's put of the same key is under way
}  # fmt: skip
_DAMAGED = {
    "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "ChecksumMismatch",
}  # fmt: skip
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_DENIED = {
    "AccessDenied": "",
    "AllAccessDisabled": "",
    "AccountProblem": "",
    "InvalidAccessKeyId": "the credentials are wrong",
    "SignatureDoesNotMatch": "the credentials are wrong",
    "InvalidToken": "the session token is wrong",
    "AuthorizationHeaderMalformed": "the region is probably wrong",
    "RequestTimeTooSkewed": "the clock of this host differs too much from the server's",
}
_FULL = {
    "QuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "StorageFull", "XMinioStorageFull",
    "XMinioAdminBucketQuotaExceeded", "NotEnoughSpace",
}  # fmt: skip
_BY_CODE = {
    **dict.fromkeys(_BUSY, Kind.RETRY),
    **dict.fromkeys(_DAMAGED, Kind.DAMAGED),
    **dict.fromkeys(_EXPIRED, Kind.EXPIRED),
    **dict.fromkeys(_DENIED, Kind.DENIED),
    **dict.fromkeys(_FULL, Kind.FULL),
    "NoSuchKey": Kind.NO_KEY,
    "NoSuchBucket": Kind.NO_BUCKET,
    "NoSuchUpload": Kind.NO_UPLOAD,
    "PreconditionFailed": Kind.CONDITION,
    "InvalidRange": Kind.RANGE,
    "InvalidObjectState": Kind.OTHER,  # archived: 403, and yet no question of rights
}
_BY_STATUS = {
    400: Kind.REFUSED, 405: Kind.REFUSED, 501: Kind.REFUSED,
    401: Kind.DENIED, 403: Kind.DENIED,
    404: Kind.UNSURE,
    408: Kind.RETRY, 429: Kind.RETRY, 500: Kind.RETRY, 502: Kind.RETRY, 503: Kind.RETRY, 504: Kind.RETRY,
    412: Kind.CONDITION, 416: Kind.RANGE,
    507: Kind.FULL,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed try. ``text`` is for messages, ``hint`` says what to look at (may be empty)."""

    kind: Kind
    text: str
    hint: str = ""


def of_answer(status: int, code: str, message: str) -> Fault:
    """Return what an error answer means. The code counts before the status: a 200 may carry an error too."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, Kind.RETRY if status > 504 else Kind.OTHER)
    hint = _DENIED.get(code, "")
    if kind is Kind.EXPIRED:
        hint = "the credentials have expired, and there are no newer ones"
    elif kind is Kind.NO_BUCKET:
        hint = "there is no such bucket"
    elif 300 <= status < 400:
        hint = "the bucket is in another region"
    elif kind is Kind.UNSURE:
        hint = "a 404 that does not say what is missing: is this an S3 endpoint?"
    elif kind is Kind.NO_UPLOAD:
        hint = "the multipart upload is gone: was it aborted?"
    words = [word for word in (code if code != str(status) else "", message) if word]
    return Fault(kind, f"{status} {': '.join(words)}".strip(), hint)


_CLASSES: dict[Kind, type[StoreError]] = {
    Kind.RETRY: StoreUnavailable,
    Kind.EXPIRED: AccessDenied,
    Kind.DENIED: AccessDenied,
    Kind.NO_KEY: ObjectNotFound,
    Kind.CONDITION: ObjectExists,
    Kind.FULL: StoreFull,
}


def to_error(fault: Fault, doing: str, key: str, url: str, after: str = "") -> CkptError:
    """Return the error of ours for a fault.

    ``doing``: a verb for the message; ``after``: how often and how long it was tried.
    """
    where = f"{doing} {key!r} in {url}" if key else f"{doing} in {url}"
    text = f"{where}: {fault.text}{after}" + (f" ({fault.hint})" if fault.hint else "")
    if fault.kind is Kind.CONFIG:
        return ConfigError(text)
    return _CLASSES.get(fault.kind, StoreError)(text, key)
