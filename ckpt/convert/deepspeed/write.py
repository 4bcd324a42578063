"""DeepSpeed's own checkpoint, for any number of ranks and any ZeRO stage: ``engine.load_checkpoint`` takes it as if the
target's engine had saved it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ckpt.convert.assemble import Assembler
from ckpt.convert.deepspeed.read_optim import WRITTEN_FOR
from ckpt.convert.deepspeed.write_experts import Experts, expert_place
from ckpt.convert.deepspeed.write_optim import VERSION, Optimizer
from ckpt.convert.deepspeed.write_pipe import Pipeline
from ckpt.convert.deepspeed.write_record import UNSAID, record_of
from ckpt.convert.deepspeed.write_slice import SUB_GROUP, Member, Slice, dealt, gathered, of_shard, slices_of
from ckpt.convert.deepspeed.write_state import Objects, OptimizerState
from ckpt.convert.file_writing import write_files
from ckpt.convert.options import WEIGHTS
from ckpt.convert.ours.plan import shares
from ckpt.convert.torchfile.pickle_write import Planned
from ckpt.convert.torchfile.write import TorchFile
from ckpt.errors import ConfigError, UnsupportedLayout
from ckpt.layout.spec import BUFFER, MASTER, PARAM, TensorSpec
from ckpt.words import count

if TYPE_CHECKING:
    from ckpt.convert.opened import Opened
    from ckpt.convert.options import WriteOptions, Written
    from ckpt.convert.target import Target
    from ckpt.describe.parallel import Parallel
    from ckpt.store.base import Store

Tree = Callable[[], dict[str, Any]]


def write_deepspeed(
    opened: Opened, store: Store, target: Target, options: WriteOptions, *, sub_group_size: int = SUB_GROUP
) -> Written:
    """Write ``global_step<N>/…`` and, last, ``latest``.

    Args:
        opened: the source.
        store: root of the target, which is what ``load_checkpoint`` gets as ``load_dir``.
        target: the engine that will load it.
        options: see :class:`~ckpt.convert.options.WriteOptions`.
        sub_group_size: ``zero_optimization.sub_group_size`` of that engine; matters for ZeRO-3 only.

    Raises:
        UnsupportedLayout: DeepSpeed has no such layout, or no file for something of the source; names it.
        LayoutError, ConfigError, MissingState: the source lacks what the engine's loader needs.
        StoreError, IntegrityError: reading or writing failed.
    """
    made = DeepSpeedFiles(opened, target, options, sub_group_size=sub_group_size)
    files = [(key, file_of(tree)) for key, tree in made.files()]
    last = {"latest": made.tag.encode()}
    params = [spec for spec in target.specs if spec.role == PARAM]
    written = write_files(opened, store, options, files, last, side_by_side=True, parameters=params)
    return replace(written, format="deepspeed", lost=made.lost, made=made.made_up)


class DeepSpeedFiles:
    """The files of a checkpoint, each made when it is its turn: the tree of one is in memory at a time."""

    def __init__(
        self, opened: Opened, target: Target, options: WriteOptions, *, sub_group_size: int = SUB_GROUP
    ) -> None:
        self.opened, self.target = opened, target
        self.step = opened.step if options.step is None else options.step
        self.tag = f"global_step{self.step}"
        assembler = Assembler(opened, memory=shares(options)[0], cast=True)
        self.objects = Objects(opened)
        self.client_state = self.objects.client_state()
        self.parallel = self._parallel()
        self.made: list[str] = []
        self.experts = self._experts()
        self.ranked = self._slices()
        self.dealt = self._deal()
        self.specs = {spec.key: spec for spec in target.specs}
        self.dtype = self._dtype(options)
        self.zero = self.parallel.zero
        self.record = record_of(self.target) if self.parallel.tp > 1 else {}
        self.made += [UNSAID] if self.parallel.tp > 1 and not self.record else []
        self.pipeline = Pipeline.of(opened, target) if self.parallel is target.parallel else None
        if self.pipeline and not self.zero and self.dtype == "bfloat16":
            raise UnsupportedLayout(
                "a pipeline in bf16 without ZeRO: DeepSpeed cannot load its own either; take ZeRO-1"
            )
        state = OptimizerState(opened, self.target, cut=self.zero > 0 or self.parallel.tp > 1)
        self.has_optimizer = self._has_optimizer(options, said=bool(target.groups))
        if self.has_optimizer:
            state.read_scalars(assembler)
        ranks, ep = self.parallel.data, self.experts.ep if self.experts else 1
        self.optimizer = Optimizer(state, self.objects, self.zero, ranks, self.dtype, sub_group_size, ep)
        if self.zero == 3 and self.has_optimizer:
            self.made += self._rounded()
        if self.zero == 3 and sub_group_size == SUB_GROUP:
            self.made.append(f"sub_group_size {SUB_GROUP}, DeepSpeed's default: an engine with another cannot load it")

    def _parallel(self) -> Parallel:
        return self.target.parallel

    def _experts(self) -> Experts | None:
        """Return the experts; None if there are none."""
        before = self.objects.get("setup").get("data_parallel_world_size", 0) if self._is_dealt() else 0
        now = self.parallel.data if before and self.parallel.zero else 0
        return Experts.of(self.opened, self.target, (before, now))

    def _slices(self) -> list[list[Slice]]:
        """Return the slices of each expert-parallel rank; the target's groups are those of the first from then on."""
        if self.experts is None:
            return [slices_of(self.target)]
        targets = self.experts.targets(self.target)
        self.target = targets[0]
        return [slices_of(one, self.experts, rank) for rank, one in enumerate(targets)]

    @property
    def slices(self) -> list[Slice]:
        """Of the first expert-parallel rank, which writes what all have."""
        return self.ranked[0]

    def _is_dealt(self) -> bool:
        setup = self.objects.get("setup")
        return bool(setup.get("round_robin_gradients")) and setup.get("zero_stage") in (1, 2)

    def _deal(self) -> bool:
        """Put the members of groups into the order that ``round_robin_gradients`` gives them, if the source had it on.
        Returns whether it is on in the target.

        Raises:
            UnsupportedLayout: it had it on in a pipeline, where what stages had cannot be told apart any more.
        """
        if not self._is_dealt():
            return False
        if self.opened.degrees.get("pp", 1) > 1 or self.parallel.pp > 1:
            raise UnsupportedLayout("round_robin_gradients in a pipeline: the order of parameters is not known")
        before, ranks = self.objects.get("setup")["data_parallel_world_size"], self.parallel.data
        deal = self.parallel.zero in (1, 2)
        if self.experts is None:  # else it is done, where the groups are made
            plain = [[gathered(group, before) for group in held.groups] for held in self.slices]
            orders = [[dealt(group, ranks) if deal else group for group in groups] for groups in plain]
            self.ranked = [[replace(s, groups=tuple(map(tuple, o))) for s, o in zip(self.slices, orders, strict=True)]]
        if deal:
            self.made.append("flat groups in the order of round_robin_gradients, which the source had on")
        return deal

    def _dtype(self, options: WriteOptions) -> str:
        stepped = {member.fqn for held in self.slices for group in held.groups for member in group}
        found = Counter(s.dtype for s in self.target.specs if s.role == PARAM and s.fqn in stepped)
        return found.most_common(1)[0][0] if found else options.dtype or "float32"

    def _has_optimizer(self, options: WriteOptions, *, said: bool) -> bool:
        """Has the target optimizer state? ``said``: does the source say in which groups it was stepped?"""
        if options.roles == WEIGHTS:
            self.made.append(self._weights_only())
            return False
        state = [spec for spec in self.target.specs if spec.role not in (PARAM, BUFFER)]
        if said and (state or self.dtype == "float32"):
            return any(spec.role != PARAM for spec in state) or bool(self.objects.get("optimizer"))
        if [spec for spec in state if spec.role != MASTER]:
            raise ConfigError(
                f"{self.opened.where}: it has optimizer state, and does not say with which settings (lr, betas, …) "
                "which parameters are stepped; take weights alone (--roles weights)"
            )
        self.made.append(self._weights_only())
        return False

    def _weights_only(self) -> str:
        """Return what has to be said to DeepSpeed at the load of a checkpoint without optimizer."""
        # Without ZeRO it makes masters from what it has loaded with that flag only.
        how = "load_module_only=True (with load_optimizer_states=False its first step would undo the load)"
        if self.zero:
            how = "load_optimizer_states=False"
            if not self.objects.get("scheduler"):
                how += ", and load_lr_scheduler_states=False if the engine has a scheduler"
        return f"no optimizer state: load it with {how}"

    def _rounded(self) -> list[str]:
        """Say which parameters may change, because files of ZeRO-3 hold masters alone: those of which it is not known
        that they are the rounding of theirs.
        """
        stepped = [member.fqn for held in self.slices for group in held.groups for member in group]
        unsure = {f for f in stepped if f not in self.opened.derived and (f, PARAM) in self.specs}
        unsure = {f for f in unsure if self.specs[f, PARAM].dtype != "float32" and (f, MASTER) in self.specs}
        return [f"{count(len(unsure), 'parameter')}: ZeRO-3 rounds them from their masters"] if unsure else []

    @property
    def lost(self) -> tuple[str, ...]:
        """A line for each thing of the source that is in none of the files that have been made."""
        kept = {spec.key for spec in self.target.specs}
        left = Counter(spec.role for spec in self.opened.specs if spec.key not in kept)
        roles = [f"{role} of {count(n, 'tensor')}" for role, n in sorted(left.items())]
        return tuple(dict.fromkeys([*roles, *self.objects.lost]))

    @property
    def made_up(self) -> tuple[str, ...]:
        """A line for each thing in the files that have been made and not in the source."""
        experts = self.experts.made if self.experts else ()
        return tuple(dict.fromkeys([*self.made, *experts, *self.optimizer.made, *self.optimizer.state.made]))

    # ---------------------------------------------------------------------------------------------------------- files

    def files(self) -> Iterator[tuple[str, Tree]]:
        """Yield (key, what makes the tree) of all files but ``latest``."""
        ranks = range(self.parallel.data)
        for number, held in enumerate(self.slices):
            mp = f"mp_rank_{held.mp:02d}"
            ranked = [slices[number] for slices in self.ranked]
            if self.zero == 3:
                for rank in ranks:
                    yield f"{self.tag}/zero_pp_rank_{rank}_{mp}_model_states.pt", _later(self.model, held, rank)
            else:
                yield f"{self.tag}/{mp}_model_states.pt", _later(self.model, held, 0)
            yield from self._expert_files(mp, ranked)
            for layer in self._layers(held):
                name = f"layer_{layer:02d}-model_{held.tensor_rank:02d}-model_states.pt"
                yield f"{self.tag}/{name}", _later(self.layer, held, layer)
            if self.zero == 3 or (self.zero and self.has_optimizer):
                prefix = "bf16_" if self.dtype == "bfloat16" else ""
                for rank in ranks:
                    own = ranked[rank % len(ranked)]
                    yield f"{self.tag}/{prefix}zero_pp_rank_{rank}_{mp}_optim_states.pt", _later(self.optim, own, rank)

    def _expert_files(self, mp: str, ranked: list[Slice]) -> Iterator[tuple[str, Tree]]:
        layers = self._expert_layers(ranked[0])
        members = self.experts.members(ranked) if self.experts else {}
        for layer, (prefix, experts) in enumerate(layers.items()):
            for number in range(experts):
                own = members[prefix, number]
                key = f"{self.tag}/layer_{layer}_expert_{number}_{mp}_model_states.pt"
                yield key, lambda own=own: self._expert(own)  # type: ignore[misc]
        for rank, held in enumerate(ranked) if layers and not self.zero else ():
            yield f"{self.tag}/expp_rank_{rank}_{mp}_optim_states.pt", _later(self.expert_optim, held, rank)

    def _expert_layers(self, held: Slice) -> dict[str, int]:
        """Return the MoE layers of a slice; in a pipeline some stages may have none, and are written like others."""
        return self.experts.layers(held) if self.experts else {}

    def _layers(self, held: Slice) -> list[int]:
        """Return the layers of which a slice writes files; with experts its module is in one file."""
        return self.pipeline.layers_of(held) if self.pipeline and not self._expert_layers(held) else []

    def model(self, held: Slice, rank: int) -> dict[str, Any]:
        """Return the tree of a ``*_model_states.pt``."""
        counters, scheduler = self.objects.get("engine"), self.objects.get("scheduler")
        parallel, stepped = self.parallel, bool(self.zero)
        module, experts = self._module(held), self._expert_layers(held)
        frozen = stepped and not self.pipeline  # of ZeRO-1 too, unlike DeepSpeed: its script for fp32 weights needs it
        tree = {
            "module": module if experts or not self.pipeline else None,
            "buffer_names": [member.name for member in held.buffers],
            "optimizer": self.optimizer.whole(held) if self.has_optimizer and not stepped and not experts else None,
            "param_shapes": self._shapes(held) if stepped else None,
            "frozen_param_shapes": {m.fqn: torch.Size(m.local) for m in held.frozen if not m.expert}
            if frozen
            else None,
            "shared_params": self._shared(held) if stepped else None,
            "frozen_param_fragments": self._fragments(held, rank, module) if frozen else None,
            "lr_scheduler": scheduler.get("state"),
            "data_sampler": None,
            "random_ltd": self.objects.get("random_ltd") or None,
            "skipped_steps": counters.get("skipped_steps", 0),
            "global_steps": counters.get("global_steps") or self.step,
            "dp_world_size": parallel.data,
            "mp_world_size": parallel.tp * parallel.pp,
            "checkpoint_parallel_dimensions": {"pp_degree": parallel.pp, "tp_degree": parallel.tp},
            "ds_config": self._config(),
            "ds_version": VERSION,
            **self.record,
        }
        if experts:
            tree |= {"num_experts": list(experts.values()), "ds_autoep_layers": None}
        if "global_samples" in counters:
            tree["global_samples"] = counters["global_samples"]
        return {**tree, **self.client_state}

    def optim(self, held: Slice, rank: int) -> dict[str, Any]:
        """Return the tree of a ``*_optim_states.pt``."""
        return {
            "optimizer_state_dict": self.optimizer.zero(held, rank),
            WRITTEN_FOR: self._steps(),
            "ds_config": self._config(),
            "ds_version": VERSION,
        }

    def expert_optim(self, held: Slice, rank: int) -> dict[str, Any]:
        """Return the tree of an ``expp_rank_*_optim_states.pt``: all that such a rank steps without ZeRO."""
        return {"optimizer": self.optimizer.whole(held) if self.has_optimizer else None}

    def _steps(self) -> int:
        """Return the optimizer steps that the model's files speak of; the optimizer's own count may be another one, if
        the source comes from elsewhere, and DeepSpeed does not read this.
        """
        counters = self.objects.get("engine")
        taken: int = (counters.get("global_steps") or self.step) - counters.get("skipped_steps", 0)
        return taken

    def layer(self, held: Slice, number: int) -> dict[str, Any]:
        """Return the tree of a ``layer_*-model_states.pt``."""
        prefix = self.pipeline.prefix(number) if self.pipeline else ""
        return {k[len(prefix) :]: v for k, v in self._module(held).items() if k.startswith(prefix)}

    def _config(self) -> dict[str, Any]:
        low = {"bfloat16": {"bf16": {"enabled": True}}, "float16": {"fp16": {"enabled": True}}}.get(self.dtype, {})
        dealt_out = {"round_robin_gradients": True} if self.dealt else {}
        return {**self.objects.get("ds_config"), **low, "zero_optimization": {"stage": self.zero, **dealt_out}}

    def _module(self, held: Slice) -> dict[str, Any]:
        found = self._tensors([member for member in (*held.params, *held.buffers) if not member.expert])
        whole = self.pipeline is not None and bool(self._expert_layers(held))  # not in files of layers
        stage = {m.fqn.partition(".")[0] for m in (*held.params, *held.buffers)}
        for name, state in self.objects.modules.items():
            here = not whole or name.partition(".")[0] in stage
            if here and not (self.experts and self.experts.local_name(f"{name}.")):
                found[f"{name}.".lstrip(".") + "_extra_state"] = state
        return found

    def _expert(self, members: Sequence[Member]) -> dict[str, Any]:
        """Return the tree of a ``layer_*_expert_*_model_states.pt``; there names are those of the whole model."""
        place = expert_place(members[0].fqn)
        states = {name: one for name, one in self.objects.modules.items() if expert_place(f"{name}.") == place}
        return {**self._tensors(members), **{f"{name}._extra_state": one for name, one in states.items()}}

    def _tensors(self, members: Iterable[Member]) -> OrderedDict[str, Any]:
        """Return parameters and buffers, with all names that they have."""
        found: OrderedDict[str, Any] = OrderedDict()
        for member in members:
            if (member.fqn, BUFFER) in self.specs:
                found[member.fqn] = member.planned(self.specs[member.fqn, BUFFER])
                continue
            spec = self.param(member)
            found[member.fqn] = Planned(spec.dtype, (0,)) if self.zero == 3 else member.planned(spec)
        for alias, name in self.target.description.aliases.items():
            if name in found:
                found[alias] = found[name]
        return found

    def param(self, member: Member) -> TensorSpec:
        """Return what a parameter is filled from: of a source that has masters alone, those."""
        return self.specs.get((member.fqn, PARAM)) or TensorSpec(member.fqn, PARAM, self.dtype, member.tiling.shape)

    def _shapes(self, held: Slice) -> list[OrderedDict[str, torch.Size]]:
        groups = held.groups
        if self.zero == 3:
            groups = tuple(members for sub_groups in self.optimizer.sub_groups(held) for members in sub_groups)
        return [OrderedDict((m.name, torch.Size(m.local)) for m in group) for group in groups]

    def _shared(self, held: Slice) -> dict[str, str]:
        names = {member.fqn for member in held.params if not member.expert}
        return {alias: name for alias, name in self.target.description.aliases.items() if name in names}

    def _fragments(self, held: Slice, rank: int, module: dict[str, Any]) -> dict[str, Planned] | None:
        """Return what DeepSpeed fills the engine's frozen parameters from, if there is anything at all."""
        if self.zero < 3:
            # All, in the same storages: what is frozen there need not be here, or was taken for a buffer.
            return {m.fqn: module[m.fqn] for m in (*held.params, *held.buffers) if not m.expert}
        if not held.frozen and not self.has_optimizer:
            return None  # weights alone come by another way, frozen or not
        ranks = self.parallel.data
        shards = {m.fqn: (self.param(m), -(-m.numel // ranks), m) for m in held.frozen}
        return {
            fqn: Planned(spec.dtype, (size,), tuple(of_shard(m, spec, ranks, rank)))
            for fqn, (spec, size, m) in shards.items()
        }


def file_of(tree: Tree) -> Callable[[], TorchFile]:
    """Return what makes the file of a tree."""
    return lambda: TorchFile(tree())


def _later(function: Callable[[Slice, int], dict[str, Any]], held: Slice, rank: int) -> Tree:
    return lambda: function(held, rank)
