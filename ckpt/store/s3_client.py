"""The seam to boto3: one client a process, calls that are tried again within a budget, errors mapped to ours.

botocore's own retries are off. They would hide how often a call was sent (a conditional put must know), multiply with
ours so that no budget held, and they do not cover a body that breaks off.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import random
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import boto3
import urllib3
from botocore import exceptions as boto
from botocore.config import Config
from botocore.parsers import ResponseParserError

from ckpt.errors import CkptError, StoreError
from ckpt.store.s3_errors import Fault, Kind, of_answer, to_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt.store.s3_options import S3Options

    T = TypeVar("T")

log = logging.getLogger("ckpt")

FIRST_WAIT, LONGEST_WAIT = 0.1, 20.0
"""Seconds: the bound of the first random wait between two tries, doubled with each, and the bound of all."""
MAX_DAMAGED = 4
"""Tries of a transfer whose checksum does not agree: it is chance once, and not four times."""

_DENIED = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.NoAuthTokenError,
    boto.SSOError,
    *(getattr(boto, name) for name in ("LoginError",) if hasattr(boto, name)),  # newer than the oldest we allow
)
_CONFIG = (
    boto.ParamValidationError,
    boto.ValidationError,
    boto.BaseEndpointResolverError,
    boto.ProfileNotFound,
    boto.ConfigParseError,
    boto.ConfigNotFound,
    boto.InvalidS3AddressingStyleError,
    boto.InvalidDNSNameError,
    boto.UnknownRegionError,
)
_DAMAGED = (boto.FlexibleChecksumError, boto.ChecksumError)
_BROKEN = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    ResponseParserError,  # what a proxy or load balancer in between says in its own words
    urllib3.exceptions.HTTPError,
    OSError,
)
_VENDORS = (boto.BotoCoreError, boto.ClientError, ResponseParserError, urllib3.exceptions.HTTPError, OSError)

_random = random.SystemRandom()  # a save must not move the user's streams of random numbers

_clients: dict[tuple[int, int, S3Options], Any] = {}
"""Making a client takes 0.1 s and more, and every operation opens its root anew. By process: sockets do not survive a
fork; by environment: credentials come from there."""


class Body(io.RawIOBase):
    """Bytes of several buffers, one after the other, as the file that botocore wants (to sign it); not a copy."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = [view for view in views if view.nbytes]
        self._size = sum(view.nbytes for view in self.views)
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def readable(self) -> bool:
        """See :class:`io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See :class:`io.RawIOBase`."""
        return True

    def tell(self) -> int:
        """See :class:`io.RawIOBase`."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See :class:`io.RawIOBase`."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """See :class:`io.RawIOBase`."""
        into, skip = memoryview(buffer).cast("B"), self._at
        for view in self.views:
            if skip < view.nbytes:
                taken = view[skip : skip + into.nbytes]
                into[: taken.nbytes] = taken
                self._at += taken.nbytes
                return taken.nbytes
            skip -= view.nbytes
        return 0


def crc32(views: Sequence[memoryview]) -> str:
    """Return the CRC-32 of the buffers, one after the other, as S3 writes it."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def told(answer: Mapping[str, Any], name: str, doing: str, key: str, url: str) -> Any:
    """Return a field that every S3 endpoint's answer has.

    Raises:
        StoreError: it is not there. Some other service's 200 is parsed as an answer in which nothing is said.
    """
    if name not in answer:
        raise StoreError(f"{doing} {key!r} in {url}: an answer without {name}: is this an S3 endpoint?", key)
    return answer[name]


class Tries:
    """How often a call was sent."""

    count = 0


