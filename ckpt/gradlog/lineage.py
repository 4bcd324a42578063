"""Moved to :mod:`ckpt.repo.lineage`."""

from ckpt.repo.lineage import (
    HEAD,
    ROOT,
    LogHead,
    Span,
    Way,
    begin_log,
    heads_of,
    log_behind,
    log_key,
    log_numbers,
    read_head,
    ways,
    ways_to,
)

__all__ = [
    "HEAD",
    "ROOT",
    "LogHead",
    "Span",
    "Way",
    "begin_log",
    "heads_of",
    "log_behind",
    "log_key",
    "log_numbers",
    "read_head",
    "ways",
    "ways_to",
]
