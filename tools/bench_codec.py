"""How small the state of a really trained model gets, and how fast: the measurement behind docs/adr/0008-codec.md.

``tools/setup && .venv/bin/python tools/bench_codec.py``

A small byte-level GPT learns Python's standard library. Its state is cut into chunks as a save would cut it. Rates are
of one core, in MB of raw bytes a second of CPU time, the fastest of several passes, with the byte planes included.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import zstandard
from measure import machine
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from ckpt.format.codec import PLANES_HASH_LOG
from ckpt.format.planes import shuffle, unshuffle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK = 4 << 20
CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 128, 8, 256, 4, 4


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then transform."""
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """A byte-level GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte."""
        return self.head(self.norm(self.blocks(self.token(x) + self.place.weight)))


def text() -> torch.Tensor:
    """Return the source of Python's standard library, a few MB of it."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def trained(steps: int, console: Console) -> dict[str, list[torch.Tensor]]:
    """Return role -> tensors of a mixed-precision job: bf16 parameters, fp32 masters, Adam's moments."""
    torch.manual_seed(0)
    data, model = text(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, started = [], time.monotonic()
    for _ in range(steps):
        at = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        batch = data[at].long()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [p.detach() for p in model.parameters()]
    size, seconds = sum(p.numel() for p in weights) / 1e6, time.monotonic() - started
    console.print(f"{size:.1f} M parameters, {steps} steps in {seconds:.0f} s, loss {losses[0]:.2f} → {losses[-1]:.2f}")
    return {
        "param": [p.bfloat16() for p in weights],
        "master": weights,
        "exp_avg": [optimizer.state[p]["exp_avg"] for p in model.parameters()],
        "exp_avg_sq": [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()],
    }


def chunks(tensors: list[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of tensors in chunks."""
    for tensor in tensors:
        data = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
        yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))


class Result(NamedTuple):
    """Bytes before by bytes after, and MB/s."""

    ratio: float
    encode: float
    decode: float


def parameters(level: int, **changes: int) -> zstandard.ZstdCompressionParameters:
    """Return a level of zstd's, with some of its parameters replaced."""
    return zstandard.ZstdCompressionParameters.from_level(level, write_content_size=True, **changes)


CANDIDATES = {
    "zstd 1": (False, parameters(1)),
    "zstd 3": (False, parameters(3)),
    "planes, zstd 1": (True, parameters(1)),
    "planes, zstd 3": (True, parameters(3)),
    f"planes, zstd 1, table 2^{PLANES_HASH_LOG}": (True, parameters(1, hash_log=PLANES_HASH_LOG)),
}
"""Name -> with byte planes?, zstd's parameters. The last is what ckpt does."""


def measured(
    pieces: list[memoryview], width: int, planes: bool, how: zstandard.ZstdCompressionParameters, passes: int
) -> Result:
    """Encode and decode all pieces several times."""
    compressor, decompressor = zstandard.ZstdCompressor(compression_params=how), zstandard.ZstdDecompressor()
    total = sum(map(len, pieces))

    def encode(piece: memoryview) -> bytes:
        return compressor.compress(shuffle(piece, width) if planes else piece)

    frames = [encode(piece) for piece in pieces]
    targets = [memoryview(bytearray(len(piece))) for piece in pieces]

    def decode(frame: bytes, target: memoryview) -> None:
        if planes:
            unshuffle(decompressor.decompress(frame), width, target)
        else:
            target[:] = decompressor.decompress(frame)

    def decode_all() -> None:
        for frame, target in zip(frames, targets, strict=True):
            decode(frame, target)

    encoding = fastest(lambda: [encode(piece) for piece in pieces], passes)
    decoding = fastest(decode_all, passes)
    if targets != pieces:
        raise SystemExit("the codec does not give back what it was given")
    return Result(total / sum(map(len, frames)), total / encoding / 1e6, total / decoding / 1e6)


def fastest(work: Callable[[], object], passes: int) -> float:
    """Return the CPU seconds of the fastest pass."""
    seconds = []
    for _ in range(passes):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--passes", type=int, default=5, help="over each role and codec (default 5)")
    options = parser.parse_args()
    console = Console(width=110, highlight=False)
    state = trained(options.steps, console)
    about = machine()
    table = Table(title=f"one core of {about['cores']} ({about['cpu']}), load average {os.getloadavg()[0]:.1f}")
    for column in ("role", "codec", "ratio", "encode MB/s", "decode MB/s"):
        table.add_column(column, justify="left" if column in ("role", "codec") else "right")
    for role, tensors in state.items():
        pieces, width = list(chunks(tensors)), tensors[0].element_size()
        for name, (planes, how) in CANDIDATES.items():
            found = measured(pieces, width, planes, how, options.passes)
            rates = (f"{found.ratio:.3f}", f"{found.encode:.0f}", f"{found.decode:.0f}")
            table.add_row(f"{role}, {str(tensors[0].dtype)[6:]}", name, *rates)
    console.print(table)


if __name__ == "__main__":
    main()
