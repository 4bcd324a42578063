"""Plain data from JSON or YAML that nobody has checked: a rules file, the description of a model. Pure."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import yaml

from ckpt.errors import ConfigError


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML without aliases (a few lines of which expand to gigabytes) and repeated keys (the last would win)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        _refuse_repeated(keys)
        return super().construct_mapping(node, deep=deep)


def parse_mapping(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML document; the caller bounds its length.

    Args:
        text: the document, bytes in UTF-8.
        where: how errors call it.

    Raises:
        ConfigError: not UTF-8, not parseable, a key listed twice, nested too deeply, or no mapping.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        if decoded.lstrip().startswith("{"):
            try:
                found = json.loads(decoded, object_pairs_hook=_once)
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


def shortened(text: str, most: int = 200) -> str:
    """Return the beginning of a text that an error is to quote."""
    return text if len(text) <= most else text[: most - 3] + "..."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated([key for key, _ in pairs])
    return dict(pairs)


def _refuse_repeated(keys: list[Any]) -> None:
    if len(set(keys)) < len(keys):
        repeated = sorted({str(key) for key, n in Counter(keys).items() if n > 1})
        raise yaml.YAMLError(f"keys listed twice: {', '.join(repeated[:5])}")


def _reason(error: Exception) -> str:
    """Return what is wrong in one line: PyYAML draws the place over several."""
    if isinstance(error, yaml.MarkedYAMLError):
        marks = (error.context_mark, error.problem_mark)
        places = ["" if m is None else f"in line {m.line + 1}, column {m.column + 1}" for m in marks]
        said = [f"{text} {place}" for text, place in zip((error.context, error.problem), places, strict=True) if text]
        return shortened(", ".join(" ".join(one.split()) for one in said), 400)
    return shortened(" ".join(str(error).split())) or type(error).__name__
