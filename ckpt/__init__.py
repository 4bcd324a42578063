"""Redundancy-aware checkpoints for distributed training. docs/architecture.md is the way in.

Names are loaded when first used, so that ``python -m ckpt ls`` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.analysis.claims import AuditReport
    from ckpt.analysis.content import ContentReport
    from ckpt.analysis.report import AnalysisReport
    from ckpt.analyzing import analyze
    from ckpt.auditing import audit
    from ckpt.checkpointer import Checkpointer
    from ckpt.engine.parallel import Parallel
    from ckpt.errors import (
        CheckpointExists,
        CkptError,
        ConfigError,
        DigestMismatch,
        FormatError,
        IntegrityError,
        LayoutError,
        MissingChunk,
        MissingState,
        NoSuchCheckpoint,
        RankFailure,
        ReplayError,
        ReplicaDivergence,
        SaveCancelled,
        SaveInFlight,
        StoreError,
        UnsupportedLayout,
    )
    from ckpt.loading import latest, load, steps
    from ckpt.preempting import Preemption, on_preemption
    from ckpt.report import LoadReport, SaveReport
    from ckpt.runtime.handle import SaveHandle
    from ckpt.saving import async_save, save

_HOME = {
    "save": "ckpt.saving",
    "async_save": "ckpt.saving",
    "SaveHandle": "ckpt.runtime.handle",
    "load": "ckpt.loading",
    "latest": "ckpt.loading",
    "steps": "ckpt.loading",
    "on_preemption": "ckpt.preempting",
    "Preemption": "ckpt.preempting",
    "analyze": "ckpt.analyzing",
    "audit": "ckpt.auditing",
    "Checkpointer": "ckpt.checkpointer",
    "AuditReport": "ckpt.analysis.claims",
    "ContentReport": "ckpt.analysis.content",
    "AnalysisReport": "ckpt.analysis.report",
    "Parallel": "ckpt.engine.parallel",
    "SaveReport": "ckpt.report",
    "LoadReport": "ckpt.report",
    "CkptError": "ckpt.errors",
    "ConfigError": "ckpt.errors",
    "LayoutError": "ckpt.errors",
    "UnsupportedLayout": "ckpt.errors",
    "MissingState": "ckpt.errors",
    "StoreError": "ckpt.errors",
    "FormatError": "ckpt.errors",
    "IntegrityError": "ckpt.errors",
    "DigestMismatch": "ckpt.errors",
    "MissingChunk": "ckpt.errors",
    "ReplayError": "ckpt.errors",
    "ReplicaDivergence": "ckpt.errors",
    "NoSuchCheckpoint": "ckpt.errors",
    "CheckpointExists": "ckpt.errors",
    "RankFailure": "ckpt.errors",
    "SaveCancelled": "ckpt.errors",
    "SaveInFlight": "ckpt.errors",
}

__all__ = [
    "AnalysisReport",
    "AuditReport",
    "CheckpointExists",
    "Checkpointer",
    "CkptError",
    "ConfigError",
    "ContentReport",
    "DigestMismatch",
    "FormatError",
    "IntegrityError",
    "LayoutError",
    "LoadReport",
    "MissingChunk",
    "MissingState",
    "NoSuchCheckpoint",
    "Parallel",
    "Preemption",
    "RankFailure",
    "ReplayError",
    "ReplicaDivergence",
    "SaveCancelled",
    "SaveHandle",
    "SaveInFlight",
    "SaveReport",
    "StoreError",
    "UnsupportedLayout",
    "analyze",
    "async_save",
    "audit",
    "latest",
    "load",
    "on_preemption",
    "save",
    "steps",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # what is loaded when first used is there before


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
