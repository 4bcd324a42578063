"""Parallel: degrees of parallelism and how the optimizer is cut; Mesh: which rank stands where. Pure."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ckpt.describe.model import refuse
from ckpt.errors import ConfigError
from ckpt.layout.mesh import AXES
from ckpt.layout.spec import ITEMSIZE
from ckpt.layout.structs import gather

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENGINES = ("ddp", "deepspeed", "fsdp2", "zero_redundancy_optimizer", "megatron")
LOW_PRECISION = ("bfloat16", "float16")
MAX_WORLD = 2**20

STATE: dict[str, tuple[tuple[str, ...], str | None]] = {
    "adamw": (("exp_avg", "exp_avg_sq"), "float32"),
    "ds_adam": (("exp_avg", "exp_avg_sq"), "int64"),
    "adagrad": (("sum",), "float32"),
    "sgd": (("momentum_buffer",), None),
    "lion": (("exp_avg",), None),
    "none": ((), None),
}
"""Optimizer -> (moments, dtype of its scalar ``step``). ``adamw`` is torch's; DeepSpeed's own (``ds_adam``) count in a
Python int. ``sgd`` is with momentum: without it there is no state (``none``)."""


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model is trained, as a user would say it.

    ``engine``: what cuts the optimizer, one of :data:`ENGINES`; None: ``ddp`` for ZeRO 0, ``deepspeed`` for 1 and 2
    and, without a pipeline, 3; else ``fsdp2``. ``zero``: 0-3 (``fsdp2`` is always 3, ``megatron`` 1 is its distributed
    optimizer). ``dp``, ``tp``, ``pp``, ``ep``, ``cp``: degrees; ``ep`` lies inside ``dp * cp``. ``shard``: ranks that
    share one copy (HSDP); None: all data-parallel ones. ``order``: axes from the slowest to the fastest rank number.
    ``stages``: layers of each pipeline stage; empty: equal. ``ranks_per_host`` or ``hosts``: what fails together.

    ``dtype``: of the parameters; None: bfloat16, or float32 where the optimizer steps the parameters themselves (ddp,
    fsdp2, zero_redundancy_optimizer: their mixed precision casts on the way into the layers). ``master``: are there
    separate fp32 masters? None: as the engine does it. ``optimizer``: a key of :data:`STATE`.
    ``decay_groups``: two parameter groups, matrices and the rest.
    ``vocabulary_multiple``: each tensor rank's rows of a vocabulary are padded to a multiple of it (Megatron's
    ``make-vocab-size-divisible-by``); None: 128 with megatron, 1 with deepspeed, else no padding.
    ``autotp``: tensor parallelism is DeepSpeed's AutoTP, which pads nothing and cuts unevenly. ``world``: if given,
    checked.
    """

    engine: str | None = None
    zero: int = 0
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    shard: int | None = None
    order: tuple[str, ...] | str = AXES
    stages: tuple[int, ...] = ()
    hosts: int | None = None
    ranks_per_host: int | None = None
    dtype: str | None = None
    master: bool | None = None
    optimizer: str = "adamw"
    decay_groups: bool = False
    vocabulary_multiple: int | None = None
    autotp: bool = False
    world: int | None = None

    @classmethod
    def of(cls, plain: Mapping[str, Any], where: str = "parallel") -> Parallel:
        """Return it from plain data (the ``parallel:`` part of a file, called ``where`` in errors).

        Raises:
            ConfigError: with every unknown key and wrong type.
        """
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {'; '.join(gather(plain, cls)[1])}") from error

    @property
    def ranks(self) -> int:
        """World size."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data(self) -> int:
        """Ranks that hold the same model slice, before any ZeRO: data and context parallel together."""
        return self.dp * self.cp

    @property
    def kind(self) -> str:
        """The engine, chosen if it was left open."""
        if self.engine is not None:
            return self.engine
        if self.zero == 0:
            return "ddp"
        return "fsdp2" if self.zero == 3 and self.pp > 1 else "deepspeed"

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes from the slowest to the fastest; those that were left out have size one."""
        named = tuple(self.order.replace(" ", "").split(",")) if isinstance(self.order, str) else tuple(self.order)
        return (*(a for a in AXES if a not in named), *named)

    @property
    def precision(self) -> str:
        """Dtype of the parameters, chosen if it was left open."""
        if self.dtype is not None:
            return self.dtype
        stepped_themselves = self.kind in ("ddp", "fsdp2", "zero_redundancy_optimizer") and not self.master
        return "float32" if stepped_themselves and self.optimizer != "none" else "bfloat16"

    @property
    def masters(self) -> bool:
        """Does the optimizer step a separate fp32 copy?

        DeepSpeed's ZeRO stages keep one even of fp32 parameters; its ZeRO-0 and Megatron of low precision ones only;
        torch's engines step the parameters themselves.
        """
        if self.master is not None:
            return self.master
        if self.optimizer == "none":
            return False
        low = self.precision in LOW_PRECISION
        return (self.kind == "deepspeed" and (low or self.zero > 0)) or (self.kind == "megatron" and low)

    @property
    def vocabulary_padding(self) -> int | None:
        """``vocabulary_multiple``, chosen if it was left open."""
        return self.vocabulary_multiple or {"megatron": 128, "deepspeed": 1}.get(self.kind)

    @property
    def host_size(self) -> int:
        """Ranks on one host; the whole world if nothing was said."""
        if self.ranks_per_host is not None:
            return self.ranks_per_host
        return -(-self.ranks // self.hosts) if self.hosts else self.ranks

    def host_of(self, rank: int) -> int:
        """Return the host of a rank; launchers fill one after the other."""
        return rank // self.host_size

    def check(self) -> None:
        """Raise :class:`ConfigError` with everything that is wrong, whatever the model."""
        problems = list(self.problems())
        if problems:
            refuse("this parallel layout cannot be", problems)

    def problems(self) -> Iterator[str]:
        """Yield everything that is wrong with the numbers themselves."""
        degrees = {name: getattr(self, name) for name in ("dp", "tp", "pp", "ep", "cp")}
        may_be_none = ("shard", "hosts", "ranks_per_host", "world", "vocabulary_multiple")
        optional = {name: getattr(self, name) for name in may_be_none}
        bad = {k: v for k, v in (degrees | optional).items() if v is not None and v < 1}
        yield from (f"{name} is {value}, expected at least 1" for name, value in bad.items())
        if self.kind not in ENGINES:
            yield f"engine {self.engine!r}, expected one of {', '.join(ENGINES)}"
        if self.zero not in range(4):
            yield f"zero is {self.zero}, expected 0, 1, 2 or 3"
        if self.optimizer not in STATE:
            yield f"optimizer {self.optimizer!r}, expected one of {', '.join(STATE)}"
        if self.precision not in ITEMSIZE:
            yield f"dtype {self.dtype!r} is unknown"
        if sorted(self.axes) != sorted(AXES):
            yield f"order {self.order!r}, expected each of {', '.join(AXES)} at most once"
        yield from (f"a pipeline stage of {n} layers" for n in self.stages if n < 0)
        if self.stages and len(self.stages) != self.pp:
            yield f"stages lists {len(self.stages)} pipeline stages, pp is {self.pp}"
        if bad:
            return
        product = f"dp {self.dp} x cp {self.cp} x tp {self.tp} x pp {self.pp}"
        if self.ranks > MAX_WORLD:
            yield f"{product} is {self.ranks} ranks, at most {MAX_WORLD}"
        if self.world is not None and self.world != self.ranks:
            yield f"{product} is {self.ranks} ranks, the world has {self.world}"
        yield from self._group_problems()
        yield from self._engine_problems()

    def _group_problems(self) -> Iterator[str]:
        if self.data % self.ep:
            yield f"ep {self.ep} does not divide the {self.data} ranks of dp x cp, in which expert ranks lie"
        if self.shard is not None:
            if self.data % self.shard:
                yield f"shard {self.shard} does not divide the {self.data} data-parallel ranks: groups would not tile"
            if self.shard % self.ep:
                yield f"ep {self.ep} does not divide the {self.shard} ranks that share one copy"
        if self.hosts is not None and self.ranks_per_host is not None:
            if self.hosts * self.ranks_per_host != self.ranks:
                yield f"{self.hosts} hosts of {self.ranks_per_host} ranks are not {self.ranks} ranks"
        elif self.hosts is not None and self.ranks % self.hosts:
            uneven = f"{self.ranks} ranks do not fill {self.hosts} hosts evenly"
            yield f"{uneven}: give --ranks-per-host instead (in a file ranks_per_host)"

    def _engine_problems(self) -> Iterator[str]:
        if self.shard is not None and self.shard != self.data and self.kind != "fsdp2":
            yield f"shard is for fsdp2 (HSDP), the engine is {self.kind}"
        allowed = {"ddp": (0,), "fsdp2": (0, 3), "zero_redundancy_optimizer": (0, 1), "megatron": (0, 1)}.get(self.kind)
        if allowed and self.zero not in allowed:
            yield f"{self.kind} has no ZeRO stage {self.zero}, expected one of {list(allowed)}"
        if self.autotp and self.kind != "deepspeed":
            yield f"autotp is for deepspeed, the engine is {self.kind}"
        if self.autotp and self.vocabulary_multiple is not None:
            yield "autotp pads no vocabulary, so no vocabulary_multiple"
        if self.kind == "deepspeed" and self.zero > 1 and self.pp > 1:
            yield f"DeepSpeed refuses ZeRO-{self.zero} with a pipeline: ZeRO-1 at most"
        if self.kind == "deepspeed" and self.zero == 3 and self.ep > 1:
            yield "DeepSpeed refuses ZeRO-3 with its expert parallelism: ZeRO-2 at most"
        if self.kind == "zero_redundancy_optimizer" and self.ep > 1:
            yield "zero_redundancy_optimizer has one process group, so no expert parallelism"


class Mesh:
    """``ranks[p, t, d]``: number of the rank on stage ``p``, tensor rank ``t``, data index ``d``; int64.

    The data index counts the ranks of dp and cp together, ascending by rank.
    """

    def __init__(self, parallel: Parallel) -> None:
        axes = parallel.axes
        sizes = [getattr(parallel, a) for a in axes]
        grid = np.arange(prod(sizes), dtype=np.int64).reshape(sizes)
        grid = grid.transpose([axes.index(a) for a in ("pp", "tp", *(a for a in axes if a in ("dp", "cp")))])
        self.ranks: npt.NDArray[np.int64] = np.ascontiguousarray(grid.reshape(parallel.pp, parallel.tp, parallel.data))
        self._position: npt.NDArray[np.int64] = np.argsort(self.ranks.reshape(-1))

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return (stage, tensor rank, data index) of a rank.

        Raises:
            ConfigError: no such rank.
        """
        if not 0 <= rank < self.ranks.size:
            raise ConfigError(f"rank {rank} is not in a world of {self.ranks.size}")
        p, t, d = np.unravel_index(int(self._position[rank]), self.ranks.shape)
        return int(p), int(t), int(d)
