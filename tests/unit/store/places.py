"""Stores on servers of the tests."""

from __future__ import annotations

from ckpt.store.s3 import S3Store


def at(server, endpoint: str = "", **options: object) -> S3Store:
    """A store on an empty place of ``server``, reached by ``endpoint``."""
    bucket, prefix = server.place()
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return S3Store.from_url(f"s3://{bucket}/{prefix}?endpoint={endpoint or server.url}{more}")
