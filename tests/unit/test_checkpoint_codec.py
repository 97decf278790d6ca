"""Bodies: whatever a step changes, applying its body gives exactly the new bits, in no more bytes than these have."""

import hashlib
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from codec_rig import LEVELS, Sent, Step, moved, place, sent, step, steps, weights, written
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint.codec import DENSE_SHARE, Level, Place, apply_body, decode_body, encode_body
from slackwater.checkpoint.dense import encode_dense
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.element_sum import element_sum, seed_of
from slackwater.checkpoint.sparse import contexts_of
from slackwater.checkpoint.tensor import WIDTHS, Bits, TensorSpec, tile_at
from slackwater.errors import InvalidInputError, WrongBaseError

OLD = np.array([0x3F80, 0x8000, 0x7FC0, 0x7FC1], dtype="<u2")
NEW = np.array([0x3F81, 0x0000, 0x7FC1, 0x7FC1], dtype="<u2")


def in_canaries(bits: Bits) -> tuple[Bits, Bits]:
    """A copy between elements that nobody may write: all of it, and the part in the middle."""
    edge = np.full(64, 0x5A, dtype=bits.dtype)
    whole = np.concatenate((edge, bits, edge))
    return whole, whole[64:-64]


def held_by(made: Sent) -> tuple[list[Bits], list[Bits]]:
    wholes, held = zip(*(in_canaries(old) for old in made.olds), strict=True)
    return list(wholes), list(held)


def assert_canaries_live(wholes: list[Bits]) -> None:
    assert all((whole[:64] == 0x5A).all() and (whole[-64:] == 0x5A).all() for whole in wholes)


@settings(max_examples=examples(300))
@given(steps(), st.sampled_from(LEVELS))
def test_every_step_arrives_bit_for_bit(made: Step, level: Level) -> None:
    before = [old.tobytes() for old in made.olds]
    encoded = made.encode(level)
    if encoded is None:
        assert made.num_changed == 0
        return
    assert sum(tile.changed for tile in encoded.entry.tiles) == made.num_changed
    assert all(tile.changed and tile.pre != tile.post for tile in encoded.entry.tiles)
    news = [new.tobytes() for new in encoded.news]
    assert written(encoded.decode(), encoded.olds) == news
    wholes, held = held_by(encoded)
    assert encoded.apply(held) == len(held)
    assert [bits.tobytes() for bits in held] == news
    assert_canaries_live(wholes)
    assert [old.tobytes() for old in made.olds] == before


@settings(max_examples=examples(60))
@given(steps(), st.sampled_from(LEVELS))
def test_applying_twice_is_skipped(made: Step, level: Level) -> None:
    encoded = made.encode(level)
    if encoded is None:
        return
    held = [old.copy() for old in encoded.olds]
    encoded.apply(held)
    after = [bits.tobytes() for bits in held]
    assert encoded.apply(held) == 0
    assert encoded.decode(held) == [None] * len(held)
    assert [bits.tobytes() for bits in held] == after


@settings(max_examples=examples(60))
@given(steps(), st.sampled_from(LEVELS), st.data())
def test_a_body_applied_to_some_of_its_tiles_goes_on_or_is_refused_by_name(
    made: Step, level: Level, data: st.DataObject
) -> None:
    encoded = made.encode(level)
    if encoded is None:
        return
    done = data.draw(st.lists(st.booleans(), min_size=len(encoded.olds), max_size=len(encoded.olds)))
    held = [
        (new if is_done else old).copy() for old, new, is_done in zip(encoded.olds, encoded.news, done, strict=True)
    ]
    before = [bits.tobytes() for bits in held]
    is_sparse = encoded.encoded.encoding == "sparse"
    if len(set(done)) == 2 and is_sparse and contexts_of(memoryview(encoded.body)) > 1:
        assert level == "wan"
        with pytest.raises(WrongBaseError, match=r"has its new bits and .* its old ones"):
            encoded.apply(held)
        assert [bits.tobytes() for bits in held] == before
    else:
        assert encoded.apply(held) == done.count(False)
        assert [bits.tobytes() for bits in held] == [new.tobytes() for new in encoded.news]


