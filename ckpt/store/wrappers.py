"""The wrappers of stores: each is a store over any store, in any order.

``Limited(Retrying(store), rate)`` counts a repeated call once against the rate, ``Retrying(Limited(store, rate))`` each
time; ``Metered`` counts what passes where it stands.
"""

from __future__ import annotations

from ckpt.store.limited import Limited, Rate, limited
from ckpt.store.metered import Metered, Tally
from ckpt.store.retrying import Retrying

__all__ = ["Limited", "Metered", "Rate", "Retrying", "Tally", "limited"]
