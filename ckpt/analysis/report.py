"""The report of an analysis: what is held and how often, what survives, what must be written. Pure.

Plain data whose JSON follows from the holdings alone, byte for byte: neither the order of rows nor the numbering of
sets, which a live job and a description of it choose differently, can be seen in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.analysis.blocks import Block, SetTable, blocks_of
from ckpt.analysis.classes import CellClass, cell_classes
from ckpt.analysis.domains import RANK, whole_number
from ckpt.analysis.heat import HeatMap, heat_map
from ckpt.analysis.kills import KillTable, kill_table
from ckpt.analysis.losing import Loss, lose
from ckpt.analysis.refuting import Redundancy
from ckpt.analysis.survival import SurvivalRow, rounded, survival_table
from ckpt.errors import ConfigError
from ckpt.words import count, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpt.analysis.domains import Domains
    from ckpt.analysis.holdings import Holdings, TensorPieces

_SHOWN = 6
"""classes in the short form"""

VERSION = 1
"""Of the JSON form: a field that changes its meaning or goes away is a new version."""


class RoleBytes(msgspec.Struct, frozen=True, kw_only=True):
    """One role, or all of them.

    ``bytes_held``: over all ranks. ``bytes_unique``: one copy of everything that cannot be derived.
    ``bytes_derivable``: one copy of what can: params that are cast(master). ``redundant_share``: of the bytes held, the
    share that is in neither of the former; 0 if nothing is held.
    """

    role: str
    bytes_held: int
    bytes_unique: int
    bytes_derivable: int
    redundant_share: float


class MustWrite(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss of ``losses`` domains at once could destroy, and must be written therefore.

    A row counts if its tolerance is below ``losses``: ``k`` losses are survived by what is held in more than ``k``
    domains. All roles of a recoverable combination are written, because they must be of one step.
    """

    losses: int
    bytes: int
    parameters: int
    share: float


