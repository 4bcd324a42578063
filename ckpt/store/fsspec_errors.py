"""What fsspec's backends raise, as errors of ours.

A backend is a package that may not be installed, so its classes are told by their names and by the attributes in which
HTTP clients keep the status; whatever is not known stays a :class:`~ckpt.errors.StoreError` with its cause.
"""

from __future__ import annotations

import errno
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt.errors import AccessDenied, CkptError, ObjectNotFound, StoreError, StoreFull, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_GONE = {errno.ENOENT, errno.ENOTDIR}
_BUSY = {
    errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.EPIPE, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
}  # fmt: skip
_STATUS = {401: AccessDenied, 403: AccessDenied, 404: ObjectNotFound, 408: StoreUnavailable, 429: StoreUnavailable,
           507: StoreFull}  # fmt: skip
_UNANSWERED = {
    "TimeoutError", "FSTimeoutError", "Timeout", "ConnectionError", "ConnectTimeout", "ReadTimeout",  # Python, requests
    "ClientConnectionError", "ClientPayloadError",  # aiohttp
    "ServiceRequestError", "ServiceResponseError",  # azure-core
    "TransportError", "RetryError", "ServiceUnavailable", "TooManyRequests",  # google
    "HTTPClientError", "SSHException", "NoValidConnectionsError", "EOFError",  # botocore, paramiko, a closed connection
}  # fmt: skip
_UNAUTHORIZED = {"GoogleAuthError", "NoCredentialsError", "ClientAuthenticationError", "AuthenticationException"}


@contextmanager
def mapped(key: str, url: str, doing: str) -> Iterator[None]:
    """The seam at which a backend's errors become ours."""
    try:
        yield
    except (CkptError, MemoryError):
        raise
    except Exception as error:
        raise class_of(error)(f"{doing} {key!r} in {url}: {_said(error)}", key) from error


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def class_of(error: Exception) -> type[StoreError]:
    """Return the class for ``error``: by type, then by HTTP status, then by the number of the operating system."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ObjectNotFound
    if isinstance(error, PermissionError) or names & _UNAUTHORIZED:
        return AccessDenied
    status = _status(error)
    if status in _STATUS:
        return _STATUS[status]
    if status is not None and status >= 500:
        return StoreUnavailable
    if names & _UNANSWERED or isinstance(error, ConnectionError | socket.gaierror):
        return StoreUnavailable
    code = error.errno if isinstance(error, OSError) else None
    for codes, cls in ((_FULL, StoreFull), (_DENIED, AccessDenied), (_GONE, ObjectNotFound), (_BUSY, StoreUnavailable)):
        if code in codes:
            return cls
    # What gcsfs makes of a 403: an OSError without a number.
    return AccessDenied if isinstance(error, OSError) and str(error).startswith("Forbidden") else StoreError


def _status(error: Exception) -> int | None:
    """Return the HTTP status that ``error`` carries, wherever its library keeps it."""
    places = (error, getattr(error, "response", None))
    for place in places:
        for name in ("status_code", "status", "code"):
            value = getattr(place, name, None)
            value = int(value) if isinstance(value, str) and value.isdigit() else value
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None
