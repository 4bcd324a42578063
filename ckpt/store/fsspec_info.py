"""What fsspec's backends call the time of an object's last change."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

# In this order: "created" is the same where objects are never changed, and something else on a file system.
_NAMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def modified_of(info: dict[str, Any]) -> float | None:
    """Return the seconds since the epoch of the last change, or None if ``info`` does not tell."""
    value = next((info[name] for name in _NAMES if info.get(name) is not None), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    return float(value) if isinstance(value, int | float) else None
