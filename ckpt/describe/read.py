"""Reading what a user hands in: a description from a file nobody has checked, and the fields of a mapping. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.errors import ConfigError
from ckpt.layout.parsing import parse_mapping, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BYTES = 4 * 2**20
"""of a description: the longest config.json that people publish has a few kilobytes"""


def parse(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML document.

    Raises:
        ConfigError: not UTF-8, too long, not parseable, nested too deeply, or no mapping.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where}: {len(text)} bytes, a description has at most {MAX_BYTES}")
    return parse_mapping(text, where)


class Fields:
    """Typed reads from a mapping that collect problems, so that all of them can be told at once."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self._plain = plain
        self.problems: list[str] = []

    def given(self, name: str) -> bool:
        """Is there such an entry, be it null?"""
        return name in self._plain

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**24) -> int:
        """Return a number within bounds; a missing or null one is the default, which None makes a problem."""
        value = self._plain.get(name)
        if value is None:
            if default is None:
                self.problems.append(f"{name} is missing")
            return least if default is None else default
        if type(value) is not int or not least <= value <= most:
            self.problems.append(f"{name} is {_short(value)}, expected an integer from {least} to {most}")
            return least
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._plain.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.problems.append(f"{name} is {_short(value)}, expected true or false")
            return default
        return value

    def integers(self, name: str, *, most: int) -> tuple[int, ...]:
        """Return a list of numbers from 0 to ``most``; a missing one is empty."""
        value = self._plain.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n <= most for n in value):
            self.problems.append(f"{name} is {_short(value)}, expected a list of integers from 0 to {most}")
            return ()
        return tuple(value)

    def require(self, condition: bool, problem: str) -> None:
        """Note a problem unless the condition holds."""
        if not condition:
            self.problems.append(problem)


def _short(value: object) -> str:
    return shortened(repr(value), 60)
