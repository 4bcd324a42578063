from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict, namedtuple
from contextlib import suppress
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import ConfigError, MalformedData
from ckpt.layout.spec import ITEMSIZE
from ckpt.runtime.objects import MAX_DEPTH, decode_object, encode_object
from ckpt.runtime.staging import as_tensor, tensor_bytes
from tests.property.fake import numbered

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def there_and_back(tree: Any) -> Any:
    """As through a checkpoint: the document as bytes, each tensor as its bytes."""
    document, tensors = encode_object(tree, "x")
    json.loads(document)
    copies = [
        as_tensor(bytearray(tensor_bytes(t)), str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors
    ]
    return decode_object(document, copies, "f")


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and bytes(tensor_bytes(a)) == bytes(tensor_bytes(b))
    if isinstance(a, np.longdouble):
        return bool(a == b)  # has padding of any content
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    return bool(a == b)


hashables = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**80), 2**80),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.floats(allow_nan=False),
        st.sampled_from(["$tuple", "$", "$dict", "$tensor"]),
    ),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
arrays = st.sampled_from(
    [
        np.float32(0.1),
        np.float64("nan"),
        np.int64(-5),
        np.bool_(True),
        np.uint8(255),
        np.complex64(1 - 2j),
        np.str_("ü"),
        np.str_(""),
        np.bytes_(b"ab"),
        np.float16(-0.0),
        np.longdouble("0.1"),
        np.zeros((0, 3), "f4"),
        np.array(7),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.array(["a", "bcd"]),
        np.array([b"x", b"yz"]),
        np.array([True, False]),
        np.arange(12.0)[::-3],
        np.ones((2, 2), order="F"),
    ]
)
tensors = st.builds(
    numbered, st.sampled_from(sorted(ITEMSIZE)), st.sampled_from([(), (0,), (0, 3), (1,), (2, 3)]), st.integers(0, 9)
)
trees = st.recursive(
    st.one_of(hashables, st.floats(), st.complex_numbers(), arrays, tensors, st.binary(max_size=9).map(bytearray)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(hashables, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(hashables, inner, max_size=3),
        st.dictionaries(st.sampled_from(["$tensor", "$tuple", "$dict", "a"]), inner, max_size=2),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=250)
@given(trees)
def test_every_tree_comes_back_as_it_was(tree):
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        float("-inf"),
        -0.0,
        5e-324,
        0.1,
        2**63,
        -(2**64),
        10**300,
        10**1200,
        True,
        0,
        "",
        "\ud800",
        "\0",
        None,
        b"",
        bytearray(b"\0"),
        (),
        [],
        {},
        set(),
        frozenset(),
        {1, "a", (2,)},
        {None: 1, 2.5: 2, (3,): 3, b"4": 4, True: 5},
        {"$tuple": [1]},
        {"$x": 1, "y": 2},
        {"$": {}},
        {"a": {"$dict": []}},
        [{"$tensor": 0}],
        complex(float("nan"), -0.0),
        torch.Size([2, 3]),
        torch.Size([]),
        torch.float32,
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("cuda", 3),
        np.random.RandomState(3).get_state(),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_single_values(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::5],
        torch.tensor(1.5).expand(2, 3),
        torch.empty(0, 3).t(),
        torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.nn.Parameter(torch.ones(2)),
        torch.arange(1 << 12)[5:7],
    ],
    ids=["transposed", "strided", "stride 0", "empty", "channels last", "conj", "neg", "parameter", "view"],
)
def test_strided_and_lazy_tensors_come_back_by_value(tensor):
    """Strides ignored at save once scrambled transposed weights; a small view must not carry its whole storage."""
    back = there_and_back({"t": tensor})["t"]
    assert torch.equal(back, tensor.detach().resolve_conj().resolve_neg())
    assert back.is_contiguous()
    assert back.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_mappings_become_dicts_in_their_order():
    for mapping in (OrderedDict(b=1, a=2), defaultdict(int, b=1, a=2), MappingProxyType({"b": 1, "a": 2})):
        assert list(there_and_back(mapping).items()) == [("b", 1), ("a", 2)]


class Loud(IntEnum):
    ONE = 1


Point = namedtuple("Point", "x y")


class Pickled:
    def __reduce__(self) -> tuple[Any, ...]:
        raise AssertionError("pickled")


@pytest.mark.parametrize(
    "value",
    [
        Loud.ONE,
        Point(1, 2),
        Pickled(),
        object(),
        print,
        len,
        type,
        range(3),
        (i for i in ()),
        memoryview(b"x"),
        np.datetime64("2020"),
        np.array([None]),
        np.zeros(1, "i4,f4"),
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        10**5000,
        -(10**4300),
    ],
    ids=lambda v: type(v).__name__ + repr(v)[:12] if not isinstance(v, int | torch.Tensor) else type(v).__name__,
)
def test_what_cannot_be_stored_is_refused_with_its_path(value):
    with pytest.raises(ConfigError, match=r"^extra\['a'\]\[1\]\[2\]: "):
        encode_object({"a": [0, (1, 2, value)]}["a"], "extra['a']")


