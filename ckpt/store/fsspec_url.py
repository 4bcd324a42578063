"""What a URL of another store may look like."""

from __future__ import annotations

import re

from ckpt.errors import ConfigError

_URL = re.compile(r"([a-z][a-z0-9+._-]*)://(.*)", re.IGNORECASE | re.DOTALL)
_SECRET, _HIDDEN = re.compile(r"^([^/@:]*):[^/]*@"), r"\1:***@"


def parse(url: str) -> tuple[str, str, str]:
    """Return the protocol of ``url`` in lower case, the URL with it, and the URL as messages may show it.

    What is shown has no password, and is the same for all ways to write one place: ranks compare it.

    Raises:
        ConfigError: no URL, or one that a file system would take for another place than was meant.
    """
    found = _URL.fullmatch(url)
    if found is None:
        raise ConfigError(f"root {url!r} is not a URL (protocol://…)")
    protocol, rest = found[1].lower(), found[2]
    shown = f"{protocol}://{_SECRET.sub(_HIDDEN, rest).rstrip('/')}"
    if "::" in url:
        raise ConfigError(f"root {shown!r}: a chained URL; caches and archives between are no place for a checkpoint")
    if "?" in rest or "#" in rest:
        raise ConfigError(f"root {shown!r}: '?' and '#' mean different things to different file systems")
    if "\0" in rest or not _encodable(rest):
        raise ConfigError(f"root {shown!r} cannot be the name of an object")
    if any(part in (".", "..") for part in rest.split("/")):
        raise ConfigError(f"root {shown!r}: '.' and '..' are ordinary names to an object store")
    return protocol, f"{protocol}://{rest}", shown


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
