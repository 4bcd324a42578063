"""What a ``config.json`` beside the weights says of a model that Hugging Face knows: how tensor parallelism cuts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.describe.huggingface import model_of_config
from ckpt.describe.read import MAX_BYTES, parse
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from ckpt.convert.opened import Opened
    from ckpt.describe.model import Described

CONFIG = "config.json"
FORMATS = ("safetensors", "torch")
"""Formats beside whose files it stands."""


def described_tensors(opened: Opened) -> dict[str, Described]:
    """Return the tensors of the model by name; empty if there is no such file, or none of a model that is known.

    Raises:
        StoreError: it is there and cannot be read.
    """
    if opened.format not in FORMATS or opened.store.size(CONFIG) is None:
        return {}
    try:
        model = model_of_config(parse(opened.store.get(CONFIG, 0, MAX_BYTES + 1), CONFIG))
    except ConfigError:  # a rules file can say what this one does not
        return {}
    return {tensor.fqn: tensor for tensor in model.tensors}
