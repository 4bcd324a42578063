"""A named loss: which tensors are gone, and from whom the others can be rebuilt. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ckpt.analysis.blocks import SetTable
from ckpt.analysis.combination import combinations_of, is_derivable
from ckpt.analysis.domains import spans
from ckpt.analysis.holdings import pieces_of
from ckpt.errors import ConfigError
from ckpt.layout.spec import PARAM

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpt.analysis.domains import Domains
    from ckpt.analysis.holdings import Holdings, RoleColumn, TensorRows
    from ckpt.layout.box import Box
    from ckpt.layout.graph import ShardGraph

Corners = tuple[tuple[int, ...], tuple[int, ...]]
"""A box: offsets and sizes."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Elements that lost a copy and can be rebuilt. ``ranks``: for each role that it takes, who still holds it.

    With a graph these are all who hold it, and ``boxes`` says of what; without, the lowest rank of each row.
    """

    elements: int
    ranks: dict[str, str]
    boxes: tuple[Corners, ...] = ()


class TensorLoss(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that the loss touches.

    ``elements``, ``bytes``: what cannot be rebuilt at one step (bytes of the roles that would have to be written).
    ``roles_gone``: role -> elements of it that nobody holds any longer, whether or not that matters.
    """

    fqn: str
    elements: int
    bytes: int
    roles_gone: dict[str, int]
    rebuild_from: tuple[Source, ...]
    boxes: tuple[Corners, ...] = ()


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """The loss of ``ranks``. ``domains``: those of which no rank is left. Tensors that lost no copy are not listed."""

    domains: tuple[str, ...]
    ranks: str
    elements: int
    bytes: int
    tensors_gone: int
    tensors: tuple[TensorLoss, ...]


def lose(
    holdings: Holdings, domains: Domains, lost: str | Iterable[int], graph: ShardGraph | None = None
) -> Loss:
    """Return what the loss of these ranks, all at once, does.

    Args:
        holdings: who holds what.
        domains: names that ``lost`` may use.
        lost: ranks, or text for :meth:`~ckpt.analysis.domains.Domains.parse`.
        graph: the graph of which these are the holdings, to say where in a tensor.

    Raises:
        ConfigError: with every name or rank that does not exist.
    """
    ranks = set(domains.parse(lost) if isinstance(lost, str) else lost)
    unknown = sorted(rank for rank in ranks if not 0 <= rank < holdings.world)
    if unknown:
        raise ConfigError(f"lost ranks {spans(unknown)} are not in this job of {holdings.world} ranks")
    gone = np.isin(np.arange(holdings.world), sorted(ranks))
    table = SetTable(holdings.sets)
    alive, touched = table.any_of(~gone), table.any_of(gone)
    tensors = []
    if graph is None:
        for tensor in holdings.tensors:
            if touched[tensor.holders].any():
                tensors.append(_tensor_loss(tensor, holdings, alive, touched, ranks))
    else:
        tensors = [one for piece in pieces_of(graph) if (one := _piece_loss(piece, graph, ranks))]
    whole = [name for name in domains.names if ranks.issuperset(domains.members[name])]
    return Loss(
        domains=tuple(whole),
        ranks=spans(sorted(ranks)),
        elements=sum(one.elements for one in tensors),
        bytes=sum(one.bytes for one in tensors),
        tensors_gone=len({one.fqn for one in tensors if one.bytes}),
        tensors=tuple(tensors),
    )
