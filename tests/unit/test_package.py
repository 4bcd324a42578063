"""The public names: there before anything is loaded, and complete."""

from __future__ import annotations

import subprocess
import sys

import ckpt


def test_all_names_are_listed_and_can_be_had() -> None:
    assert set(ckpt.__all__) == set(ckpt._HOME)
    assert all(getattr(ckpt, name) is not None for name in ckpt.__all__)


def test_names_can_be_completed_without_loading_torch() -> None:
    code = "import sys, ckpt; print(*dir(ckpt)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(ckpt.__all__) <= set(done.stdout.split())
