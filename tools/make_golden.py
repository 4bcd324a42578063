"""Write the golden repository of the present format version: once per version, then never again.

python -m tools.make_golden          writes tests/compat/v<N>/, refuses to touch one that is there
"""

from __future__ import annotations

import sys
from pathlib import Path

from ckpt.format.manifest import VERSION
from tests.compat.golden import STEPS, WORLD, golden_model
from tests.property.fake import engines, save_all, zero1

TARGET = Path(__file__).resolve().parents[1] / "tests" / "compat" / f"v{VERSION}"


def main() -> int:
    """Write it; return the exit code."""
    if TARGET.exists():
        print(f"{TARGET} is there: a released format does not change", file=sys.stderr)
        return 1
    for step in STEPS:
        model = golden_model(step)
        made = engines(model, zero1(model, WORLD), WORLD, filled=True, at_step=step)
        save_all(made, TARGET, extra={"epoch": step, "shape": (step, 2.5)})
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
