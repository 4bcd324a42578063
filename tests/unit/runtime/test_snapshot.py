"""What an asynchronous save copies at the call, and how it finds what was written into too early."""

from __future__ import annotations

import pytest
import torch

from ckpt.engine.base import LiveShard
from ckpt.errors import IntegrityError
from ckpt.layout.box import Box
from ckpt.layout.spec import RankLayout, TensorSpec
from ckpt.runtime import snapshot as module
from ckpt.runtime.pieces import PieceTable
from ckpt.runtime.snapshot import Snapshot, private_pieces, versions_of


def shard(fqn: str, role: str, owner: torch.Tensor | None = None) -> LiveShard:
    tensor = torch.zeros(4)
    return LiveShard(TensorSpec(fqn, role, "float32", (4,)), Box((0,), (4,)), tensor, owner)


def copied(private: list[module.Piece], pieces: list[LiveShard]) -> list[tuple[str, str]]:
    pairs = zip(private, pieces, strict=True)
    return [old.spec.key for new, old in pairs if new.tensor.data_ptr() != old.tensor.data_ptr()]


def test_what_forward_may_change_is_copied():
    """Buffers, and parameters without optimizer state: nobody's step waits for those."""
    pieces = [shard("w", "param"), shard("w", "exp_avg"), shard("b", "buffer"), shard("momentum", "param")]
    private, doubtful = private_pieces(pieces, (), stepped=True)
    assert copied(private, pieces) == [("b", "buffer"), ("momentum", "param")]
    assert doubtful == set()


def test_a_parameter_with_a_master_is_stepped_though_it_has_no_state_of_its_own():
    pieces = [shard("w", "param"), shard("w", "master")]
    assert copied(private_pieces(pieces, {"w"}, stepped=True)[0], pieces) == []


def test_large_parameters_that_no_optimizer_steps_are_looked_at_twice_instead(monkeypatch):
    monkeypatch.setattr(module, "COPIED_BYTES", 31)
    pieces = [shard("a", "param"), shard("b", "param"), shard("w", "param"), shard("w", "exp_avg")]
    private, doubtful = private_pieces(pieces, (), stepped=True)
    assert (copied(private, pieces), doubtful) == ([], {"a", "b"})


def test_of_an_adapter_that_says_nothing_all_is_copied():
    pieces = [shard("w", "param"), shard("w", "exp_avg"), shard("b", "buffer")]
    private, doubtful = private_pieces(pieces, (), stepped=False)
    assert (len(copied(private, pieces)), doubtful) == (3, set())


def test_a_write_through_the_owner_is_found():
    """The local part of a DTensor does not count what is written through the DTensor."""
    owner = torch.zeros(4)
    piece = shard("w", "param", owner)
    one = Snapshot(1, "fake", RankLayout(0), PieceTable([piece]), [], frozenset(), versions=versions_of([piece]))
    one.check_unchanged()
    owner.add_(1)
    with pytest.raises(IntegrityError, match=r"w.*was written into before its snapshot was staged"):
        one.check_unchanged()
