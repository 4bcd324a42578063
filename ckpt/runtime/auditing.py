"""The claims of a live job put to the test: digests as for a save, nothing written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ckpt.analysis.audit import find_diverging, sides_of
from ckpt.analysis.claims import (
    BUFFERS,
    DERIVATION,
    PROVED,
    REFUTED,
    REPLICA,
    UNPROVED,
    AuditReport,
    Claim,
    Finding,
)
from ckpt.format.digest import from_raw
from ckpt.layout.spec import BUFFER, PARAM
from ckpt.runtime.comparing import IN_AUDIT, Answer, Question, ask
from ckpt.runtime.differing import is_constant
from ckpt.runtime.digesting import Digests, Exchanged, digest_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ckpt.plan.save_plan import SavePlan
    from ckpt.runtime.agree import JobPlan
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.pieces import PieceTable

ClaimKey = tuple[str, str, str, tuple[int, ...]]


class _Seen(msgspec.Struct, array_like=True):
    """What a rank knows of its chunks. ``constant``: all elements are bitwise equal. ``underived``: params that are not
    the cast of this rank's master. ``assumed``: diverging ones that only count as whole, and whose first holder it is.
    """

    constant: list[int]
    underived: list[int]
    assumed: list[int]


def audit_job(comm: Comm, job: JobPlan, pieces: PieceTable, assumed: Collection[str] = ()) -> AuditReport:
    """Compare what the ranks declare to be redundant. Collective, inside an operation that has been entered.

    Args:
        comm: all ranks of the job.
        job: what they hold, and the plan that says who proves what.
        pieces: this rank's memory.
        assumed: FQNs that only count as whole, so that a save keeps every copy that differs.

    Returns:
        The same report on every rank.
    """
    plan, mine, seen = job.plan, Digests(), _Seen([], [], [])
    payloads = comm.gather("digest", lambda: _digest(mine, seen, plan, comm.rank, pieces, comm.beat))
    exchanged = Exchanged(plan, payloads)
    copies = {i: sides_of(d) for i, d in find_diverging(len(plan.chunks), plan.shared, exchanged.held).items()}
    first = (i for i in copies if plan.chunks[i].ranks[0] == comm.rank)
    seen.assumed += [i for i in first if plan.chunks[i].spec.fqn in assumed]
    encoded = comm.gather("judge", lambda: msgspec.msgpack.encode(seen))
    told = [msgspec.msgpack.decode(data, type=_Seen) for data in encoded]
    constant = {i for one in told for i in one.constant}
    underived = {i for one in told for i in one.underived if i not in copies}
    questions = []
    for i in sorted(copies.keys() | underived):
        sides, cast = copies.get(i), exchanged.cast(i) if i in copies and i in plan.proofs else None
        if sides is None:
            questions.append(Question(i, (plan.chunks[i].ranks,), plan.owners[i], (0,)))
        elif cast is None:
            questions.append(Question(i, tuple(sides.values())))
        else:
            wrong = tuple(k for k, content in enumerate(sides) if content != cast)
            questions.append(Question(i, tuple(sides.values()), plan.owners[i], wrong))
    answers = ask(comm, plan, pieces, questions, IN_AUDIT)
    kept = {i for one in told for i in one.assumed}
    findings = [f for one in questions for f in _findings(plan, one, answers.get(one.chunk), one.chunk in kept)]
    wrong_casts = {one.chunk for one in questions if one.wrong}
    return AuditReport(
        from_raw(job.layout),
        plan.world,
        _claims(plan, job.graph.derived, set(copies), wrong_casts, constant),
        tuple(sorted(findings, key=lambda f: (f.fqn, f.role, f.box, f.kind))),
    )


def _digest(
    mine: Digests, seen: _Seen, plan: SavePlan, rank: int, pieces: PieceTable, beat: Callable[[], None]
) -> bytes:
    def look(i: int, data: memoryview) -> None:
        if plan.owners[i] == rank and is_constant(data, plan.chunks[i].spec.itemsize):
            seen.constant.append(i)

    digest_chunks(mine, plan, rank, pieces, beat, look)
    seen.underived += [i for i, cast in mine.casts.items() if cast != mine.held[i]]
    return mine.shared(plan, rank)


def _findings(plan: SavePlan, question: Question, answer: Answer | None, assumed: bool) -> list[Finding]:
    chunk = plan.chunks[question.chunk]
    spec, found = chunk.spec, []
    if len(question.sides) > 1:
        kind = BUFFERS if spec.role == BUFFER else REPLICA
        exact = answer.replicas if answer else None
        found.append(Finding(kind, *spec.key, chunk.box, question.sides, exact, assumed or kind == BUFFERS))
    if question.prover is not None and question.wrong:
        ranks = tuple(sorted(r for k in question.wrong for r in question.sides[k]))
        sides = ((question.prover,), ranks)
        found.append(Finding(DERIVATION, *spec.key, chunk.box, sides, answer.cast if answer else None))
    return found


def _claims(
    plan: SavePlan, derived: frozenset[str], diverging: set[int], wrong_casts: set[int], constant: set[int]
) -> tuple[Claim, ...]:
    """Return every declared claim with the state of each of its pieces, sorted."""
    pieces: dict[ClaimKey, list[tuple[int, int]]] = {}
    for i, chunk in enumerate(plan.chunks):
        fqn, role = chunk.spec.key
        equal = UNPROVED if i in constant else PROVED
        if len(chunk.ranks) > 1:
            kind = BUFFERS if role == BUFFER else REPLICA
            state = REFUTED if i in diverging else equal
            pieces.setdefault((kind, fqn, role, chunk.ranks), []).append((chunk.nbytes, state))
        if role == PARAM and fqn in derived:
            # Where no rank holds param and master of the same elements, nobody can compare them. Where masters differ,
            # the param is the cast of one of them at best.
            wrong = i in wrong_casts or plan.proofs.get(i) in diverging
            state = REFUTED if wrong else equal if i in plan.proofs else UNPROVED
            pieces.setdefault((DERIVATION, fqn, role, chunk.ranks), []).append((chunk.nbytes, state))
    claims = []
    for key, rows in sorted(pieces.items()):
        nbytes, states = zip(*rows, strict=True)
        claims.append(Claim(*key, np.array(nbytes, np.int64), np.array(states, np.uint8)))
    return tuple(claims)
