"""Structs from plain data (a parsed file), with all that is wrong, where msgspec tells the first problem. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_origin

import msgspec


def gather(plain: object, cls: type[msgspec.Struct], at: str = "$") -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ``cls`` that are sound in ``plain``, and what is wrong with the others, in msgspec's words.

    Of a field that is a tuple of structs, the sound ones are returned. ``at``: the path of ``plain`` in the file.
    """
    if not isinstance(plain, Mapping):
        return {}, _converted(plain, cls, at)[1]
    sound, problems = dict[str, Any](), list[str]()
    known = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    problems += [_at(f"Object contains unknown field `{key}`", at) for key in plain if key not in known]
    for name, field in known.items():
        if name in plain:
            value, said = _value(plain[name], field.type, f"{at}.{name}")
            problems += said
            if value is not msgspec.UNSET:
                sound[field.name] = value
        elif field.required:
            problems.append(_at(f"Object missing required field `{name}`", at))
    return sound, problems


def _value(value: object, kind: Any, at: str) -> tuple[Any, list[str]]:
    item = get_args(kind)[0] if get_origin(kind) is tuple else None
    if not (isinstance(item, type) and issubclass(item, msgspec.Struct) and isinstance(value, list | tuple)):
        return _converted(value, kind, at)
    found, problems = list[msgspec.Struct](), list[str]()
    for i, one in enumerate(value):
        fields, said = gather(one, item, f"{at}[{i}]")
        problems += said
        found += [] if said else [item(**fields)]
    return tuple(found), problems


def _converted(value: object, kind: Any, at: str) -> tuple[Any, list[str]]:
    try:
        return msgspec.convert(value, kind), []
    except msgspec.ValidationError as error:
        return msgspec.UNSET, [_at(str(error), at)]


def _at(said: str, at: str) -> str:
    """Return a message of msgspec with the path that it has in the whole file."""
    message, _, path = said.partition(" - at `$")
    place = at + path.rstrip("`")
    return message if place == "$" else f"{message} - at `{place}`"
