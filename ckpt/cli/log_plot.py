"""A picture of a gradient log: the gradient's norm, the learning rates and the loss scale over steps."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMATS = (".svg", ".png")
MOST_GROUPS = 8
"""Groups whose learning rates are drawn; more make no readable picture."""


def checked_plot(path: str) -> Any:
    """Return the plotting library, before anything is read.

    Raises:
        ConfigError: the file's name has another ending, its folder is not there, or matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path!r}: expected a name that ends in {' or '.join(FORMATS)}")
    if not target.parent.is_dir():
        raise ConfigError(f"--plot {path!r}: there is no folder {str(target.parent)!r}")
    try:
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'ckpt[plot]'") from error


def write_plot(library: Any, path: Path, document: dict[str, Any]) -> None:
    """Draw the listed steps.

    Raises:
        ConfigError: the file cannot be written.
    """
    steps = document["steps"]
    panels = ["norm", "lr", *(["loss scale"] if any(one["loss_scale"] is not None for one in steps) else [])]
    figure = library.figure.Figure(figsize=(9, 2.2 * len(panels) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True)
    for name, axis in zip(panels, axes, strict=True):
        _PANELS[name](axis, steps, document)
        axis.grid(visible=True, alpha=0.3)
        _marks(axis, steps)
    axes[-1].set_xlabel("step")
    figure.suptitle("gradient log" + (" (skipped steps are dotted)" if any(one["skipped"] for one in steps) else ""))
    kind = path.suffix.lower()[1:]
    try:
        with library.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ckpt"}):  # words stay words
            figure.savefig(path, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    except OSError as error:
        raise ConfigError(f"--plot {str(path)!r}: cannot be written: {error.strerror or error}") from error


def _norm(axis: Any, steps: Sequence[dict[str, Any]], _document: dict[str, Any]) -> None:
    norms = [one["norm"] for one in steps]
    axis.plot([one["step"] for one in steps], _known(norms), linewidth=1, marker=_marker(steps), markersize=3)
    if any(norms) and min(norm for norm in norms if norm is not None) > 0:
        axis.set_yscale("log")
    axis.set_ylabel("gradient norm")


def _rates(axis: Any, steps: Sequence[dict[str, Any]], document: dict[str, Any]) -> None:
    groups = document["groups"][:MOST_GROUPS]
    drawn: set[tuple[float | None, ...]] = set()
    for i, (optimizer, group) in enumerate(groups):
        rates = tuple(one["lr"][i] for one in steps)
        if rates not in drawn:  # groups mostly differ in their weight decay
            axis.plot([one["step"] for one in steps], _known(rates), linewidth=1, label=f"group {optimizer}/{group}")
        drawn.add(rates)
    if len(drawn) > 1:
        axis.legend(fontsize="small")
    axis.set_ylabel("learning rate")


def _scale(axis: Any, steps: Sequence[dict[str, Any]], _document: dict[str, Any]) -> None:
    axis.step([one["step"] for one in steps], _known([one["loss_scale"] for one in steps]), where="post", linewidth=1)
    if all((one["loss_scale"] or 1) > 0 for one in steps):
        axis.set_yscale("log", base=2)
    axis.set_ylabel("loss scale")


_PANELS = {"norm": _norm, "lr": _rates, "loss scale": _scale}


def _known(values: Sequence[float | None]) -> list[float]:
    """Return numbers for a line that has a gap where one is not known."""
    return [float("nan") if value is None else value for value in values]


def _marker(steps: Sequence[dict[str, Any]]) -> str:
    return "." if len(steps) < 100 else ""


def _marks(axis: Any, steps: Sequence[dict[str, Any]]) -> None:
    """Mark the steps that were skipped, and those before which an option was set by hand."""
    for one in steps:
        if one["skipped"]:
            axis.axvline(one["step"], color="tab:orange", linestyle=":", linewidth=0.8)
        if one["changed"]:
            axis.axvline(one["step"], color="tab:red", linestyle="--", linewidth=0.8)
