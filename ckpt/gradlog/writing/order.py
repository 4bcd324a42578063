"""Is a step logged in front of the scheduler's step that belongs to it? Then who comes back is one such step behind.

Nothing in the log shows it: the scheduler's state and learning rates of a record are those that were there. But in the
first step of a job nothing has moved the scheduler yet, and something moves it between the record and the next step of
the optimizer. A loop that steps its scheduler first, and one that does it in between, have moved it by then.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.engine.base import ReplayableAdapter

log = logging.getLogger("ckpt")

LOOKED_AT = 3
"""Steps of a log in which this is looked for; it costs a scheduler's state dict."""


class Order:
    """Looks at the schedulers of an engine in a log's first steps, and tells once.

    Args:
        adapter: of the engine.
        on: else this does nothing.
    """

    def __init__(self, adapter: ReplayableAdapter, *, on: bool) -> None:
        self._adapter = adapter
        self._left = LOOKED_AT if on else 0
        self._begun = self._seen = self._state() if on else ""
        self._waits = False

    def logged(self) -> None:
        """Say that a step was logged."""
        if not self._left:
            return
        self._left -= 1
        self._seen, before = self._state(), self._seen
        self._waits = True
        if before is self._begun and self._seen != before:  # moved by the first record: all is well
            self._left, self._waits = 0, False

    def steps(self) -> None:
        """Say that an optimizer is about to take a step."""
        if not self._waits:
            return
        self._waits = False
        if self._state() != self._seen:
            self._left = 0
            log.warning(
                "a scheduler has moved between keeper.step() and the next step of the optimizer: call keeper.step() "
                "behind scheduler.step(). As it is, a job that comes back is one scheduler step behind (unless the "
                "loop steps the scheduler before the optimizer)"
            )

    def _state(self) -> str:
        counters = self._adapter.counters()
        return repr([counters.get(name) for name in ("scheduler", "schedulers")])
