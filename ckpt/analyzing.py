"""``ckpt.analyze``: who holds what in a live job, what survives, what is redundant. Every rank of the job calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

import msgspec

from ckpt.analysis.claims import PROVED, AuditReport
from ckpt.analysis.domains import HOST, RANK, Domains
from ckpt.analysis.holdings import holdings_of, pieces_of
from ckpt.analysis.refuting import left_of, refutations_of
from ckpt.analysis.report import Report
from ckpt.analysis.report import analyze as report_of
from ckpt.engine.base import EngineAdapter
from ckpt.engine.find import adapter_for
from ckpt.errors import ConfigError
from ckpt.format.digest import digest, from_raw
from ckpt.runtime.auditing import audit_job
from ckpt.runtime.contents import content_of
from ckpt.runtime.describing import meet
from ckpt.runtime.pieces import PieceTable
from ckpt.runtime.torch_comm import communicator

if TYPE_CHECKING:
    from ckpt.analysis.content import ContentReport
    from ckpt.runtime.comm import Comm

Mapped = Callable[[int], object] | Mapping[int, object] | Mapping[str, Iterable[int]]
DomainsLike = str | Domains | Mapped
"""``"host"``, ``"rank"``, a function of the rank, rank -> name, or name -> its ranks."""

SHOWN_OPTION = 120
"""Characters of an argument that an error shows."""


class AuditedReport(Report, frozen=True, kw_only=True):
    """A report whose claims were put to the test: what was refuted is not counted as redundant.

    ``redundancy`` has the numbers. ``audit``: :meth:`~ckpt.analysis.claims.AuditReport.plain`.
    """

    audit: dict[str, Any]


@overload
def analyze(  # type: ignore[overload-overlap]  # a Mapping is an object too
    engine: Mapping[str, Any], *, timeout: float | None = None
) -> ContentReport: ...


@overload
def analyze(
    engine: object,
    *,
    domains: DomainsLike | None = None,
    lose: str | Iterable[int] | None = None,
    k: int | None = None,
    audit: bool | AuditReport = False,
    timeout: float | None = None,
) -> Report: ...


def analyze(
    engine: object,
    *,
    domains: DomainsLike | None = None,
    lose: str | Iterable[int] | None = None,
    k: int | None = None,
    audit: bool | AuditReport = False,
    timeout: float | None = None,
) -> Report | ContentReport:
    """Say what is held and how often, what survives losses, and what must be written therefore. Collective.

    Args:
        engine: as for :func:`ckpt.save`. Or a plain state dict, nested at will, of tensors whose layout is unknown:
            each rank hands in its own, and what is held twice is found by its bytes.
        domains: what fails at once: ``"host"`` (the default; ``CKPT_HOST`` names a rank's host if the system does not),
            ``"rank"``, a function of the rank, rank -> name, or name -> its ranks.
        lose: domains or ranks whose loss is to be looked at, as text (``"host:a,host:b"``, ``"rank:0-3"``) or as ranks.
        k: how many domains may be lost at once before something must be read back (default 1).
        audit: count as redundant only what is equal. True: compare now, as :func:`ckpt.audit` does; or what several
            audits of this layout found together (``first & second``). Gives an :class:`AuditedReport`.
        timeout: seconds without a sign of life after which a rank counts as lost (default ``CKPT_TIMEOUT``, 300).

    Returns:
        The same report on every rank: a :class:`~ckpt.analysis.report.Report` of an engine, a
        :class:`~ckpt.analysis.content.ContentReport` of a state dict.

    Raises:
        RankFailure: a step failed on some ranks, or some did not call; the same error on every rank.
        ConfigError, LayoutError: the same cause on every rank, with all problems.
    """
    comm = communicator()
    with comm.joint("analyze", timeout):
        if isinstance(engine, Mapping) and not isinstance(engine, EngineAdapter):
            unused = {
                "domains": domains,
                "lose": lose,
                "k": k,
                "audit": audit if isinstance(audit, AuditReport) else audit or None,
            }
            return content_of(comm, _plain_only(engine, [n for n, v in unused.items() if v is not None]))
        return _analyze_engine(comm, engine, domains, lose, 1 if k is None else k, audit)


def _plain_only(state: Mapping[Any, Any], given: list[str]) -> Mapping[Any, Any]:
    if given:
        raise ConfigError(f"{', '.join(given)}: not for a plain state dict, whose layout is unknown")
    return state


def _analyze_engine(
    comm: Comm,
    engine: object,
    domains: DomainsLike | None,
    lose: str | Iterable[int] | None,
    k: int,
    audit: bool | AuditReport,
) -> Report:
    lost = lose if lose is None or isinstance(lose, str) else tuple(lose)
    given = None if domains in (None, HOST) else _given_domains(comm.world, domains)
    asked = (
        f"domains={HOST if given is None else given}",
        f"lose={lost!r}",
        f"k={k}",
        f"audit={audit.to_json().decode() if isinstance(audit, AuditReport) else audit}",
    )
    met = meet(comm, "analyze", lambda: adapter_for(engine), tuple(map(_short, asked)))
    graph, found = met.job.graph, given or Domains.by_host(comm.world, met.hosts)
    if not isinstance(audit, AuditReport) and not audit:
        pieces = list(pieces_of(graph))
        return report_of(holdings_of(graph, pieces), found, lost=lost, k=k, pieces=pieces)
    if not isinstance(audit, AuditReport):
        audit = audit_job(comm, met.job, PieceTable(met.state.shards))
    _check_layout(audit, from_raw(met.job.layout))
    left = left_of(graph, refutations_of(audit.findings), audit.redundant(PROVED))
    report = report_of(left.holdings, found, lost=lost, k=k, pieces=left.pieces, redundancy=left.redundancy)
    return AuditedReport(**msgspec.structs.asdict(report), audit=audit.plain())


def _check_layout(audit: AuditReport, layout: str) -> None:
    if audit.layout != layout:
        raise ConfigError(f"audit: expected one of this layout ({layout}), found one of {audit.layout}")


def _short(option: str) -> str:
    """Return what to compare between ranks: every rank learns it of every other, so it must not grow with the world."""
    return option if len(option) <= SHOWN_OPTION else f"{option[:SHOWN_OPTION]}… ({digest(option.encode())})"


def _given_domains(world: int, domains: DomainsLike | None) -> Domains:
    if isinstance(domains, Domains):
        domains.check(world)
        return domains
    if domains == RANK:
        return Domains.by_rank(world)
    if domains is None or isinstance(domains, str):
        raise ConfigError(f"domains={domains!r}: expected {HOST!r}, {RANK!r}, a mapping, or a function of the rank")
    return Domains.of("domain", world, domains)
