"""How long a rank waits for a sign of life from the others."""

from __future__ import annotations

import math
import os

from ckpt.errors import ConfigError


def checked_timeout(seconds: object, said: str) -> float:
    """Return ``seconds`` if it is a positive, finite number, else raise :class:`ConfigError` that quotes ``said``."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigError(f"{said} is not a positive number of seconds")
    return float(seconds)


def default_timeout() -> float:
    """Return the seconds of ``CKPT_TIMEOUT`` (default 300)."""
    text = os.environ.get("CKPT_TIMEOUT", "300")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    return checked_timeout(value, f"CKPT_TIMEOUT={text!r}")
