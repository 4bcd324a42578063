"""Where an S3 root is and how it is talked to: the URL, and the knobs that may stand in it."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from ckpt.errors import ConfigError
from ckpt.store.base import check_key

MIN_PART, MAX_PART, MAX_PARTS, MAX_OBJECT = 5 << 20, 5 << 30, 10_000, 5 << 40
"""What S3 allows: bytes of a part (the last one may be smaller), parts of an upload, bytes of an object."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_CHOICES = {
    "addressing": ("auto", "path", "virtual"),
    "checksums": ("auto", "on", "off"),
    "sign": ("auto", "yes", "no"),
}


@dataclass(frozen=True, slots=True)
class S3Options:
    """The knobs of an S3 root. Each may stand in the URL: ``s3://bucket/prefix?endpoint=…&concurrency=16``.

    Credentials never do: they come from where boto3 finds them (environment, files, instance metadata).
    """

    endpoint: str = ""
    """Base URL of the service; empty: what boto3 finds (``AWS_ENDPOINT_URL``), else AWS."""
    region: str = ""
    profile: str = ""
    addressing: str = "auto"
    """``auto``, ``path`` or ``virtual``; auto is path for an endpoint of your own."""
    concurrency: int = 8
    """Parts that one writer uploads at once."""
    part_bytes: int = 8 << 20
    """Bytes of a part, at least 5 MiB; larger where the object would have too many parts."""
    max_parts: int = MAX_PARTS
    retry_s: float = 120.0
    """Seconds after the first failure of a call in which it is tried again; 0: never."""
    connect_s: float = 10.0
    """Seconds to wait for a connection."""
    read_s: float = 60.0
    """Seconds without a byte after which a connection counts as dead."""
    checksums: str = "auto"
    """``auto``: CRC32 with every upload, until the endpoint refuses it; ``on``: always; ``off``: never."""
    sign: str = "auto"
    """Sign the bytes of uploads (SHA-256). ``auto``: over http only, because over https TLS protects them."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"S3 option {name}={getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        if not MIN_PART <= self.part_bytes <= MAX_PART:
            raise ConfigError(f"S3 option part_bytes={self.part_bytes}, expected {MIN_PART} to {MAX_PART}")
        if not 1 <= self.max_parts <= MAX_PARTS or self.concurrency < 1:
            raise ConfigError(
                f"S3 options max_parts={self.max_parts}, concurrency={self.concurrency}, expected 1 to {MAX_PARTS}"
                " parts and a positive concurrency"
            )
        if not (0 <= self.retry_s < math.inf and 0 < self.connect_s < math.inf and 0 < self.read_s < math.inf):
            raise ConfigError("S3 options retry_s, connect_s, read_s: expected seconds, the last two more than 0")
        if self.endpoint:
            _check_endpoint(self.endpoint)

    @property
    def told_endpoint(self) -> str:
        """The endpoint for messages: this one, or the one that boto3 takes from the environment."""
        found = self.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if found:
            _check_endpoint(found)  # the environment's may carry a password, which must not get into a message
        return found


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if "@" in parts.netloc:
        raise ConfigError("an S3 endpoint has no user and password: credentials come from the environment")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"S3 endpoint {endpoint!r}, expected http(s)://host[:port]")


def parse(url: str) -> tuple[str, str, S3Options]:
    """Return bucket, prefix (without slashes at its ends) and options of an ``s3://`` URL.

    Raises:
        ConfigError: no bucket, credentials in the URL, an option that there is not or whose value cannot be.
    """
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:  # its text is not repeated: it would end in a log
        raise ConfigError("an S3 URL has no user and password: credentials come from the environment")
    if scheme.lower() != "s3" or not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"root {url!r}: expected s3://bucket/prefix, found bucket {bucket!r}")
    if "#" in url:
        raise ConfigError(f"root {url!r}: expected '#' written as %23")
    prefix = unquote(prefix).strip("/")
    return bucket, check_key(prefix) if prefix else "", _options(query)


def tell(bucket: str, prefix: str, endpoint: str) -> str:
    """Return the URL of a place: the same for everybody who means it, and :func:`parse` brings it back."""
    place = f"s3://{bucket}/{quote(prefix)}" if prefix else f"s3://{bucket}"
    return place + (f"?endpoint={quote(endpoint, safe=':/[]')}" if endpoint else "")


def address(bucket: str, prefix: str, options: S3Options) -> str:
    """Return the URL that :func:`parse` makes the same of, options included."""
    values = {one.name: getattr(options, one.name) for one in fields(S3Options) if one.name != "endpoint"}
    given = {name: value for name, value in values.items() if value != getattr(S3Options(), name)}
    endpoint = {"endpoint": options.endpoint} if options.endpoint else {}
    query = urlencode({**endpoint, **given})
    return tell(bucket, prefix, "") + (f"?{query}" if query else "")


def _options(query: str) -> S3Options:
    kinds = {field.name: field.type for field in fields(S3Options)}
    values: dict[str, str | int | float] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise ConfigError(f"S3 options {query!r}, expected name=value&…") from error
    for name, text in pairs:
        if name not in kinds or name in values:
            state = "given twice" if name in values else "not known"
            raise ConfigError(f"S3 option {name!r} is {state}; there are {', '.join(kinds)}")
        try:
            values[name] = {"int": int, "float": float, "str": str}[str(kinds[name])](text)
        except ValueError as error:
            raise ConfigError(f"S3 option {name}={text!r}, expected a number") from error
    return S3Options(**values)  # type: ignore[arg-type]  # each was made by its field's own type
