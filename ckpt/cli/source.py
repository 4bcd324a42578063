"""What the commands that read foreign checkpoints have in common: how a source is opened, and how it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpt.words import count, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt.convert.checking import Checked
    from ckpt.convert.opened import Opened
    from ckpt.convert.options import ReadOptions

FORMATS = ("ckpt", "deepspeed", "universal", "dcp", "megatron", "safetensors", "torch")
"""Names of the formats that are read; a test compares with :mod:`ckpt.convert.find`, whose import takes its time."""


def source_options(body: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of its source."""
    options = (
        click.option("--from", "kind", type=click.Choice(FORMATS), help="Format of SRC (A); default: by looking."),
        click.option("--rules", metavar="FILE", help="How tensor parallelism cuts which tensor (docs/rules.md)."),
        click.option(
            "--check-source",
            is_flag=True,
            help="First compare all of SRC (A and B) with the checksums that files of torch.save have.",
        ),
        click.option(
            "--optimizer-step",
            type=click.IntRange(min=0),
            help="Steps that the optimizer has taken, if DeepSpeed's files rightly differ from their engine's count.",
        ),
        click.option(
            "--trust-pickle",
            is_flag=True,
            help="Unpickle whatever the source's files ask for. That runs code from them: only for files of your own.",
        ),
    )
    for option in reversed(options):
        body = option(body)
    return body


def read_options(given: dict[str, Any]) -> tuple[ReadOptions, str | None]:
    """Return how the source is to be read, and its format if it was named.

    Raises:
        ConfigError: the rules cannot be read.
    """
    from ckpt.convert.options import ReadOptions
    from ckpt.engine.parallel import read_rules

    rules = read_rules(given["rules"]) if given["rules"] is not None else None
    said = ReadOptions(trust_pickle=given["trust_pickle"], rules=rules, optimizer_step=given["optimizer_step"])
    return said, given["kind"]


def checked_words(checked: Checked) -> list[str]:
    """Return what a comparison with checksums has found."""
    right = f"{count(checked.records, 'record')} of {count(checked.files, 'file')} ({size(checked.nbytes)})"
    return [*([f"checked: {right} have their checksums"] if checked.files else []), *checked.unsaid]


def step_words(opened: Opened) -> str:
    """Return what a checkpoint is, in a few words."""
    known = [f"{name} {n}" for name, n in opened.degrees.items() if name != "zero" and n > 1]
    known += [f"ZeRO-{opened.degrees['zero']}"] if "zero" in opened.degrees else []
    layout = f" ({', '.join(known)})" if known else ""
    return f"{opened.format}, step {opened.step}, {count(opened.world, 'rank')}{layout}"
