"""Process groups as ranks, and this rank's place among them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, in group order."""
    return tuple(dist.get_process_group_ranks(group))


def place_in(ranks: tuple[int, ...]) -> tuple[int, int]:
    """Return this rank's number in a group and how many ranks that has; (0, at least 1) if this rank is not in it."""
    own = dist.get_rank() if dist.is_initialized() else 0
    return ranks.index(own) if own in ranks else 0, max(1, len(ranks))
