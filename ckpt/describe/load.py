"""From a file to a :class:`Description`. Pure but for reading the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.describe.huggingface import model_of_config
from ckpt.describe.parallel import Parallel
from ckpt.describe.placement import Description
from ckpt.describe.read import MAX_BYTES, parse
from ckpt.describe.shapes import model_of_shapes
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.describe.model import ModelSpec


def read_model(path: str | Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the model that a file describes, and its ``parallel:`` part (empty in a ``config.json``).

    Raises:
        ConfigError: the file cannot be read, or what it says cannot be.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    return model_of(parse(text, str(path)), str(path))


def model_of(plain: Mapping[str, Any], where: str) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the same from the file's parsed contents: a ``config.json`` has ``model_type``, one of shapes ``tensors``.

    Raises:
        ConfigError: neither of the two, or what it says cannot be.
    """
    if "tensors" in plain:
        model = model_of_shapes(plain, where)
        return model, dict(plain.get("parallel") or {})
    if "model_type" in plain:
        return model_of_config(plain, where), {}
    raise ConfigError(
        f"{where}: expected a Hugging Face config.json (with model_type) or a file of shapes (with tensors, see "
        "docs/shapes.md)"
    )


def describe(path: str | Path, **parallel: Any) -> Description:
    """Return the description of a file; keywords are fields of :class:`Parallel` and override the file's.

    Raises:
        ConfigError: all problems of a part at once.
    """
    model, said = read_model(path)
    Parallel.of(said, f"{path}: parallel")  # so that an error names the file only if it is the file's
    return Description(model, Parallel.of(said | parallel))