class Api:
    """Calls one endpoint. Safe to use from several threads, and in processes forked from this one.

    Args:
        url: of the store, for messages.
        options: see :class:`~ckpt.store.s3_options.S3Options`.
    """

    def __init__(self, url: str, options: S3Options) -> None:
        self.url, self.options = url, options
        self.checksums = options.checksums != "off"

    def run(
        self,
        doing: str,
        key: str,
        step: Callable[[Any, bool], T],
        *,
        answers: Mapping[Kind, Callable[[Fault], T]] | None = None,
        tries: Tries | None = None,
        stop: threading.Event | None = None,
    ) -> T:
        """Return what ``step(client, checksums)`` returns, tried again while that can help and the budget lasts.

        Args:
            doing: a verb for messages.
            key: of the object, for messages.
            step: one try. It is sent again after faults of which nobody knows whether the server acted.
            answers: faults that are no errors here, and what they mean.
            tries: counts them for the caller.
            stop: set by a caller that wants no further try.

        Raises:
            CkptError: as in :mod:`ckpt.store.s3_errors`.
        """
        tries, stop = tries or Tries(), stop or threading.Event()
        sums, refused, deadline, started, renewed, damaged = self.checksums, None, 0.0, time.monotonic(), False, 0
        while True:
            tries.count += 1
            try:
                result = step(self._client(), sums)
            except CkptError:
                raise
            except _VENDORS as error:
                fault, cause = classify(error), error
            else:
                if refused is not None:
                    self._do_without_checksums(refused)
                return result
            now = time.monotonic()
            deadline = deadline or now + self.options.retry_s
            if answers and fault.kind in answers:
                return answers[fault.kind](fault)
            if fault.kind is Kind.REFUSED and sums and self.options.checksums == "auto":
                sums, refused = False, fault
                continue
            if fault.kind is Kind.EXPIRED and not renewed:
                renewed = True
                self._renew()
                continue
            damaged += fault.kind is Kind.DAMAGED
            if fault.kind is Kind.RETRY or (fault.kind is Kind.DAMAGED and damaged < MAX_DAMAGED):
                wait = _random.uniform(0, min(FIRST_WAIT * 2 ** min(tries.count - 1, 20), LONGEST_WAIT))
                if now + wait < deadline and not stop.is_set():
                    log.debug("%s %r in %s: %s, trying again in %.1f s", doing, key, self.url, fault.text, wait)
                    stop.wait(wait)
                    continue
            after = f" (tried {tries.count} times in {now - started:.0f} s)" if tries.count > 1 else ""
            raise to_error(refused or fault, doing, key, self.url, after) from cause

    def _do_without_checksums(self, refused: Fault) -> None:
        self.checksums = False
        log.warning(
            "%s refuses uploads with checksums (%s): doing without, so that bytes that change on the way are only found"
            " when they are read",
            self.url,
            refused.text,
        )

    def _key(self) -> tuple[int, int, S3Options]:
        credentials = hash(tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))))
        return os.getpid(), credentials, self.options

    def _client(self) -> Any:
        key = self._key()
        # Two threads may both make one at first. That is wasteful once; a lock could be held at a fork for ever.
        return _clients.get(key) or _clients.setdefault(key, _make(self.options, self.url))

    def _renew(self) -> None:
        """Forget this process's client: a new one reads credential files anew, which somebody may have replaced."""
        _clients.pop(self._key(), None)


def _make(options: S3Options, url: str) -> Any:
    try:
        session = boto3.session.Session(profile_name=options.profile or None, region_name=options.region or None)
        client = _client_of(session, options, options.sign == "no")
        if options.sign == "auto" and client.meta.endpoint_url.startswith("https:"):  # only botocore knows which it is
            client = _client_of(session, options, True)
    except _CONFIG as error:
        raise to_error(Fault(Kind.CONFIG, str(error)), "open", "", url) from error
    except ValueError as error:  # an endpoint or region that is none
        raise to_error(Fault(Kind.CONFIG, str(error)), "open", "", url) from error
    for operation in ("PutObject", "UploadPart"):
        client.meta.events.register(f"before-send.s3.{operation}", _send_buffers)
    return client


def _client_of(session: Any, options: S3Options, unsigned: bool) -> Any:
    return session.client(
        "s3",
        endpoint_url=options.endpoint or None,
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=options.connect_s,
            read_timeout=options.read_s,
            max_pool_connections=max(32, 2 * options.concurrency),  # readers use threads of their own
            tcp_keepalive=True,
            # Ours go as headers, which endpoints that do not know them ignore. botocore's default over https is a
            # trailer in an aws-chunked body, which such endpoints store as a part of the object.
            request_checksum_calculation="when_required",
            # Only where a whole object is read, which asks for it: ranges have none.
            response_checksum_validation="when_required",
            s3={"addressing_style": options.addressing, "payload_signing_enabled": not unsigned},
        ),
    )


def _send_buffers(request: Any, **_: object) -> None:
    """Give urllib3 the buffers themselves: a file it reads, and copies, in pieces of 16 KiB."""
    if isinstance(request.body, Body):
        request.body = request.body.views


def classify(error: Exception) -> Fault:
    """Return what went wrong in a try."""
    if isinstance(error, boto.ClientError):
        told = error.response.get("Error", {})
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return of_answer(status, str(told.get("Code", "")), str(told.get("Message", "")))
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, _DENIED):
        return Fault(Kind.DENIED, text, "no usable credentials")
    if isinstance(error, _CONFIG):
        return Fault(Kind.CONFIG, text)
    if isinstance(error, _DAMAGED):
        return Fault(Kind.DAMAGED, text)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return Fault(Kind.OTHER, text, "the endpoint's certificate is not trusted: AWS_CA_BUNDLE names your own")
    if isinstance(error, _BROKEN):
        return Fault(Kind.RETRY, text)
    return Fault(Kind.OTHER, text)