@settings(max_examples=examples(100))
@given(steps(), st.sampled_from(LEVELS))
def test_a_body_is_never_larger_than_the_elements(made: Step, level: Level) -> None:
    encoded = made.encode(level)
    if encoded is None:
        return
    full = sum(new.nbytes for new in encoded.news)
    assert len(encoded.body) <= full
    dense = encode_dense(encoded.olds, encoded.news)
    if dense is not None:
        assert len(encoded.body) <= len(dense)


@settings(max_examples=examples(100))
@given(steps(), st.sampled_from(LEVELS))
def test_the_sums_move_by_what_the_body_says(made: Step, level: Level) -> None:
    encoded = made.encode(level)
    if encoded is None:
        return
    for tile, old, new in zip(encoded.encoded.tiles, encoded.olds, encoded.news, strict=True):
        seed = seed_of(tile.place.spec.name)
        before, after = (element_sum(seed, tile.place.tile, bits) for bits in (old, new))
        assert (before + tile.sum_change) % 2**64 == after != before
        assert (tile.pre, tile.post) == (tile_digest(old), tile_digest(new))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", WIDTHS)
def test_every_dtype_takes_its_largest_steps(dtype: str, level: Level) -> None:
    """From the lowest place on the line to the middle and back, and half the line from each pattern."""
    top, ones = 1 << (8 * WIDTHS[dtype] - 1), (1 << 8 * WIDTHS[dtype]) - 1
    ends = np.array([0, top, ones, top - 1, 1, ones - 1], dtype=f"<u{WIDTHS[dtype]}")
    old: Bits = np.zeros(500, dtype=ends.dtype)
    for before in ends:
        for after in ends:
            old[7], new = before, old.copy()
            new[7] = after
            if before != after:
                encoded = sent(step(dtype, old, new), level)
                assert encoded.encoded.encoding == "sparse"
                assert written(encoded.decode(), [old]) == [new.tobytes()]


@pytest.mark.parametrize("level", LEVELS)
def test_a1_08_bits_are_compared_and_never_values(level: Level) -> None:
    encoded = sent(step("BF16", OLD, NEW), level)
    assert encoded.entry.tiles[0].changed == 3
    (result,) = written(encoded.decode(), [OLD])
    digest = hashlib.sha256(result).hexdigest()
    assert digest == "0184a5fa008a79ca971eaa285ed85d3871a7d9fcb8a4ade8d77bef2e9440dec2"
    # Among so many that it goes sparse, the same holds.
    many = sent(step("BF16", np.tile(OLD, 900), np.concatenate((NEW, np.tile(OLD, 899)))), level)
    assert many.encoded.encoding == "sparse"
    assert written(many.decode(), many.olds)[0][:8] == result


def test_a1_08_what_an_arithmetic_compare_misses_is_a_change() -> None:
    zeros = sent(step("F32", np.array([0], "<u4"), np.array([1 << 31], "<u4")))
    payload = sent(step("F32", np.array([0x7FC00000], "<u4"), np.array([0x7FC00001], "<u4")))
    assert zeros.entry.tiles[0].changed == payload.entry.tiles[0].changed == 1
    assert step("F32", np.array([0x7FC00000], "<u4"), np.array([0x7FC00000], "<u4")).encode("fast") is None


@pytest.mark.parametrize(
    ("move", "density", "level", "encoding"),
    [
        ("neighbours", 0.002, "fast", "sparse"),
        ("neighbours", 0.05, "fast", "sparse"),
        ("neighbours", 0.2, "fast", "dense"),
        ("neighbours", 1.0, "fast", "dense"),
        ("neighbours", 0.1, "wan", "sparse"),
        ("bits", 1.0, "fast", "full"),
        ("bits", 1.0, "wan", "full"),
    ],
)
def test_each_density_takes_the_encoding_that_suits_it(move: str, density: float, level: Level, encoding: str) -> None:
    rng = np.random.default_rng(5)
    old = weights(rng, "BF16", 40_000)
    encoded = sent(step("BF16", old, moved(rng, "BF16", old, move, density)), level)
    assert encoded.encoded.encoding == encoding
    assert encoded.body == sent(step("BF16", old, encoded.news[0]), level).body  # deterministic


