"""Parts of a report as rows for people: the same on the terminal and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpt.cli.words import percent
from ckpt.words import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.analysis.classes import CellClass, RoleCopies
    from ckpt.analysis.report import AnalysisReport, MustWrite
    from ckpt.analysis.survival import Held
    from ckpt.cli.subject import PaperCount

SHOWN_LOSSES = 3
"""Losses that "must be written" is shown for, unless more are asked for."""
PUBLISHED_RANGE = "none for this one; 25 % to 100 % for Yi-34B, MegaScale-530B, DeepSeek-V3 and Kimi-K2 together"


class MergedClass(NamedTuple):
    """Classes that a reader need not tell apart. ``first``: the one that survives fewest losses.

    Classes that differ in how often scalars are held and in nothing that matters are one, and so are all scalars
    (a few bytes a tensor). ``more``: are there some that survive more losses than ``first``?
    """

    first: CellClass
    roles: tuple[RoleCopies, ...]
    nbytes: int
    more: bool = False

    def label(self, domain: str) -> str:
        """Say how often its roles are held, those that are held alike together."""
        if self.more:
            copies = [one.copies for one in self.roles]
            listed = ", ".join(dict.fromkeys(one.role for one in self.roles))
            return f"{listed}, one value a tensor: {min(copies):,} to {max(copies):,}"
        alike: dict[tuple[int, int], list[str]] = {}
        for one in self.roles:
            alike.setdefault((one.copies, one.domains), []).append(one.role)
        said = []
        for (held, domains), names in sorted(alike.items()):
            on = "" if domain == "rank" or held == 0 else f" on {count(domains, domain)}"
            said.append(f"{', '.join(names)}: {held:,}{on}")
        what = {"parameter": "frozen, ", "state": "state, "}.get(self.first.kind, "")
        return what + "; ".join(said)

    def survives(self, domain: str) -> str:
        """Say how many losses it survives, whichever they are."""
        tolerance = self.first.tolerance
        said = "is lost" if tolerance < 0 else f"any {count(tolerance, domain)}" if tolerance else "none"
        return f"at worst {said}" if self.more else said

    def verdict(self) -> str:
        """Say what follows."""
        return f"the rarest: {self.first.verdict}" if self.more else self.first.verdict


def merged_classes(classes: Sequence[CellClass]) -> list[MergedClass]:
    """Return classes as rows, in the order of the report, scalars last."""
    found: dict[tuple[object, ...], MergedClass] = {}
    scalars = [one for one in classes if one.kind == "scalar"]
    for one in classes:
        if one.kind == "scalar":
            continue
        roles = tuple(role for role in one.roles if not role.scalar)
        key = (one.kind, one.derived, roles, one.tolerance, one.verdict)
        known = found.get(key, MergedClass(one, roles, 0))
        found[key] = known._replace(nbytes=known.nbytes + one.bytes)
    rows = list(found.values())
    if scalars:
        first = min(scalars, key=lambda one: one.tolerance)
        roles = tuple(role for one in scalars for role in one.roles)
        alike = len({(one.tolerance, one.verdict, one.roles) for one in scalars}) == 1
        held = first.roles if alike else roles
        rows.append(MergedClass(first, held, sum(one.bytes for one in scalars), more=not alike))
    return rows


def shown_losses(report: AnalysisReport) -> Sequence[MustWrite]:
    """Return the rows of "must be written" that are shown."""
    return report.must_write[: max(SHOWN_LOSSES, report.k)]


def worst_shares(held: Held) -> tuple[float, float]:
    """Return the bounds of the share that is held in the worst case; equal where it is exact."""
    if held.worst == held.worst_upper:
        return held.worst_share, held.worst_share
    if not held.worst:  # the whole is not known from here
        return 0.0, 1.0
    return held.worst_share, held.worst_share * held.worst_upper / held.worst


def paper_lines(paper: PaperCount) -> list[tuple[str, str]]:
    """Return our number beside the paper's, as (name, text)."""
    lines = [("this layout", f"{percent(paper.share)} of parameters, gradients and optimizer states")]
    if paper.open:
        stated = PUBLISHED_RANGE if paper.published is None else f"{paper.published:g} %"
        if paper.published is not None and paper.changed:
            stated += f", for another layout: {', '.join(paper.changed)} replaced"
        lines.append(("the paper's number", stated))
    lines.append(("layout", paper.layout))
    return [*lines, ("sources", paper.open)] if paper.open else lines
