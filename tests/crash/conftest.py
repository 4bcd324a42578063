"""The sweeps here make thousands of files on a disk that is not going to lose power."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_real_fsync(monkeypatch):
    """The order of syncs is tested in tests/unit/store; here only that an operation at its place may not come back."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
