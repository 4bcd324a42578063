from __future__ import annotations

import itertools
import random

import pytest

from ckpt.errors import AccessDenied, DigestMismatch, MalformedData, MissingChunk, StoreUnavailable
from ckpt.format.digest import digest
from ckpt.format.manifest import BlobEntry, PackRef
from ckpt.repo.transfer import GAP, PIECE, Held, copy_pack, header_of, trouble_with
from ckpt.store.memory import MemoryStore

KEY = "steps/1/a/packs/p.safetensors"


class Watched(MemoryStore):
    """Notes every range that is read and every piece that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[int, int]] = []
        self.written: list[int] = []

    def read_into(self, key, start, buffer):
        self.read.append((start, start + len(buffer)))
        return super().read_into(key, start, buffer)

    def writer(self, key, **options):
        made = super().writer(key, **options)
        whole, written = made.write, self.written

        def write(data):
            written.append(len(data))
            whole(data)

        made.write = write
        return made


def stored(data: bytes, header: int = 16) -> tuple[Watched, PackRef]:
    """A pack whose header is ``header`` bytes and whose data are ``data``."""
    store = Watched()
    head = (header - 8).to_bytes(8, "little") + b" " * (header - 8)
    store.objects[KEY] = head + data
    return store, PackRef(key=KEY, nbytes=len(head) + len(data), header=digest(head))


def held(store: Watched, *ranges: tuple[int, int]) -> list[Held]:
    data = store.objects[KEY]
    return [Held(BlobEntry(digest(data[a:b]), 0, a, b - a), f"{a}-{b}") for a, b in ranges]


def nothing(_nbytes: int) -> None:
    pass


def test_a_pack_is_copied_to_the_byte_with_what_nobody_asked_for():
    src, pack = stored(random.Random(0).randbytes(300_000))
    dst, moved = Watched(), []
    copy_pack(src, dst, pack, held(src, (16, 40), (100_000, 200_000)), moved.append)
    assert dst.objects == src.objects
    assert sum(moved) == pack.nbytes


def test_pieces_are_bounded_whatever_the_pack_holds():
    """Memory is one piece, be the pack of many small chunks, of large ones, or of bytes that nobody asked for."""
    size = 5 * PIECE // 2
    src, pack = stored(bytes(size))
    small = [(a, a + 1000) for a in range(16, size // 2, 1000)]
    for ranges in (small, [(16, PIECE)], [], [(16, 17), (size, size + 16)]):
        src.read.clear()
        dst = Watched()
        copy_pack(src, dst, pack, held(src, *ranges), nothing)
        assert dst.objects == src.objects
        assert max(dst.written) <= PIECE
        assert max(b - a for a, b in src.read) <= PIECE
        assert sum(dst.written) == pack.nbytes
        assert len(dst.written) <= 5, "and small chunks go together"


def test_a_chunk_larger_than_a_piece_is_one_piece():
    src, pack = stored(bytes(PIECE + 5000))
    dst = Watched()
    copy_pack(src, dst, pack, held(src, (20, PIECE + 4000)), nothing)
    assert dst.objects == src.objects
    assert max(dst.written) == PIECE + 3980


def test_only_what_is_wanted_is_read_to_judge_a_pack():
    src, pack = stored(bytes(20 * GAP))
    wanted = held(src, (100, 200), (200, 300), (400, 500), (10 * GAP, 10 * GAP + 7))
    assert trouble_with(src, pack, wanted, nothing) is None
    assert sum(b - a for a, b in src.read) < 3 * GAP
    src.objects[KEY] = src.objects[KEY][: 5 * GAP] + b"\1" + src.objects[KEY][5 * GAP + 1 :]
    assert trouble_with(src, pack, wanted, nothing) is None, "bytes that nobody asked for"


@pytest.mark.parametrize("seed", range(60))
def test_any_bit_flipped_in_what_is_wanted_is_found_and_named(seed):
    """Chunks of any size, some of no bytes, some that overlap or are the same, with holes between them."""
    rng = random.Random(seed)
    size = rng.choice([40, 5000, 3 * GAP])
    src, pack = stored(rng.randbytes(size))
    cuts = sorted(rng.randrange(16, pack.nbytes + 1) for _ in range(rng.randrange(2, 12)))
    ranges = [pair for pair in itertools.pairwise(cuts) if rng.random() < 0.7]
    ranges += [tuple(sorted(rng.sample(cuts, 2))) for _ in range(rng.randrange(3))]
    ranges += [*ranges[:1], (16, 16), (pack.nbytes, pack.nbytes)]
    wanted = held(src, *ranges)
    whole = src.objects[KEY]
    copy_pack(src, Watched(), pack, wanted, nothing)
    assert trouble_with(src, pack, wanted, nothing) is None
    for start, stop in {r for r in ranges if r[0] < r[1]}:
        at = rng.randrange(start, stop)
        src.objects[KEY] = whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
        hit = [f"object '{a}-{b}'" for a, b in ranges if a <= at < b]
        dst = Watched()
        with pytest.raises(DigestMismatch, match=r"expected xxh3-128:.*found xxh3-128:") as caught:
            copy_pack(src, dst, pack, wanted, nothing)
        assert any(name in str(caught.value) for name in hit)
        assert KEY in str(caught.value)
        assert dst.objects == {}
        assert any(name in str(trouble_with(src, pack, wanted, nothing)) for name in hit)
    for at in (0, 3, 8, 15):
        src.objects[KEY] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        with pytest.raises((DigestMismatch, MalformedData), match="header"):
            copy_pack(src, Watched(), pack, wanted, nothing)


def test_a_pack_that_ends_too_early_is_a_missing_chunk():
    src, pack = stored(bytes(1000))
    src.objects[KEY] = src.objects[KEY][:500]
    dst = Watched()
    with pytest.raises(MissingChunk, match=r"ends at 500, expected bytes up to 1016"):
        copy_pack(src, dst, pack, [], nothing)
    assert dst.objects == {}


def test_a_header_length_that_cannot_be_is_refused_before_it_is_read():
    src, pack = stored(bytes(1000))
    src.objects[KEY] = b"\xff" * 8 + src.objects[KEY][8:]
    with pytest.raises(MalformedData, match=r"length \d+ does not fit a file of 1016 bytes"):
        header_of(src, pack)
    assert src.read == []


def test_packs_of_releases_that_recorded_no_header_digest_are_copied_too():
    src, pack = stored(bytes(1000))
    bare = PackRef(key=KEY, nbytes=pack.nbytes)
    dst = Watched()
    copy_pack(src, dst, bare, held(src, (16, 1016)), nothing)
    assert dst.objects == src.objects


@pytest.mark.parametrize("error", [StoreUnavailable("503", KEY), AccessDenied("not yours", KEY)])
def test_a_store_that_is_busy_says_nothing_about_the_pack(error, monkeypatch):
    src, pack = stored(bytes(1000))

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(src, "read_into", refuse)
    with pytest.raises(type(error)):
        trouble_with(src, pack, held(src, (16, 20)), nothing)
