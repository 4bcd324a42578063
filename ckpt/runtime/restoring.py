"""The read side of a load, as one rank goes through it: index, who reads what, packs, bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ckpt.errors import CkptError, to_wire
from ckpt.plan.read_plan import Places, plan_alone, plan_together, runs_of_numbers
from ckpt.runtime.broadcast import Transfer
from ckpt.runtime.cargo import Outcome, settle
from ckpt.runtime.collective import CollectiveTransfer
from ckpt.runtime.fabric import fabric_of
from ckpt.runtime.groups import agree_on_groups, wished_fabric
from ckpt.runtime.handing import hand_index
from ckpt.runtime.placing import Chunks
from ckpt.runtime.reading import GAP_BYTES, check_packs
from ckpt.runtime.reading_mode import EACH, PER_HOST, exchange_needs, span_for
from ckpt.runtime.sharing import Sharing, share
from ckpt.store.metered import Metered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpt.plan.load_plan import ChunkRead
    from ckpt.plan.read_plan import Unit
    from ckpt.repo.repository import Index
    from ckpt.runtime.comm import Comm
    from ckpt.runtime.fabric import Fabric
    from ckpt.runtime.groups import Groups
    from ckpt.runtime.pieces import Piece
    from ckpt.store.base import Store


class Restore:
    """Reads one checkpoint with all ranks. Every method but the first is collective.

    Args:
        comm: all ranks, in an operation.
        store: where it is.
        read: ``once``, ``once per host`` or ``each``, the same on all ranks.
        budget: bytes of host memory, the same on all ranks.
        hosts: name of each rank's host.

    Raises:
        ConfigError: ``CKPT_FABRIC`` is none of its words.
    """

    def __init__(self, comm: Comm, store: Store, read: str, budget: int, hosts: Sequence[str]) -> None:
        self.comm, self.read, self.budget, self.hosts = comm, read, budget, hosts
        self.store = Metered(store)
        self.span = span_for(read, budget)
        self.received = self.chunk_bytes = 0
        self._wish = wished_fabric()
        self._fabric: Fabric | None = None
        self._sharing: Sharing | None = None
        self._groups: Groups | None = None
        self._places: Places | None = None
        self._units: dict[str, list[Unit]] = {}
        self._reads: Mapping[str, Sequence[ChunkRead]] = {}

    def open(self, step: int) -> Store:
        """Return the store to read the index and the objects of ``step`` from.

        Raises:
            FormatError, IntegrityError, StoreError: unless ``each``, rank 0's on all ranks.
        """
        if self.read == EACH:
            return self.store
        self._fabric = fabric_of(self.comm)
        return hand_index(self.comm, self._fabric, self.store, step, self.hosts)

    def plan(self, index: Index, reads: Mapping[str, Sequence[ChunkRead]], targets: Sequence[Piece]) -> None:
        """Agree on who reads what, and see that all packs are there.

        Args:
            index: of the checkpoint, whole.
            reads: stage -> what this rank needs in it; the same stages on all ranks.
            targets: this rank's pieces.

        Raises:
            ConfigError: ``CKPT_FABRIC`` asks for what cannot be.
            MissingChunk: a pack is absent or has another size.
        """
        places = self._places = Places(index.specs, index.parts)
        self._reads = reads
        for stage, wanted in reads.items():
            runs = runs_of_numbers(places.number(read.entry) for read in wanted if read.entry.nbytes)
            if self.read != EACH:
                needs = exchange_needs(self.comm, runs)
                if self.read == PER_HOST:  # others' plans are made by others, and no chain leaves its host
                    here = self.hosts[self.comm.rank]
                    needs = [n if h == here else n[:0] for n, h in zip(needs, self.hosts, strict=True)]
                self._units[stage] = plan_together(places.order, needs, self.hosts, span=self.span)
            else:
                self._units[stage] = plan_alone(places.order, runs, self.comm.rank, gap=GAP_BYTES, span=self.span)
        if self.read != EACH:
            here = self.hosts[self.comm.rank]
            self._groups = agree_on_groups(self.comm, self._wish, here, self._units, reads, targets)
            if self._groups is None:
                self._sharing = share(self.comm, self.hosts, span=self.span, budget=self.budget)
        sizes = {pack.key: pack.nbytes for part in index.parts for pack in part.packs}
        own = [unit for units in self._units.values() for unit in units if unit.chain[0] == self.comm.rank]
        first = [places.order[number] for unit in own for number, _ in unit.items]
        self._alike("packs", lambda: check_packs(self.store, first, sizes))

    def _alike(self, name: str, work: Callable[[], object]) -> None:
        """Run ``work`` on all ranks; one error for all, which unless ``each`` is the first rank's own."""
        if self.read == EACH:
            self.comm.run(name, work)
            return

        def outcome() -> bytes:
            try:
                work()
            except CkptError as error:
                return msgspec.msgpack.encode(Outcome(failed=0, error=to_wire(error)))
            return msgspec.msgpack.encode(Outcome())

        settle([msgspec.msgpack.decode(data, type=Outcome) for data in self.comm.gather(name, outcome)])

    def carry(self, stage: str, targets: Sequence[Piece]) -> None:
        """Bring the chunks of a stage of the plan into the live tensors of all ranks.

        Raises:
            DigestMismatch, MissingChunk, StoreError: unless ``each``, of the first unit that failed on any rank.
            PlanError: a number that the target's dtype cannot hold exactly.
            RankFailure: a rank is gone, or (``each``) only some ranks failed.
        """
        if self._places is None:
            raise CkptError("nothing was planned")
        cargo = Chunks(self.store, self._places, self._reads[stage], targets)
        units = self._units[stage]
        if self.read == EACH:
            alone = Transfer(self.comm, None, cargo, span=self.span, budget=self.budget)
            self.comm.run(stage, lambda: alone.run_alone(stage, units))
            done = alone.outcome
        else:
            done = self._transfer(cargo).run(stage, units)
            told = self.comm.gather(stage, lambda: msgspec.msgpack.encode(done))
            settle([msgspec.msgpack.decode(data, type=Outcome) for data in told])
        self.received += done.received
        self.chunk_bytes += done.read

    def _transfer(self, cargo: Chunks) -> Transfer | CollectiveTransfer:
        if self._groups is not None:
            return CollectiveTransfer(self.comm, self._groups, cargo, span=self.span, budget=self.budget)
        return Transfer(
            self.comm,
            self._fabric,
            cargo,
            span=self.span,
            budget=self.budget,
            sharing=self._sharing,
        )
