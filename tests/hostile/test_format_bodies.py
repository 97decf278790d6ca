"""Bodies that an attacker or a bad disk could send: each ends in a CorruptError naming tensor and tile."""

import struct
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slackwater.checkpoint.codec import decode_tile, encode_tile
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import Encoding, TensorEntry, TileEntry
from slackwater.checkpoint.tensor import Bits, TileWrite, tile_at
from slackwater.errors import CorruptError, WrongBaseError


@dataclass(frozen=True, kw_only=True)
class Case:
    old: Bits
    new: Bits
    entry: TensorEntry
    body: bytes

    def decode(self, body: bytes | None = None, tile: TileEntry | None = None) -> TileWrite | None:
        sent = self.body if body is None else body
        listed = replace(tile or self.entry.tiles[0], length=len(sent))
        return decode_tile(self.entry, tile_at(self.entry.spec, 0), listed, memoryview(sent), self.old)


def make(encoding: Encoding) -> Case:
    rng = np.random.default_rng(3)
    old = rng.integers(0, 2**16, 400, dtype=np.uint16)
    new: Bits = np.zeros_like(old) if encoding == "full" else old.copy()
    new[::9] ^= 3
    encoded = encode_tile(old, new)
    assert encoded is not None
    assert encoded.encoding == encoding
    tile = TileEntry(
        index=0,
        encoding=encoded.encoding,
        object=0,
        offset=0,
        length=len(encoded.body),
        changed=encoded.changed,
        pre=tile_digest(old),
        post=tile_digest(new),
    )
    entry = TensorEntry(name="model.w", dtype="BF16", shape=(old.size,), tiles=(tile,))
    return Case(old=old, new=new, entry=entry, body=encoded.body)


SPARSE = make("sparse")
FULL = make("full")
CASES = [pytest.param(SPARSE, id="sparse"), pytest.param(FULL, id="full")]


def frame(plane: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(plane)


def sparse_body(head: bytes, *planes: bytes) -> bytes:
    return head + struct.pack(f"<{len(planes)}I", *map(len, planes)) + b"".join(planes)


@pytest.mark.parametrize("case", CASES)
def test_every_truncation_is_refused(case: Case) -> None:
    for end in range(len(case.body)):
        with pytest.raises(CorruptError, match=r"model\.w tile 0"):
            case.decode(case.body[:end])


@pytest.mark.parametrize("case", CASES)
def test_a_flipped_bit_never_gives_other_weights(case: Case) -> None:
    for bit in range(8 * len(case.body)):
        body = bytearray(case.body)
        body[bit // 8] ^= 1 << bit % 8
        try:
            write = case.decode(bytes(body))
        except CorruptError:
            continue
        # A few bits of a zstd frame mean nothing to its reader; the result is proved all the same.
        assert write is not None
        result = case.old.copy()
        result[slice(None) if write.positions is None else write.positions] = write.values
        assert result.tobytes() == case.new.tobytes()


@pytest.mark.parametrize("case", CASES)
def test_bytes_after_the_end_are_refused(case: Case) -> None:
    with pytest.raises(CorruptError, match="end: 1 bytes follow"):
        case.decode(case.body + b"\0")


@pytest.mark.parametrize("case", CASES)
@given(body=st.binary(max_size=200))
def test_noise_is_refused(case: Case, body: bytes) -> None:
    with pytest.raises(CorruptError):
        case.decode(body)


@pytest.mark.parametrize("case", CASES)
def test_a_body_of_another_length_than_listed_is_refused(case: Case) -> None:
    listed = case.entry.tiles[0]
    with pytest.raises(CorruptError, match="length"):
        decode_tile(case.entry, tile_at(case.entry.spec, 0), listed, memoryview(case.body + b"x"), case.old)


@pytest.mark.parametrize("case", CASES)
def test_a_count_that_does_not_add_up_is_refused(case: Case) -> None:
    listed = replace(case.entry.tiles[0], changed=case.entry.tiles[0].changed - 1)
    with pytest.raises(CorruptError, match="changed"):
        case.decode(tile=listed)


def test_swapped_tiles_are_refused_by_their_digests() -> None:
    other = replace(SPARSE.entry.tiles[0], post=tile_digest(SPARSE.old[::-1].copy()))
    with pytest.raises(CorruptError, match="post"):
        SPARSE.decode(tile=other)
    with pytest.raises(WrongBaseError, match=r"model\.w tile 0"):
        SPARSE.decode(tile=replace(SPARSE.entry.tiles[0], pre=tile_digest(SPARSE.new)))


@pytest.mark.parametrize(
    ("head", "field"),
    [
        (struct.pack("<IBBH", 0, 1, 2, 0), "count"),
        (struct.pack("<IBBH", 401, 1, 2, 0), "count"),
        (struct.pack("<IBBH", 2**32 - 1, 1, 2, 0), "count"),
        (struct.pack("<IBBH", 45, 0, 2, 0), "gap width"),
        (struct.pack("<IBBH", 45, 3, 2, 0), "gap width"),
        (struct.pack("<IBBH", 45, 255, 2, 0), "gap width"),
        (struct.pack("<IBBH", 45, 1, 4, 0), "step width"),
        (struct.pack("<IBBH", 45, 1, 2, 1), "reserved"),
    ],
)
def test_a_lying_header_is_refused_by_field(head: bytes, field: str) -> None:
    with pytest.raises(CorruptError, match=rf"model\.w tile 0: {field}"):
        SPARSE.decode(head + SPARSE.body[8:])


def test_gaps_that_leave_the_tile_are_refused() -> None:
    gaps = frame(b"\xff" * 4)
    wide = struct.pack("<IBBH", 1, 4, 2, 0)
    steps = (frame(b"\2"), frame(b"\0"))
    with pytest.raises(CorruptError, match="gaps: they reach element 4294967295"):
        SPARSE.decode(sparse_body(wide, *[frame(b"\xff")] * 4, *steps))
    two = struct.pack("<IBBH", 4, 1, 2, 0)
    with pytest.raises(CorruptError, match="gaps"):
        SPARSE.decode(sparse_body(two, gaps, frame(b"\2" * 4), frame(b"\0" * 4)))


def test_a8_09_a_bomb_is_refused_before_it_is_inflated() -> None:
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(64 * 1024 * 1024))
    nameless = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(bytes(64 * 1024 * 1024))
    head = struct.pack("<IBBH", 1, 1, 2, 0)
    tracemalloc.start()
    try:
        for plane in (bomb, nameless):
            with pytest.raises(CorruptError, match="plane 0: content size"):
                SPARSE.decode(sparse_body(head, plane, frame(b"\2"), frame(b"\0")))
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


def test_a8_09_a_frame_that_lies_about_its_size_is_refused() -> None:
    honest = frame(bytes(200) + bytes(range(200)))
    small = frame(bytes(range(45)))
    assert zstandard.get_frame_parameters(small).content_size == 45
    lying = small[:5] + bytes([45]) + honest[7:]
    head = struct.pack("<IBBH", 45, 1, 2, 0)
    with pytest.raises(CorruptError, match="plane 0"):
        SPARSE.decode(sparse_body(head, lying, frame(bytes(45)), frame(bytes(45))))


def test_two_frames_in_one_plane_are_refused() -> None:
    head = struct.pack("<IBBH", 1, 1, 2, 0)
    with pytest.raises(CorruptError, match="plane 0"):
        SPARSE.decode(sparse_body(head, frame(b"\0") + frame(b"\0"), frame(b"\2"), frame(b"\0")))
