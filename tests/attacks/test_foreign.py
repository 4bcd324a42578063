"""Files of other formats by somebody who wants code to run, memory to fill up, or a wrong tensor. See README.md."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.convert.options import ReadOptions
from ckpt.convert.torchfile import pickle_machine
from ckpt.convert.torchfile.file import read_pickle, read_tree
from ckpt.convert.torchfile.read import open_torch
from ckpt.errors import CkptError, FormatError, MalformedData, UnsupportedFeature
from ckpt.store.local import LocalStore
from ckpt.store.memory import MemoryStore

ROOM = 64 << 20
"""Bytes that a refusal may take."""


def saved(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def archive(pickled: bytes, records: dict[str, bytes] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as new:
        new.writestr("archive/data.pkl", pickled)
        for name, data in (records or {}).items():
            new.writestr(name, data)
    return out.getvalue()


def read(data: bytes) -> Any:
    store = MemoryStore()
    store.put("x.pt", data)
    return read_tree(store, "x.pt")


def refused(data: bytes, error: type[CkptError] = FormatError) -> str:
    """It is refused by name, within bounded memory."""
    tracemalloc.start()
    try:
        with pytest.raises(error) as caught:
            read(data)
        assert tracemalloc.get_traced_memory()[1] < ROOM
    finally:
        tracemalloc.stop()
    assert "'x.pt' in memory" in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------- code in a pickle


@pytest.fixture
def trap(monkeypatch):
    """Whatever a pickle might want to run, or have imported, notes that it was."""
    ran: list[str] = []

    def noting(name: str):
        return lambda *args, **kwargs: ran.append(name)

    wanted = [(os, "system"), (builtins, "eval"), (torch, "load"), (pickle, "loads"), (pickle, "Unpickler")]
    for module, name in [*wanted, (pickle_machine, "import_module")]:
        monkeypatch.setattr(module, name, noting(name))
    return ran


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


CALLS = {
    "reduce": b"\x80\x02cposix\nsystem\n" + text("touch x") + b"\x85R.",
    "reduce of os": b"\x80\x02cos\nsystem\n" + text("touch x") + b"\x85R.",
    "python 2 names": b"\x80\x02c__builtin__\neval\n" + text("1") + b"\x85R.",
    "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x07touch x\x85R.",
    "inst": b"(S'touch x'\nios\nsystem\n.",
    "obj": b"\x80\x02(cos\nsystem\n" + text("touch x") + b"o.",
    "newobj": b"\x80\x02cos\nsystem\n" + text("touch x") + b"\x85\x81.",
    "newobj_ex": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x07touch x\x85}\x92.",
    "build": b"\x80\x02cargparse\nNamespace\n)\x81cos\nsystem\nb.",
    "extension": b"\x80\x02\x82\x01.",
    "import by a module's name": b"\x80\x02ctrapped\nx\n.",
    "getattr of a function": b"\x80\x02cbuiltins\ngetattr\ncbuiltins\neval\nX\x01\0\0\0x\x86R.",
    "getattr of a value": b"\x80\x02cbuiltins\ngetattr\n}X\x05\0\0\0clear\x86R.",
    "a record called": b"\x80\x02cargparse\nNamespace\n)R)R.",
    "a dtype called": b"\x80\x02ctorch\nfloat32\n)R.",
    "a text called": b"\x80\x02X\x01\0\0\0x)R.",
    "torch.load": b"\x80\x02ctorch\nload\nX\x01\0\0\0x\x85R.",
    "hub": b"\x80\x02ctorch.hub\nload\nX\x01\0\0\0x\x85R.",
    "storage from bytes": b"\x80\x02ctorch.storage\n_load_from_bytes\nU\x01x\x85R.",
    "dotted name": b"\x80\x04\x8c\x08builtins\x8c\x11dict.__init__.gcd\x93.",
    "another codec": b"\x80\x02c_codecs\nencode\nX\x01\0\0\0xX\x05\0\0\0rot13\x86R.",
    "codec of bytes": b"\x80\x02c_codecs\nencode\nC\x01xX\x04\0\0\0zlib\x86R.",
    "numpy objects": b"\x80\x02cnumpy\ndtype\nX\x02\0\0\0O8\x85R.",
    "numpy fields": b"\x80\x02cnumpy\ndtype\nX\x0e\0\0\0f4,f4,O,(9,)f4\x85R.",
    "setstate of a tensor": b"\x80\x02ctorch\nSize\n)R}b.",
    "a storage's file": b"\x80\x02X\x0c\0\0\0/etc/passwdaQ.",
}


@pytest.mark.parametrize("code", CALLS.values(), ids=CALLS)
def test_nothing_is_run(code, trap) -> None:
    for data in (archive(code), archive(b"\x80\x02}" + text("model") + code[:-1].removeprefix(b"\x80\x02") + b"s.")):
        refused(data)
    store = MemoryStore()
    store.put("x.pkl", code)
    with pytest.raises(FormatError):
        read_pickle(store, "x.pkl")
    assert trap == []


@pytest.mark.parametrize("at", [0, 15, -1])
def test_nothing_is_run_from_the_old_format(trap, at) -> None:
    """In front of the magic number, behind it, and in place of the pickle with the tree."""
    data = saved({"a": 1}, _use_new_zipfile_serialization=False)
    tree = data.rindex(b"\x80\x02}")
    at = tree if at < 0 else at
    refused(data[:at] + CALLS["reduce of os"] + data[at:])
    assert trap == []


def test_what_is_trusted_does_run(monkeypatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(os, "system", ran.append)
    store = MemoryStore()
    store.put("x.pkl", CALLS["reduce of os"])
    assert read_pickle(store, "x.pkl", trust_pickle=True) is None
    assert ran == ["touch x"]


# ------------------------------------------------------------------------------------------------------------- memory


def nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def doubled(times: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """A pair of two pairs of two pairs …: few bytes, 2 ** times values."""
    pairs = b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(times))
    return b"\x80\x04" + before + b")" + pairs + after + b"."


BOMBS = {
    "nested": nested(20_000),
    "doubled": doubled(60),
    "doubled as a key": doubled(60, b"}", b"Ns"),
    "doubled as keys": doubled(60, b"}(", b"Nu"),
    "doubled in a set": doubled(60, b"\x8f(", b"\x90"),
    "doubled in a frozen set": doubled(60, b"(", b"\x91"),
    "doubled in a set that is made": doubled(60, b"cbuiltins\nset\n", b"\x85\x85R"),
    "doubled in a dictionary that is made": doubled(60, b"cbuiltins\ndict\n", b"N\x86\x85\x85R"),
    "doubled in place of a storage": doubled(60, b"", b"Q"),
    "doubled in place of a device": doubled(60, b"ctorch\ndevice\n", b"\x85R"),
    "doubled in place of a size": doubled(60, b"ctorch\nSize\n", b"\x85R"),
    "doubled in place of a numpy type": doubled(60, b"cnumpy\ndtype\n", b"\x85R"),
    "doubled in place of an encoding": doubled(60, b"c_codecs\nencode\nX\x01\0\0\0x", b"\x86R"),
    "doubled in place of a class": doubled(
        60, b"ctorch._tensor\n_rebuild_from_type_v2\nN", b")}tR".replace(b"t", b"\x87")
    ),
    "in itself": b"\x80\x02]q\0h\0a.",
    "in its own keys": b"\x80\x02}q\0X\x01\0\0\0ah\0s.",
    "a long text": b"\x80\x02X\xff\xff\xff\xff.",
    "a longer text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
    "a long number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "digits": b"L" + b"9" * 100_000 + b"L\n.",
    "a bytearray by size": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "bytes by size": b"\x80\x02cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.",
    "a numpy array by shape": b"\x80\x04cnumpy.core.numeric\n_frombuffer\n(C\x01xcnumpy\ndtype\n\x8c\x02f8\x85R"
    b"J\xff\xff\xff\x7f\x85\x8c\x01CtR.",
    "a far memo": b"\x80\x02Nr\xff\xff\xff\xff0j\xff\xff\xff\xff\x85cbuiltins\neval\n.",
    "no end": b"\x80\x02}" * 1000,
    "marks": b"\x80\x02" + b"(" * 20_000 + b".",
    "no mark": b"\x80\x02Nt.",
    "nothing on the stack": b"\x80\x02.",
    "two things on the stack": b"\x80\x02NN.",
    "a list as a key": b"\x80\x02}]Ns.",
}


@pytest.mark.parametrize("code", BOMBS.values(), ids=BOMBS)
def test_bombs(code) -> None:
    refused(archive(code))


def tensor(shape: tuple, strides: tuple, offset: Any = 0, numel: Any = 4, key: str = "0") -> bytes:
    """A pickle of one tensor in a storage of four floats."""

    class Storage:
        pass

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, strides, False, {})

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, key, "cpu", numel) if isinstance(value, Storage) else None

    out = io.BytesIO()
    Pickler(out, 2).dump(Tensor())
    return out.getvalue()


@pytest.mark.parametrize(
    "of",
    [
        {"shape": (5,), "strides": (1,)},
        {"shape": (4,), "strides": (1,), "offset": 1},
        {"shape": (2, 2), "strides": (3, 1)},
        {"shape": (2,), "strides": (-1,), "offset": 3},
        {"shape": (-1,), "strides": (1,)},
        {"shape": (1,), "strides": (1,), "offset": -1},
        {"shape": (1 << 40,), "strides": (0,)},
        {"shape": (1 << 62, 1 << 62), "strides": (0, 0)},
        {"shape": (2,), "strides": (1 << 62,)},
        {"shape": (2, 2), "strides": (1,)},
        {"shape": (1.5,), "strides": (1,)},
        {"shape": (True,), "strides": (1,)},
        {"shape": ("4",), "strides": (1,)},
        {"shape": (1,) * 1000, "strides": (1,) * 1000},
        {"shape": (1,), "strides": (1,), "offset": "0"},
        {"shape": (4,), "strides": (1,), "numel": 1 << 60},
        {"shape": (4,), "strides": (1,), "numel": -4},
        {"shape": (4,), "strides": (1,), "numel": 3},
        {"shape": (4,), "strides": (1,), "key": "../../etc/passwd"},
        {"shape": (4,), "strides": (1,), "key": "1"},
    ],
    ids=lambda of: str(of)[:80],
)
def test_tensors_outside_of_their_storage(of) -> None:
    assert read(archive(tensor((4,), (1,)), {"archive/data/0": bytes(16)})).shape == (4,)
    refused(archive(tensor(**of), {"archive/data/0": bytes(16)}))


# ---------------------------------------------------------------------------------------------------------------- zip


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "archive/../../x", "archive//x", "other/x", "archive/./x"])
def test_names_that_leave_the_archive(name, tmp_path) -> None:
    assert "a record named" in refused(archive(b"N.", {name: b"x"}), MalformedData)
    assert list(tmp_path.iterdir()) == []


def patched(data: bytes, signature: bytes, at: int, value: bytes) -> bytes:
    """Overwrite a field of the last header of a kind."""
    start = data.rindex(signature) + at
    return data[:start] + value + data[start + len(value) :]


PLAIN = archive(tensor((4,), (1,)), {"archive/data/0": bytes(16)})
CENTRAL, END = b"PK\1\2", b"PK\5\6"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (patched(PLAIN, CENTRAL, 42, b"\0\0\0\0"), "does not fit|twice|another"),  # two records at one place
        (patched(PLAIN, CENTRAL, 42, b"\xf0\xff\xff\x7f"), ""),  # outside of the file
        (patched(PLAIN, CENTRAL, 20, b"\xff\xff\xff\x7f" * 2), "does not fit"),  # 2 GiB
        (patched(PLAIN, CENTRAL, 20, b"\x40\0\0\0" * 2), "does not fit|in the archive"),  # into the directory
        (patched(PLAIN, CENTRAL, 24, b"\xff\xff\xff\x7f"), "compressed"),  # unpacks to 2 GiB
        (patched(PLAIN, CENTRAL, 10, b"\x08\0"), "compressed"),
        (patched(PLAIN, CENTRAL, 8, b"\1\0"), "encrypted"),
        (patched(PLAIN, END, 12, b"\xff\xff\xff\x7f"), ""),  # a directory of 2 GiB
        (patched(PLAIN, END, 16, b"\xff\xff\xff\x7f"), ""),
        (patched(PLAIN, END, 8, b"\xff\xff\xff\xff"), ""),
        (b"PK\3\4" + PLAIN[PLAIN.rindex(END) :][:4] + bytes(18), "without records"),
        (PLAIN[:-4], "truncated"),
        (PLAIN[4:], "no file of torch.save"),
    ],
    ids=[
        "overlap",
        "outside",
        "long",
        "longer",
        "bomb",
        "deflated",
        "encrypted",
        "size",
        "start",
        "count",
        "empty",
        "cut",
        "head",
    ],
)
def test_archives_that_lie(data, said) -> None:
    try:
        read(data)
    except FormatError:
        found = refused(data)
        assert not said or any(part in found for part in said.split("|")), found
    else:  # zipfile mends some of it; then everything must be where it was
        assert read(data) == read(PLAIN)


def test_a_real_bomb_is_not_unpacked() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * (20 << 20) + b"N.")
    assert len(out.getvalue()) < 1 << 18
    assert "compressed" in refused(out.getvalue(), UnsupportedFeature)


def test_a_directory_that_is_larger_than_memory(tmp_path) -> None:
    size = 3 << 30
    with open(tmp_path / "x.pt", "wb") as file:  # a hole of 3 GiB between the magic and a directory that covers it
        file.write(b"PK\3\4" + bytes(60))
        file.seek(size)
        file.write(b"PK\5\6" + struct.pack("<4H2LH", 0, 0, 1, 1, size - 64, 64, 0))
    with pytest.raises(MalformedData, match="asks for"):
        read_tree(LocalStore(tmp_path), "x.pt")


# ------------------------------------------------------------------------------------------------------------- anything

SEEDS = [
    saved({"model": {"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16)}, "step": 3}),
    saved({"w": torch.arange(4.0), "n": [1, "a", (2.5, None)]}, _use_new_zipfile_serialization=False),
]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_is_read_or_refused(data) -> None:
    seed = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(seed) - 1))
        change = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if change == "set":
            seed[at] = data.draw(st.integers(0, 255))
        elif change == "cut":
            del seed[at : at + data.draw(st.integers(1, 8))]
        else:
            seed[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    store = MemoryStore()
    store.put("x.pt", bytes(seed))
    with suppress(CkptError):
        open_torch(store, "there", options=ReadOptions())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([bytes([n]) for n in range(33, 153)] + list(CALLS.values())[:4]), max_size=40))
def test_any_opcodes_are_read_or_refused(parts) -> None:
    with suppress(CkptError):
        read(archive(b"\x80\x02" + b"".join(parts) + b"."))
