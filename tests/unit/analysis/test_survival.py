from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest

from ckpt.analysis.blocks import SetTable, blocks_of
from ckpt.analysis.chance import NothingLost
from ckpt.analysis.domains import Domains
from ckpt.analysis.kills import kill_table
from ckpt.analysis.survival import losses_of_interest, rounded, survival_table
from tests.unit.analysis.jobs import data_parallel, replica_groups


def table_of(holdings, domains):
    return {row.lost: row for row in survival_table(kill_table(blocks_of(holdings), SetTable(holdings.sets), domains))}


def chance_of_groups(domains: int, copies: int, lost: int) -> Fraction:
    groups = domains // copies
    ways = sum(
        (-1) ** j * comb(groups, j) * comb(domains - copies * j, lost - copies * j)
        for j in range(min(groups, lost // copies) + 1)
    )
    return Fraction(ways, comb(domains, lost))


@pytest.mark.parametrize(
    ("domains", "copies", "lost", "chance"),
    [(16, 2, 2, 0.933), (16, 2, 3, 0.800), (32, 2, 2, 0.968), (32, 2, 4, 0.810), (128, 2, 2, 0.992), (128, 2, 4, 0.953),
     (30, 3, 4, 0.990)],
)  # fmt: skip
def test_replica_groups_survive_as_published(domains, copies, lost, chance):
    row = table_of(replica_groups(domains // copies, copies), Domains.by_rank(domains))[lost]
    assert row.nothing_lost == pytest.approx(chance, abs=6e-4)
    assert row.nothing_lost == rounded(float(chance_of_groups(domains, copies, lost)))
    assert row.nothing_lost_exact


def test_thousands_of_hosts_overflow_nothing():
    rows = table_of(replica_groups(1024, 2), Domains.by_rank(2048))
    assert list(rows) == losses_of_interest(2048)
    for lost, row in rows.items():
        exact = chance_of_groups(2048, 2, lost)
        assert row.nothing_lost == (rounded(float(exact)) if exact > Fraction(1, 10**30) else 0.0)
        # Each group is worth the same and dies with the chance of its two hosts.
        assert row.bytes.expected_share == rounded(float(1 - Fraction(lost * (lost - 1), 2048 * 2047)))
        assert row.bytes.worst_share == rounded(1 - lost // 2 / 1024)
        assert row.exact


def test_zero1_loses_its_slices_and_nothing_else_counts():
    rows = table_of(data_parallel(8, zero=1), Domains.by_host(8, 2))
    assert [row.parameters.worst for row in rows.values()] == [480, 360, 240, 120, 0]
    assert [row.nothing_lost for row in rows.values()] == [1, 0, 0, 0, 0]
    assert rows[1].parameters.expected_share == 0.75
    step = 2 * 4  # on every rank
    assert [row.bytes.worst for row in rows.values()] == [5760 + step, 4320 + step, 2880 + step, 1440 + step, 0]


def test_plain_data_parallel_survives_while_one_host_is_left():
    rows = table_of(data_parallel(8, zero=0), Domains.by_host(8, 2))
    assert [row.bytes.worst_share for row in rows.values()] == [1, 1, 1, 1, 0]
    assert [row.nothing_lost for row in rows.values()] == [1, 1, 1, 1, 0]


def test_state_that_nobody_holds_is_lost_from_the_start():
    chance = NothingLost([(frozenset(),), (frozenset({1}),)], 3)
    assert [chance.bounds(lost) for lost in range(4)] == [(0.0, 0.0)] * 4


def test_rows():
    assert losses_of_interest(0) == [0]
    assert losses_of_interest(3) == [0, 1, 2, 3]
    assert losses_of_interest(2048)[8:] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert losses_of_interest(9) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
