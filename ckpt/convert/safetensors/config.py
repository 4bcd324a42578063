"""What a ``config.json`` beside the weights says of a model that Hugging Face knows: how tensor parallelism cuts it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.convert.opened import INLINE
from ckpt.describe.autotp import MODEL_TYPES, as_autotp
from ckpt.describe.huggingface import model_of_config
from ckpt.describe.model import Described, Split
from ckpt.describe.read import MAX_BYTES, parse
from ckpt.errors import CkptError, ConfigError
from ckpt.store.open import store_above, url_below

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.convert.opened import Opened
    from ckpt.store.base import Store

CONFIG = "config.json"
ADVICE = (
    "give --rules (docs/rules.md), or put the config.json of a model of Hugging Face into the folder of the checkpoint "
    "or the one above it"
)


@dataclass(frozen=True, slots=True)
class Beside:
    """``where``: the file, empty if there is none. ``tensors``: of its model, by name, with Megatron's splits;
    ``splits``: those that count. ``problem``: why it says nothing, empty if it does. ``note``: what is assumed.
    """

    where: str = ""
    tensors: Mapping[str, Described] = field(default_factory=dict)
    splits: Mapping[str, Split | None] = field(default_factory=dict)
    problem: str = ""
    note: str = ""

    @property
    def advice(self) -> str:
        """What a user can do about tensors of which nothing says how they are cut."""
        if not self.where:
            return ADVICE
        return f"give --rules (docs/rules.md); {self.problem or f'{self.where} describes other names or shapes'}"


def config_beside(opened: Opened, *, autotp: bool = False) -> Beside:
    """Return what a ``config.json`` says that lies in the folder of the checkpoint, or in the one above it.

    Args:
        opened: the checkpoint.
        autotp: is the model to be cut as DeepSpeed's AutoTP cuts it?

    Raises:
        StoreError: it is there and cannot be read.
    """
    for store, key in _places(opened):
        if store.size(key) is not None:
            return _read(store.get(key, 0, MAX_BYTES + 1), url_below(store.url, key), autotp=autotp)
    if opened.where == opened.store.url:  # else it is the folder of one step, and the one above was looked at
        with suppress(CkptError):  # nobody has said that it may be looked at
            above = store_above(opened.store)
            if above is not None and above.size(CONFIG) is not None:
                where = url_below(above.url, CONFIG)
                return _read(above.get(CONFIG, 0, MAX_BYTES + 1), where, autotp=autotp)
    return Beside()


def _places(opened: Opened) -> Iterator[tuple[Store, str]]:
    keys = [pack.key for part in opened.parts for pack in part.packs if not pack.key.startswith(INLINE)]
    folders = {key.partition("/")[0] for key in keys if "/" in key}
    if len(folders) == 1:
        yield opened.store, f"{folders.pop()}/{CONFIG}"
    yield opened.store, CONFIG


def _read(data: bytes, where: str, *, autotp: bool) -> Beside:
    try:
        config = parse(data, where)
        model = model_of_config(config, where)
    except ConfigError as error:  # a rules file can say what this one does not
        return Beside(where, problem=str(error).replace("\n  - ", "; "))
    tensors = {tensor.fqn: tensor for tensor in model.tensors}
    kind = config["model_type"]
    if autotp and kind not in MODEL_TYPES:
        problem = f"DeepSpeed's AutoTP is not known to cut a {kind} ({where}): only rules can say how your engine does"
        return Beside(where, tensors, problem=problem)
    splits = {tensor.fqn: tensor.split for tensor in (as_autotp(model) if autotp else model).tensors}
    note = f"tensor parallelism as DeepSpeed's AutoTP cuts a {kind} ({where})" if autotp else ""
    return Beside(where, tensors, splits, note=note)
