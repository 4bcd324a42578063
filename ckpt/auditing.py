"""``ckpt.audit``: is what the ranks declare to be redundant really equal? Every rank of the job calls it.

describe → agree → plan → digest → compare: the path of a save without a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.engine.find import adapter_for
from ckpt.runtime.auditing import audit_job
from ckpt.runtime.describing import meet
from ckpt.runtime.pieces import PieceTable
from ckpt.runtime.torch_comm import communicator

if TYPE_CHECKING:
    from ckpt.analysis.claims import AuditReport


def audit(engine: object, *, timeout: float | None = None) -> AuditReport:
    """Compare what the ranks declare to be redundant, and name every element that is not. Collective; writes nothing.

    Declared replicas are compared by digest, and each param that should be cast(master) with that cast. A few of the
    chunks that differ are compared element by element as well (:data:`ckpt.runtime.comparing.IN_AUDIT`); the others
    are listed with their box and ranks. Content of equal elements proves nothing, so audit again after some steps and
    combine the reports (``a & b``).

    Args:
        engine: as for :func:`ckpt.save`; it must stand between two optimizer steps.
        timeout: seconds without a sign of life after which a rank counts as lost (default ``CKPT_TIMEOUT``, 300).

    Returns:
        The same report on every rank. Findings are no errors.

    Raises:
        RankFailure: a step failed on some ranks, or some did not call; the same error on every rank.
        ConfigError, LayoutError: the same cause on every rank.
    """
    comm = communicator()
    with comm.joint("audit", timeout):
        met = meet(comm, "audit", lambda: adapter_for(engine))
        return audit_job(comm, met.job, PieceTable(met.state.shards), met.state.assumed)