class AnalysisReport(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`analyze` found.

    ``tensors``, ``parameters``, ``elements`` (buffers too, and each distinct copy of them): of the model. ``k``: the
    losses that verdicts speak of. ``redundancy``: None if the claims were not put to the test, so that the report is
    true as far as they are; otherwise what was refuted is not counted as held or derivable. ``audit``: of a live job
    the test itself (:meth:`~ckpt.analysis.claims.AuditReport.plain`), likewise None without one.
    """

    version: int = VERSION
    world: int
    domain_kind: str
    domain_count: int
    k: int
    tensors: int
    parameters: int
    elements: int
    aliases: dict[str, str]
    total: RoleBytes
    roles: tuple[RoleBytes, ...]
    classes: tuple[CellClass, ...]
    must_write: tuple[MustWrite, ...]
    survival: tuple[SurvivalRow, ...]
    heat: HeatMap
    loss: Loss | None = None
    redundancy: Redundancy | None = None
    audit: dict[str, Any] | None = None

    def __str__(self) -> str:
        """Return the report in a few lines."""
        total = self.total
        on = "" if self.domain_kind == RANK else f" on {count(self.domain_count, self.domain_kind)}"
        held, unique, derivable = size(total.bytes_held), size(total.bytes_unique), size(total.bytes_derivable)
        lines = [
            f"{count(self.world, RANK)}{on}: {count(self.tensors, 'tensor')}, "
            f"{self.parameters:,} parameters; {held} held, {unique} unique, {derivable} derivable, "
            f"{total.redundant_share:.1%} redundant"
        ]
        lines += [
            f"{size(one.bytes)} ({one.kind}, like {one.example!r}): {one.verdict}" for one in self.classes[:_SHOWN]
        ]
        lines += [f"… and {len(self.classes) - _SHOWN} more classes"] if len(self.classes) > _SHOWN else []
        lines += [
            f"{count(row.lost, self.domain_kind)} lost: at least {row.bytes.worst_share:.1%} of the state "
            f"is still held, {row.bytes.expected_share:.1%} expected"
            for row in self.survival[1:4]
        ]
        if self.loss is not None:
            lines.append(
                f"the loss of {self.loss.title(self.domain_kind)}: {count(self.loss.tensors_gone, 'tensor')}, "
                f"{count(self.loss.elements, 'element')} ({size(self.loss.bytes)}) cannot be rebuilt"
            )
        return "\n  ".join(lines)

    def to_json(self) -> bytes:
        """Return the report as JSON: keys sorted, the same bytes for the same holdings."""
        return msgspec.json.encode(self, order="sorted")


def checked_losses(k: object) -> int:
    """Return how many losses are to be survived.

    Raises:
        ConfigError: that is no number, or less than 1.
    """
    number = whole_number(k)
    if number is None or number < 1:
        raise ConfigError(f"k: expected the number of losses to survive, at least 1, found {k!r}")
    return number


def analyze(
    holdings: Holdings,
    domains: Domains,
    *,
    lost: str | Iterable[int] | None = None,
    k: int = 1,
    pieces: Iterable[TensorPieces] | None = None,
    redundancy: Redundancy | None = None,
) -> AnalysisReport:
    """Return the report of a job.

    Args:
        holdings: who holds what.
        domains: which ranks fail together.
        lost: a named loss to look at, as for :func:`ckpt.analysis.losing.lose`.
        k: how many domains may be lost at once before something has to be read back; verdicts are for this number.
        pieces: those of which these are the holdings, to name the boxes of what is lost and all who hold the rest.
        redundancy: what a test of the claims said, if the holdings are what it left of them.

    Raises:
        ConfigError: the domains are not this job's, ``lost`` names what is not there, or ``k`` is
            not between 1 and their number.
    """
    domains.check(holdings.world)
    k = checked_losses(k)
    if k > len(domains.names):
        known = f"the job has {count(len(domains.names), domains.kind)}"
        raise ConfigError(f"k: {count(k, domains.kind)} to be lost at once, {known}: expected at most as many")
    loss = None if lost is None else lose(holdings, domains, lost, pieces)
    sets = SetTable(holdings.sets)
    blocks = blocks_of(holdings)
    table = kill_table(blocks, sets, domains)
    roles = _roles(blocks, sets)
    return AnalysisReport(
        world=holdings.world,
        domain_kind=domains.kind,
        domain_count=len(domains.names),
        k=k,
        tensors=len({tensor.fqn for tensor in holdings.tensors}),
        parameters=int(table.weight[:, 1].sum()),
        elements=sum(int(block.volume.sum()) for block in blocks if not block.is_scalar),
        aliases=dict(holdings.aliases),
        total=_role_bytes("total", *(sum(r[i] for r in roles.values()) for i in range(3))),
        roles=tuple(_role_bytes(role, *found) for role, found in sorted(roles.items())),
        classes=cell_classes(holdings, blocks, sets, table, domains, k),
        must_write=_must_write(table, k),
        survival=survival_table(table),
        heat=heat_map(holdings, blocks, sets, table, domains.of_rank),
        loss=loss,
        redundancy=redundancy,
    )


def _roles(blocks: Sequence[Block], sets: SetTable) -> dict[str, list[int]]:
    """Return role -> [bytes held, unique, derivable]."""
    found: dict[str, list[int]] = {}
    for block in blocks:
        for c, column in enumerate(block.columns):
            if column.scalar:
                continue
            one = block.elements * column.itemsize
            total = found.setdefault(column.role, [0, 0, 0])
            total[0] += int((one * sets.size[block.holders[:, c]]).sum())
            total[2 if block.is_derivable(c) else 1] += int(one.sum())
    return found


def _role_bytes(role: str, held: int, unique: int, derivable: int) -> RoleBytes:
    return RoleBytes(
        role=role,
        bytes_held=held,
        bytes_unique=unique,
        bytes_derivable=derivable,
        redundant_share=rounded((held - unique - derivable) / held) if held else 0.0,
    )


def _must_write(table: KillTable, k: int) -> tuple[MustWrite, ...]:
    """For 1 to 8 losses, or to ``k`` if that is more; fewer if there are no more domains."""
    total = int(table.weight[:, 0].sum())
    rows: list[MustWrite] = []
    for losses in range(1, min(max(k, 8), table.domains) + 1):
        nbytes, parameters = (int(one) for one in table.weight[table.tolerance < losses].sum(axis=0))
        rows.append(
            MustWrite(
                losses=losses,
                bytes=nbytes,
                parameters=parameters,
                share=rounded(nbytes / total) if total else 0.0,
            )
        )
    return tuple(rows)
