"""``ckpt.analyze``: who holds what in a live job, what survives, what is redundant. Every rank of the job calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from ckpt.analysis.claims import PROVED, AuditReport
from ckpt.analysis.domains import HOST, RANK, Domains
from ckpt.analysis.holdings import holdings_of, pieces_of
from ckpt.analysis.losing import checked_lost
from ckpt.analysis.refuting import left_of, refutations_of
from ckpt.analysis.report import AnalysisReport, checked_losses
from ckpt.analysis.report import analyze as report_of
from ckpt.engine.base import EngineAdapter
from ckpt.engine.find import adapter_for
from ckpt.errors import ConfigError
from ckpt.format.digest import digest, from_raw
from ckpt.runtime.auditing import audit_job
from ckpt.runtime.contents import content_of, is_state_dict
from ckpt.runtime.describing import meet
from ckpt.runtime.pieces import PieceTable
from ckpt.runtime.torch_comm import communicator

if TYPE_CHECKING:
    from ckpt.analysis.content import ContentReport
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.contents import StateDict

Mapped = Callable[[int], object] | Mapping[int, object] | Mapping[str, Iterable[int]]
DomainsLike = str | Domains | Mapped
"""``"host"``, ``"rank"``, a function of the rank, rank -> name, or name -> its ranks."""

T = TypeVar("T")

SHOWN_OPTION = 120
"""Characters of an argument that an error shows."""


@overload
def analyze(  # type: ignore[overload-overlap]  # a Mapping is an object too
    engine: StateDict, *, timeout: float | None = None
) -> ContentReport: ...


@overload
def analyze(  # type: ignore[overload-overlap]
    engine: Mapping[str, Any],
    *,
    domains: DomainsLike | None = None,
    lose: str | Iterable[int] | None = None,
    k: int | None = None,
    audit: bool | AuditReport = False,
    timeout: float | None = None,
) -> AnalysisReport | ContentReport: ...


@overload
def analyze(
    engine: object,
    *,
    domains: DomainsLike | None = None,
    lose: str | Iterable[int] | None = None,
    k: int | None = None,
    audit: bool | AuditReport = False,
    timeout: float | None = None,
) -> AnalysisReport: ...


def analyze(
    engine: object,
    *,
    domains: DomainsLike | None = None,
    lose: str | Iterable[int] | None = None,
    k: int | None = None,
    audit: bool | AuditReport = False,
    timeout: float | None = None,
) -> AnalysisReport | ContentReport:
    """Say what is held and how often, what survives losses, and what must be written therefore. Collective.

    Args:
        engine: as for :func:`ckpt.save`. Or a plain state dict, nested at will, of tensors whose layout is unknown:
            each rank hands in its own, and what is held twice is found by its bytes. A dict without any tensor is an
            engine, as for a save (``{"model": model, "optimizer": optimizer}``).
        domains: what fails at once: ``"host"`` (the default; ``CKPT_HOST`` names a rank's host if the system does not),
            ``"rank"``, a function of the rank, rank -> name, or name -> its ranks.
        lose: domains or ranks whose loss is to be looked at, as text (``"host:a,host:b"``, ``"rank:0-3"``) or as ranks.
        k: how many domains may be lost at once before something must be read back (default 1).
        audit: count as redundant only what is equal. True: compare now, as :func:`ckpt.audit` does; or what several
            audits of this layout found together (``first & second``). The report then has it as ``audit``.
        timeout: seconds without a sign of life after which a rank counts as lost (default ``CKPT_TIMEOUT``, 300).

    Returns:
        The same report on every rank: a :class:`~ckpt.analysis.report.AnalysisReport` of an engine, a
        :class:`~ckpt.analysis.content.ContentReport` of a state dict.

    Raises:
        RankFailure: a step failed on some ranks, or some did not call; the same error on every rank.
        ConfigError, LayoutError: the same cause on every rank, with all problems.
    """
    comm = communicator()
    with comm.joint("analyze", timeout):
        if isinstance(engine, Mapping) and not isinstance(engine, EngineAdapter) and is_state_dict(engine):
            unused = {
                "domains": domains,
                "lose": lose,
                "k": k,
                "audit": audit if isinstance(audit, AuditReport) else audit or None,
            }
            return content_of(comm, _plain_only(engine, [n for n, v in unused.items() if v is not None]))
        return _analyze_engine(comm, engine, _Asked.of(comm.world, domains, lose, k, audit))


def _plain_only(state: Mapping[Any, Any], given: list[str]) -> Mapping[Any, Any]:
    if given:
        raise ConfigError(f"{', '.join(given)}: not for a plain state dict, whose layout is unknown")
    return state


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments, checked as far as that needs no engine. ``domains``: None for hosts, whose names are exchanged."""

    domains: Domains | None
    lost: str | tuple[int, ...] | None
    k: int
    audit: bool | AuditReport

    @classmethod
    def of(cls, world: int, domains: object, lose: object, k: object, audit: object) -> _Asked:
        """Check the arguments of an analysis.

        Raises:
            ConfigError: with all that is wrong with them.
        """
        problems: list[str] = []

        def checked(check: Callable[[], T]) -> T | None:
            try:
                return check()
            except ConfigError as error:
                problems.append(str(error))
                return None

        given = checked(lambda: _given_domains(world, domains))
        lost = None if lose is None else checked(lambda: checked_lost(lose))
        losses = checked(lambda: checked_losses(1 if k is None else k))
        report = checked(lambda: _given_audit(audit))
        if losses is None or report is None or problems:
            raise ConfigError("\n".join(problems))
        return cls(given, lost, losses, report)

    def options(self) -> tuple[str, ...]:
        """Return what all ranks must have asked for alike, in words."""
        audit = self.audit.to_json().decode() if isinstance(self.audit, AuditReport) else self.audit
        domains = HOST if self.domains is None else self.domains
        return tuple(map(_short, (f"{domains=!s}", f"lose={self.lost!r}", f"k={self.k}", f"{audit=!s}")))


def _analyze_engine(comm: Comm, engine: object, asked: _Asked) -> AnalysisReport:
    met = meet(comm, "analyze", lambda: adapter_for(engine), asked.options())
    graph, found = met.job.graph, asked.domains or Domains.by_host(comm.world, met.hosts)
    if asked.audit is False:
        pieces = list(pieces_of(graph))
        return report_of(holdings_of(graph, pieces), found, lost=asked.lost, k=asked.k, pieces=pieces)
    audit = asked.audit
    if audit is True:
        audit = audit_job(comm, met.job, PieceTable(met.state.shards), met.state.assumed)
    _check_layout(audit, from_raw(met.job.layout))
    left = left_of(graph, refutations_of(audit.findings), audit.redundant(PROVED))
    report = report_of(left.holdings, found, lost=asked.lost, k=asked.k, pieces=left.pieces, redundancy=left.redundancy)
    return msgspec.structs.replace(report, audit=audit.plain())


def _check_layout(audit: AuditReport, layout: str) -> None:
    if audit.layout != layout:
        raise ConfigError(f"audit: expected one of this layout ({layout}), found one of {audit.layout}")


def _short(option: str) -> str:
    """Return what to compare between ranks: every rank learns it of every other, so it must not grow with the world."""
    return option if len(option) <= SHOWN_OPTION else f"{option[:SHOWN_OPTION]}… ({digest(option.encode())})"


def _given_domains(world: int, domains: Any) -> Domains | None:
    if domains is None or (isinstance(domains, str) and domains == HOST):
        return None
    if isinstance(domains, Domains):
        domains.check(world)
        return domains
    if isinstance(domains, str):
        if domains == RANK:
            return Domains.by_rank(world)
        raise ConfigError(f"domains={domains!r}: expected {HOST!r}, {RANK!r}, a mapping, or a function of the rank")
    return Domains.of("domain", world, domains)


def _given_audit(audit: object) -> bool | AuditReport:
    if isinstance(audit, bool | AuditReport):
        return audit
    raise ConfigError(f"audit={audit!r}: expected a truth value, or an AuditReport")
