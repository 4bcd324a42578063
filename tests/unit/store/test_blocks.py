from __future__ import annotations

import threading

import pytest

from ckpt.errors import BudgetTooSmall
from ckpt.store.blocks import BLOCK_BYTES, PAGE, Blocks, Part


@pytest.mark.parametrize("size", [4096, 1 << 20, BLOCK_BYTES, 5 << 20])
def test_blocks_are_aligned_writable_and_of_the_asked_size(size):
    pool = Blocks(3 * size, size)
    blocks = [pool.take(0) for _ in range(3)]
    for number, block in enumerate(blocks):
        assert block is not None
        assert block.nbytes == size
        assert block.ctypes.data % 4096 == 0
        assert block.ctypes.data % (2 << 20) == 0 or size < 2 << 20, "a huge page can hold it"
        block[:] = number
    assert [set(block[:: size // 64].tolist()) for block in blocks] == [{0}, {1}, {2}], "they do not overlap"


def test_no_more_is_handed_out_than_the_budget_and_what_comes_back_is_used_again():
    pool = Blocks(2 * 4096 + 4095, 4096)
    first, second = pool.take(0), pool.take(0)
    assert pool.in_use == 8192
    assert pool.take(0) is None
    assert pool.take(0.01) is None
    pool.give(first)
    assert pool.in_use == 4096
    assert pool.take(0) is first
    pool.give(second)
    pool.give(first)
    assert pool.in_use == 0


def test_who_waits_gets_the_block_that_another_thread_gives_back():
    pool = Blocks(8192, 4096)
    mine, other = pool.take(), pool.take()
    got = []
    waiting = threading.Thread(target=lambda: got.append(pool.take()))
    waiting.start()
    pool.give(other)
    waiting.join(20)
    assert [block is other for block in got] == [True]
    pool.give(mine)


def test_memory_that_cannot_be_had_is_not_counted(monkeypatch):
    pool = Blocks(8192, 4096)
    with monkeypatch.context() as patch:
        patch.setattr("ckpt.store.blocks.mmap.mmap", lambda *_: (_ for _ in ()).throw(OSError(12, "no memory")))
        with pytest.raises(OSError, match="no memory"):
            pool.take()
    assert pool.in_use == 0
    assert pool.take(0) is not None
    assert pool.take(0) is not None


def test_a_pool_of_one_block_is_refused():
    with pytest.raises(BudgetTooSmall, match="a memory budget of 8191 bytes, at least 8192 are needed"):
        Blocks(8191, 4096)


def test_a_part_gives_no_more_than_its_share_and_gives_back_to_the_whole():
    whole = Blocks(4 * PAGE, PAGE)
    part = Part(whole, 2 * PAGE)
    taken = [part.take(0), part.take(0)]
    assert part.take(0.01) is None
    assert (part.in_use, whole.in_use) == (2 * PAGE, 2 * PAGE)
    part.give(taken.pop())
    again = part.take(0)
    assert again is not None
    for block in (*taken, again):
        part.give(block)
    assert (part.in_use, whole.in_use) == (0, 0)


def test_a_part_waits_for_the_whole_as_well():
    whole = Blocks(2 * PAGE, PAGE)
    part = Part(whole, 2 * PAGE)
    other = [whole.take(0), whole.take(0)]
    assert part.take(0.01) is None
    assert part.in_use == 0
    whole.give(other.pop())
    assert part.take(0) is not None