def test_a_dense_body_is_taken_where_it_is_shorter_though_sparse_is_short() -> None:
    """In wide elements, whose far steps cost sparse bodies more than their bits."""
    rng = np.random.default_rng(11)
    old = weights(rng, "F64", 20_000)
    made = step("F64", old, moved(rng, "F64", old, "bits", 0.07))
    for level in LEVELS:
        encoded = sent(made, level)
        assert encoded.encoded.encoding == "dense"
        assert len(encoded.body) < made.num_bytes // 8
        assert written(encoded.decode(), [old]) == [encoded.news[0].tobytes()]


def test_more_levels_of_effort_give_fewer_bytes() -> None:
    rng = np.random.default_rng(6)
    old = weights(rng, "BF16", 200_000)
    exponents = (old >> 7) & 0xFF
    new = np.where(rng.random(old.size) < 0.4 * 0.5 ** (exponents - 110.0).clip(0), old + 1, old).astype("<u2")
    made = step("BF16", old, new)
    assert len(sent(made, "wan").body) < 0.85 * len(sent(made, "fast").body)


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
def test_bits_that_lie_at_odd_addresses_are_read_and_written(dtype: str) -> None:
    rng = np.random.default_rng(7)
    old = weights(rng, dtype, 300)
    for density in (0.05, 1.0):
        for level in LEVELS:
            made = sent(step(dtype, old, moved(rng, dtype, old, "neighbours", density)), level)
            memory = np.zeros(old.nbytes + 1, dtype=np.uint8)
            held = memory[1:].view(old.dtype)
            held[:] = old
            assert sent(step(dtype, held, made.news[0]), level).body == made.body
            assert written(made.decode([held]), [held]) == [made.news[0].tobytes()]
            assert made.apply([held]) == 1
            assert held.tobytes() == made.news[0].tobytes()


