"""Refuted chunks looked at element by element: the bytes of each side travel to one rank, which says what differs.

Only the ranks concerned carry bytes: they go through the job's key-value store, which serves what is asked for, and not
through an all-gather, which would bring every chunk to every rank. Bounded in every direction (:class:`Limits`): so
many chunks, so many sides of each, so many bytes at a time, because one process serves them all.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ckpt.analysis.claims import DERIVATION, Difference, Finding
from ckpt.runtime.differing import difference
from ckpt.runtime.staging import cast_bytes, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.layout.spec import TensorSpec
    from ckpt.plan.save_plan import SavePlan
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.pieces import PieceTable

MAX_SHOWN = 8
"""Underived params that each rank tells of in a save."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How closely to look.

    ``chunks``: how many are looked at in detail; of every tensor the first ones. The others are known by box and ranks.
    ``sides``: copies of one chunk that are compared (buffers may differ on every rank); fewer, but two, where they are
    more than ``batch_bytes``. ``batch_bytes``: sides that are on their way at a time, unless two sides are more.
    """

    chunks: int
    sides: int
    batch_bytes: int = 8 << 20

    def sides_of(self, nbytes: int) -> int:
        """Return how many sides of a chunk of so many bytes are compared."""
        return max(2, min(self.sides, self.batch_bytes // max(nbytes, 1)))


IN_AUDIT = Limits(32, 16)
IN_SAVE = Limits(8, 2, 16 << 20)
"""Buffers that differ by right do so in every save. One side of each chunk travels: at most 32 MiB with chunks of 4."""


@dataclass(frozen=True, slots=True)
class Question:
    """One refuted chunk. ``sides``: ranks with equal bytes, as :attr:`Verdict.copies` orders them. ``prover``: the rank
    whose cast(master) is to be compared as well. ``wrong``: positions of the sides that are not that cast.
    ``compared``: how many of the sides, the first ones, are looked at element by element.
    """

    chunk: int
    sides: tuple[tuple[int, ...], ...]
    prover: int | None = None
    wrong: tuple[int, ...] = ()
    compared: int = 2

    @property
    def judge(self) -> int:
        """The rank that compares: the prover, which alone has the cast, else the first holder."""
        return self.sides[0][0] if self.prover is None else self.prover

    def givers(self) -> tuple[int, ...]:
        """Return the rank that gives each side's bytes, of the sides that are compared; the judge gives its own."""
        return tuple(self.judge if self.judge in ranks else ranks[0] for ranks in self.sides[: self.compared])


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What the judge of a question says. ``cast``: over the compared sides that are not cast(master), against it."""

    chunk: int
    replicas: Difference | None
    cast: Difference | None


def ask(comm: Comm, plan: SavePlan, pieces: PieceTable, questions: list[Question], limits: Limits) -> dict[int, Answer]:
    """Answer the first questions of every tensor. Collective; all ranks pass the same questions and limits.

    Returns:
        chunk -> answer, the same on every rank.
    """
    chosen = _chosen(plan, questions, limits)
    if not chosen:
        return {}
    mine: list[Answer] = []
    for number, batch in enumerate(_batches(plan, chosen, limits.batch_bytes)):
        exchange = _Exchange(comm, number, plan, pieces)
        try:
            comm.run("compare", partial(exchange.give, batch))
            comm.run("compare", partial(exchange.answer, batch, mine))
        finally:
            exchange.forget()  # everybody has read what there was to read, or nobody will
    gathered = comm.gather("compare", lambda: msgspec.msgpack.encode(mine))
    answers = (a for data in gathered for a in msgspec.msgpack.decode(data, type=list[Answer]))
    return {answer.chunk: answer for answer in answers}


def _chosen(plan: SavePlan, questions: list[Question], limits: Limits) -> list[Question]:
    """Return every tensor's first question before any tensor's second one, each with the sides to be compared."""
    turns: dict[TensorSpec, int] = {}
    order = []
    for question in sorted(questions, key=lambda q: q.chunk):
        spec = plan.chunks[question.chunk].spec
        turns[spec] = turns.get(spec, 0) + 1
        order.append((turns[spec], question.chunk, question))
    chosen = [question for _, _, question in sorted(order, key=lambda one: one[:2])[: limits.chunks]]
    return [replace(q, compared=limits.sides_of(plan.chunks[q.chunk].nbytes)) for q in chosen]


def _batches(plan: SavePlan, questions: list[Question], most: int) -> Iterator[list[Question]]:
    batch: list[Question] = []
    total = 0
    for question in questions:
        nbytes = plan.chunks[question.chunk].nbytes * sum(giver != question.judge for giver in question.givers())
        if batch and total + nbytes > most:
            yield batch
            batch, total = [], 0
        batch.append(question)
        total += nbytes
    yield batch


def cast_difference(plan: SavePlan, pieces: PieceTable, chunk: int, copies: list[memoryview]) -> Difference | None:
    """Compare copies of a derivable param's chunk with the cast of this rank's own master.

    Raises:
        LayoutError: the chunk, or the master that is to prove it, is not in this rank's memory.
    """
    one = plan.chunks[chunk]
    master = plan.chunks[plan.proofs[chunk]].spec
    right = cast_bytes(pieces.view(master, one.box), pieces.view(one.spec, one.box).dtype)
    return difference([right, *copies], one.spec.dtype, one.box)


def underived(plan: SavePlan, rank: int, pieces: PieceTable, numbers: list[int]) -> list[Finding]:
    """Return the findings about params that this rank holds and that are not the cast of its own master.

    ``numbers``: their chunks; the first of each tensor is looked at, :data:`MAX_SHOWN` at most.
    """
    found: dict[TensorSpec, Finding] = {}
    for i in numbers:
        chunk = plan.chunks[i]
        if chunk.spec in found or len(found) == MAX_SHOWN:
            continue
        exact = cast_difference(plan, pieces, i, [tensor_bytes(pieces.view(chunk.spec, chunk.box))])
        found[chunk.spec] = Finding(DERIVATION, *chunk.spec.key, chunk.box, ((rank,), chunk.ranks), exact)
    return list(found.values())


class _Exchange:
    """Brings the bytes of one batch to its judges."""

    def __init__(self, comm: Comm, number: int, plan: SavePlan, pieces: PieceTable) -> None:
        self.comm, self.number, self.plan, self.pieces = comm, number, plan, pieces
        self._made: list[str] = []

    def give(self, batch: list[Question]) -> None:
        """Put what other ranks need of this one into the store."""
        for question in batch:
            if question.judge != self.comm.rank and self.comm.rank in question.givers():
                self._made.append(self._key(question.chunk, self.comm.rank))
                self.comm.store.set(self._made[-1], bytes(self._own(question.chunk)))
                self.comm.beat()

    def answer(self, batch: list[Question], answers: list[Answer]) -> None:
        """Answer the questions that this rank judges."""
        for question in batch:
            if question.judge != self.comm.rank:
                continue
            chunk = self.plan.chunks[question.chunk]
            copies = [self._bytes_of(question.chunk, giver) for giver in question.givers()]
            cast = None
            if question.prover is not None:
                wrong = [copies[k] for k in question.wrong if k < len(copies)]
                cast = cast_difference(self.plan, self.pieces, question.chunk, wrong)
            answers.append(Answer(question.chunk, difference(copies, chunk.spec.dtype, chunk.box), cast))
            self.comm.beat()

    def forget(self) -> None:
        """Delete what this rank has put into the store, which may be gone with the rank that served it."""
        with suppress(RuntimeError):
            for key in self._made:
                self.comm.store.delete_key(key)

    def _key(self, chunk: int, rank: int) -> str:
        return f"compare/{self.comm.operation}/{self.number}/{chunk}/{rank}"

    def _own(self, chunk: int) -> memoryview:
        one = self.plan.chunks[chunk]
        return tensor_bytes(self.pieces.view(one.spec, one.box))

    def _bytes_of(self, chunk: int, giver: int) -> memoryview:
        return self._own(chunk) if giver == self.comm.rank else memoryview(self.comm.store.get(self._key(chunk, giver)))
