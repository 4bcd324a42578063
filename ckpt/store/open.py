"""From what a user writes as a root to a store."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from ckpt.errors import ConfigError
from ckpt.store.base import Store
from ckpt.store.local import LocalStore

Root = str | os.PathLike[str] | Store


def open_store(root: Root) -> Store:
    """Return the store for a path, a ``file://`` URL, or a store object (returned as it is).

    Raises:
        ConfigError: an empty root, or a URL scheme that this release has no store for.
    """
    if isinstance(root, Store):
        return root
    text = os.fspath(root)
    if not text or "\0" in text:
        raise ConfigError(f"root {text!r} is not a path or URL")
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalStore(os.path.expanduser(text))
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"root {text!r}: a file URL has three slashes (file:///path)")
        if not parts.path or "?" in text or "#" in text:  # would silently be another directory
            raise ConfigError(f"root {text!r}: expected file:///path, with '?' and '#' written as %3F and %23")
        return LocalStore(unquote(parts.path))
    raise ConfigError(f"root {text!r}: no store for {scheme!r} in this release, expected a path or file:// URL")


def default_root(root: Root | None) -> Root:
    """Return ``root``, or ``CKPT_ROOT`` from the environment, or ``./checkpoints``."""
    return root if root is not None else os.environ.get("CKPT_ROOT") or "checkpoints"
