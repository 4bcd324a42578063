from __future__ import annotations

import numpy as np
import pytest

from ckpt.convert.compare import PIECE_BYTES, Row, compare, compare_written
from ckpt.convert.find import open_source
from ckpt.convert.options import ReadOptions
from ckpt.errors import DigestMismatch
from ckpt.layout.spec import TensorSpec
from tests.harness.steps import three_steps
from tests.unit.convert.sources import Source

EMPTY = {"n": (0, 4)}


def rows(a: Source, b: Source, **options) -> list[Row]:
    return compare(a.open(), b.open(), **options)


def small() -> Source:
    return Source().weights({"w": (4, 6), "v": (3,), **EMPTY}, ("param", "exp_avg", "step"))


def test_equal_is_equal() -> None:
    found = rows(small(), small())
    assert {row.status for row in found} == {"equal"}
    assert len(found) == 9
    assert [(row.fqn, row.role) for row in found][:3] == [("n", "exp_avg"), ("n", "param"), ("n", "step")]


def test_what_differs_by_how_much_and_in_how_many_elements() -> None:
    a, b = Source(), Source()
    values = np.arange(6, dtype="f4")
    a.put("w", "param", (6,), "float32", values.tobytes())
    other = values.copy()
    other[[1, 4]] += [0.5, -2]
    b.put("w", "param", (6,), "float32", other.tobytes())
    assert rows(a, b) == [Row("w", "param", "different", 2, 0, 2.0)]
    other[0] = np.nan
    b = Source().put("w", "param", (6,), "float32", other.tobytes())
    assert rows(a, b) == [Row("w", "param", "different", 3, 1, 2.0)]


def test_a_tensor_larger_than_a_piece_is_compared_to_its_end() -> None:
    size = 3 * PIECE_BYTES // 4 + 7
    values = np.arange(size, dtype="f4")
    a = Source().put("w", "param", (size,), "float32", values.tobytes())
    values[-1] -= 3
    values[0] += 1
    b = Source().put("w", "param", (size,), "float32", values.tobytes())
    told = []
    assert rows(a, b, progress=lambda *now: told.append(now)) == [Row("w", "param", "different", 2, 0, 3.0)]
    assert told == [(4 * size, 4 * size)]


def test_what_is_missing_is_told_of_each_side() -> None:
    a = small().weights({"only": (2,)})
    b = small().add("v", "momentum", (3,))
    found = {(row.fqn, row.role): row.status for row in rows(a, b) if row.status != "equal"}
    assert found == {("only", "param"): "only_a", ("v", "momentum"): "only_b"}
    assert [r.status for r in rows(a, b, roles=("momentum",))] == ["only_b"]


def test_a_tied_name_is_the_tensor_that_is_listed() -> None:
    a, b = Source().weights({"embed": (3, 2)}), Source().weights({"embed": (3, 2), "head": (3, 2)})
    a.builder.aliases["head"] = "embed"
    assert {row.status for row in rows(a, b)} == {"equal"}
    assert {row.status for row in rows(b, a)} == {"equal"}


def test_a_weight_is_one_thing_at_two_precisions() -> None:
    both = Source().add("w", "param", (8,), "bfloat16").add("w", "master", (8,))
    fp32 = Source().add("w", "param", (8,))
    master = Source().add("w", "master", (8,))
    assert [(r.role, r.status) for r in rows(both, master)] == [("master", "equal"), ("param", "equal")]
    assert {r.note for r in rows(both, master)} == {"", "compared with the rounding of the other side's master"}
    assert [(r.role, r.status) for r in rows(fp32, master)] == [("param", "equal")]
    for a, b in ((both, fp32), (fp32, both)):
        assert {r.status for r in rows(a, b)} == {"equal"}, "an fp32 engine and one with masters"
    low = Source().add("w", "param", (8,), "bfloat16")
    assert rows(low, fp32) == [Row("w", "param", "different", note="dtype bfloat16 and float32")]
    found = {(r.role, r.status, r.note) for r in rows(both, low)}
    assert found == {("param", "equal", ""), ("master", "only_a", "")}
    off = Source().add("w", "param", (8,), first=0.001)
    assert {r.status for r in rows(both, off)} == {"different"}


