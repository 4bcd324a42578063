"""What ckpt has set itself to reach, and whether a run shows it. Every line is a figure and a yes or no."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures import Figure, Layout

OURS, DCP, META = "ckpt", "DCP", "torch_checkpointing"
MIB = 1 << 20
BUDGET = 256 * MIB
HEADERS = 1.002
"""Headers, index and commit, beside the information itself."""


class Line(NamedTuple):
    """One target in one layout. ``reached`` is None where a peer to compare with has not run."""

    layout: str
    target: str
    found: str
    reached: bool | None


def lines(layout: Layout) -> Iterator[Line]:
    """Yield every target that this layout's records can tell of."""
    for store in layout.stores("stall"):
        yield from _stall(layout, store)
    for store in layout.stores("save"):
        yield from _save(layout, store)
    for store in layout.stores("load"):
        yield from _load(layout, store)
    yield from _memory(layout)
    share, cpu = (layout.values("digest", OURS, None, key) for key in ("share", "cpu share"))
    if share and cpu:
        # Wall time of a thread that waits for a core is no cost of the digest; where cores are free, the two are one.
        found = f"{share.text()}, CPU time alone {cpu.text()}"
        yield Line(layout.name, "7. digests, share of the durable save: ≤ 0.10", found, share.median <= 0.10)


def _ratio(mine: Figure | None, theirs: Figure | None) -> float | None:
    return mine.median / theirs.median if mine and theirs and theirs.median > 0 else None


def _rivals(layout: Layout, item: str, store: str) -> list[str]:
    """Return the systems to beat: no yardstick, and not ckpt in another mode."""
    names = layout.peers(item, store=store)
    return [n for n in names if n in PEERS and not PEERS[n].yardstick and not n.startswith(OURS)]


def _stall(layout: Layout, store: str) -> Iterator[Line]:
    lost, call = layout.lost(OURS, store), layout.calls(OURS, store)
    if not lost or not call:
        return
    ratio = _ratio(lost, layout.lost(DCP, store))
    yield _line(layout, f"1. stall on {store}, of DCP's: ≤ 0.20", ratio, lambda r: r <= 0.2)
    ratio = _ratio(lost, layout.lost(META, store))
    yield _line(layout, f"1. stall on {store}, of torch_checkpointing's: ≤ 1", ratio, lambda r: r <= 1)
    ratio = _ratio(call, layout.calls(DCP, store))
    yield _line(layout, f"1. the call on {store}, of DCP's: ≤ 0.05", ratio, lambda r: r <= 0.05)


def _line(layout: Layout, target: str, ratio: float | None, judge: object) -> Line:
    if ratio is None:
        return Line(layout.name, target, "not measured, or below the noise", None)
    return Line(layout.name, target, f"{ratio:.2f}", judge(ratio))  # type: ignore[operator]


def _save(layout: Layout, store: str) -> Iterator[Line]:
    rate = layout.against("save", OURS, "raw", store, "durable")
    if rate:
        reached = rate.median >= 0.9 if store != "s3" else None
        yield Line(layout.name, f"2. durable save on {store}, of a raw write's rate: ≥ 0.90", rate.text(), reached)
    yield from _faster(layout, "save", "durable", store, f"2. durable save on {store}, times the fastest peer's: > 1")
    size = layout.share_of_information("save", OURS, store, "bytes")
    if size:
        target = f"3. bytes on {store}, of the information: ≤ 1 (and {HEADERS - 1:.1%} for headers and index)"
        yield Line(layout.name, target, size.text(4), size.high <= HEADERS)
        others = {n: layout.values("save", n, store, "bytes") for n in _rivals(layout, "save", store)}
        least = min(((f.low, n) for n, f in others.items() if f), default=None)
        if least:
            ratio = size.high * layout.information / least[0]
            found = f"{ratio:.5f} ({least[1]})"
            yield Line(layout.name, f"3. bytes on {store}, of the thriftiest peer's: ≤ 1", found, ratio <= 1)


def _faster(layout: Layout, item: str, key: str, store: str, target: str) -> Iterator[Line]:
    against = {n: layout.against(item, OURS, n, store, key) for n in _rivals(layout, item, store)}
    found = {n: f for n, f in against.items() if f}
    if found:
        name = min(found, key=lambda n: found[n].median)
        yield Line(layout.name, target, f"{found[name].text()} ({name})", found[name].median > 1)


def _load(layout: Layout, store: str) -> Iterator[Line]:
    rate = layout.against("load", OURS, "raw", store, "load")
    if rate:
        reached = rate.median >= 0.9 if store != "s3" else None
        yield Line(layout.name, f"4. load from {store}, of a raw read's rate: ≥ 0.90", rate.text(), reached)
    if store != "s3":  # what comes over a socket is not counted
        size = layout.values("save", OURS, store, "bytes")
        read = layout.values("load", OURS, store, "read")
        if read and size:
            # Every rank reads the index for itself, and Python its own files.
            ratio = read.median / size.median
            yield Line(layout.name, f"4. bytes read from {store}, of those stored: 1", f"{ratio:.3f}", ratio <= 1.05)
    yield from _faster(layout, "load", "load", store, f"4. load from {store}, times the fastest peer's: > 1")


def _memory(layout: Layout) -> Iterator[Line]:
    for item, what in (("save", "a save"), ("async", "an asynchronous save"), ("load", "a load")):
        rss = layout.peak(item, OURS, None, MIB)
        if rss is not None:
            limit = (BUDGET + 64 * MIB) / MIB
            yield Line(layout.name, f"5. MiB added by {what}: ≤ {limit:.0f}", f"{rss:.0f}", rss <= limit)
    slope = layout.slope(OURS)
    if slope is not None:
        target = "5. MiB a save that stay behind, over many asynchronous saves: about 0"
        yield Line(layout.name, target, f"{slope / MIB:+.3f}", abs(slope) < 0.1 * MIB)
