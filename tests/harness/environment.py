"""The environment that every process of a multi-rank test runs in. Imported before torch and deepspeed are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
EXTENSIONS = REPO / ".cache" / "torch_extensions"
"""Where DeepSpeed's compiled operators live: inside the project, so that no other program's build can block ours."""


def rank_environment() -> dict[str, str]:
    """Return the variables to set before torch is imported."""
    return {
        "DS_ACCELERATOR": "cpu",
        "DEEPSPEED_LOG_LEVEL": "error",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # With AMX, oneDNN's bf16 matmul was seen to differ in the last bits from run to run.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        # Inductor starts a pool of compile workers on import; a process that forks must not own one.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": _joined(str(REPO), os.environ.get("PYTHONPATH", "")),
        "PATH": _joined(str(Path(sys.executable).parent), os.environ.get("PATH", "")),  # torch looks for `ninja` there
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
    }


def _joined(*paths: str) -> str:
    return os.pathsep.join(path for path in paths if path)
