"""From records to figures: medians, ratios run by run, what a save costs a loop, slopes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

from benchmarks.items import BASE


@dataclass(frozen=True)
class Figure:
    """A median with the smallest and the largest value that it came from."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """Return ``0.97 (0.91–1.04)``; one value stands alone."""
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def figure(values: list[float]) -> Figure | None:
    """Return the figure of some values, None if there are none."""
    return Figure(median(values), min(values), max(values)) if values else None


class Layout:
    """The records of one layout, asked by system and store."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        self.name: str = result["layout"]
        self.information: int = result["information"]
        self.records: list[dict[str, Any]] = result["records"]
        self.first: list[dict[str, Any]] = result["first"]

    def of(self, item: str, peer: str, store: str | None = None) -> list[dict[str, Any]]:
        """Return all records of a system, in the order of the runs; of any store if none is named."""
        return [
            r
            for r in self.records
            if r["item"] == item and r["peer"] == peer and (store is None or r["store"] == store)
        ]

    def peers(self, *items: str, store: str | None = None) -> list[str]:
        """Return the systems that have such records, in the order of their first."""
        found = [r["peer"] for r in self.records if r["item"] in items and (store is None or r["store"] == store)]
        return [name for name in dict.fromkeys(found) if name != BASE]

    def stores(self, item: str) -> list[str]:
        """Return the stores that an item was measured on."""
        return list(dict.fromkeys(r["store"] for r in self.records if r["item"] == item))

    def values(self, item: str, peer: str, store: str | None, key: str, unit: float = 1.0) -> Figure | None:
        """Return the figure of one measurement."""
        return figure([r[key] / unit for r in self.of(item, peer, store) if r.get(key) is not None])

    def against(self, item: str, peer: str, other: str, store: str | None, key: str) -> Figure | None:
        """Return other's value over the peer's, run by run: of times, how much faster the peer is than the other."""
        theirs = {r["run"]: r[key] for r in self.of(item, other, store)}
        return figure([theirs[r["run"]] / r[key] for r in self.of(item, peer, store) if theirs.get(r["run"])])

    def peak(self, item: str, peer: str, store: str | None, unit: float) -> float | None:
        """Return the memory added at the highest point of any run, the first included: buffers may stay behind."""
        found = [*self.of(item, peer, store)]
        found += [r for r in self.first if r["item"] == item and r["peer"] == peer and store in (None, r["store"])]
        return max((r["rss"] / unit for r in found), default=None)

    def share_of_information(self, item: str, peer: str, store: str | None, key: str) -> Figure | None:
        """Return bytes over the layout's information."""
        return self.values(item, peer, store, key, self.information)

    def _bases(self, store: str, run: int) -> list[tuple[int, float]]:
        """Return place in time (of all records) and seconds of the loops without saves of one run."""
        return [
            (place, r["loop"])
            for place, r in enumerate(self.records)
            if (r["item"], r["peer"], r["store"], r["run"]) == ("stall", BASE, store, run)
        ]

    def lost(self, peer: str, store: str) -> Figure | None:
        """Return the seconds that one save costs the loop.

        A whole loop with saves minus the mean of the loops without that ran before it and after it, over its saves.
        """
        lost = []
        for place, r in enumerate(self.records):
            if (r["item"], r["peer"], r["store"]) == ("stall", peer, store):
                bases = self._bases(store, r["run"])
                near = [max((b for b in bases if b[0] < place), default=None)]
                near.append(min((b for b in bases if b[0] > place), default=None))
                beside = [b[1] for b in near if b]
                lost += [(r["loop"] - mean(beside)) / len(r["calls"])] if beside else []
        return figure(lost)

    def calls(self, peer: str, store: str, key: str = "calls") -> Figure | None:
        """Return the seconds of the calls of all loops (``key`` ``waits``: of waiting for the save before)."""
        return figure([one for r in self.of("stall", peer, store) for one in r[key]])

    def noise(self, store: str) -> Figure | None:
        """Return how far neighbouring loops without saves are apart, a save: what is smaller cannot be told."""
        saves = max((len(r["calls"]) for r in self.records if r["item"] == "stall"), default=0)
        apart = []
        for run in {r["run"] for r in self.of("stall", BASE, store)}:
            seconds = [b[1] for b in self._bases(store, run)]
            apart += [abs(one - other) / saves for one, other in pairwise(seconds)] if saves else []
        return figure(apart)

    def slope(self, peer: str) -> float | None:
        """Return the bytes that resident memory grows by each save, by least squares, without the first fifth."""
        for record in self.of("slope", peer):
            resident = record["resident"][len(record["resident"]) // 5 :]
            if len(resident) > 1:
                x0, y0 = (len(resident) - 1) / 2, mean(resident)
                top = sum((x - x0) * (y - y0) for x, y in enumerate(resident))
                return top / sum((x - x0) ** 2 for x in range(len(resident)))
        return None
