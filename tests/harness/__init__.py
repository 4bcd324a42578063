"""Tools for tests that need several ranks. ``from tests.harness import ranks``."""

from tests.harness.pool import Outcome, Outcomes, RanksFailed, RanksTimedOut, ranks

__all__ = ["Outcome", "Outcomes", "RanksFailed", "RanksTimedOut", "ranks"]
