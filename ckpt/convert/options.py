"""What a user may say about how a source is read."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.layout.rules import Rules


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """``trust_pickle``: unpickle whatever the files ask for, which runs code from them. ``rules``: how tensor
    parallelism cut what the source does not say itself (docs/rules.md).
    """

    trust_pickle: bool = False
    rules: Rules | None = None
