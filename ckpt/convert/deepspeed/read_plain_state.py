"""From the numbered optimizer state of a job without ZeRO to an index, once it is known which number is which name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.read_files import numel_of
from ckpt.convert.deepspeed.read_model import numbered_expert, prefix_of
from ckpt.convert.deepspeed.read_optim import NOT_STATE, Optimizer
from ckpt.convert.deepspeed.read_pieces import add_flat, add_stored
from ckpt.convert.deepspeed.read_plain import Candidate, Group, Item, Taken, by_name, deal, groups_of
from ckpt.convert.deepspeed.read_plain_pipe import Layer, Naming, Twins, deal_stages
from ckpt.convert.torchfile.names import Stored, kind_of
from ckpt.errors import MalformedData, MissingChunk, UnsupportedFeature
from ckpt.layout.box import Box
from ckpt.layout.spec import MASTER
from ckpt.words import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckpt.convert.deepspeed.read_model import Model

_LAYER = re.compile(r"(\d+)\.")
_At = tuple[int, int | None]
"""Model-parallel rank, and expert-parallel rank if experts have files of their own."""


class PlainOptimizer:
    """Adds what a model's files hold of the optimizer. ``gathered``: groups for the engine's objects."""

    def __init__(self, model: Model, gathered: Optimizer) -> None:
        self.model, self.gathered = model, gathered
        self.wrapper = ""
        self._held: dict[_At, tuple[str, list[Group]]] = {}

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
                self._hold(mp, job.models[mp].get("optimizer"), job.files.model[mp, 0], None)
            for ep in experts:
                key = job.files.expert_optim[ep, mp]
                self._hold(mp, job.files.read(key).get("optimizer"), key, ep)
        dealt = self._deal_stages()
        dealt.update({at: self._deal(*at) for at in self._held if at not in dealt})
        for (mp, expert), taken in dealt.items():
            self._add(mp, expert, taken if self._alike(dealt, mp, expert) else None)

    def _count_experts(self, ep: int) -> None:
        """Find how many experts each expert-parallel rank has: the files count them through all of them."""
        totals: dict[str, int] = {}
        for name in (name for shapes in self.model.shapes.values() for name in shapes):
            prefix, number = prefix_of(name)
            if prefix:
                totals[prefix] = max(totals.get(prefix, 0), number + 1)
        self.model.local_experts = {prefix: max(1, total // ep) for prefix, total in totals.items()}

    def _hold(self, mp: int, optimizer: Any, key: str, expert: int | None) -> None:
        self.gathered.groups[mp, expert] = []
        if optimizer is None:
            return
        if not isinstance(optimizer, dict):
            raise MalformedData(f"{key}: the optimizer is a {kind_of(optimizer)}, expected a dictionary")
        groups, self.wrapper = groups_of(optimizer, key)
        self.gathered.first.setdefault(mp, optimizer)
        self._held[mp, expert] = key, groups

    def _add(self, mp: int, expert: int | None, taken: list[Taken] | None) -> None:
        key, groups = self._held[mp, expert]
        if taken is None:
            shown = [c.local for c in self._candidates(mp)]
            self.model.builder.lost.append(
                f"{key}: optimizer state was left out: the files do not tell which of {some(shown, 3)} each entry is of"
            )
            return
        members: list[list[str]] = [[] for _ in groups]
        for one in taken:
            fqn = self.model.name(mp, one.candidate.local, one.candidate.expert)
            members[one.group].append(fqn)
            self._add_one(mp, key, groups[one.group], one, fqn)
        self.gathered.groups[mp, expert] = [
            {"params": names, "options": group.options} for group, names in zip(groups, members, strict=True)
        ]

    def _alike(self, dealt: Mapping[_At, list[Taken] | None], mp: int, expert: int | None) -> bool:
        """Are the tensor-parallel ranks beside it dealt out as it is? What they have together is known only then."""
        first = mp // self.model.job.tp * self.model.job.tp
        beside = [dealt[m, expert] for m in range(first, first + self.model.job.tp) if (m, expert) in dealt]
        names = [None if one is None else [(t.group, t.candidate.local) for t in one] for one in beside]
        return all(one == names[0] for one in names)

    # ----------------------------------------------------------------------------------------- who is to be dealt out

    def _deal(self, mp: int, expert: int | None) -> list[Taken] | None:
        """Deal out the parameters of a model whose file is one, in the order of its modules."""
        groups = self._held[mp, expert][1]
        module, experts = list(self._module(mp)), [] if expert is None else list(self._experts(mp, expert))
        if self._too_few(mp, groups):
            raise self._other_model(mp, groups)
        return deal(self.model.job.files.store, groups, _in_place(module, experts))

    def _other_model(self, mp: int, groups: list[Group]) -> MalformedData:
        count = sum(len(group.items) for group in groups)
        return MalformedData(
            f"{self.model.job.files.where}: the optimizer of model-parallel rank {mp} steps {count} tensors, the "
            f"model's files do not have as many: a file is missing, or they are of another model"
        )

    def _deal_stages(self) -> dict[_At, list[Taken] | None]:
        """Deal out the layers of a pipeline, all stages together."""
        job = self.model.job
        found: dict[_At, list[Taken] | None] = {}
        for tp in range(job.tp if job.files.layers else 0):
            ranks = [m for m in range(tp, job.mp, job.tp) if (m, None) in self._held]
            ranks = [m for m in ranks if job.models[m].get("module") is None]  # else it is all in one file
            if not ranks:
                continue
            stages = [self._held[m, None][1] for m in ranks]
            named = [by_name(groups, list(self._candidates(m))) for m, groups in zip(ranks, stages, strict=True)]
            if all(one is not None for one in named):
                found.update({(m, None): one for m, one in zip(ranks, _once(named), strict=True)})
                continue
            layers = self._layers(ranks)
            naming = deal_stages(job.files.store, stages, layers) if layers is not None else None
            if naming is None:
                self._check_count(ranks, stages)
            found.update({(m, None): None if naming is None else naming[n] for n, m in enumerate(ranks)})
            self._tell_shared(naming or [])
        return found

    def _check_count(self, ranks: list[int], stages: list[list[Group]]) -> None:
        """Check that a pipeline has as many parameters as its optimizers step; more, if stages share some."""
        have = sum(1 for m in ranks[:1] for _ in self._candidates(m))
        needed = sum(len(group.items) for groups in stages for group in groups)
        flat = any(group.flat for groups in stages for group in groups)
        if not flat and needed > have and not Twins(self.model.job.files.store, stages).proven:
            raise self._other_model(ranks[0], stages[0])

    def _tell_shared(self, naming: Naming) -> None:
        shared = {one.candidate.local for stage in naming for one in stage if one.shared}
        shared = {local.partition(".")[0] for local in shared if self.model.name(0, local) == local}
        self.model.builder.notes += [
            f"layer {number} is shared by stages of the pipeline: without ZeRO no file has its name in the job "
            f"(tied_modules.<key>), it is called {number!r} (rules can rename it)"
            for number in sorted(shared)
        ]

    def _too_few(self, mp: int, groups: list[Group]) -> bool:
        if self.model.job.files.layers or self.model.job.files.experts or any(g.flat for g in groups):
            return False
        return sum(len(g.items) for g in groups) > len(list(self._module(mp)))

    def _candidates(self, mp: int) -> Iterator[Candidate]:
        """Yield all parameters that an optimizer may step: of a pipeline those of all stages."""
        job = self.model.job
        parts = job.files.layers and job.models[mp].get("module") is None
        for m in range(mp % job.tp, job.mp, job.tp) if parts else (mp,):
            yield from self._module(m)

    def _layers(self, ranks: list[int]) -> list[Layer] | None:
        """Return the layers of a pipeline in their order; None if nothing says where one comes."""
        said: dict[int, int] = {}
        numbered: dict[int, list[Candidate]] = {}
        tied: list[Candidate] = []
        for n, mp in enumerate(ranks):
            said.update({int(found[1]): n for name in self.model.buffers[mp] if (found := _LAYER.match(name))})
            for candidate in self._module(mp):
                if found := _LAYER.match(candidate.local):
                    numbered.setdefault(int(found[1]), []).append(candidate)
                elif n == 0:
                    tied.append(candidate)
                else:
                    return None
        layers = [Layer(said.get(number), tuple(numbered[number])) for number in sorted(numbered)]
        return [Layer(0, tuple(tied)), *layers] if tied else layers

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
        stages = range(mp % model.job.tp, model.job.mp, model.job.tp) if candidate.expert is None else (mp,)
        holder = next((m for m in stages if candidate.local in model.shapes[m]), mp)
        tiling = model.tiling(holder, candidate.local, fqn)
        twice = holder != mp and candidate.local in model.shapes[mp]
        own = [] if one.shared or twice else model.claims.own(fqn, holder, tiling)
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
            found = f"of shape {list(value.shape)}" if isinstance(value, Stored) else f"a {kind_of(value)}"
            raise UnsupportedFeature(f"{key}: optimizer state {role!r} of {fqn!r} is {found}, not as the parameter is")
        spec = self.model.builder.spec(fqn, role, value.dtype, value.shape)
        self.model.builder.add(spec, Box.whole(value.shape), value.key, value.start)
        self.model.builder.notes.append(f"optimizer state {role!r} is not as its parameters are: it is carried whole")


def _once(named: Iterable[list[Taken] | None]) -> Iterator[list[Taken]]:
    """Yield what stages step by its names; what an earlier stage has too is shared."""
    seen: set[str] = set()
    for taken in named:
        locals_ = {one.candidate.local for one in taken or ()}
        yield [replace(one, shared=one.candidate.local in seen) for one in taken or ()]
        seen |= locals_


def _in_place(module: list[Candidate], experts: list[Candidate]) -> list[Candidate]:
    """Return the parameters of a module with those of experts behind the gate of their layer."""
    found = list(module)
    for prefix in dict.fromkeys(prefix_of(one.local)[0] for one in experts):
        gate = prefix.removesuffix("experts.deepspeed_experts.") + "gate."
        at = 1 + max((n for n, one in enumerate(found) if one.local.startswith(gate)), default=len(found) - 1)
        found[at:at] = [one for one in experts if prefix_of(one.local)[0] == prefix]
    return found
