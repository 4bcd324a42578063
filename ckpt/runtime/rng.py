"""Random number generators of one rank: python, numpy, torch, and every CUDA device that this process uses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckpt.errors import ConfigError


def capture_rng() -> dict[str, Any]:
    """Return the state of all generators, without drawing from any."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: dict[str, Any]) -> list[str]:
    """Put the generators back. Returns notes on what could not be.

    Raises:
        ConfigError: the state is not one of these generators'.
    """
    notes = []
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available():
            if "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], torch.cuda.current_device())
            else:
                notes.append("the checkpoint has no CUDA generator state: the device's generator was left as it is")
        elif "cuda" in state:
            notes.append("the checkpoint has a CUDA generator state and this process has no CUDA device")
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"random generator state cannot be restored: {error!r}") from error
    return notes


def derive_rng(seed: int) -> None:
    """Seed all generators from one 64-bit number: for a rank that the saved job did not have."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.manual_seed(seed)  # seeds CUDA devices too
