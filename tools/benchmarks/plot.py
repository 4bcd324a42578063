"""The figures of a result as a drawing: durable saves, loads and stalls, a group of bars a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.figures import Layout
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.figures import Figure


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the drawing; the name's suffix says in what format."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "bench", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    layouts = [Layout(one) for one in result["layouts"]]
    stores = list(dict.fromkeys(s for layout in layouts for s in layout.stores("save")))
    panels: list[tuple[str, Callable[[Layout, str], Figure | None], float | None]] = []
    for store in stores:
        title = f"durable save on {store}, rate of a raw write = 1"
        panels.append((title, lambda y, n, s=store: y.against("save", n, "raw", s, "durable"), 1.0))
        title = f"load from {store}, rate of a raw read = 1"
        panels.append((title, lambda y, n, s=store: y.against("load", n, "raw", s, "load"), 1.0))
    stalls = dict.fromkeys(s for layout in layouts for s in layout.stores("stall"))
    panels += [(f"seconds lost a save, {store}", lambda y, n, s=store: y.lost(n, s), 0.0) for store in stalls]
    names = [n for n in PEERS if any(n in layout.peers("save", "load", "stall") for layout in layouts)]
    colors = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    chart, axes = plt.subplots(len(panels), 1, figsize=(9, 2.1 * len(panels)), squeeze=False, layout="constrained")
    for (title, value, line), axis in zip(panels, axes[:, 0], strict=True):
        for i, layout in enumerate(layouts):
            found = [(n, value(layout, n)) for n in names]
            shown = [(n, f) for n, f in found if f]
            for j, (name, f) in enumerate(shown):
                at, width = i + (j - (len(shown) - 1) / 2) * 0.8 / len(names), 0.8 / len(names)
                spread = [[f.median - f.low], [f.high - f.median]]
                axis.bar(at, f.median, width, yerr=spread, color=colors[name], error_kw={"linewidth": 0.6})
        if line is not None:
            axis.axhline(line, color="black", linewidth=0.6)
        axis.set_title(title, loc="left")
        axis.set_xticks(range(len(layouts)), [layout.name for layout in layouts])
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[n]) for n in names]
    chart.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
    chart.savefig(path, metadata={"Date": None})
    plt.close(chart)
