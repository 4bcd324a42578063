"""Any layout to any other and back: whatever was cut how, every element is where it belongs, and nothing has changed.

``CKPT_PAIRS=300 pytest -o faulthandler_timeout=0 tests/property/test_reshard.py`` tries as many pairs of layouts; that
takes minutes.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ckpt.describe.model import Described, ModelSpec, Split, Tied
from ckpt.describe.parallel import STATE, Parallel
from ckpt.describe.placement import Description
from ckpt.errors import ConfigError
from ckpt.layout.spec import PARAM
from ckpt.repo.repository import Repository
from tests.harness.conversions import (
    again,
    convert,
    described,
    differences,
    held_by,
    logical_digest,
    one_file,
    specs_of,
    values_of,
)
from tests.harness.descriptions import ENGINES_AND_STAGES

PAIRS = int(os.environ.get("CKPT_PAIRS", "10"))


@st.composite
def models(draw) -> ModelSpec:
    """Fused QKV with fewer key heads than ranks, fused gate and up, odd sizes, experts, a tie, buffers."""
    layers = draw(st.sampled_from([1, 2, 4]))
    width = draw(st.sampled_from([3, 4, 6, 7]))
    heads, kv = draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (12, 2)]))
    qkv = ((heads * 2, heads), (kv * 2, kv), (kv * 2, kv))
    rows = sum(n for n, _ in qkv)
    tensors = [Described("embed.weight", (draw(st.integers(3, 13)), width), "embedding", split=Split(0, (), True))]
    for i in range(layers):
        at = {"layer": i, "trainable": draw(st.integers(0, 5)) > 0}
        turned = draw(st.booleans())
        shape = (width, rows) if turned else (rows, width)
        tensors += [
            Described(f"layers.{i}.norm", (width,), "norm", **at),
            Described(f"layers.{i}.qkv", shape, split=Split(int(turned), qkv), **at),
            Described(f"layers.{i}.out", (width, heads * 2), split=Split(1, ((heads * 2, heads),)), **at),
            Described(f"layers.{i}.gate_up", (24, width), split=Split(0, ((12, 12), (12, 12))), **at),
            Described(f"layers.{i}.mask", (3,), "buffer", layer=i, dtype="int64", trainable=False),
        ]
        for e in range(draw(st.sampled_from([0, 4])) if i == 0 else 0):
            tensors.append(Described(f"layers.{i}.experts.{e}", (12, 3), "expert", split=Split(0), expert=e, **at))
    tensors.append(Described("norm", (draw(st.integers(1, 9)),), "norm", place="last"))
    tensors.append(Described("count", (), "buffer", place="every", dtype="int64", trainable=False))
    tied = (Tied("head.weight", "embed.weight"),) if draw(st.booleans()) else ()
    return ModelSpec("random", tuple(tensors), tied)


@st.composite
def jobs(draw, model: ModelSpec, **ways) -> Description:
    """The model in one layout out of all that these engines have."""
    engine, zero = draw(st.sampled_from(ENGINES_AND_STAGES))
    pp = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, model.layers), min_size=pp - 1, max_size=pp - 1)))
    parallel = Parallel(
        engine=engine,
        zero=zero,
        dp=draw(st.integers(1, 8)),
        tp=draw(st.integers(1, 4)),
        pp=pp,
        ep=draw(st.sampled_from([1, 2, 4])) if model.experts else 1,
        order=tuple(draw(st.permutations(["pp", "dp", "tp"]))),
        stages=tuple(b - a for a, b in zip([0, *cuts], [*cuts, model.layers], strict=True)),
        decay_groups=draw(st.booleans()),
        **ways,
    )
    try:
        return Description(model, parallel)
    except ConfigError:
        assume(False)
        raise


@st.composite
def pairs(draw) -> tuple[Description, Description]:
    model = draw(models())
    optimizer = draw(st.sampled_from(sorted(STATE)))
    ways = {
        "dtype": draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        "master": optimizer != "none" and draw(st.booleans()),
        "optimizer": optimizer,
    }
    return draw(jobs(model, **ways)), draw(jobs(model, **ways))


@settings(max_examples=PAIRS, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs())
def test_there_and_back(pair) -> None:
    one, other = (described(job) for job in pair)
    specs = specs_of(one.layouts)
    assert specs_of(other.layouts) == specs
    derived = {fqn for layout in one.layouts for fqn in layout.derived}
    values = values_of(specs, derived)
    first = convert(one_file(specs, values, world=len(one.layouts), derived=derived), one)
    there = convert(again(first), other)
    back = convert(again(there), one)
    for store in (first, there, back):
        assert differences(held_by(store), values) == []
    assert logical_digest(held_by(back)) == logical_digest(held_by(first))
    unique = sum(spec.nbytes for spec in specs if not (spec.role == PARAM and spec.fqn in derived))
    totals = [Repository(store).read_commit(7).totals for store in (first, there, back)]
    assert all(total["bytes_unique"] == unique >= total["bytes_written"] for total in totals)
