from __future__ import annotations

import json
import math

import pytest
import torch

from ckpt.layout.box import Box
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.differing import difference, is_constant
from ckpt.runtime.staging import tensor_bytes

WHOLE = Box((10, 20), (3, 4))


def copies(*values: torch.Tensor) -> list[bytes]:
    return [bytes(tensor_bytes(v)) for v in values]


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_one_bit_of_one_element_is_found_in_every_dtype(dtype):
    right = bytearray(12 * ITEMSIZE[dtype])
    wrong = bytearray(right)
    wrong[6 * ITEMSIZE[dtype]] ^= 1
    found = difference([right, wrong], dtype, WHOLE)
    assert found is not None
    assert (found.box, found.elements) == (Box((11, 22), (1, 1)), 1)
    assert found.unordered == 0
    assert found.max_abs is not None
    assert found.max_abs > 0
    assert difference([right, right, right], dtype, WHOLE) is None


def test_the_box_is_the_smallest_and_the_distance_the_largest_of_any_two_copies():
    a = torch.zeros(3, 4)
    b, c = a.clone(), a.clone()
    b[0, 1], c[1, 3], b[1, 3] = 1.0, -2.0, 0.5
    found = difference(copies(a, b, c), "float32", WHOLE)
    assert found is not None
    assert found.box == Box((10, 21), (2, 3))
    assert (found.elements, found.unordered, found.max_abs) == (2, 0, 2.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_not_finite_is_counted_and_never_a_number(dtype):
    a = torch.zeros(3, 4, dtype=dtype)
    b = a.clone()
    b[0, 0], b[0, 1] = math.nan, math.inf
    found = difference(copies(a, b), str(dtype)[6:], WHOLE)
    assert found is not None
    assert (found.elements, found.unordered, found.max_abs) == (2, 2, None)
    b[2, 2] = 0.5
    found = difference(copies(a, b), str(dtype)[6:], WHOLE)
    assert found is not None
    assert (found.elements, found.unordered, found.max_abs) == (3, 2, 0.5)


def test_bits_decide_not_values():
    a = torch.tensor([math.nan, 0.0])
    other_nan, negative = a.clone(), a.clone()
    other_nan.view(torch.int32)[0] ^= 1
    negative[1] = -0.0
    assert difference(copies(a, a), "float32", Box((0,), (2,))) is None
    found = difference(copies(a, other_nan), "float32", Box((0,), (2,)))
    assert found is not None
    assert (found.box, found.unordered, found.max_abs) == (Box((0,), (1,)), 1, None)
    found = difference(copies(a, negative), "float32", Box((0,), (2,)))
    assert found is not None
    assert (found.box, found.unordered, found.max_abs) == (Box((1,), (1,)), 0, 0.0)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "expected"),
    [
        ("int64", 2**62, 2**62 + 1, 1.0),  # float64 has no such numbers
        ("int64", -(2**63), 2**63 - 1, float(2**64 - 1)),
        ("int8", -128, 127, 255.0),
        ("uint8", 0, 255, 255.0),
        ("bool", 0, 1, 1.0),
        ("float64", -1.7e308, 1.7e308, 1.7976931348623157e308),
        ("complex64", 1 + 1j, 1 + 4j, 3.0),
    ],
)
def test_distances_are_exact_and_fit_json(dtype, a, b, expected):
    kind = getattr(torch, dtype)
    found = difference(copies(torch.tensor(a, dtype=kind), torch.tensor(b, dtype=kind)), dtype, Box((), ()))
    assert found is not None
    assert (found.box, found.max_abs) == (Box((), ()), expected)
    json.dumps(found.max_abs, allow_nan=False)


def test_constant_means_every_element_bit_for_bit():
    assert is_constant(tensor_bytes(torch.full((100,), 3.0)), 4)
    assert is_constant(tensor_bytes(torch.tensor(7)), 8)
    for place in (0, 1, 50, 99):
        other = torch.full((100,), 3.0)
        other[place] = -3.0
        assert not is_constant(tensor_bytes(other), 4)
    assert not is_constant(tensor_bytes(torch.tensor([0.0, -0.0])), 4)
    assert not is_constant(tensor_bytes(torch.tensor([1, 2], dtype=torch.int8)), 1)
