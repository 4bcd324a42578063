"""Who held what, by somebody who can write the root: analyses get sense, or one of our errors; loads do not care."""

from __future__ import annotations

import pytest

import ckpt
from ckpt.repo.holders import holdings_of_index, hosts_of_index
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from tests.attacks.forge import Forger, leaves, survives, valid
from tests.attacks.test_forged import HOSTILE


@pytest.fixture(scope="module")
def forger() -> Forger:
    return Forger(valid())


def test_wrong_values_everywhere_in_the_table(forger):
    read = refused = 0
    for path in leaves(forger.root["holders"]):
        for value in HOSTILE:
            store = forger.changed("root", ("holders", *path), value)
            try:
                index = Repository(store).read_index(1)
                holdings, hosts = holdings_of_index(index), hosts_of_index(index)
            except ckpt.LayoutError:  # no table, no hosts: as from an earlier release
                refused += 1
                continue
            except ckpt.CkptError:
                refused += 1
                assert verify(Repository(store)).damaged
                continue
            read += 1
            assert all(rows.volume.sum() == max(0, rows.numel) for rows in holdings.tensors)
            assert len(hosts) == holdings.world
    assert refused > 10 * read, "nearly all of these are nonsense"


def test_a_table_that_lies_does_not_keep_a_checkpoint_from_loading(forger):
    store = forger.changed("root", ("holders", "sets"), [[[5, 1, 1]]])
    assert survives(store)
    (found,) = verify(Repository(store)).findings
    assert "holders: set 0 ends at rank 5 of 1" in found.message
