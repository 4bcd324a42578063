"""What the golden repositories hold. A change here would hide a change of the format: do not."""

from __future__ import annotations

import torch

from tests.property.fake import Model, small_model

STEPS, WORLD = (9, 10), 2
"""Nine and ten: a reader that sorts names as text finds the wrong one newest."""


def golden_model(step: int) -> Model:
    """The state of one step; the frozen ``emb`` and ``table`` are the same in both."""
    model = small_model(step)
    model.tensors["table", "param"] = torch.arange(600, dtype=torch.int16).reshape(20, 30)
    return model
