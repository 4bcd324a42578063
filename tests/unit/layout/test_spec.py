from __future__ import annotations

import pytest
import torch

from ckpt.errors import ConfigError
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE, RankLayout, Shard, TensorSpec


def test_item_sizes_are_torchs():
    """A wrong size would shift every chunk of that dtype."""
    for name, size in ITEMSIZE.items():
        assert getattr(torch, name).itemsize == size


def test_a_dtype_that_cannot_be_stored_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'w' \(param\).*'qint8'"):
        TensorSpec("w", "param", "qint8", (2,))


def test_bytes():
    spec = TensorSpec("w", "param", "bfloat16", (3, 4))
    assert (spec.nbytes, TensorSpec("s", "step", "float32", ()).nbytes, spec.key) == (24, 4, ("w", "param"))
    layout = RankLayout(0, (Shard(spec, Box((0, 0), (1, 4))), Shard(spec, Box((2, 0), (1, 2)))))
    assert layout.nbytes == 12
    assert str(spec) == "tensor 'w' (param) bfloat16[3, 4]"
