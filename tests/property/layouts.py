"""Random layouts of jobs, small enough to look at every element: meshes as engines cut them, and wild ones."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from ckpt.layout.box import Box, boxes_of_range
from ckpt.layout.spec import BUFFER, MASTER, PARAM, RankLayout, Shard, TensorSpec
from tests.property.fake import KINDS, cut

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
MOMENTS = ("exp_avg", "exp_avg_sq")


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(o, e) for o, e in zip(box.offsets, box.ends, strict=True))))


@st.composite
def roles_of_tensor(draw) -> tuple[list[tuple[str, str]], bool]:
    """(role, dtype) of one tensor, scalars left out; is the param derived?"""
    kind = draw(st.sampled_from(["mixed", "mixed", "same", "plain", "frozen", "buffer", "unclaimed"]))
    if kind == "buffer":
        return [(BUFFER, "float32")], False
    if kind == "frozen":
        return [(PARAM, "float16")], False
    moments = [(name, "float32") for name in MOMENTS[: draw(st.integers(0, 2))]]
    if kind == "plain":
        return [(PARAM, "float32"), *moments], False
    param = "float32" if kind == "same" else "float16"
    return [(PARAM, param), (MASTER, "float32"), *moments], kind != "unclaimed"


@st.composite
def wild_jobs(draw, max_world: int = 6) -> list[RankLayout]:
    """Every role of every tensor cut in a way of its own."""
    world = draw(st.integers(1, max_world))
    shards: list[list[Shard]] = [[] for _ in range(world)]
    derived = []
    for i in range(draw(st.integers(1, 3))):
        shape = draw(shapes)
        roles, is_derived = draw(roles_of_tensor())
        derived += [f"layers.{i}.w"] * is_derived
        for role, dtype in roles:
            spec = TensorSpec(f"layers.{i}.w", role, dtype, shape)
            for rank, own in enumerate(cut(draw(st.sampled_from(KINDS)), shape, world, draw(st.integers(0, 5)))):
                shards[rank] += [Shard(spec, box) for box in own]
        if len(roles) > 1 and draw(st.booleans()):
            spec = TensorSpec(f"layers.{i}.w", "step", "float32", ())
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                shards[rank].append(Shard(spec, Box((), ())))
    return [RankLayout(rank, tuple(own), (), tuple(derived)) for rank, own in enumerate(shards)]


@st.composite
def mesh_jobs(draw) -> list[RankLayout]:
    """dp x tp x pp, experts over parts of dp; optimizer slices as under ZeRO-1 or everything sliced as under ZeRO-3."""
    dp, tp, pp = draw(st.sampled_from([(2, 1, 1), (4, 1, 1), (2, 2, 1), (3, 2, 1), (2, 1, 2), (2, 2, 2), (4, 2, 1)]))
    ep = draw(st.sampled_from([e for e in (1, 2, 4) if dp % e == 0]))
    zero = draw(st.sampled_from([0, 1, 3]))
    shards: list[list[Shard]] = [[] for _ in range(dp * tp * pp)]
    derived = []
    for i in range(draw(st.integers(1, 3))):
        shape = (tp * draw(st.integers(1, 3)), tp * draw(st.integers(1, 2)))
        cut_dim = draw(st.sampled_from([None, 0, 1]))
        stage = draw(st.integers(0, pp - 1))
        expert = draw(st.sampled_from([None, *range(ep)])) if ep > 1 else None
        roles, is_derived = draw(roles_of_tensor())
        fqn = f"layers.{i}.w"
        derived += [fqn] * is_derived
        replicas = [d for d in range(dp) if expert is None or d % ep == expert]
        for d, t in product(replicas, range(tp)):
            local = Box.whole(shape)
            if cut_dim is not None:
                part = shape[cut_dim] // tp
                local = Box(
                    tuple(t * part if dim == cut_dim else 0 for dim in range(2)),
                    tuple(part if dim == cut_dim else n for dim, n in enumerate(shape)),
                )
            rank = (stage * dp + d) * tp + t
            for role, dtype in roles:
                sliced = zero == 3 or (zero == 1 and role not in (PARAM, BUFFER))
                spec = TensorSpec(fqn, role, dtype, shape)
                boxes = [local]
                if sliced and role != BUFFER:
                    each = -(-local.volume // len(replicas))
                    place = replicas.index(d)
                    low, high = (min(local.volume, each * p) for p in (place, place + 1))
                    boxes = [
                        Box(tuple(a + b for a, b in zip(local.offsets, box.offsets, strict=True)), box.sizes)
                        for box in boxes_of_range(local.sizes, low, high)
                    ]
                shards[rank] += [Shard(spec, box) for box in boxes]
            if len(roles) > 1:
                shards[rank].append(Shard(TensorSpec(fqn, "step", "float32", ()), Box((), ())))
    return [RankLayout(rank, tuple(own), (), tuple(derived)) for rank, own in enumerate(shards)]


any_job = st.one_of(wild_jobs(), mesh_jobs())
