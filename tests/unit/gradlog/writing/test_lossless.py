"""A gradient in the fewest bytes that hold it, and never in fewer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.gradlog.writing.lossless import Keeper

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def check(grad: torch.Tensor, keeper: Keeper | None = None) -> torch.dtype:
    kept = (keeper or Keeper()).keep(grad)
    assert torch.equal(bits(kept.restored(grad.dtype)), bits(grad))
    assert not len(grad) or kept.data.data_ptr() != grad.data_ptr()
    return kept.data.dtype


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 65536, 0.123456789, 0.9999999, 3.7e-4, 1 / 3])
@pytest.mark.parametrize("size", [1, 2, 63, 65, 200_000])
def test_what_was_half_is_kept_as_half(dtype, scale, size) -> None:
    generator = torch.Generator().manual_seed(size)
    half = torch.randn(size, generator=generator).mul_(0.02 if dtype is torch.bfloat16 else 40.0).to(dtype)
    grad = half.float().mul_(torch.tensor(scale, dtype=torch.float32))
    assert check(grad).itemsize == 2


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 10**6), st.sampled_from(sorted(HALF)))
def test_any_multiplier_is_found(seed, millionths, name) -> None:
    half = torch.randn(300, generator=torch.Generator().manual_seed(seed)).mul_(8.0).to(HALF[name])
    assert check(half.float().mul_(millionths / 10**6)).itemsize == 2


def test_what_has_more_bits_is_kept_whole() -> None:
    assert check(torch.randn(10_000, generator=torch.Generator().manual_seed(1))) is torch.float32


def test_one_element_that_does_not_fit_is_enough() -> None:
    grad = torch.randn(100_000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).float()
    grad[77_777] += 1e-3
    assert check(grad) is torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0])
def test_signs_of_zero_and_what_is_no_number(value) -> None:
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).float() * 0.3
    grad[5] = value
    grad[900] = value
    check(grad)


@pytest.mark.parametrize("tiny", [1e-38, 1e-40, 1e-44])
def test_gradients_below_the_smallest_normal_number(tiny) -> None:
    check(torch.randn(1000, generator=torch.Generator().manual_seed(4)) * tiny)


@pytest.mark.parametrize("zeros", [0, 1, 5000])
def test_zeros_cost_two_bytes(zeros) -> None:
    assert check(torch.zeros(zeros)).itemsize == 2


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_the_largest_element_need_not_be_in_the_sample(dtype) -> None:
    half = torch.randn(10_000, generator=torch.Generator().manual_seed(8)).mul_(1e-3).to(dtype)
    half[4321] = 900.0
    assert check(half.float() * 0.011).itemsize == 2


def test_few_rows_of_a_large_embedding() -> None:
    grad = torch.zeros(1_000_000)
    grad[123_456:123_520] = torch.randn(64, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).float() * 0.7
    assert check(grad).itemsize == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_kept_as_they_are(dtype) -> None:
    assert check(torch.randn(100, generator=torch.Generator().manual_seed(6)).to(dtype)) is dtype


def test_the_multiplier_changes_from_step_to_step() -> None:
    keeper, generator = Keeper(), torch.Generator().manual_seed(7)
    for step in range(20):
        half = torch.randn(5000, generator=generator).to(torch.bfloat16).float()
        assert check(half * (1.0 / (1.0 + step * 0.37)), keeper).itemsize == 2
