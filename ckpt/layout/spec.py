"""TensorSpec, Shard, RankLayout: who declares to hold what, as plain data.

dtypes are this project's own strings (torch's names without ``torch.``): bytes outlive code, enums do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ckpt.errors import ConfigError
from ckpt.layout.box import Box

ITEMSIZE: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element of every dtype that can be stored."""

PARAM, MASTER, BUFFER = "param", "master", "buffer"
"""Roles that this library knows by name. All other roles are the optimizer's own state keys (``exp_avg``, …)."""


@dataclass(frozen=True, slots=True, order=True)
class TensorSpec:
    """A global tensor, independent of any layout: identity is ``(fqn, role)``."""

    fqn: str
    role: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"tensor {self.fqn!r} ({self.role}): dtype {self.dtype!r} cannot be stored")

    @property
    def key(self) -> tuple[str, str]:
        """``(fqn, role)``."""
        return (self.fqn, self.role)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, unpadded tensor."""
        return prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"tensor {self.fqn!r} ({self.role}) {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """One box of one tensor, held by one rank."""

    spec: TensorSpec
    box: Box


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Everything that one rank declares to hold. A rank may hold nothing.

    ``aliases``: other FQN -> FQN under which the same tensor is listed (tied weights). ``derived``: FQNs whose
    ``param`` is claimed to equal ``cast(master)``; a claim until the digests of a save prove it. ``groups``: (axis, the
    ranks of this rank's process group along it). ``unused``: what the user said of the layout and fits nothing here.
    """

    rank: int
    shards: tuple[Shard, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    derived: tuple[str, ...] = field(default=())
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return sum(s.box.volume * s.spec.itemsize for s in self.shards)
