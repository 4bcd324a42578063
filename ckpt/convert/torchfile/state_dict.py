"""What a state dict says of its tensors: which are buffers, and what their names are without the wrappers' parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.engine.shared_partition import clean_name
from ckpt.errors import MalformedData
from ckpt.layout.spec import BUFFER, PARAM

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids", "masked_bias"})
"""Last parts of names that modules of torch and transformers give to buffers, and to nothing else."""
_HOLDER = "module."
"""What data-parallel wrappers put before every name."""


def role_of(name: str, dtype: str, *, listed: Collection[str] = ()) -> str:
    """Return whether a tensor is a parameter or a buffer, which a state dict does not say.

    ``listed``: names that are known to be buffers.

    >>> role_of("bn.running_mean", "float32"), role_of("mask", "bool"), role_of("fc.weight", "bfloat16")
    ('buffer', 'buffer', 'param')
    """
    numbers = dtype.startswith(("float", "bfloat", "complex"))
    return BUFFER if name in listed or not numbers or name.rpartition(".")[2] in _BUFFERS else PARAM


def clean_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Return each name as the model has it, without the parts of wrappers.

    Raises:
        MalformedData: two are the same then.

    >>> clean_names(["module.fc._orig_mod.weight", "module.fc._orig_mod.bias"], "")
    {'module.fc._orig_mod.weight': 'fc.weight', 'module.fc._orig_mod.bias': 'fc.bias'}
    """
    found = {name: clean_name(name) for name in names}
    if found and all(name.startswith(_HOLDER) for name in found.values()):
        found = {name: clean.removeprefix(_HOLDER) for name, clean in found.items()}
    before: dict[str, str] = {}
    for name, clean in found.items():
        if before.setdefault(clean, name) != name:
            raise MalformedData(f"{where}: tensors {before[clean]!r} and {name!r} are both {clean!r} without wrappers")
    return found
