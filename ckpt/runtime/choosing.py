"""Which roles' chunks are encoded: those whose bytes reach the store sooner so, by measurement.

Encoding overlaps with storing, so a role takes the longer of the two. A sample of its own bytes tells how fast and how
small they get; the store's speed is what its last writes achieved. On a fast disk the codec is the slower one and stays
off. What has not been measured is not guessed: the first save of a process to a store writes raw bytes, and learns.
ADR 0008.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
CORE_SHARE = 0.5
"""How much of a core the encoder can count on: others capture, digest and copy, and ranks may share cores. A sample is
too short to show it.
"""
LEAST_BYTES, LEAST_SECONDS = 16 << 20, 0.25
"""Less, written in less time, tells how long a file takes to open and sync, and not how fast bytes go."""
TRIAL_SECONDS = 0.03
"""Of CPU time, once: long enough to show how cores are shared, which a sample is too short for."""
LEAST_SAMPLE, LEAST_TRIAL = 4 << 10, 64 << 10
_KEPT = 8
_GOOD_PART = 1 / 3
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
    encoder_rate: float | None = None,
) -> dict[str, Choice]:
    """Return what to do with each role. The same numbers give the same choice.

    Args:
        samples: of each role; None where there was nothing to encode, or nothing to find out (:func:`undecided`).
        store_rate: bytes a second that the store takes; None if not known.
        asked: the user's wish.
        before: what was chosen last for this store.
        encoder_rate: bytes a second that encoding came to where it was done; a sample alone may look faster.
    """
    limit = encoder_rate or float("inf")
    chosen = {}
    for role, sample in samples.items():
        wish = asked if isinstance(asked, str) else asked.get(role, AUTO)
        last = (before or {}).get(role)
        chosen[role] = (
            _judge(sample, store_rate, last is not None and last.codec == ZSTD, limit)
            if wish == AUTO
            else Choice(wish, "asked for")
        )
    return chosen


def _judge(sample: Sample | None, store_rate: float | None, on: bool, limit: float) -> Choice:
    if store_rate is None:
        return Choice(NONE, "the store's speed is not known yet")
    if sample is None or sample.raw < LEAST_SAMPLE:
        return Choice(NONE, "too few bytes to measure")
    encoding = max(sample.seconds / CORE_SHARE, sample.raw / limit)
    storing, without = sample.stored / store_rate, sample.raw / store_rate
    store, codec = _speed(store_rate), _speed(sample.raw / encoding) if encoding else "of any speed"
    if max(encoding, storing) <= without * (STAY_ON if on else SWITCH_ON):
        return Choice(ZSTD, f"store {store} is slower than the codec {codec}, ratio {sample.ratio:.2f}")
    if encoding > storing:
        return Choice(NONE, f"codec {codec} is too slow for the store {store}")
    return Choice(NONE, f"ratio {sample.ratio:.2f} is too low")


def _speed(rate: float) -> str:
    return f"{rate / 1e6:,.0f} MB/s" if rate >= 10e6 else f"{rate / 1e6:.2g} MB/s"


# ---------------------------------------------------------------------------------- what this process knows of stores

_rates: dict[str, deque[float]] = {}
_encoders: deque[float] = deque(maxlen=3)
_chosen: dict[str, dict[str, Choice]] = {}


def observe(url: str, nbytes: int, seconds: float, encoding: float = 0.0, encoded: int = 0) -> None:
    """Note how fast a store took what a save gave it.

    Args:
        url: of the store.
        nbytes: given to it.
        seconds: that the save stood still for the store, in writes and until all was durable, and ``encoding``. Not
            what else the save did meanwhile: a store that keeps up with it is fast, however slow the save.
        encoding: how many of these seconds the encoder was at work, perhaps with the store idle. If a good part of
            them, this only shows how fast the store is *at least*; and if that is clearly more than was thought, what
            was thought is forgotten, so that the next save writes raw bytes and measures.
        encoded: bytes that the encoder was given.
    """
    if seconds <= 0 or not nbytes or (nbytes < LEAST_BYTES and seconds < LEAST_SECONDS):
        return
    if encoding > 0 and encoded:
        _encoders.append(encoded / encoding)
    rate = nbytes / seconds
    known = rate_of(url)
    if encoding < _GOOD_PART * seconds:
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
    url: str, pieces: Mapping[str, Callable[[], Iterable[tuple[Buffer, int]]]], asked: Asked = AUTO
) -> dict[str, Choice]:
    """Choose for a save to the store ``url``, and remember it.

    Args:
        url: of the store.
        pieces: of each role, a function that returns some of its bytes with their item sizes, about
            :data:`SAMPLE_BYTES`; called only if the choice depends on it.
        asked: the user's wish.
    """
    ready = {role: list(get()) for role, get in pieces.items() if undecided(url, role, asked)}
    samples = {role: measure(ready[role]) if role in ready else None for role in pieces}
    enough = sum(sample.raw for sample in samples.values() if sample is not None) >= LEAST_TRIAL
    if enough and not _encoders:
        _encoders.append(_trial([piece for of_role in ready.values() for piece in of_role]))
    encoder_rate = median(_encoders) if _encoders else None
    chosen = choose(samples, rate_of(url), asked, _chosen.get(url), encoder_rate)
    _chosen[url] = {**_chosen.get(url, {}), **chosen}
    return chosen


def _trial(pieces: Sequence[tuple[Buffer, int]]) -> float:
    """Encode for a while; return the bytes a second by the clock on the wall, as others use the cores too."""
    total, began, cpu = 0, time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < TRIAL_SECONDS:
        total += measure(pieces).raw
    return total / (time.perf_counter() - began)
