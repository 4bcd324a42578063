"""From the numbered optimizer state of a job without ZeRO to an index, once it is known which number is which name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_files import numel_of
from ckpt.convert.deepspeed.read_model import numbered_expert, prefix_of
from ckpt.convert.deepspeed.read_optim import NOT_STATE, Optimizer
from ckpt.convert.deepspeed.read_pieces import add_flat, add_stored
from ckpt.convert.deepspeed.read_plain import Candidate, Group, Item, Taken, deal, groups_of
from ckpt.convert.torchfile.names import Stored
from ckpt.errors import MalformedData, MissingChunk, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.spec import MASTER
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.convert.deepspeed.read_model import Model


class PlainOptimizer:
    """Adds what a model's files hold of the optimizer. ``gathered``: groups for the engine's objects."""

    def __init__(self, model: Model, gathered: Optimizer) -> None:
        self.model, self.gathered = model, gathered
        self.wrapper = ""
        self._firsts: dict[int, int] = {}
        """stage of a pipeline -> number of its first layer"""

    def add(self) -> None:
        """Add masters and state of all model-parallel ranks.

        Raises:
            MissingChunk: files of experts' optimizers are missing, by name.
            MalformedData: an optimizer's state that is none.
        """
        job = self.model.job
        experts = sorted({ep for ep, _ in job.files.expert_optim})
        if experts:
            pattern = "expp_rank_{mp}_mp_rank_{dp:02d}_optim_states.pt"
            what = f"{len(job.files.experts)} files of experts"
            job.files.expect(job.files.expert_optim, experts[-1] + 1, job.mp, pattern, what)
            self._count_experts(len(experts))
        elif job.files.experts:
            raise MissingChunk(f"{job.files.where}: expp_rank_0_mp_rank_00_optim_states.pt and all of its kind")
        for mp in range(job.mp):
            if not experts:
                self._add(mp, job.models[mp].get("optimizer"), job.files.model[mp, 0], None)
            for ep in experts:
                key = job.files.expert_optim[ep, mp]
                self._add(mp, job.files.read(key).get("optimizer"), key, ep)

    def _count_experts(self, ep: int) -> None:
        """Find how many experts each expert-parallel rank has: the files count them through all of them."""
        totals: dict[str, int] = {}
        for name in (name for shapes in self.model.shapes.values() for name in shapes):
            prefix, number = prefix_of(name)
            if prefix:
                totals[prefix] = max(totals.get(prefix, 0), number + 1)
        self.model.local_experts = {prefix: max(1, total // ep) for prefix, total in totals.items()}

    def _add(self, mp: int, optimizer: Any, key: str, expert: int | None) -> None:
        if optimizer is None:
            self.gathered.groups[mp, expert] = []
            return
        if not isinstance(optimizer, dict):
            raise MalformedData(f"{key}: the optimizer is a {type(optimizer).__name__}, expected a dictionary")
        groups, self.wrapper = groups_of(optimizer, key)
        self.gathered.first.setdefault(mp, optimizer)
        taken, shown = self._deal(mp, groups, expert)
        if taken is None:
            self.model.builder.notes.append(
                f"{key}: optimizer state was left out: the files do not tell which of {some(shown, 3)} each entry is of"
            )
            self.gathered.groups[mp, expert] = []
            return
        members: list[list[str]] = [[] for _ in groups]
        for one in taken:
            fqn = self.model.name(mp, one.candidate.local, one.candidate.expert)
            members[one.group].append(fqn)
            self._add_one(mp, key, groups[one.group], one, fqn)
        self.gathered.groups[mp, expert] = [
            {"params": names, "options": group.options} for group, names in zip(groups, members, strict=True)
        ]

    # ----------------------------------------------------------------------------------------- who is to be dealt out

    def _deal(self, mp: int, groups: list[Group], expert: int | None) -> tuple[list[Taken] | None, list[str]]:
        store = self.model.job.files.store
        shown: list[str] = []
        for candidates in self._ways(mp, groups, expert):
            shown = shown or [c.local for c in candidates]
            taken = deal(store, groups, candidates)
            if taken is not None:
                if self.model.job.files.layers:
                    self._next_stage(mp, taken)
                return taken, shown
        if not shown or self._too_few(mp, groups):
            count = sum(len(group.items) for group in groups)
            raise MalformedData(
                f"{self.model.job.files.where}: the optimizer of model-parallel rank {mp} steps {count} tensors, the "
                f"model's files do not have as many: a file is missing, or they are of another model"
            )
        return None, shown

    def _ways(self, mp: int, groups: list[Group], expert: int | None) -> Iterator[list[Candidate]]:
        """Yield what the optimizer of a rank may step, in the order of its module, the likeliest first."""
        if not self.model.job.files.layers:
            yield [*self._module(mp), *(self._experts(mp, expert) if expert is not None else ())]
            return
        # No file says where the stages of a pipeline begin: as many layers as there are parameters, and behind the
        # first stage perhaps an earlier layer once more, which the stages share.
        layers = self._layers(mp)
        numbers = sorted(layers)
        start = self._firsts.get(mp, numbers[0] if numbers else 0)
        needed = sum(len(g.items) for g in groups)
        own = [n for n in numbers if n >= start]
        for before in (None, *(n for n in numbers if n < start)):
            shared = [] if before is None else layers[before]
            for end in range(len(own) + 1):
                candidates = [*shared, *(c for n in own[:end] for c in layers[n])]
                if groups and groups[0].flat:
                    if sum(numel_of(c.shape) for c in candidates) == sum(g.end for g in groups):
                        yield candidates
                elif len(candidates) == needed:
                    yield candidates

    def _too_few(self, mp: int, groups: list[Group]) -> bool:
        if self.model.job.files.layers or self.model.job.files.experts or any(g.flat for g in groups):
            return False
        return sum(len(g.items) for g in groups) > len(list(self._module(mp)))

    def _next_stage(self, mp: int, taken: list[Taken]) -> None:
        numbers = [int(one.candidate.local.partition(".")[0]) for one in taken]
        start = self._firsts.get(mp, 0)
        for number in sorted({n for n in numbers if n < start}):
            self.model.builder.notes.append(
                f"layer {number} is shared by stages of the pipeline: without ZeRO no file has its name in the job "
                f"(tied_modules.<key>), it is called {number!r} (rules can rename it)"
            )
        self._firsts[mp + self.model.job.tp] = 1 + max((n for n in numbers if n >= start), default=start - 1)

    def _layers(self, mp: int) -> dict[int, list[Candidate]]:
        tp = self.model.job.tp
        found: dict[int, list[Candidate]] = {}
        for m in range(mp % tp, self.model.job.mp, tp):
            for candidate in self._module(m):
                head = candidate.local.partition(".")[0]
                if head.isdecimal():
                    found.setdefault(int(head), []).append(candidate)
        return found

    def _module(self, mp: int) -> Iterator[Candidate]:
        """Yield the parameters of a module once each, in its order."""
        seen: set[Stored] = set()
        for local, value in self.model.modules[mp].items():
            if not isinstance(value, Stored) or local in self.model.buffers[mp] or (value.volume and value in seen):
                continue
            seen.add(value)
            yield Candidate(local, value.shape, value)

    def _experts(self, mp: int, expert: int) -> Iterator[Candidate]:
        job = self.model.job
        for (_, _, m), key in sorted(job.files.experts.items()):
            if m == mp:
                for name, value in job.files.read(key).items():
                    prefix, number = prefix_of(name)
                    count = self.model.local_experts.get(prefix, 0)
                    mine = count > 0 and number // count == expert
                    if mine and isinstance(value, Stored) and not self.model.is_buffer(name):
                        local = numbered_expert(name, number % count)
                        self.model.shapes[mp].setdefault(local, value.shape)
                        yield Candidate(local, value.shape, value, expert)

    # -------------------------------------------------------------------------------------------------- one parameter

    def _add_one(self, mp: int, key: str, group: Group, one: Taken, fqn: str) -> None:
        model, candidate = self.model, one.candidate
        holder = next(
            (m for m in range(mp % model.job.tp, model.job.mp, model.job.tp) if candidate.local in model.shapes[m]), mp
        )
        tiling = model.tiling(holder, candidate.local, fqn)
        own = model.claims.own(fqn, holder, tiling)
        if holder != mp:
            own = []  # the first stage's counts
        item = group.items[0 if group.flat else one.at]
        roles: dict[str, Any] = {MASTER: item.master} if item.master is not None else {}
        if item.master is not None:
            model.builder.derived.add(fqn)
        for role, value in {**roles, **item.state}.items():
            if value is None:
                continue
            if role in NOT_STATE and role not in roles:
                raise UnsupportedFeature(f"{key}: optimizer state with the key {role!r:.80}")
            if isinstance(value, Stored) and self._like(group, item, value, candidate):
                spec = model.builder.spec(fqn, role, value.dtype, tiling.shape)
                if group.flat:
                    at = value.start + one.at * spec.itemsize
                    add_flat(model.builder, spec, tiling, 0, numel_of(candidate.shape), value.key, at, own)
                else:
                    add_stored(model.builder, model.job.files.store, spec, tiling, value, own)
            elif (isinstance(value, Stored) and value.volume == 1) or type(value) in (bool, int, float):
                self.gathered.add_scalar(key, role, value, [fqn])
            else:
                self._add_odd(key, fqn, role, value)

    @staticmethod
    def _like(group: Group, item: Item, value: Stored, candidate: Candidate) -> bool:
        if group.flat:
            return item.master is not None and value.shape == item.master.shape
        return value.shape == candidate.shape

    def _add_odd(self, key: str, fqn: str, role: str, value: Any) -> None:
        """Carry state of another shape whole (Adafactor's factors), if nothing has cut it."""
        if not isinstance(value, Stored) or not value.is_contiguous or self.model.job.tp > 1:
            found = f"of shape {list(value.shape)}" if isinstance(value, Stored) else f"a {type(value).__name__}"
            raise UnsupportedFeature(f"{key}: optimizer state {role!r} of {fqn!r} is {found}, not as the parameter is")
        spec = self.model.builder.spec(fqn, role, value.dtype, value.shape)
        self.model.builder.add(spec, Box.whole(value.shape), value.key, value.start)
        self.model.builder.notes.append(f"optimizer state {role!r} is not as its parameters are: it is carried whole")