def test_a_key_that_cannot_be_stored_is_refused_with_its_path():
    with pytest.raises(ConfigError, match=r"^x key "):
        encode_object({Loud.ONE: 1}, "x")


def test_a_tree_that_contains_itself_is_refused():
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ConfigError, match=f"more than {MAX_DEPTH} deep"):
        encode_object(tree, "x")


def test_the_deepest_tree_that_is_written_can_be_read():
    tree: Any = 1
    for n in range(MAX_DEPTH):
        tree = [tree] if n % 3 else ({n: tree},)[0]
    assert same(there_and_back(tree), tree)


HOSTILE = [
    "",
    "{",
    "nul",
    "[" * 100_000,
    '{"a":' * 100_000,
    "1 2",
    "9" * 5000,
    '{"$new": 1}',
    '{"$": 1}',
    '{"$tensor": 1}',
    '{"$tensor": -1}',
    '{"$tensor": true}',
    '{"$tensor": "0"}',
    '{"$tensor": 1e400}',
    '{"$tuple": 5}',
    '{"$set": [[1]]}',
    '{"$set": [{}]}',
    '{"$frozenset": [{"$set": []}]}',
    '{"$dict": [[[1], 2]]}',
    '{"$dict": [[1]]}',
    '{"$dict": 5}',
    '{"$dict": [5]}',
    '{"$bytes": 5}',
    '{"$bytes": "*"}',
    '{"$bytes": "YQ"}',
    '{"$bytearray": "ü"}',
    '{"$float": "x"}',
    '{"$float": []}',
    '{"$complex": ["1"]}',
    '{"$complex": 5}',
    '{"$complex": ["x", "y"]}',
    '{"$size": [1e400]}',
    '{"$size": [1180591620717411303424]}',
    '{"$size": 3}',
    '{"$size": ["x"]}',
    '{"$device": "foo"}',
    '{"$device": 5}',
    '{"$device": "cuda:99999999999"}',
    '{"$device": null}',
    '{"$device": "cpu\\u0000"}',
    '{"$dtype": "load"}',
    '{"$dtype": "torch.load"}',
    '{"$dtype": "__class__"}',
    '{"$dtype": 5}',
    '{"$dtype": ""}',
    '{"$numpy": []}',
    '{"$numpy": ["<f4", [1], ""]}',
    '{"$numpy": ["<f4", [-1], "AAAAAAAAAAA="]}',
    '{"$numpy": ["<f4", [1180591620717411303424], ""]}',
    '{"$numpy": ["|O", [1], "AAAAAAAAAAA="]}',
    '{"$numpy": ["O", [1], "AAAAAAAAAAA="]}',
    '{"$numpy": ["f4,(", [1], ""]}',
    '{"$numpy": ["|V4", [1], "AAAAAA=="]}',
    '{"$numpy": [[["a", "f4"]], [1], "AAAAAA=="]}',
    '{"$numpy": [{"names": ["a"]}, [1], ""]}',
    '{"$numpy": [null, [1], "AAAAAAAAAAA="]}',
    '{"$numpy": ["<f4", [Infinity], ""]}',
    '{"$numpy": ["<f4", {"a": 1}, "AAAAAA=="]}',
    '{"$numpy": ["3<f4", [1], "AAAAAAAAAAAAAAAA"]}',
    '{"$numpy": ["<M8", [1], "AAAAAAAAAAA="]}',
    '{"$numpy": ["<U999999999", [1], ""]}',
    '{"$numpy": ["<f99", [1], ""]}',
    '{"$scalar": ["<f4", [2], ""]}',
    '{"$numpy": ["<f4", [1], 5]}',
    '{"$numpy": ["<f4", "1", "AAAAAA=="]}',
]


@pytest.mark.parametrize("document", HOSTILE, ids=lambda d: repr(d[:50]))
def test_a_hostile_document_is_malformed_never_a_crash(document):
    with pytest.raises(MalformedData, match=r"^f: "):
        decode_object(document.encode("utf-8"), [torch.zeros(1)], "f")


@pytest.mark.parametrize("document", [b"\xff\xfe\x00", b"\x80\x04\x95\x10", b'"\xff"'])
def test_a_document_that_is_no_text_is_malformed(document):
    with pytest.raises(MalformedData):
        decode_object(document, [], "f")


@settings(deadline=None)
@given(trees, st.integers(0), st.integers(1, 255))
def test_a_changed_byte_never_raises_anything_else(tree, at, flip):
    document, tensors_ = encode_object(tree, "x")
    spoiled = bytearray(document)
    spoiled[at % len(spoiled)] ^= flip
    with suppress(MalformedData):
        decode_object(bytes(spoiled), tensors_, "f")
