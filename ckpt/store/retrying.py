"""Retries of what may succeed later, in any store."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, TypeVar

from ckpt.errors import ConfigError, ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from ckpt.store.forward import Forward
from ckpt.store.limited import positive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpt.store.base import Buffer, ObjectInfo, ObjectWriter, Store
    from ckpt.store.blocks import Blocks

T = TypeVar("T")

_LONGEST_S = 30.0


class Retrying(Forward):
    """A store whose calls are repeated after a transient error, with full jitter (a random pause up to a bound that
    doubles), until a number of attempts or a time is used up; then the last error is raised.

    A put that must not replace is repeated too, but the first attempt may have succeeded without its answer: if the
    object is there then, and has the bytes that were to be put, the put has succeeded. So two writers that put *equal*
    bytes at once may both succeed if the store fails for one of them at that moment; ckpt's commits are never equal.

    A stream cannot be repeated: its bytes are gone. Opening one is retried, its ``write`` and ``finish`` are not.

    Args:
        store: the store below.
        budget_s: seconds that a call and its pauses may take before the last attempt begins; an attempt itself is not
            cut short.
        attempts: how often a call is made at most.
        base_s: upper bound of the first pause.
        clock: seconds, for tests.
        sleep: waits for seconds, for tests.

    Raises:
        ConfigError: a number that is not positive.
    """

    def __init__(
        self,
        store: Store,
        budget_s: float = 60.0,
        attempts: int = 8,
        base_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(store)
        self.budget_s, self.base_s = positive("budget_s", budget_s), positive("base_s", base_s)
        self.attempts = int(positive("attempts", attempts))
        if self.attempts != attempts:
            raise ConfigError(f"attempts={attempts!r}, expected a whole number")
        self._clock, self._sleep = clock, sleep

    def _retry(self, call: Callable[[], T]) -> T:
        began, made = self._clock(), 0
        while True:
            try:
                made += 1
                return call()
            except StoreError as error:
                if not error.transient:
                    raise
                # Of every rank in a job, at the same moment: jitter must not move the user's random generators.
                part = int.from_bytes(os.urandom(4), "big") / 2**32
                pause = part * min(_LONGEST_S, self.base_s * 2.0 ** min(made - 1, 60))
                spent = self._clock() - began
                if made < self.attempts and spent + pause <= self.budget_s:
                    self._sleep(pause)
                    continue
                if type(error) is not StoreUnavailable:
                    raise
                raise StoreUnavailable(f"{error} (attempt {made}, after {spent:.1f} s: given up)", error.key) from error

    def put(self, key: str, data: Buffer, *, overwrite: bool = False) -> None:
        """See :class:`~ckpt.store.base.Store`; a create whose answer was lost is told by its bytes."""
        uncertain = False

        def once() -> None:
            nonlocal uncertain
            try:
                self.inner.put(key, data, overwrite=overwrite)
            except ObjectExists:
                if not uncertain or not self._holds(key, data):
                    raise
            except StoreError as error:
                uncertain = uncertain or error.transient
                raise

        self._retry(once)

    def _holds(self, key: str, data: Buffer) -> bool:
        """Has ``key`` these bytes? May raise a transient error, after which the whole put is tried again."""
        try:
            return self.inner.size(key) == len(data) and self.inner.get(key) == bytes(data)
        except ObjectNotFound:
            return False

    def writer(self, key: str, *, head: int = 0, size: int = 0, blocks: Blocks | None = None) -> ObjectWriter:
        """See :class:`~ckpt.store.base.Store`. Only opening is retried."""
        return self._retry(lambda: self.inner.writer(key, head=head, size=size, blocks=blocks))

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See :class:`~ckpt.store.base.Store`."""
        return self._retry(lambda: self.inner.get(key, start, nbytes))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See :class:`~ckpt.store.base.Store`."""
        return self._retry(lambda: self.inner.read_into(key, start, buffer))

    def size(self, key: str) -> int | None:
        """See :class:`~ckpt.store.base.Store`."""
        return self._retry(lambda: self.inner.size(key))

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """See :class:`~ckpt.store.base.Store`. Lists everything first: a listing that was cut off begins anew."""
        yield from self._retry(lambda: list(self.inner.walk(prefix)))

    def children(self, prefix: str) -> list[str]:
        """See :class:`~ckpt.store.base.Store`."""
        return self._retry(lambda: self.inner.children(prefix))

    def delete(self, key: str) -> None:
        """See :class:`~ckpt.store.base.Store`."""
        self._retry(lambda: self.inner.delete(key))
