from __future__ import annotations

import pytest

from ckpt.plan.read_plan import Unit
from ckpt.runtime.sharing import DONE, HERE, STOP, Sharing, Slots, block_bytes, place_in_page, share
from ckpt.store.blocks import PAGE, Blocks
from tests.property.fake import comms, run_ranks


def unit(start: int = 0, nbytes: int = 8, *, encoded: bool = False) -> Unit:
    return Unit(0, 0, "pack", start, nbytes, nbytes, (), encoded, (0, 1))


def shared(names: str, span: int = 1 << 20, budget: int = 16 << 20) -> list[Sharing | None]:
    jobs = comms(len(names))

    def work(rank: int) -> Sharing | None:
        with jobs[rank].joint("load"):
            return share(jobs[rank], names, span=span, budget=budget)

    return run_ranks(jobs, work)


def test_a_neighbour_sees_what_lies_in_a_slot_and_is_told_where():
    one, two = shared("aa")
    slots, _ = one.pools()
    block, what = slots.take(), unit(start=PAGE + 5, nbytes=9)
    block[5:14] = range(9)
    one.tell(1, 77, slots.number(block), HERE)
    (told,) = two.hear()
    assert (told.number, told.sender, told.what) == (77, 0, HERE)
    assert bytes(two.look(told, what)) == bytes(range(9))
    two.tell(0, 77, told.slot, DONE)
    one.stop()
    heard = one.hear()
    assert [(m.what, m.slot) for m in heard] == [(DONE, told.slot), (STOP, 0)]


@pytest.mark.parametrize(("names", "sharing"), [("aaaa", {"a"}), ("abab", {"a", "b"}), ("aab", {"a"}), ("abc", None)])
def test_hosts_with_several_ranks_share(names, sharing):
    for rank, one in enumerate(shared(names)):
        assert (one and one.hosts) == sharing
        if one is not None:
            here = {r for r, name in enumerate(names) if name == names[rank]} if names.count(names[rank]) > 1 else set()
            assert one.mates == here - {rank}
            assert (one.pools() is not None) is (one.mates != set())


def test_a_budget_without_a_slot_for_each_rank_is_no_sharing():
    assert shared("aaaa", span=4 << 20, budget=15 << 20) == [None] * 4
    assert all(shared("aaaa", span=4 << 20, budget=16 << 20))


def test_all_ranks_of_a_host_together_stay_within_the_budget():
    found = shared("aaaa", span=1 << 20, budget=8 << 20)
    slots, other = found[0].pools()
    taken = [slots.take() for _ in range(2)]
    assert all(block is not None for block in taken)
    assert slots.take() is None
    slots.give(taken[0])
    assert slots.number(slots.take()) == slots.number(taken[0])
    assert isinstance(other, Blocks)


def test_what_comes_from_other_hosts_has_slots_of_its_own():
    reads, comes = shared("aabb")[0].pools()
    assert isinstance(reads, Slots)
    assert isinstance(comes, Slots)
    first, second = reads.take(), comes.take()
    assert reads.number(first) != reads.number(second)


def test_whoever_is_gone_cannot_be_told():
    one, two = shared("aa")
    two._finalizer()
    with pytest.raises(RuntimeError, match="cannot reach a rank of this host"):
        one.tell(1, 0, 0, HERE)


def test_a_block_has_room_for_a_unit_wherever_in_a_page_it_starts():
    assert block_bytes(5 << 20) == (5 << 20) + PAGE
    assert place_in_page(unit(start=PAGE + 7)) == 7
    assert place_in_page(unit(start=PAGE + 7, encoded=True)) == 0
    (one, _) = shared("aa")
    assert one.fits(unit(start=PAGE - 1, nbytes=1 << 20))
    assert not one.fits(unit(nbytes=(1 << 20) + PAGE + 1))