def test_a_buffer_may_be_a_param_to_a_format_that_does_not_know() -> None:
    assert {r.status for r in rows(Source().add("b", "buffer", (3,)), Source().add("b", "param", (3,)))} == {"equal"}


def test_of_a_name_that_is_param_and_buffer_on_one_side_each_is_compared_with_its_own() -> None:
    both = Source().add("b", "buffer", (3,)).put("b", "param", (3,), "float32", bytes(12))
    assert [(row.role, row.status) for row in rows(both, Source().add("b", "buffer", (3,)))] == [
        ("buffer", "equal"),
        ("param", "only_a"),
    ]


def test_counts_are_numbers_and_shapes_and_dtypes_are_told() -> None:
    a, b = Source().add("w", "step", (), "float32", 7), Source().add("w", "step", (), "int64", 7)
    assert [row.status for row in rows(a, b)] == ["equal"]
    b = Source().add("w", "step", (), "int64", 9)
    assert rows(a, b) == [Row("w", "step", "different", 1, 0, 2.0)]
    a, b = Source().add("w", "param", (4, 2)), Source().add("w", "param", (8,))
    assert rows(a, b) == [Row("w", "param", "different", note="shape [4, 2] and [8]")]
    b = Source().add("w", "param", (4, 2), "float64")
    assert rows(a, b) == [Row("w", "param", "different", note="dtype float32 and float64")]
    b = Source().put("w", "param", (4, 2), "complex64", bytes(64))
    assert rows(a, b)[0].note == "dtype float32 and complex64"


def test_what_was_to_be_written_is_cast_like_there() -> None:
    a = Source().add("w", "param", (8,), first=0.1)
    low = Source().add("w", "param", (8,), "bfloat16")
    specs = [TensorSpec("w", "param", "bfloat16", (8,)), TensorSpec("v", "param", "float32", (2,))]
    found = compare_written(Source().add("w", "param", (8,)).open(), low.open(), specs)
    assert [(r.fqn, r.status) for r in found] == [("v", "only_a"), ("w", "equal")]
    assert compare_written(a.open(), low.open(), specs[:1])[0].status == "different"


def test_it_does_not_matter_how_a_tensor_is_cut(tmp_path) -> None:
    a, b = Source(), Source()
    raw = np.arange(24, dtype="f4")
    a.put("w", "param", (4, 6), "float32", raw.tobytes())
    spec = b.builder.spec("w", "param", "float32", (4, 6))
    for n, (first, stop) in enumerate([(0, 5), (5, 17), (17, 24)]):
        b._store.put(f"part{n}", raw[first:stop].tobytes())
        b.builder.add_range(spec, first, stop, f"part{n}", 0)
    assert [row.status for row in rows(a, b)] == ["equal"]
    other = Source().put("w", "param", (6, 4), "float32", raw.tobytes())
    assert [row.status for row in rows(a, other)] == ["different"], "the shape counts"
    root = three_steps(tmp_path / "root")
    first, second = (open_source(str(root), step=n, options=ReadOptions()) for n in (1, 2))
    differing = {(row.fqn, row.role) for row in compare(first, second) if row.status != "equal"}
    assert differing == {("w", "param"), ("small", "buffer")}


def test_damage_is_an_error_and_no_difference(tmp_path) -> None:
    root = three_steps(tmp_path / "root")
    good = open_source(str(root), step=1, options=ReadOptions())
    pack = next((root / "steps/1").rglob("rank00000*"))
    raw = bytearray(pack.read_bytes())
    raw[-1] ^= 1
    pack.write_bytes(raw)
    with pytest.raises(DigestMismatch, match="tensor 'emb'"):
        compare(good, good)


def test_what_a_cast_makes_infinite_is_counted() -> None:
    values = np.array([1, 1e6, -1e6, np.inf, np.nan, 65504], "f4")
    source = Source().put("w", "param", (6,), "float32", values.tobytes()).open()
    with np.errstate(over="ignore"):
        cast = values.astype("f2")
    written = Source().put("w", "param", (6,), "float16", cast.tobytes()).open()
    found = compare_written(source, written, [TensorSpec("w", "param", "float16", (6,))])
    assert found == [Row("w", "param", "equal", overflowed=2)]
    same = compare_written(source, source, source.specs)
    assert same == [Row("w", "param", "equal")]