def test_a_few_changes_are_written_by_position_and_many_as_a_whole() -> None:
    old: Bits = np.zeros(8000, dtype="<u2")
    for changed in (1, 8000 // DENSE_SHARE, 8000 // DENSE_SHARE + 1, 8000):
        new = old.copy()
        new[:changed] = 1
        (write,) = sent(step("BF16", old, new), "wan").decode()
        assert write is not None
        assert (write.positions is None) is (changed * DENSE_SHARE > old.size)
        assert write.num_bytes == (16_000 if write.positions is None else changed * 6)


def test_decoding_reads_what_is_held_and_leaves_it() -> None:
    for density in (0.05, 1.0):
        old = weights(np.random.default_rng(8), "BF16", 300)
        made = sent(step("BF16", old, moved(np.random.default_rng(8), "BF16", old, "neighbours", density)))
        old.flags.writeable = False
        assert written(made.decode([old]), [old]) == [made.news[0].tobytes()]
        with pytest.raises(InvalidInputError, match="t0 tile 0 can't be written"):
            made.apply([old])


def test_one_tile_that_cannot_be_written_stops_all_of_them() -> None:
    olds = tuple(np.full(50, index, dtype="<u2") for index in range(2))
    made = sent(Step(dtype="BF16", olds=olds, news=tuple(old + 1 for old in olds)))
    held = [old.copy() for old in olds]
    held[1].flags.writeable = False
    with pytest.raises(InvalidInputError, match="t1 tile 0"):
        made.apply(held)
    assert held[0].tobytes() == olds[0].tobytes()


def test_tiles_that_stay_are_left_out() -> None:
    olds = tuple(weights(np.random.default_rng(index), "BF16", 100) for index in range(4))
    made = Step(dtype="BF16", olds=olds, news=(olds[0], olds[1] + 1, olds[2], olds[3] + 1))
    for level in LEVELS:
        assert [tile.place.spec.name for tile in sent(made, level).encoded.tiles] == ["t1", "t3"]
    assert replace(made, news=olds).encode("fast") is None


@pytest.mark.parametrize("held", [np.zeros(4, "<u4"), np.zeros(3, "<u2"), np.zeros((1, 4), "<u2"), np.zeros(4, ">u2")])
def test_bits_that_are_not_this_tile_are_the_callers_fault(held: np.ndarray[Any, Any]) -> None:
    made = sent(step("BF16", OLD, NEW))
    for act in (made.decode, made.apply):
        with pytest.raises(InvalidInputError, match="t0 tile 0"):
            act([held])
    with pytest.raises(InvalidInputError, match="w tile 0"):
        encode_body([place("BF16", 4)], [held], [NEW], "fast")
    with pytest.raises(InvalidInputError, match="w tile 0"):
        encode_body([place("BF16", 4)], [OLD], [held], "fast")


def test_bits_that_lie_apart_are_the_callers_fault() -> None:
    made = sent(step("BF16", OLD, NEW))
    apart = np.repeat(OLD, 2)[::2]
    for act in (made.decode, made.apply):
        with pytest.raises(InvalidInputError, match="t0 tile 0: its bits lie apart"):
            act([apart])
    for old, new in ((apart, NEW), (NEW, apart)):
        with pytest.raises(InvalidInputError, match="w tile 0: its bits lie apart"):
            encode_body([place("BF16", 4)], [old], [new], "fast")
    assert apart.tobytes() == OLD.tobytes()


def test_tiles_of_two_dtypes_never_share_a_body() -> None:
    """Not even where their elements are as wide: the line is the same, the exponents aren't."""
    with pytest.raises(InvalidInputError, match="b tile 0 is F16 among tiles of BF16"):
        encode_body([place("BF16", 4, "a"), place("F16", 4, "b")], [OLD, OLD], [NEW, NEW], "fast")


def test_a_body_for_other_tiles_than_listed_is_the_callers_fault() -> None:
    made = sent(step("BF16", OLD, NEW))
    with pytest.raises(InvalidInputError, match="2 places and 1 tiles for a body of 1"):
        decode_body([*made.places, *made.places], made.entry, memoryview(made.body), made.olds)
    with pytest.raises(InvalidInputError, match="1 places and 2 tiles"):
        apply_body(made.places, made.entry, memoryview(made.body), [OLD, OLD])


def test_another_base_is_told_by_tensor_and_tile_and_left_alone() -> None:
    made = sent(step("BF16", OLD, NEW))
    other = OLD[::-1].copy()
    with pytest.raises(WrongBaseError, match="t0 tile 0"):
        made.decode([other])
    with pytest.raises(WrongBaseError, match="t0 tile 0"):
        made.apply([other])
    assert other.tobytes() == OLD[::-1].tobytes()


def test_memory_follows_the_tile_and_not_the_model() -> None:
    old = weights(np.random.default_rng(9), "BF16", 2**20)
    made = sent(step("BF16", old, moved(np.random.default_rng(9), "BF16", old, "neighbours", 0.01)))
    held = [old.copy()]
    tracemalloc.start()
    made.apply(held)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held[0].tobytes() == made.news[0].tobytes()
    assert peak < old.nbytes // 2


@pytest.mark.parametrize("level", ["fast", "wan"])
def test_a_small_tile_with_many_changes_leaves_its_neighbours_sparse(level: Level) -> None:
    rng = np.random.default_rng(11)
    olds = [weights(rng, "BF16", size) for size in (576, 200_000)]
    news = [moved(rng, "BF16", old, "neighbours", density) for old, density in zip(olds, (0.3, 0.02), strict=True)]
    specs = [TensorSpec(name=name, dtype="BF16", shape=old.shape) for name, old in zip("ab", olds, strict=True)]
    places = [Place(spec=spec, tile=tile_at(spec, 0)) for spec in specs]
    encoded = encode_body(places, olds, news, level)
    assert encoded is not None
    assert (encoded.encoding, len(encoded.tiles)) == ("sparse", 2)
