"""DeepSpeed's universal checkpoint: each parameter's state whole, in files of its own, for any number of ranks.

What ``ds_to_universal`` makes, and a little more: the model files that engines of ZeRO-1 and 2 ask for *and* those that
engines of ZeRO-3 ask for, so that one checkpoint serves all stages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.convert.deepspeed.write import DeepSpeedFiles, file_of
from ckpt.convert.deepspeed.write_experts import refuse_experts
from ckpt.convert.deepspeed.write_optim import VERSION, whole_tensor
from ckpt.convert.deepspeed.write_slice import Member, Slice, whole_slice
from ckpt.convert.deepspeed.write_state import loss_scaler
from ckpt.convert.file_writing import write_files
from ckpt.convert.torchfile.pickle_write import Instance, Named
from ckpt.describe.model import refuse
from ckpt.describe.parallel import Parallel
from ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt.convert.deepspeed.write import Tree
    from ckpt.convert.opened import Opened
    from ckpt.convert.options import WriteOptions, Written
    from ckpt.convert.target import Target
    from ckpt.describe.model import Split
    from ckpt.store.base import Store

_ADAM = {"exp_avg", "exp_avg_sq"}
_LONGEST = 255
"""Bytes of a name in a file system."""
_INFO = {"universal_checkpoint_version": 0.4}


def write_universal(opened: Opened, store: Store, target: Target, options: WriteOptions) -> Written:
    """Write ``global_step<N>_universal/…`` and, last, ``latest_universal``.

    Args:
        opened: the source.
        store: root of the target, which is what ``load_checkpoint`` gets as ``load_dir``; its engine's config has
            ``"checkpoint": {"load_universal": true}``.
        target: its degrees do not matter; its rules of tensor parallelism are written beside the tensors.
        options: see :class:`~ckpt.convert.options.WriteOptions`.

    Raises:
        ConfigError: the source has no optimizer state, which is all that this format is for.
        UnsupportedLayout, LayoutError, MissingState: the source has what the format cannot hold, or lacks what it must.
        StoreError, IntegrityError: reading or writing failed.
    """
    made = UniversalFiles(opened, target, options)
    if not made.has_optimizer:
        raise ConfigError("a universal checkpoint is loaded through the optimizer: it cannot hold weights alone")
    made.check_names()
    files = [(f"{made.tag}/{key}", file_of(tree)) for key, tree in made.files()]
    written = write_files(opened, store, options, files, {"latest_universal": made.tag.encode()})
    return replace(written, format="universal", lost=(*made.lost, *made.unread()), made=made.made_up)


class UniversalFiles(DeepSpeedFiles):
    """The files, each made when it is its turn; keys are below the tag."""

    def __init__(self, opened: Opened, target: Target, options: WriteOptions) -> None:
        super().__init__(opened, target, options)
        self.tag = f"{self.tag}_universal"
        self.held = self.slices[0]

    def _parallel(self) -> Parallel:
        return Parallel(engine="deepspeed", zero=1)

    def _experts(self) -> None:
        """There is no place for them: engines would look for the experts of all ranks under the same names."""
        refuse_experts(self.opened, self.target)

    def _slices(self) -> list[list[Slice]]:
        return [[whole_slice(self.target)]]

    def files(self) -> Iterator[tuple[str, Tree]]:
        """Yield (key, what makes the tree) of all files."""
        yield "mp_rank_00_model_states.pt", lambda: self._with_info(self.model(self.held, 0))
        yield (
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            lambda: self._with_info({**self.model(self.held, 0), "module": {}}),
        )
        yield "zero/optimizer_state.pt", self._common
        splits = {t.fqn: t.split for t in self.target.description.model.tensors}
        for group in self.held.groups:
            state = self.optimizer.state.elementwise(group)
            for n, member in enumerate(group):
                split = splits[member.fqn]
                yield from self._of(member, {role: fillings[n] for role, fillings in state.items()}, split)

    def _of(self, member: Member, state: dict[str, Any], split: Split | None) -> Iterator[tuple[str, Tree]]:
        folder = f"zero/{member.fqn}"
        for role, filling in {"fp32": self.optimizer.state.master(member), **state}.items():
            tensor = whole_tensor(member, filling)
            yield f"{folder}/{role}.pt", lambda tensor=tensor: {"param": tensor, **_cut(member, split)}  # type: ignore[misc]
        for role, value in self.optimizer.state.scalars([member]).items():
            if role == "step":
                yield f"{folder}/step.pt", lambda value=value: value  # type: ignore[misc]

    @staticmethod
    def _with_info(tree: dict[str, Any]) -> dict[str, Any]:
        return {**tree, "universal_checkpoint_info": _INFO}

    def _common(self) -> dict[str, Any]:
        """Return what all parameters share: settings, in the words of ZeRO-1 and 2 and in those of ZeRO-3."""
        scaler = loss_scaler(self.objects, self.dtype, self.made)
        options = [{**self.optimizer.state.options(g), "params": [n]} for n, g in enumerate(self.held.number)]
        state = {n: self.optimizer.state.scalars(group) for n, group in enumerate(self.held.groups)}
        return {
            "loss_scaler": scaler,
            "dynamic_loss_scale": scaler.attributes["dynamic"],
            "overflow": False,
            "zero_stage": 1,
            "partition_count": [1] * len(options),
            "ds_version": VERSION,
            "param_groups": options,
            "optimizer_state_dict": {"state": state, "param_groups": options},
        }

    def check_names(self) -> None:
        """Raise :class:`ConfigError` if a tensor's name cannot be that of a folder, which this format makes of it."""
        problems = [
            f"tensor {member.fqn!r:.300}"
            for group in self.held.groups
            for member in group
            if any(part in ("", ".", "..") or len(part.encode()) > _LONGEST for part in member.fqn.split("/"))
        ]
        if problems:
            refuse("a universal checkpoint has a folder for each parameter, and these are no names of one", problems)

    def unread(self) -> list[str]:
        """Return a line for each thing that is in the files and that DeepSpeed does not read back from them."""
        found = []
        if self.held.frozen or self.held.buffers:
            found.append(
                "frozen parameters and buffers: in mp_rank_00_model_states.pt, which DeepSpeed does not read them "
                "back from when it loads a universal checkpoint"
            )
        options = [self.optimizer.state.options(g) for g in self.held.number]
        if any(one != options[0] for one in options):
            found.append("settings of groups: an engine of ZeRO-3 gives those of the first group to all")
        roles = set().union(*(self.optimizer.state.elementwise(group) for group in self.held.groups))
        if roles != _ADAM:
            found.append(
                f"optimizer state {sorted(roles)}: an engine of ZeRO-3 reads {sorted(_ADAM)}, and nothing else"
            )
        return found


def _cut(member: Member, split: Split | None) -> dict[str, Any]:
    """Return how tensor parallelism cuts a tensor, in DeepSpeed's words; nothing for one that it does not cut."""
    if split is None:
        return {}
    if split.vocabulary:
        return {"vocab_tensor": True, "cat_dim": split.dim}
    sizes = tuple(size for size, _ in split.parts)
    if len(sizes) < 2:
        return {"cat_dim": split.dim}
    if len(set(sizes)) == 1:
        return {"cat_dim": split.dim, "param_n_sub_params": len(sizes)}
    shape = tuple(sizes if d == split.dim else size for d, size in enumerate(member.local))
    kind = Named("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    return {"sub_param_shape": Instance(kind, {"patterns": [], "shape": shape, "partition_dim": split.dim})}
