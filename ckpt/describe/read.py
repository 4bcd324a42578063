"""Reading what a user hands in: JSON or YAML from a file nobody has checked, and the fields of a mapping. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml

from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BYTES = 4 * 2**20
"""of a description: the longest config.json that people publish has a few kilobytes"""


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML without aliases (a few lines of which expand to gigabytes) and repeated keys (the last would win)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
        if repeated:
            raise yaml.YAMLError(f"keys listed twice: {', '.join(repeated[:5])}")
        return super().construct_mapping(node, deep=deep)


def parse(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML document.

    Raises:
        ConfigError: not UTF-8, too long, not parseable, nested too deeply, or no mapping.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where}: {len(text)} bytes, a description has at most {MAX_BYTES}")
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        if decoded.lstrip().startswith("{"):
            try:
                found = json.loads(decoded)
            except json.JSONDecodeError:
                found = yaml.load(decoded, _PlainLoader)  # noqa: S506 # a SafeLoader; YAML has braces too
        else:
            found = yaml.load(decoded, _PlainLoader)  # noqa: S506 # a SafeLoader
    # ValueError: a number of thousands of digits, an impossible date; RecursionError: brackets in brackets.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: neither JSON nor YAML: {_reason(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{where}: expected a mapping with names as keys, found {type(found).__name__}")
    return found


def _reason(error: Exception) -> str:
    """Return what is wrong in one line: PyYAML draws the place over several."""
    if isinstance(error, yaml.MarkedYAMLError):
        marks = (error.context_mark, error.problem_mark)
        places = ["" if m is None else f"in line {m.line + 1}, column {m.column + 1}" for m in marks]
        said = [f"{text} {place}" for text, place in zip((error.context, error.problem), places, strict=True) if text]
        return _short_text(", ".join(" ".join(one.split()) for one in said), 400)
    return _short_text(" ".join(str(error).split())) or type(error).__name__


class Fields:
    """Typed reads from a mapping that collect problems, so that all of them can be told at once."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self._plain = plain
        self.problems: list[str] = []

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
    return _short_text(repr(value), 60)


def _short_text(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
