from __future__ import annotations

import pytest

from ckpt.describe.model import Described, ModelSpec, Split, Tied
from ckpt.errors import ConfigError, LayoutError
from ckpt.layout.rules import Part, TensorRule


@pytest.mark.parametrize(
    ("rule", "shape", "split"),
    [
        ({}, (8, 4), None),
        ({"dim": -1}, (8, 4), Split(1)),
        ({"dim": 0, "heads": 2}, (8, 4), Split(0, ((8, 2),))),
        ({"dim": 0, "stride": 2}, (8, 4), Split(0, ((4, 4), (4, 4)))),
        ({"dim": 0, "fused": (Part(4, 2), 4)}, (8, 4), Split(0, ((4, 2), (4, 4)))),
        ({"dim": 0, "size": 8}, (8, 4), Split(0, (), True)),
    ],
)
def test_rules_become_splits(rule, shape, split) -> None:
    assert Split.of_rule(TensorRule(match="x", **rule), shape) == split


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"dim": 2}, "cuts dimension 2"),
        ({"dim": 0, "size": 9}, "says size 9, the tensor has 8"),
        ({"dim": 0, "stride": 3}, "8 rows are not 3 equal parts"),
        ({"dim": 0, "fused": (4, 5)}, "add up to 9, expected 8"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rule, said) -> None:
    with pytest.raises(ConfigError, match=said):
        Split.of_rule(TensorRule(match="x", **rule), (8, 4))


def runs(split: Split, size: int, degree: int, *, uneven: bool = False, multiple: int | None = None):
    return [split.runs(size, degree, rank, uneven=uneven, multiple=multiple) for rank in range(degree)]


def test_a_padded_vocabulary_is_held_without_its_padding() -> None:
    found = runs(Split(0, (), True), 10, 4, multiple=2)
    assert found == [(((0, 4),), 4), (((4, 4),), 4), (((8, 2),), 4), ((), 4)]


def test_uneven_rows_are_chunked_only_where_the_engine_may() -> None:
    assert runs(Split(0), 5, 2, uneven=True) == [(((0, 3),), 3), (((3, 2),), 2)]
    with pytest.raises(LayoutError, match="tp 2 does not divide size 5"):
        runs(Split(0), 5, 2)


def test_neighbours_share_a_head_that_there_are_too_few_of() -> None:
    found = runs(Split(0, ((8, 4), (4, 2))), 12, 4)
    assert [r for r, _ in found] == [((0, 2), (8, 2)), ((2, 2), (8, 2)), ((4, 2), (10, 2)), ((6, 2), (10, 2))]


def test_a_model_that_cannot_be_lists_all_problems() -> None:
    model = ModelSpec(
        "m",
        (
            Described("a", (2, 0)),
            Described("a", (2,), "what"),
            Described("b", (2**40, 2**40), dtype="float3", place="middle"),
        ),
        (Tied("c", "d"), Tied("a", "b")),
    )
    with pytest.raises(ConfigError) as caught:
        model.check()
    assert "8 problems" in str(caught.value)
    with pytest.raises(ConfigError, match="has no tensors"):
        ModelSpec("m", ()).check()


def test_named_shapes() -> None:
    model = ModelSpec.from_named_shapes({"w": (3, 2), "b": [3]}, {"n": ((), "int64")}, {"v": "w"})
    assert [(t.fqn, t.kind, t.trainable) for t in model.tensors] == [
        ("w", "matrix", True),
        ("b", "norm", True),
        ("n", "buffer", False),
    ]
    assert (model.parameters, model.layers, model.experts) == (9, 0, 0)
