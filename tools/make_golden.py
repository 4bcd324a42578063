"""Write golden repositories of the present format version: once per version, then never again.

python -m tools.make_golden          writes tests/compat/v<N>/, refuses to touch one that is there
python -m tools.make_golden log NAME writes tests/compat/logs/NAME/: gradient logs, and the state that they lead to
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ckpt.format.manifest import VERSION
from tests.compat import golden_log
from tests.compat.golden import STEPS, WORLD, golden_model
from tests.property.fake import engines, save_all, zero1

COMPAT = Path(__file__).resolve().parents[1] / "tests" / "compat"


def main() -> int:
    """Write one of them; return the exit code."""
    logs = sys.argv[1:2] == ["log"]
    target = COMPAT / "logs" / sys.argv[2] if logs else COMPAT / f"v{VERSION}"
    if target.exists():
        print(f"{target} is there: a released format does not change", file=sys.stderr)
        return 1
    if logs:
        for codec in ("none", "zstd"):
            state = golden_log.write(target / codec, codec)
            (target / f"{codec}.json").write_text(json.dumps(state, indent=1))
    else:
        for step in STEPS:
            model = golden_model(step)
            made = engines(model, zero1(model, WORLD), WORLD, filled=True, at_step=step)
            save_all(made, target, extra={"epoch": step, "shape": (step, 2.5)})
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
