"""What an opened checkpoint holds, in a form that two checkpoints of the same state have alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.unit.convert.contents import contents

if TYPE_CHECKING:
    from ckpt.convert.opened import Opened

Content = dict[tuple[str, str], tuple[torch.dtype, tuple[int, ...], bytes]]


def content(opened: Opened) -> Content:
    """Return (name, role) -> dtype, shape, bytes of every tensor: equal for equal state, NaN included."""
    raw = {key: (t, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for key, t in contents(opened).items()}
    return {key: (tensor.dtype, tuple(tensor.shape), data) for key, (tensor, data) in raw.items()}


def objects(opened: Opened) -> dict[str, Any]:
    """Return the objects beside the tensors, but for generators; the members of a group those of all ranks, sorted."""
    found: dict[str, Any] = {}
    for one in opened.objects:
        if one.kind == "rng":
            continue
        tree = plain(one.tree)
        if one.name == "optimizer" and tree is not None:
            before = found.get("optimizer", {"groups": [{"params": []} for _ in tree["groups"]]})
            groups = zip(tree["groups"], before["groups"], strict=True)
            joined = [{**new, "params": sorted({*new["params"], *old["params"]})} for new, old in groups]
            tree = {**tree, "groups": joined}
        found[one.name] = tree
    return found


def plain(tree: Any) -> Any:
    """Return a tree that ``==`` compares: tensors as lists."""
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return type(tree)(map(plain, tree)) if type(tree) in (list, tuple) else tree
