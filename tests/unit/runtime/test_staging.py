from __future__ import annotations

import numpy as np
import pytest
import torch

from ckpt.errors import MalformedData, UnsupportedLayout
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.staging import as_tensor, cast_bytes, tensor_bytes
from tests.property.fake import numbered

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3)])
def test_bytes_and_back_for_every_dtype(dtype, shape):
    tensor = numbered(dtype, shape, 3)
    data = tensor_bytes(tensor)
    assert (data.format, data.ndim, len(data)) == ("B", 1, tensor.numel() * ITEMSIZE[dtype])
    back = as_tensor(bytearray(data), dtype, shape)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bytes(tensor_bytes(back)) == bytes(data)


def test_a_contiguous_cpu_tensor_is_not_copied():
    tensor = torch.arange(10.0)
    view = tensor_bytes(tensor[2:5])
    tensor[2] = -1
    assert np.frombuffer(view, "f4")[0] == -1


def test_strides_are_resolved_to_row_major():
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert bytes(tensor_bytes(tensor.t())) == np.arange(6, dtype="i4").reshape(2, 3).T.tobytes()
    assert bytes(tensor_bytes(torch.tensor(7, dtype=torch.uint8).expand(3))) == b"\7\7\7"
    conj = torch.tensor([1 + 2j]).conj()
    assert bytes(tensor_bytes(conj)) == np.array([1 - 2j], "c8").tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "complex64"])
def test_one_element_of_a_transposed_tensor_has_bytes(dtype):
    """torch calls it contiguous and leaves it a stride that no byte view can have: the save was refused."""
    tensor = numbered(dtype, (3, 4), 1)
    one = tensor.t()[2:3, 1:2]
    assert bytes(tensor_bytes(one)) == bytes(tensor_bytes(tensor[1:2, 2:3].clone()))
    assert bytes(tensor_bytes(tensor.t()[2:3, 1])) == bytes(tensor_bytes(one))
    assert bytes(tensor_bytes(tensor[::2, ::3][1:, 1:])) == bytes(tensor_bytes(tensor[2, 3].clone()))
    assert bytes(tensor_bytes(tensor.t()[:0])) == b""


def test_bits_are_kept_nan_payloads_and_minus_zero_too():
    raw = bytes.fromhex("0100c07f 010080ff 00000080 010080 7f".replace(" ", ""))
    tensor = as_tensor(bytearray(raw), "float32", (4,))
    assert bytes(tensor_bytes(tensor)) == raw
    target = torch.zeros(4)
    target.copy_(tensor)
    assert bytes(tensor_bytes(target)) == raw


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"])
def test_a_tensor_without_plain_memory_is_refused(tensor):
    with pytest.raises(UnsupportedLayout, match="no plain bytes"):
        tensor_bytes(tensor)


@pytest.mark.parametrize("offset", range(9))
def test_a_chunk_may_start_anywhere_in_a_span(offset):
    values = numbered("float64", (3,), 1)
    span = bytearray(offset) + bytearray(tensor_bytes(values))
    assert torch.equal(as_tensor(memoryview(span)[offset:], "float64", (3,)), values)


@pytest.mark.parametrize(
    ("size", "shape"),
    [(0, (3,)), (0, ()), (8, (3,)), (16, (3,)), (12, (-3,)), (12, (-1, -3)), (0, (-1, 0)), (0, (2**50,))],
)
def test_bytes_that_are_not_this_tensor_are_refused(size, shape):
    """With no bytes at all, memory of that size would be handed out as it was found."""
    with pytest.raises(MalformedData, match="bytes for a tensor"):
        as_tensor(bytearray(size), "float32", shape)


@pytest.mark.parametrize("name", ["load", "float99", "nn", "", "__class__"])
def test_a_name_that_is_no_dtype_is_refused(name):
    with pytest.raises(UnsupportedLayout, match="no dtype"):
        as_tensor(bytearray(4), name, (1,))


def test_a_cast_rounds_to_nearest_even():
    masters = torch.tensor([1.00390625, 1.01171875, 1e-40, float("inf")])  # halfway down, halfway up, subnormal
    assert bytes(cast_bytes(masters, torch.bfloat16)) == bytes(tensor_bytes(masters.bfloat16()))
    assert torch.equal(
        as_tensor(bytearray(cast_bytes(masters, torch.bfloat16)), "bfloat16", (4,)),
        torch.tensor([1.0, 1.015625, 1e-40, float("inf")]).bfloat16(),
    )
