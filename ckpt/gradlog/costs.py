"""What saving costs a job, and how far apart full saves should be therefore."""

from __future__ import annotations

import math
import time

FEWEST, MOST = 10, 100_000
"""Steps between full saves that ``auto`` chooses among."""


class Costs:
    """What saving costs this job, measured on this rank: seconds of a step, of a full save, of a replayed step."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._plain: list[float] = []
        self._beside = 0.0
        self._beside_steps = 0
        self._call = 0.0

    def step(self, saving: bool) -> None:
        """Take note that a step has ended; ``saving``: a full save was under way."""
        now = time.monotonic()
        if self._last is not None:
            if saving:
                self._beside += now - self._last
                self._beside_steps += 1
            else:
                self._plain = [*self._plain[-63:], now - self._last]
        self._last = now

    def full(self, seconds: float) -> None:
        """Take note of a call that began a full save."""
        self._call = seconds

    def best(self, mtbf: float, before: int) -> int:
        """Return the steps between full saves that lose the least time: sqrt(2 C / (rate x T x r)).

        C: seconds that a full save costs; T: of a step; r: of a replayed step, taken as half a step; rate: of failures.
        Without a measurement: as before.
        """
        if len(self._plain) < FEWEST:
            return before
        step = sorted(self._plain)[len(self._plain) // 2]
        cost = max(self._call + self._beside - self._beside_steps * step, self._call, 1e-3)
        self._beside, self._beside_steps = 0.0, 0
        best = math.sqrt(2 * cost * mtbf / (step * max(0.5 * step, 1e-6)))
        return min(max(int(best), FEWEST), MOST)
