"""What ``ckpt analyze`` looks at: a checkpoint, or a job that is only described.

All that is wrong with a command line is found before any file is opened, and told in one :class:`ConfigError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.analysis.domains import Domains
from ckpt.analysis.holdings import Holdings, TensorPieces, pieces_of
from ckpt.analysis.paper import paper_share
from ckpt.analysis.refuting import Redundancy, left_of
from ckpt.describe.closed import holdings as holdings_of_description
from ckpt.describe.exact import exact_graph
from ckpt.describe.load import describe
from ckpt.describe.presets import PRESETS, preset
from ckpt.errors import LayoutError
from ckpt.repo.holders import graph_of_index, hosts_of_index, refutations_of_index
from ckpt.repo.repository import Repository
from ckpt.store.open import open_store
from ckpt.words import count, size

if TYPE_CHECKING:
    from ckpt.describe.parallel import Parallel
    from ckpt.describe.placement import Description

HOST_SIZE = 8
"""Ranks of a host where nobody says: the accelerators of the machines that large models are trained on."""


@dataclass(frozen=True)
class PaperCount:
    """The redundancy as AdaCheck counts it, beside what that paper says.

    ``share``: of parameters, gradients and optimizer states, ours. ``published``: in percent, None: not for this one.
    ``layout``: that gives ours. ``open``: what the sources leave open. ``changed``: options that replace the preset's.
    """

    share: float
    layout: str
    published: float | None = None
    open: str = ""
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """``kind``: ``checkpoint`` or ``description``. ``hosts``: as far as they are known; ``assumed``: what was
    assumed of them; ``notes``: what else a reader should know.

    ``pieces``: makes those of which these are the holdings, or None: only a named loss needs them. ``redundancy``: what
    the save found of a checkpoint's claims.
    """

    kind: str
    name: str
    layout: str
    holdings: Holdings
    hosts: Domains | None
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    paper: PaperCount | None = None
    pieces: Callable[[], Sequence[TensorPieces] | None] = lambda: None
    redundancy: Redundancy | None = None


@dataclass(frozen=True)
class Asked:
    """The arguments that say what is looked at. ``layout``: the fields of ``Parallel`` that were given."""

    root: str | None
    step: int | None
    model: str | None
    preset: str | None
    layout: Mapping[str, Any]

    def problems(self) -> list[str]:
        """Return everything that does not go together."""
        given = [f"--{name}" for name, value in (("model", self.model), ("preset", self.preset)) if value is not None]
        found = []
        if self.root is None and not given:
            found.append("nothing to analyze: expected ROOT, --model FILE or --preset NAME (--list-presets lists them)")
        if self.root is not None and given:
            found.append(f"ROOT {self.root!r} and {' and '.join(given)}: a checkpoint has its own model")
        if len(given) > 1:
            found.append("--model and --preset: expected one of them")
        if self.root is not None and self.layout:
            options = ", ".join(map(option, self.layout))
            found.append(f"{options}: only with --model or --preset, a checkpoint has its own layout")
        if self.step is not None and self.root is None:
            found.append("--step: only with ROOT")
        if self.preset is not None and self.preset not in PRESETS:
            found.append(f"--preset {self.preset!r}: expected one of {', '.join(PRESETS)}")
        return found

    def subject(self) -> Subject:
        """Read it.

        Raises:
            ConfigError: the file, or the layout that it is asked for, cannot be.
            LayoutError: the checkpoint was saved by a release that did not record who held what.
        """
        if self.root is not None:
            return _of_checkpoint(Repository(open_store(self.root)), self.step)
        layout = _with_consequences(self.layout)
        described = describe(self.model or "", **layout) if self.preset is None else preset(self.preset, **layout)
        return _of_description(described, self.preset, tuple(map(option, self.layout)))


def option(name: str) -> str:
    """Return the option that sets a field of ``Parallel``."""
    return f"--{name.replace('_', '-')}"


def _with_consequences(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Add what a given option makes void of a file's or preset's layout, or follows from it."""
    changed = dict(layout)
    if "pp" in changed:
        changed.setdefault("stages", ())
    for one, other in (("hosts", "ranks_per_host"), ("ranks_per_host", "hosts")):
        if one in layout and other not in layout:
            changed[other] = None
    if changed.get("engine") == "fsdp2":
        changed.setdefault("zero", 3)
    return changed


