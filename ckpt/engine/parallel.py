"""``ckpt.Parallel``: an engine together with what its framework does not record of its layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt.engine.base import Context
from ckpt.engine.shared_ranks import group_ranks
from ckpt.errors import ConfigError
from ckpt.layout.mesh import AXES
from ckpt.layout.parsing import parse_mapping
from ckpt.layout.rules import Rules

MAX_RULES_FILE = 1 << 20

_AXES = (*AXES, "ep")


class Parallel:
    """Wrap an engine for :func:`ckpt.save`, :func:`ckpt.load`, … where its framework leaves something unsaid.

    Args:
        engine: whatever could be passed alone.
        rules: how tensor parallelism cut which tensors, names that are local to a pipeline stage, weights that are tied
            across stages: a path to a YAML or JSON file, the same as plain data, or :class:`ckpt.layout.rules.Rules`.
        groups: axis (``"tp"``, ``"dp"``, ``"pp"``, ``"ep"``, ``"cp"``) -> this rank's process group along it, or the
            ranks in it. An engine that has an ``mpu`` object of Megatron's kind names them itself.
        names: name on this rank -> global name, a function in place of the rules' ``names``.

    Raises:
        ConfigError: rules that cannot be read or understood, an unknown axis, or a group that is none.
    """

    def __init__(
        self,
        engine: object,
        *,
        rules: str | Path | Mapping[str, Any] | Rules | None = None,
        groups: Mapping[str, dist.ProcessGroup | Sequence[int]] | None = None,
        names: Callable[[str], str] | None = None,
    ) -> None:
        if isinstance(engine, Parallel):
            raise ConfigError("ckpt.Parallel around a ckpt.Parallel: expected the engine itself")
        read = read_rules(rules) if isinstance(rules, str | Path) else Rules.of(rules or {})
        if names is not None and read.names:
            raise ConfigError("names were given both as a function and in the rules: expected one of them")
        if names is not None and not callable(names):
            raise ConfigError(f"names is a {type(names).__name__}: expected a function from a name to a name")
        unknown = [axis for axis in groups or {} if axis not in _AXES]
        if unknown:
            raise ConfigError(f"groups of {', '.join(map(repr, unknown))}: expected axes of {', '.join(_AXES)}")
        self.engine = engine
        self.context = Context(read, {axis: _ranks(axis, group) for axis, group in (groups or {}).items()}, names)


def read_rules(path: str | Path) -> Rules:
    """Read a rules file (YAML, of which JSON is a subset).

    Raises:
        ConfigError: it cannot be read, is too large, no YAML, has a key twice, or no rules; names the file.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"rules file {path}: {error.strerror}") from error
    if len(data) > MAX_RULES_FILE:
        raise ConfigError(f"rules file {path}: {len(data)} bytes, at most {MAX_RULES_FILE}")
    plain = parse_mapping(data, f"rules file {path}")
    try:
        return Rules.of(plain)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _ranks(axis: str, group: Any) -> tuple[int, ...]:
    if isinstance(group, dist.ProcessGroup):
        return group_ranks(group)
    if isinstance(group, Sequence) and group and all(type(r) is int for r in group):
        if len(set(group)) < len(group):
            raise ConfigError(f"groups[{axis!r}] names a rank twice: {list(group)}")
        return tuple(group)
    raise ConfigError(f"groups[{axis!r}] is a {type(group).__name__}: expected a process group or a list of ranks")
