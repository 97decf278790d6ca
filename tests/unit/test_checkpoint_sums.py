"""The element sum: as its page says, and blind to nothing that a training step or a fault does."""

import hashlib
from typing import Final

import numpy as np
import pytest
from codec_rig import moved, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint.changes import Changes, find_changes
from slackwater.checkpoint.digest import object_digest, tile_digest
from slackwater.checkpoint.element_sum import element_sum, seed_of, sum_change
from slackwater.checkpoint.tensor import WIDTHS, Bits, Tile

WORD: Final = 2**64
SEEDS = st.integers(0, 2**32 - 1)


def slow_hash(seed: int, index: int, pattern: int) -> int:
    z = ((seed + index * 0x9E3779B97F4A7C15) % WORD) ^ pattern
    z = z * 0xBF58476D1CE4E5B9 % WORD
    z ^= z >> 32
    z = z * 0x94D049BB133111EB % WORD
    return z ^ z >> 29


def flat(bits: Bits, start: int = 0) -> Tile:
    return Tile(index=0, start=start, cols=bits.size)


@settings(max_examples=examples(40))
@given(st.sampled_from([*WIDTHS]), st.integers(0, 2**40), SEEDS)
def test_the_sum_is_that_of_the_page(dtype: str, start: int, seed: int) -> None:
    bits = random_bits(np.random.default_rng(seed), dtype, 70)
    wanted = sum(slow_hash(seed_of("w"), start + index, pattern) for index, pattern in enumerate(bits.tolist()))
    assert element_sum(seed_of("w"), flat(bits, start), bits) == wanted % WORD


def test_the_seed_is_the_start_of_the_names_sha256() -> None:
    assert seed_of("ü.weight") == int.from_bytes(hashlib.sha256("ü.weight".encode()).digest()[:8], "little")


def test_nothing_adds_nothing() -> None:
    nothing: Bits = np.empty(0, dtype="<u2")
    changes = Changes(positions=np.empty(0, np.uint32), old=np.empty(0, np.uint64), new=np.empty(0, np.uint64))
    assert sum_change(3, Tile(index=0, start=0, cols=9), changes) == 0
    assert element_sum(3, Tile(index=0, start=0, cols=1), nothing) == 0


@settings(max_examples=examples(60))
@given(st.sampled_from(["I8", "BF16", "F32", "I64"]), st.sampled_from(["neighbours", "bits", "sign flips"]), SEEDS)
def test_the_changed_elements_alone_tell_how_the_sum_moves(dtype: str, move: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, dtype, 4 * 60)
    new = moved(rng, dtype, old, move, 0.2)
    changes = find_changes(old, new)
    assert changes is not None
    for tile in (flat(old, 2**33 + 1), Tile(index=3, start=30, rows=4, cols=60, stride=1000)):
        before, after = element_sum(9, tile, old), element_sum(9, tile, new)
        assert sum_change(9, tile, changes) == (after - before) % WORD


def test_swapped_elements_and_names_and_places_are_told_apart() -> None:
    bits = np.array([1, 2, 3, 4], dtype="<u2")
    sums = [
        element_sum(seed_of("a"), flat(bits), bits),
        element_sum(seed_of("b"), flat(bits), bits),
        element_sum(seed_of("a"), flat(bits, 1), bits),
        element_sum(seed_of("a"), flat(bits), bits[::-1].copy()),
        element_sum(seed_of("a"), Tile(index=0, start=0, rows=2, cols=2, stride=4), bits),
    ]
    assert len(set(sums)) == len(sums)


@pytest.mark.parametrize("bit", range(64))
def test_one_flipped_bit_always_moves_the_sum(bit: int) -> None:
    bits = np.array([5, 0, 7], dtype="<u8")
    flipped = bits.copy()
    flipped[1] = 1 << bit
    assert element_sum(1, flat(bits), bits) != element_sum(1, flat(bits), flipped)


def test_digests_are_those_of_the_page() -> None:
    # XXH3-64 with seed 0, from the reference implementation's own test vectors.
    assert tile_digest(np.empty(0, dtype="<u1")) == 0x2D06800538D394C2
    assert object_digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    bits = np.arange(10).astype("<u4")
    assert tile_digest(bits) == tile_digest(bits.view(np.uint8)) == tile_digest(np.repeat(bits, 2)[::2])
