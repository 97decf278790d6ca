import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slackwater.checkpoint.codec import EncodedTile, decode_dense, decode_tile, encode_tile
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import TensorEntry, TileEntry
from slackwater.checkpoint.planes import join_planes, narrowest, split_planes, steps_between, steps_onto
from slackwater.checkpoint.tensor import Bits, TileWrite, tile_at
from slackwater.errors import CorruptError, InvalidInputError, WrongBaseError

NAMES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}


def listed(encoded: EncodedTile, old: Bits, new: Bits) -> TensorEntry:
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
    return TensorEntry(name="w", dtype=NAMES[old.itemsize], shape=(old.size,), tiles=(tile,))


def decode(entry: TensorEntry, body: bytes, old: Bits) -> TileWrite | None:
    return decode_tile(entry, tile_at(entry.spec, 0), entry.tiles[0], memoryview(body), old)


def written(write: TileWrite | None, old: Bits) -> Bits:
    result = old.copy()
    if write is None:
        return result
    if write.positions is None:
        return write.values
    result[write.positions] = write.values
    return result


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """Two states of one tile: any width, any bits, any density."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    size = draw(st.integers(1, 300))
    dtype = np.dtype(f"<u{width}")
    old = draw(hnp.arrays(dtype, size))
    other = draw(hnp.arrays(dtype, size))
    mask = draw(hnp.arrays(np.bool_, size))
    return old, np.where(mask, other, old)


@given(pairs())
def test_decoding_gives_the_new_bits_back(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    encoded = encode_tile(old, new)
    if encoded is None:
        assert old.tobytes() == new.tobytes()
        return
    assert encoded.changed == int((old != new).sum())
    write = decode(listed(encoded, old, new), encoded.body, old)
    assert written(write, old).tobytes() == new.tobytes()


@given(pairs())
def test_steps_are_a_bijection_and_zero_only_where_equal(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    steps = steps_between(old, new)
    assert steps_onto(old, steps).tobytes() == new.tobytes()
    assert ((steps == 0) == (old == new)).all()


@pytest.mark.parametrize("width", [1, 2])
def test_every_pattern_of_a_narrow_element_steps_onto_every_neighbour(width: int) -> None:
    every = np.arange(256**width, dtype=f"<u{width}")
    for shift in (0, 1, 7, 128):
        other = np.roll(every, shift)
        assert (steps_onto(every, steps_between(every, other)) == other).all()


def test_neighbouring_numbers_are_one_step_apart_across_zero() -> None:
    line = np.array([0x8001, 0x8000, 0x0000, 0x0001], dtype="<u2")
    assert steps_between(line[:-1], line[1:]).tolist() == [2, 2, 2]


@given(hnp.arrays(np.dtype("<u4"), st.integers(1, 50)))
def test_planes_join_to_what_was_split(values: Bits) -> None:
    assert (join_planes(split_planes(values), values.dtype) == values).all()


@pytest.mark.parametrize(("largest", "width"), [(0, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), (2**32 - 1, 4)])
def test_gaps_take_the_narrowest_width(largest: int, width: int) -> None:
    assert narrowest(np.array([0, largest], dtype=np.int64)).itemsize == width


@pytest.mark.parametrize("gap", [255, 256, 257, 65535, 65536, 65537])
def test_gaps_at_the_cut_points_survive(gap: int) -> None:
    old: Bits = np.zeros(gap + 3, dtype="<u2")
    new = old.copy()
    new[[0, gap, gap + 2]] = [1, 2, 3]
    encoded = encode_tile(old, new)
    assert encoded is not None
    write = decode(listed(encoded, old, new), encoded.body, old)
    assert write is not None
    assert write.positions is not None
    assert write.positions.tolist() == [0, gap, gap + 2]


def test_a1_08_bits_are_compared_not_values() -> None:
    old = np.array([0x3F80, 0x8000, 0x7FC0, 0x7FC1], dtype="<u2")
    new = np.array([0x3F81, 0x0000, 0x7FC1, 0x7FC1], dtype="<u2")
    encoded = encode_tile(old, new)
    assert encoded is not None
    assert encoded.changed == 3
    result = written(decode(listed(encoded, old, new), encoded.body, old), old)
    digest = hashlib.sha256(result.tobytes()).hexdigest()
    assert digest == "0184a5fa008a79ca971eaa285ed85d3871a7d9fcb8a4ade8d77bef2e9440dec2"


def test_nothing_changed_has_no_body() -> None:
    bits = np.array([0x7FC1, 0x8000], dtype="<u2")
    assert encode_tile(bits, bits.copy()) is None


def test_a_sparse_change_is_written_sparse_and_a_dense_one_dense() -> None:
    old: Bits = np.zeros(800, dtype="<u2")
    for changed, dense in ((100, False), (101, True)):
        new = old.copy()
        new[:changed] = 1
        encoded = encode_tile(old, new)
        assert encoded is not None
        write = decode(listed(encoded, old, new), encoded.body, old)
        assert write is not None
        assert (write.positions is None) is dense
        assert write.num_bytes == (1600 if dense else 100 * 6)


def test_a_tile_that_becomes_constant_is_sent_whole() -> None:
    old = np.random.default_rng(1).integers(0, 2**16, 5000, dtype=np.uint16)
    new: Bits = np.zeros_like(old)
    encoded = encode_tile(old, new)
    assert encoded is not None
    assert encoded.encoding == "full"
    assert len(encoded.body) < 100
    write = decode(listed(encoded, old, new), encoded.body, old)
    assert written(write, old).tobytes() == new.tobytes()


def test_a_typical_step_costs_few_bits_per_changed_element() -> None:
    rng = np.random.default_rng(2)
    old = (rng.standard_normal(2**20).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    new = old.copy()
    chosen = rng.random(old.size) < 0.0142
    new[chosen] += rng.choice(np.array([1, 2**16 - 1], dtype="<u2"), int(chosen.sum()))
    encoded = encode_tile(old, new)
    assert encoded is not None
    assert len(encoded.body) * 8 / encoded.changed < 12


@settings(max_examples=50)
@given(pairs())
def test_applying_twice_is_harmless(pair: tuple[Bits, Bits]) -> None:
    old, new = pair
    encoded = encode_tile(old, new)
    if encoded is not None:
        assert decode(listed(encoded, old, new), encoded.body, new) is None


def test_decoding_never_writes_what_is_held() -> None:
    old = np.array([1, 2, 3, 4], dtype="<u2")
    new = np.array([1, 9, 3, 8], dtype="<u2")
    old.flags.writeable = False
    encoded = encode_tile(old, new)
    assert encoded is not None
    assert written(decode(listed(encoded, old, new), encoded.body, old), old).tolist() == [1, 9, 3, 8]


def test_another_base_is_told_with_tensor_and_tile() -> None:
    old, new = np.array([1, 2], dtype="<u2"), np.array([1, 3], dtype="<u2")
    encoded = encode_tile(old, new)
    assert encoded is not None
    with pytest.raises(WrongBaseError, match="w tile 0"):
        decode(listed(encoded, old, new), encoded.body, np.array([7, 7], dtype="<u2"))


@pytest.mark.parametrize("held", [np.zeros(2, dtype="<u4"), np.zeros(3, dtype="<u2"), np.zeros((1, 2), dtype="<u2")])
def test_bits_that_are_not_this_tile_are_the_callers_fault(held: np.ndarray[Any, Any]) -> None:
    old, new = np.array([1, 2], dtype="<u2"), np.array([1, 3], dtype="<u2")
    encoded = encode_tile(old, new)
    assert encoded is not None
    with pytest.raises(InvalidInputError):
        decode(listed(encoded, old, new), encoded.body, held)
    with pytest.raises(InvalidInputError):
        encode_tile(held, new)


def test_raw_bodies_are_views_and_are_proved() -> None:
    values = np.array([5, 6, 7], dtype="<u2")
    body = values.tobytes()
    entry = listed(EncodedTile(encoding="sparse", body=body, changed=3), values, values)
    raw = TileEntry(0, "raw", 0, 0, 6, 3, None, tile_digest(values))
    bits = decode_dense(entry, tile_at(entry.spec, 0), raw, memoryview(body))
    assert bits.tolist() == [5, 6, 7]
    assert not bits.flags.owndata
    with pytest.raises(CorruptError, match="w tile 0: post"):
        decode_dense(entry, tile_at(entry.spec, 0), raw, memoryview(b"\0" * 6))
    with pytest.raises(CorruptError, match="w tile 0: length"):
        decode_dense(entry, tile_at(entry.spec, 0), raw, memoryview(body[:4]))
