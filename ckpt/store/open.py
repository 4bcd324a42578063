"""From what a user writes as a root to a store."""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote

from ckpt.errors import ConfigError
from ckpt.store.base import Store
from ckpt.store.forward import Forward
from ckpt.store.local import LocalStore

Root = str | os.PathLike[str] | Store

_HALF_URL = re.compile(r"file:(?!//)|[a-z][a-z0-9+.-]*:/(?!/)", re.IGNORECASE)
"""``file:/path``, ``s3:/bucket``: as a path this would be a directory of that odd name below the working directory."""


def open_store(root: Root) -> Store:
    """Return the store for a path, a URL, or a store object (returned as it is).

    ``file://`` and ``local://`` are paths, ``s3://`` is S3 by boto3, any other protocol is fsspec's.

    Raises:
        ConfigError: no path (an empty one, a number, bytes), or a URL that there is no store for, or none that is
            installed.
        StoreError: a connection that has to be made first (``sftp://``, ``hdfs://``) failed.
    """
    if isinstance(root, Store):
        return root
    try:
        text = os.fspath(root)
    except TypeError:
        text = None
    if type(text) is not str or not text:
        # Not its repr: of a model, given in the wrong place, that is hundreds of lines.
        shown = "''" if text == "" else f"(a {type(root).__name__})"
        raise ConfigError(f"root {shown} is not a path or URL")
    if _HALF_URL.match(text):
        raise ConfigError(f"root {text!r}: a URL has '://' (file:///path), and a path of such a name begins with './'")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _local(os.path.expanduser(text), text)
    if scheme.lower() == "s3":
        from ckpt.store.s3 import S3Store  # boto3 takes a good part of a second to import

        return S3Store.from_url(text)
    if scheme.lower() not in ("file", "local"):
        from ckpt.store.fsspec_store import FsspecStore  # the same, for whoever has a path

        return FsspecStore(text)
    host, slash, path = rest.partition("/")
    if host.lower() not in ("", "localhost"):
        raise ConfigError(f"root {text!r}: a file URL has three slashes (file:///path)")
    if not slash or "?" in text or "#" in text:  # would silently be another directory
        raise ConfigError(f"root {text!r}: expected file:///path, with '?' and '#' written as %3F and %23")
    return _local(unquote("/" + path, errors="surrogateescape"), text)


def address(store: Store) -> str:
    """Return a URL by which another process opens the same store; it may hold a password, so it is for no message.

    Wrappers change neither keys nor bytes, so it is that of the store below.

    Raises:
        ConfigError: only this process has it.
    """
    while isinstance(store, Forward):
        store = store.inner
    if isinstance(store, LocalStore):
        return f"file://{quote(os.fsencode(store.root))}"
    found = getattr(store, "address", None)
    if not isinstance(found, str):
        raise ConfigError(f"no other process can open {store.url}, so there can be no workers")
    return found


def url_below(url: str, key: str) -> str:
    """Return what a store's ``url`` is of an object of it: of S3 the endpoint stays behind.

    >>> url_below("/runs", "a.pt"), url_below("s3://b/runs?endpoint=http://h:1", "a.pt")
    ('/runs/a.pt', 's3://b/runs/a.pt?endpoint=http://h:1')
    """
    place, endpoint = _split(url)
    return f"{place.rstrip('/')}/{key}{endpoint}"


def store_above(store: Store) -> Store | None:
    """Return the store of the folder that a store's root lies in; None if there is none, or none that has an address.

    Raises:
        StoreError: a connection that has to be made first failed.
    """
    try:
        place, endpoint = _split(address(store))
    except ConfigError:
        return None
    above, _, name = place.rstrip("/").rpartition("/")
    return open_store(above + endpoint) if name and "://" in above and not above.endswith("//") else None


def _split(url: str) -> tuple[str, str]:
    """Return a store's ``url`` in two: the place, and of S3 its endpoint, from the question mark on."""
    place, mark, query = url.partition("?") if url.startswith("s3://") else (url, "", "")
    return place, mark + query


def check_apart(source: str, destination: str) -> None:
    """Check that what is written does not become a part of what is read. Both: a store's ``url``.

    Raises:
        ConfigError: they are the same, or the destination lies inside of the source.
    """
    if source == destination:
        raise ConfigError(f"SRC and DST are the same, {source}")
    (above, where), (below, there) = _split(source), _split(destination)
    if where == there and below.startswith(above.rstrip("/") + "/"):
        raise ConfigError(f"DST {destination} lies inside of SRC {source}, which is only read")


def _local(path: str, given: str) -> LocalStore:
    """Return the store of a path that the file system can have."""
    try:
        if b"\0" in os.fsencode(path):
            raise ConfigError(f"root {given!r} has a NUL character")
        return LocalStore(path)
    except UnicodeEncodeError as error:
        raise ConfigError(f"root {given!r} cannot be a file name: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"root {given!r}: {error.strerror}") from error


def default_root(root: Root | None) -> Root:
    """Return ``root``, or ``CKPT_ROOT`` from the environment, or ``./checkpoints``."""
    return root if root is not None else os.environ.get("CKPT_ROOT") or "checkpoints"
