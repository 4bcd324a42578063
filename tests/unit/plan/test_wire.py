from __future__ import annotations

import msgspec
import pytest

from ckpt.errors import MalformedData
from ckpt.layout.spec import RankLayout
from ckpt.plan.wire import MAX_MEMBERS, decode_layouts, encode_layout


def sent(runs: list[list[int]]) -> bytes:
    """What a rank sends that names these runs as its group."""
    held, _, unused = msgspec.msgpack.decode(encode_layout(RankLayout(0)))
    return msgspec.msgpack.encode([held, [["dp", runs]], unused])


def test_groups_come_back_in_their_order_and_equal_ones_are_one() -> None:
    everyone = tuple(range(16384))
    layouts = [RankLayout(0, groups=(("dp", everyone), ("tp", (3, 0)))), RankLayout(1, groups=(("dp", everyone),))]
    encoded = [encode_layout(one) for one in layouts]
    assert max(map(len, encoded)) < 100, "a group of all ranks is a few bytes"
    decoded = decode_layouts(encoded)
    assert decoded == layouts
    assert decoded[0].groups[0][1] is decoded[1].groups[0][1]


@pytest.mark.parametrize("runs", [[[0, MAX_MEMBERS + 1, 1]], [[0, 0, 1]], [[0, MAX_MEMBERS + 2, 1], [0, -2, 1]]])
def test_runs_that_no_rank_sends_are_not_expanded(runs) -> None:
    with pytest.raises(MalformedData, match="layout from rank 1"):
        decode_layouts([encode_layout(RankLayout(0)), sent(runs)])
