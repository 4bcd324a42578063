from __future__ import annotations

import pytest
import torch

from ckpt.engine.torch_parts import parts_of
from ckpt.errors import ConfigError


@pytest.mark.parametrize("make", [lambda model: model.state_dict(), lambda model: {"w": torch.zeros(2), "step": 3}])
def test_a_state_dict_is_refused_in_one_sentence(make) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(50)))
    with pytest.raises(ConfigError) as caught:
        parts_of(make(model))
    text = str(caught.value)
    assert "a state dict of tensors does not say who holds what" in text
    assert "pass the module itself" in text
    assert "ckpt.analyze takes a state dict" in text
    assert len(text) < 300
