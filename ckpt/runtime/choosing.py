"""Which roles' chunks are encoded: those whose bytes reach the store sooner so, by measurement.

Encoding overlaps with storing, so a role takes the longer of the two. A sample of its own bytes tells how fast and how
small they get; the store's speed is what its last writes achieved. On a fast disk the codec is the slower one and stays
off. What has not been measured is not guessed: the first save of a process to a store writes raw bytes, and learns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ckpt.errors import ConfigError
from ckpt.format.codec import codec_of, encode

if TYPE_CHECKING:
    from ckpt.store.base import Buffer

AUTO, NONE, ZSTD = "auto", "none", "zstd"
ASKED = (AUTO, NONE, ZSTD)
Asked = str | Mapping[str, str]
"""One of :data:`ASKED` for all roles, or by role; roles that a mapping leaves out are ``auto``."""

SAMPLE_BYTES = 1 << 20
"""Of each role; encoding so much takes a few milliseconds."""
SWITCH_ON, STAY_ON = 0.90, 0.97
"""A codec is switched on where it takes no more than this share of the time without, and off above the second: two
measurements of one speed differ, and a codec that changes at every save leaves chunks that look alike and are not.
"""
LEAST_BYTES = 1 << 20
"""Smaller files tell how long opening and syncing takes, and not how fast bytes go."""
_KEPT = 8
_NEWS = 1.25
"""A store that is this much faster than thought, at the least, has changed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What encoding some bytes of a role came to: bytes before and after, and CPU seconds of one thread."""

    raw: int
    stored: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Bytes before by bytes after."""
        return self.raw / self.stored


@dataclass(frozen=True, slots=True)
class Choice:
    """``codec``: ``none``, or ``zstd`` (each chunk with the byte planes of its dtype); ``why``: in words."""

    codec: str
    why: str


def check_asked(asked: object, roles: Iterable[str] | None = None) -> Asked:
    """Return the user's ``codec=`` argument if it is one.

    ``roles``: those of the job, on all ranks, once they are known: a mapping that names another has a typing error.

    Raises:
        ConfigError: says what was expected.
    """
    values = asked.values() if isinstance(asked, Mapping) else (asked,)
    if any(value not in ASKED for value in values):
        raise ConfigError(f"codec={asked!r}: expected one of {', '.join(ASKED)}, or a mapping of roles to these")
    if isinstance(asked, Mapping):
        unknown = [role for role in asked if not isinstance(role, str) or (roles is not None and role not in {*roles})]
        if unknown:
            known = f"; the roles are {', '.join(sorted(roles))}" if roles is not None else ""
            raise ConfigError(f"codec={asked!r}: no role {unknown[0]!r}{known}")
        return dict(asked)
    return str(asked)


def measure(pieces: Iterable[tuple[Buffer, int]]) -> Sample:
    """Encode some bytes of a role, each piece with its item size, as chunks would be."""
    encode(bytes(64), ZSTD, 1)  # a thread's first use makes its context
    ready = list(pieces)
    raw = stored = 0
    start = time.thread_time()  # CPU time: that this thread had to wait once says nothing about the codec
    for data, itemsize in ready:
        nbytes = memoryview(data).nbytes
        raw += nbytes
        stored += min(nbytes, len(encode(data, codec_of(itemsize), itemsize)))
    return Sample(raw, stored, time.thread_time() - start)


def choose(
    samples: Mapping[str, Sample | None],
    store_rate: float | None,
    asked: Asked = AUTO,
    before: Mapping[str, Choice] | None = None,
    workers: int = 1,
) -> dict[str, Choice]:
    """Return what to do with each role. The same numbers give the same choice.

    Args:
        samples: of each role; None where there was nothing to encode, or nothing to find out (:func:`undecided`).
        store_rate: bytes a second that the store takes; None if not known.
        asked: the user's wish.
        before: what was chosen last for this store.
        workers: threads that encode at once.
    """
    chosen = {}
    for role, sample in samples.items():
        wish = asked if isinstance(asked, str) else asked.get(role, AUTO)
        last = (before or {}).get(role)
        chosen[role] = (
            _judge(sample, store_rate, last is not None and last.codec == ZSTD, workers)
            if wish == AUTO
            else Choice(wish, "asked for")
        )
    return chosen


def _judge(sample: Sample | None, store_rate: float | None, on: bool, workers: int) -> Choice:
    if store_rate is None:
        return Choice(NONE, "the store's speed is not known yet")
    if sample is None or not sample.raw:
        return Choice(NONE, "there was nothing to measure")
    encoding, storing, without = sample.seconds / workers, sample.stored / store_rate, sample.raw / store_rate
    store, codec = _speed(store_rate), _speed(sample.raw / encoding if encoding else float("inf"))
    if max(encoding, storing) <= without * (STAY_ON if on else SWITCH_ON):
        return Choice(ZSTD, f"store {store} is slower than the codec {codec}, ratio {sample.ratio:.2f}")
    if encoding > storing:
        return Choice(NONE, f"codec {codec} is too slow for the store {store}")
    return Choice(NONE, f"ratio {sample.ratio:.2f} is too low")


def _speed(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"


# ---------------------------------------------------------------------------------- what this process knows of stores

_rates: dict[str, deque[float]] = {}
_chosen: dict[str, dict[str, Choice]] = {}


def observe(url: str, nbytes: int, seconds: float, encoding: float = 0.0) -> None:
    """Note how fast a store took a file.

    Args:
        url: of the store.
        nbytes: of the file.
        seconds: from its first byte until it was durable.
        encoding: how many of these seconds the encoder was at work. If nearly all, the store has waited for it, and
            the file only shows how fast the store is *at least*. If that is clearly more than was thought, what was
            thought is forgotten, so that the next save writes raw bytes and measures.
    """
    if nbytes < LEAST_BYTES or seconds <= 0:
        return
    rate = nbytes / seconds
    known = rate_of(url)
    if encoding < 0.8 * seconds:
        _rates.setdefault(url, deque(maxlen=_KEPT)).append(rate)
    elif known is not None and rate > known * _NEWS:
        del _rates[url]


def rate_of(url: str) -> float | None:
    """Return the bytes a second that a store takes from this process: the median of the last files; None if unknown."""
    return median(_rates[url]) if url in _rates else None


def undecided(url: str, role: str, asked: Asked) -> bool:
    """Does the choice for ``role`` depend on a sample?"""
    wish = asked if isinstance(asked, str) else asked.get(role, AUTO)
    return wish == AUTO and rate_of(url) is not None


def decide(
    url: str, pieces: Mapping[str, Callable[[], Iterable[tuple[Buffer, int]]]], asked: Asked = AUTO, workers: int = 1
) -> dict[str, Choice]:
    """Choose for a save to the store ``url``, and remember it.

    Args:
        url: of the store.
        pieces: of each role, a function that returns some of its bytes with their item sizes, about
            :data:`SAMPLE_BYTES`; called only if the choice depends on it.
        asked: the user's wish.
        workers: threads that encode at once.
    """
    samples = {role: measure(get()) if undecided(url, role, asked) else None for role, get in pieces.items()}
    _chosen[url] = {**_chosen.get(url, {}), **choose(samples, rate_of(url), asked, _chosen.get(url), workers)}
    return {role: _chosen[url][role] for role in pieces}