def _of_checkpoint(repository: Repository, step: int | None) -> Subject:
    index = repository.read_index(repository.pick(step))
    commit, notes = index.commit, []
    try:
        hosts = Domains.by_host(commit.world, hosts_of_index(index))
    except LayoutError as error:
        if index.root.holders is None:
            raise
        hosts = None
        notes.append(f"hosts are not known ({error})")
    layout = f"saved by {count(commit.world, 'rank')} of {commit.engine} at {commit.created}"
    name = f"{repository.store.url}, step {commit.step}"
    graph = graph_of_index(index)
    left = left_of(graph, refutations_of_index(index, graph))
    notes.append(_found(left.redundancy))
    return Subject(
        "checkpoint",
        name,
        layout,
        left.holdings,
        hosts,
        tuple(notes),
        pieces=lambda: left.pieces,
        redundancy=left.redundancy,
    )


def _found(tested: Redundancy) -> str:
    """Say what the save found of the job's claims, and what it did not record."""
    if not tested.claimed:
        return "the ranks held nothing twice"
    differed = (
        f"{size(tested.refuted)} differed and are not counted as redundant" if tested.refuted else "all were equal"
    )
    return (
        f"the save compared {size(tested.claimed)} of copies: {differed}; "
        f"how much of them was constant (zeros), which proves nothing, was not recorded"
    )


def _of_description(described: Description, chosen: str | None, changed: tuple[str, ...]) -> Subject:
    parallel, holdings, assumed = described.parallel, holdings_of_description(described), []
    hosts, per_host = None, parallel.host_size
    if parallel.hosts is None and parallel.ranks_per_host is None:
        per_host = HOST_SIZE
        if holdings.world > HOST_SIZE:
            assumed.append(f"hosts of {HOST_SIZE} ranks are assumed (--ranks-per-host, --hosts)")
    if holdings.world > per_host or parallel.hosts is not None or parallel.ranks_per_host is not None:
        hosts = Domains.by_host(holdings.world, per_host)
    by_optimizer = parallel.zero >= 2 or parallel.kind == "fsdp2"
    share = paper_share(holdings, "optimizer" if by_optimizer else "param")
    layout = words(parallel)
    known = PRESETS.get(chosen or "")
    paper = PaperCount(share, layout, known.paper, known.open, changed) if known else PaperCount(share, layout)

    def pieces() -> Sequence[TensorPieces] | None:
        graph = exact_graph(described)
        return None if graph is None else tuple(pieces_of(graph))

    model = described.model
    return Subject("description", model.name, layout, holdings, hosts, model.notes, tuple(assumed), paper, pieces)


def words(parallel: Parallel) -> str:
    """Return a layout in one line: engine, degrees above one, precision."""
    degrees = [(name, getattr(parallel, name)) for name in ("dp", "tp", "pp", "ep", "cp")]
    said = [f"{name} {degree}" for name, degree in degrees if degree > 1] or ["one rank"]
    if parallel.shard is not None and parallel.shard != parallel.data:
        said.append(f"shard {parallel.shard}")
    if parallel.autotp:
        said.append("AutoTP")
    master = ", fp32 masters" if parallel.masters else ""
    return (
        f"{parallel.kind}, ZeRO-{3 if parallel.kind == 'fsdp2' else parallel.zero}, {' × '.join(said)}, "
        f"{parallel.precision}{master}, {parallel.optimizer}"
    )


def preset_row(name: str) -> dict[str, Any]:
    """Return what ``--list-presets`` says of one."""
    chosen = PRESETS[name]
    described = preset(name)
    return {
        "name": name,
        "parameters": described.model.parameters,
        "ranks": described.parallel.ranks,
        "layout": words(described.parallel),
        "published": chosen.paper,
        "open": chosen.open,
    }
