"""One transfer after the other between ranks that share memory."""

from __future__ import annotations

import pytest

from ckpt.plan.read_plan import Unit
from ckpt.runtime.broadcast import Transfer
from ckpt.runtime.fabric import fabric_of
from ckpt.runtime.sharing import share
from tests.property.fake import comms, each, run_ranks

SPAN = 1 << 20


class Numbers:
    """A cargo whose units are full of their number."""

    def __init__(self) -> None:
        self.got: dict[int, bytes] = {}

    def read(self, unit: Unit, into: memoryview) -> None:
        into[:] = bytes([unit.number]) * unit.nbytes

    def check(self, unit: Unit, data: memoryview) -> None:
        assert bytes(data) == bytes([unit.number]) * unit.nbytes

    def live(self, unit: Unit) -> memoryview | None:
        return None

    def put(self, unit: Unit, data: memoryview) -> None:
        self.got[unit.number] = bytes(data)


@pytest.mark.parametrize(
    "chains",
    [
        [(0, 1), (2, 0)],  # rank 2 has no part in the first round, and in the second it is the one that reads
        [(0, 1), (0, 2)],
        [(1, 2), (0, 1), (2, 1, 0)],
        [(0,), (1, 2), (2, 0)],
    ],
)
def test_a_rank_without_a_part_in_one_round_has_one_in_the_next(chains: list[tuple[int, ...]]) -> None:
    jobs = comms(3)

    def work(rank: int) -> list[dict[int, bytes]]:
        comm, got = jobs[rank], []
        with comm.joint("load"):
            fabric, sharing = fabric_of(comm), share(comm, "aaa", span=SPAN, budget=16 << 20)
            for number, chain in enumerate(chains):
                cargo = Numbers()
                units = [Unit(number, 0, "pack", 0, 100, 100, (), False, chain)]
                Transfer(comm, fabric, cargo, span=SPAN, sharing=sharing).run("read", units)
                comm.run("read", lambda: None)
                got.append(cargo.got)
        return got

    for rank, got in enumerate(each(run_ranks(jobs, work))):
        assert got == [{number: bytes([number]) * 100} if rank in chain else {} for number, chain in enumerate(chains)]
