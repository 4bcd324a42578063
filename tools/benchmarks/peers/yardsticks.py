"""The simplest writers there are: every rank writes the tensors that it holds into a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.engines import leaves
from benchmarks.peers.base import Peer


class _OwnFile(Peer):
    has_async: ClassVar[bool] = False
    yardstick: ClassVar[bool] = True
    suffix: ClassVar[str]

    def _file(self, place: str) -> Path:
        return Path(place) / f"rank{self.job.rank}.{self.suffix}"

    def save_sync(self, place: str) -> None:
        Path(place).mkdir(parents=True, exist_ok=True)
        self._write(self._file(place))

    def _write(self, path: Path) -> None:
        raise NotImplementedError


class TorchSave(_OwnFile):
    """``torch.save`` and ``torch.load`` with memory mapping."""

    name: ClassVar[str] = "torch.save"
    suffix: ClassVar[str] = "pt"

    def _write(self, path: Path) -> None:
        torch.save(self.job.own_state(), path)

    def load(self, place: str) -> None:
        read = torch.load(self._file(place), mmap=True)
        with torch.no_grad():
            for mine, theirs in zip(leaves(self.job.own_state()), leaves(read), strict=True):
                mine.copy_(theirs)


class SafeTensors(_OwnFile):
    """``safetensors.torch.save_file`` and ``safe_open``."""

    name: ClassVar[str] = "safetensors"
    packages: ClassVar[tuple[str, ...]] = ("safetensors",)
    suffix: ClassVar[str] = "safetensors"

    def _flat(self) -> dict[str, torch.Tensor]:
        return dict(_flatten(self.job.own_state()))

    def _write(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in self._flat().items()}, path)

    def load(self, place: str) -> None:
        from safetensors import safe_open

        with safe_open(self._file(place), "pt") as file, torch.no_grad():
            for name, tensor in self._flat().items():
                tensor.copy_(file.get_tensor(name))


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [item for key, value in tree.items() for item in _flatten(value, f"{prefix}/{key}" if prefix else key)]
