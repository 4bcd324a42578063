"""Objects in a bucket of Amazon S3, or of anything else that speaks its protocol.

An object appears whole or not at all by S3's own rules, an acknowledged one is durable, and a commit is a put under
``If-None-Match: *``. An instance may be used by several threads at once, and works in processes that are forked or
spawned with it: each process makes its own connections.
"""

from __future__ import annotations

import os
from contextlib import closing
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ckpt.errors import ObjectExists, StoreError, StoreUnavailable
from ckpt.store.base import Buffer, ObjectInfo, Orphan, check_key
from ckpt.store.s3_client import Api, Body, Tries, crc32, told
from ckpt.store.s3_errors import Fault, Kind, to_error
from ckpt.store.s3_options import S3Options, address, parse, tell
from ckpt.store.s3_writer import NONCE, S3Writer

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from ckpt.store.blocks import Blocks

SLICE = 1 << 20
"""Bytes taken from a connection at once: urllib3 makes a copy of as many."""

_proved: set[tuple[int, str, str]] = set()
"""(process, endpoint, bucket) whose If-None-Match was seen to work."""


class S3Store:
    """Keys are object names below ``prefix``; see :class:`~ckpt.store.base.Store`.

    Args:
        bucket: its name; it must exist.
        prefix: without slashes at its ends; empty for the whole bucket.
        options: how the endpoint is reached and used.
    """

    def __init__(self, bucket: str, prefix: str = "", options: S3Options | None = None) -> None:
        self.bucket, self.prefix, self.options = bucket, prefix, options or S3Options()
        self.url = tell(bucket, prefix, self.options.told_endpoint)
        self.api = Api(self.url, self.options)

    @property
    def address(self) -> str:
        """URL by which another process opens it."""
        return address(self.bucket, self.prefix, self.options)

    @classmethod
    def from_url(cls, url: str) -> S3Store:
        """Return the store of ``s3://bucket/prefix?option=value&…`` (:class:`~ckpt.store.s3_options.S3Options`).

        Raises:
            ConfigError: see :func:`~ckpt.store.s3_options.parse`. Nothing is sent.
        """
        return cls(*parse(url))

    def name_of(self, key: str) -> dict[str, str]:
        """Return the arguments that name an object."""
        return {"Bucket": self.bucket, "Key": f"{self.prefix}/{check_key(key)}" if self.prefix else check_key(key)}

    def _below(self, prefix: str) -> str:
        """Return what the names of all objects below ``prefix`` begin with."""
        parts = [part for part in (self.prefix, check_key(prefix) if prefix else "") if part]
        return "/".join([*parts, ""])

    # ------------------------------------------------------------------------------------------------------- write

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`.

        An answer can be lost: the put is sent again, and finds its own object. So each put carries a number of its own
        in the object's metadata, by which it knows what it has written.

        Raises:
            StoreError: also if the endpoint ignores ``If-None-Match``, which is tried once a process.
        """
        view = memoryview(data).cast("B")
        self.put_views("put", key, [view], os.urandom(8).hex(), overwrite)
        if not overwrite and view.nbytes <= SLICE:
            self._prove(key, view)

    def put_views(self, doing: str, key: str, views: list[memoryview], nonce: str, overwrite: bool) -> None:
        """Store an object of several buffers by one request; see :meth:`put`."""
        name, tries = self.name_of(key), Tries()
        extra: dict[str, Any] = {"Metadata": {NONCE: nonce}, **({} if overwrite else {"IfNoneMatch": "*"})}

        def step(client: Any, sums: bool) -> None:
            # Not a file if it is small: with one, botocore asks the server first whether it may send (a round trip).
            body = Body(views) if sum(view.nbytes for view in views) > SLICE else b"".join(views)
            crc = {"ChecksumCRC32": crc32(views)} if sums else {}
            told(client.put_object(**name, **extra, **crc, Body=body), "ETag", doing, key, self.url)

        def exists(fault: Fault) -> None:
            if tries.count == 1 or not self._is_ours(key, views, nonce):
                raise ObjectExists(f"{key!r} exists already in {self.url}", key)

        self.api.run(doing, key, step, tries=tries, answers={} if overwrite else {Kind.CONDITION: exists})

    def _is_ours(self, key: str, views: list[memoryview], nonce: str) -> bool:
        """Is the object what an earlier try of the same put has written?"""
        found = self.head("look at", key)
        if found is not None and NONCE in found.get("Metadata", {}):
            return bool(found["Metadata"][NONCE] == nonce)
        return self.get(key) == b"".join(views)  # an endpoint that does not keep metadata

    def _prove(self, key: str, view: memoryview) -> None:
        """Check once that a put of what is there is refused: an endpoint that ignores this would lose commits."""
        place = (os.getpid(), self.options.told_endpoint, self.bucket)
        if place in _proved:
            return
        name = self.name_of(key)
        extra = {"Metadata": {NONCE: os.urandom(8).hex()}, "IfNoneMatch": "*"}

        def step(client: Any, sums: bool) -> bool:
            crc = {"ChecksumCRC32": crc32([view])} if sums else {}
            client.put_object(**name, **extra, **crc, Body=bytes(view))
            return False

        if not self.api.run("put again", key, step, answers={Kind.CONDITION: lambda fault: True}):
            raise StoreError(
                f"put {key!r} in {self.url}: expected the endpoint to refuse a second put under If-None-Match, it took"
                " it: two jobs could commit one step, and neither would know",
                key,
            )
        _proved.add(place)

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> S3Writer:
        """See :class:`~ckpt.store.base.Store`: a multipart upload, or one put if it all fits into one part.

        Beside ``blocks`` it holds the first part until the end if there is a ``head``. What the pool cannot give while
        the writer has nothing in flight, it takes from the system: at most two parts.

        Raises:
            StoreError: ``size`` is more than an S3 object can have.
        """
        return S3Writer(self, key, head, size, blocks)

    # -------------------------------------------------------------------------------------------------------- read

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`. A whole object is checked against its checksum, where it has one."""
        if nbytes == 0:
            return self._nothing(key)
        read = _Read(self, key, start, nbytes, None)
        self.api.run("read", key, read.step, answers=read.answers)
        return bytes(read.buffer[: read.done])

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`. What has arrived when a connection breaks is not read again."""
        view = buffer.cast("B")
        if not view.nbytes:
            return len(self._nothing(key))
        read = _Read(self, key, start, view.nbytes, view)
        self.api.run("read", key, read.step, answers=read.answers)
        return read.done

    def _nothing(self, key: str) -> bytes:
        if self.size(key) is None:
            raise to_error(Fault(Kind.NO_KEY, "no such object"), "read", key, self.url)
        return b""

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        found = self.head("size of", key)
        return None if found is None else int(found["ContentLength"])

    def head(self, doing: str, key: str, stop: threading.Event | None = None) -> dict[str, Any] | None:
        """Return what a HEAD says; None if there surely is no such object. ``stop``: see :meth:`Api.run`."""
        name = self.name_of(key)

        def get(client: Any, sums: bool) -> None:
            client.get_object(**name, Range="bytes=0-0")["Body"].close()

        def why(fault: Fault) -> None:
            # The 404 of a HEAD has no body to say whether object, bucket or service is missing: a GET's does.
            answers = {Kind.NO_KEY: lambda fault: None, Kind.RANGE: lambda fault: None}
            self.api.run(doing, key, get, answers=answers, stop=stop)

        def step(client: Any, sums: bool) -> dict[str, Any] | None:
            answer = dict(client.head_object(**name))
            told(answer, "ContentLength", doing, key, self.url)
            return answer

        return self.api.run(doing, key, step, answers={Kind.UNSURE: why, Kind.NO_KEY: why}, stop=stop)

    # -------------------------------------------------------------------------------------------------------- list

    def _pages(self, prefix: str, **extra: str) -> Iterator[dict[str, Any]]:
        more = {"Bucket": self.bucket, "Prefix": self._below(prefix), **extra}
        while True:
            page: dict[str, Any] = self.api.run("list", prefix, lambda client, sums: client.list_objects_v2(**more))
            more_pages = told(page, "IsTruncated", "list", prefix, self.url)
            yield page
            if not more_pages:
                return
            more["ContinuationToken"] = page["NextContinuationToken"]

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`~ckpt.store.base.Store`. Placeholders of folders (names that end in a slash) are left out."""
        skip = len(self.prefix) + 1 if self.prefix else 0
        for page in self._pages(prefix):
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):
                    yield ObjectInfo(item["Key"][skip:], int(item["Size"]), item["LastModified"].timestamp())

    def children(self, prefix: str) -> list[str]:
        """See :class:`~ckpt.store.base.Store`."""
        skip, found = len(self._below(prefix)), dict[str, None]()
        for page in self._pages(prefix, Delimiter="/"):
            names = [item["Prefix"][skip:-1] for item in page.get("CommonPrefixes", ())]
            names += [item["Key"][skip:] for item in page.get("Contents", ())]
            found.update(dict.fromkeys(name for name in names if name))
        return list(found)

    # ------------------------------------------------------------------------------------------------------ remove

    def delete(self, key: str) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        name = self.name_of(key)

        def step(client: Any, sums: bool) -> None:
            client.delete_object(**name)

        self.api.run("delete", key, step, answers={Kind.NO_KEY: lambda fault: None})

    def orphans(self, prefix: str = "", older_than_s: float = 0.0) -> list[Orphan]:
        """See :class:`~ckpt.store.base.HasOrphans`: multipart uploads that nobody has completed or aborted."""
        more: dict[str, Any] = {"Bucket": self.bucket, "Prefix": self._below(prefix)}
        skip, found = len(self.prefix) + 1 if self.prefix else 0, []
        while True:
            page = self.api.run("list uploads", prefix, lambda client, sums: client.list_multipart_uploads(**more))
            more_pages = told(page, "IsTruncated", "list uploads", prefix, self.url)
            date = page["ResponseMetadata"]["HTTPHeaders"].get("date")  # the server's own clock
            now = parsedate_to_datetime(date) if date else datetime.now(timezone.utc)
            for upload in page.get("Uploads", ()):
                age = (now - upload["Initiated"]).total_seconds()
                if age >= older_than_s and upload["Key"].startswith(more["Prefix"]):
                    nbytes = self._uploaded(upload["Key"], upload["UploadId"])
                    found.append(Orphan(upload["Key"][skip:], upload["UploadId"], age, nbytes))
            if not more_pages:
                return found
            more.update(KeyMarker=page["NextKeyMarker"], UploadIdMarker=page["NextUploadIdMarker"])

    def _uploaded(self, name: str, upload: str) -> int:
        """Return the bytes of the parts that are there."""
        more: dict[str, Any] = {"Bucket": self.bucket, "Key": name, "UploadId": upload}
        total = 0
        while True:
            page: dict[str, Any] = self.api.run(
                "list parts of",
                name,
                lambda client, sums: client.list_parts(**more),
                answers={Kind.NO_UPLOAD: lambda fault: {}},  # completed or aborted meanwhile
            )
            total += sum(int(part["Size"]) for part in page.get("Parts", ()))
            if not page.get("IsTruncated"):
                return total
            more["PartNumberMarker"] = page["NextPartNumberMarker"]

    def abort(self, orphan: Orphan) -> None:
        """See :class:`~ckpt.store.base.HasOrphans`."""
        self.abort_upload(orphan.key, orphan.upload_id)

    def abort_upload(self, key: str, upload: str, stop: threading.Event | None = None) -> None:
        """Remove the parts of an upload; no error if it is gone already. ``stop``: see :meth:`Api.run`."""
        name = self.name_of(key)

        def step(client: Any, sums: bool) -> None:
            client.abort_multipart_upload(**name, UploadId=upload)

        self.api.run("abort the upload of", key, step, answers={Kind.NO_UPLOAD: lambda fault: None}, stop=stop)


class _Read:
    """One read, and how far it has come over all its tries: what follows is asked for from there.

    ``buffer``: where the bytes go; None: one is made of the size that the server tells.
    """

    def __init__(self, store: S3Store, key: str, start: int, nbytes: int | None, buffer: memoryview | None) -> None:
        self.store, self.key, self.start, self.nbytes = store, key, start, nbytes
        self.whole = start == 0 and nbytes is None
        self.buffer = buffer if buffer is not None else memoryview(b"")
        self.grow, self.done, self.etag = buffer is None, 0, ""
        self.answers = {Kind.RANGE: self._nothing, Kind.CONDITION: self._replaced}

    def _nothing(self, fault: Fault) -> None:
        """Nothing there from ``start`` on."""

    def _replaced(self, fault: Fault) -> None:
        raise StoreUnavailable(f"read {self.key!r} in {self.store.url}: it was replaced meanwhile", self.key)

    def _asked(self) -> dict[str, str]:
        if self.whole:
            self.done = 0  # the checksum is over all of it
            return {"ChecksumMode": "ENABLED"}
        end = "" if self.nbytes is None else str(self.start + self.nbytes - 1)
        return {"Range": f"bytes={self.start + self.done}-{end}", **({"IfMatch": self.etag} if self.etag else {})}

    def step(self, client: Any, sums: bool) -> None:
        """Read the rest."""
        asked = self._asked()
        answer = client.get_object(**self.store.name_of(self.key), **asked)
        with closing(answer["Body"]) as body:
            first = self.start + self.done
            given = answer.get("ContentRange", "").partition("-")[0].removeprefix("bytes ").strip()
            if "Range" in asked and (given or "0") != str(first):
                raise StoreError(
                    f"read {self.key!r} in {self.store.url}: expected bytes from {first}, found {given or 'all of it'}",
                    self.key,
                )
            self.etag = answer.get("ETag", "")
            length = int(told(answer, "ContentLength", "read", self.key, self.store.url))
            end = self.done + (length if self.nbytes is None else min(length, self.nbytes - self.done))
            if self.grow and len(self.buffer) < end:
                bigger = memoryview(bytearray(end))
                bigger[: self.done] = self.buffer[: self.done]
                self.buffer = bigger
            while self.done < end:
                self.done += body.readinto(self.buffer[self.done : min(end, self.done + SLICE)])
            if self.whole:
                body.readinto(bytearray(1))  # the end, where botocore compares the checksum
