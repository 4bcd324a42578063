"""Save in one random layout, load in another: no element misplaced, padding never stored, bytes as promised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.format.manifest import DERIVED
from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE, MASTER, PARAM
from ckpt.repo.repository import Repository
from ckpt.repo.verify import verify
from ckpt.store.memory import MemoryStore
from tests.property.fake import (
    KINDS,
    PADDING,
    Layout,
    Model,
    comms,
    cut,
    each,
    engines,
    load_all,
    numbered,
    run_ranks,
    save_all,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = sorted(ITEMSIZE)
shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(0,), (0, 3), (1,), (57,), (13, 3)]),
)


@st.composite
def models(draw) -> Model:
    model = Model()
    for i in range(draw(st.integers(1, 4))):
        fqn, shape = f"layer.{i}", draw(shapes)
        if draw(st.booleans()):
            master = weights(shape, 1000 * i)
            model.tensors[fqn, MASTER] = master
            param = master.to(torch.bfloat16)
            if param.numel() and draw(st.booleans()):  # one element is not what the cast gives
                flat = param.reshape(-1).clone()
                flat[draw(st.integers(0, param.numel() - 1))] = -12345.0
                param = flat.reshape(param.shape)
            model.tensors[fqn, PARAM] = param
            model.derived.add(fqn)
        else:
            model.tensors[fqn, PARAM] = numbered(draw(st.sampled_from(DTYPES)), shape, 10 * i)
        for k, role in enumerate(draw(st.lists(st.sampled_from(["exp_avg", "step", "buffer"]), unique=True))):
            model.tensors[fqn, role] = numbered(draw(st.sampled_from(DTYPES)), shape, 10 * i + k + 1)
    if draw(st.booleans()):
        model.aliases["tied"] = draw(st.sampled_from(sorted({fqn for fqn, _ in model.tensors})))
    return model


@st.composite
def layouts(draw, model: Model, world: int) -> Layout:
    return {
        key: cut(draw(st.sampled_from(KINDS)), tensor.shape, world, draw(st.integers(0, 5)))
        for key, tensor in model.tensors.items()
    }


def accounted(store: MemoryStore, step: int) -> tuple[int, int, int]:
    """Bytes of the state by the index: (stored once per place, everything that is stored, derived)."""
    index = Repository(store).read_index(step)
    places, entries, derived = set(), 0, 0
    for part in index.parts:
        for chunk in part.chunks:
            if chunk.pack == DERIVED:
                derived += chunk.nbytes
            else:
                places.add((part.packs[chunk.pack].key, chunk.start, chunk.nbytes))
                entries += chunk.nbytes
    return sum(n for _, _, n in places), entries, derived


def derivable(model: Model, layout: Layout, fqn: str) -> bool:
    """Is the param cast(master), and is there for each element a rank that can tell because it holds both?"""
    param, master = model.tensors[fqn, PARAM], model.tensors[fqn, MASTER]
    seen = torch.zeros(param.shape, dtype=torch.bool)
    for params, masters in zip(layout[fqn, PARAM], layout[fqn, MASTER], strict=True):
        held = [torch.zeros(param.shape, dtype=torch.bool) for _ in range(2)]
        for mask, boxes in zip(held, (params, masters), strict=True):
            for box in boxes:
                mask[box.relative_to(Box.whole(param.shape))] = True
        seen |= held[0] & held[1]
    return torch.equal(param, master.to(param.dtype)) and bool(seen.all())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_layout_loads_into_any_other(data):
    model = data.draw(models())
    n, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    before, after = data.draw(layouts(model, n)), data.draw(layouts(model, m))
    extra = {"note": data.draw(st.sampled_from([1, "x", None, (1, 2.5)]))}
    store = MemoryStore()
    report = save_all(engines(model, before, n, filled=True), store, extra=extra)[0]

    written, entries, derived = accounted(store, 1)
    total = sum(t.numel() * t.element_size() for t in model.tensors.values())
    assert report.bytes_written == written == sum(report.written_by_rank)
    assert report.bytes_derived == derived
    assert entries + derived == total, "every element is stored once or proved derivable"
    assert report.bytes_unique == model.nbytes()
    if all(derivable(model, before, fqn) for fqn in model.derived):
        assert entries == report.bytes_unique, "a param that is cast(master) costs nothing"
    assert bytes([PADDING] * 8) not in b"".join(v for k, v in store.objects.items() if "/packs/" in k)

    found = verify(Repository(store))
    assert not found.findings, found.findings
    target = engines(model, after, m, filled=False)
    reports = load_all(target, store, extra=extra)
    assert [line for one in target for line in one.differences()] == []
    assert all(one.extra == extra and not one.missing and not one.unexpected for one in reports)
    assert all(one.finished == {} for one in target)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_weight_is_found_at_either_precision(data):
    """A bf16 job with masters loads into an fp32 job and into a bf16 job without masters, each bit for bit."""
    shape = data.draw(shapes)
    low, high = weights(shape, 3).to(torch.bfloat16), weights(shape, 3)
    if low.numel() and data.draw(st.booleans()):
        low = low.clone()
        low.view(-1)[0] = 77.0  # not derivable here
    saved = Model({("w", PARAM): low, ("w", MASTER): high}, derived={"w"})
    n, m = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    store = MemoryStore()
    save_all(engines(saved, data.draw(layouts(saved, n)), n, filled=True), store)
    for wanted in (low, high):
        model = Model({("w", PARAM): wanted})
        target = engines(model, data.draw(layouts(model, m)), m, filled=False)
        load_all(target, store)
        assert [line for one in target for line in one.differences()] == []
    # … and the fp32 job's checkpoint into the bf16 job with masters.
    plain, store = Model({("w", PARAM): high}), MemoryStore()
    save_all(engines(plain, data.draw(layouts(plain, m)), m, filled=True), store)
    model = Model({("w", PARAM): high.to(torch.bfloat16), ("w", MASTER): high}, derived={"w"})
    target = engines(model, data.draw(layouts(model, n)), n, filled=False)
    load_all(target, store)
    assert [line for one in target for line in one.differences()] == []


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_second_save_writes_only_what_has_changed_whatever_the_layout(data):
    n, m = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    frozen, moving = numbered("bfloat16", (9, 5), 1), numbered("float32", (9, 5), 2)
    first = Model({("frozen", PARAM): frozen, ("moving", PARAM): moving})
    second = Model({("frozen", PARAM): frozen, ("moving", PARAM): numbered("float32", (9, 5), 3)})
    layout = data.draw(layouts(first, n))
    store = MemoryStore()
    save_all(engines(first, layout, n, filled=True), store, step=1)
    report = save_all(engines(second, layout, n, filled=True), store, step=2)[0]
    assert report.bytes_written == 9 * 5 * 4
    assert report.bytes_reused == 9 * 5 * 2
    for step, model in ((1, first), (2, second)):
        target = engines(model, data.draw(layouts(model, m)), m, filled=False)
        load_all(target, store, step=step)
        assert [line for one in target for line in one.differences()] == []
    assert ckpt.steps(store) == [1, 2]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_extras_of_any_mix_of_ranks_come_back(data):
    """Ranks need not pass the same extras: whatever a rank passed is stored by somebody and comes back to it."""
    world = data.draw(st.integers(2, 4))
    model = Model({("w", PARAM): numbered("float32", (4,), 1)})
    names = st.dictionaries(st.sampled_from(["a", "b", "zz"]), st.integers(0, 1), max_size=3)
    extras = [data.draw(names) for _ in range(world)]
    layout, store = {("w", PARAM): cut("replicated", (4,), world)}, MemoryStore()
    made = engines(model, layout, world, filled=True)
    each(run_ranks(comms(world), lambda r: ckpt.save(made[r], store, extra=extras[r])))
    reports = load_all(engines(model, layout, world, filled=False), store)
    for rank, report in enumerate(reports):
        assert {k: report.extra.get(k) for k in extras[rank]} == extras[rank]
        assert set(report.extra) == {k for one in extras for k in one}
