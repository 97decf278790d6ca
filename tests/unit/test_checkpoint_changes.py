"""What changed, and how far on the line: held against numpy, and against the line as the format's page draws it."""

import numpy as np
import pytest
from codec_rig import DENSITIES, SIZES, moved, off_line, on_line, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.checkpoint.changes import find_changes, gather, read_only, scatter, steps_between, steps_onto
from slackwater.checkpoint.tensor import Bits

DTYPES = st.sampled_from(["U8", "BF16", "F32", "F64"])
SEEDS = st.integers(0, 2**32 - 1)


def steps_of(old: Bits, new: Bits) -> list[int]:
    steps = np.empty(old.size, dtype=np.int64)
    steps_between(old.astype(np.uint64), new.astype(np.uint64), 8 * old.itemsize, steps)
    return steps.tolist()


def onto(old: Bits, steps: list[int]) -> Bits:
    result = np.empty(old.size, dtype=np.uint64)
    steps_onto(old.astype(np.uint64), np.array(steps, dtype=np.int64), 8 * old.itemsize, result)
    return result.astype(old.dtype)


@settings(max_examples=examples(150))
@given(DTYPES, st.sampled_from((0, *SIZES)), st.sampled_from(DENSITIES), SEEDS, st.none() | st.integers(0, 9000))
def test_the_changes_are_those_that_numpy_finds(
    dtype: str, size: int, density: float, seed: int, limit: int | None
) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, dtype, size)
    new = moved(rng, dtype, old, "bits", density)
    wanted = np.flatnonzero(old != new)
    found = find_changes(old, new, limit)
    if found is None:
        assert limit is not None
        assert wanted.size > limit
        return
    assert limit is None or wanted.size <= limit
    assert (found.count, found.positions.dtype) == (wanted.size, np.dtype(np.uint32))
    assert found.positions.tolist() == wanted.tolist()
    assert found.old.tolist() == old[wanted].tolist()
    assert found.new.tolist() == new[wanted].tolist()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000])
def test_the_limit_itself_is_allowed_and_one_more_is_not(size: int) -> None:
    """Wherever the changes lie: in whole blocks of 64, or in the rest."""
    old: Bits = np.zeros(size, dtype="<u2")
    assert find_changes(old, old + 1, size) is not None
    assert find_changes(old, old + 1, size - 1) is None
    assert find_changes(old, old.copy(), 0) is not None


@pytest.mark.parametrize("position", [0, 1, 62, 63, 64, 65, 127, 128, 4095, 4096, 4098])
def test_one_change_is_found_wherever_it_lies(position: int) -> None:
    old: Bits = np.zeros(4099, dtype="<u8")
    new = old.copy()
    new[position] = 1 << 63
    found = find_changes(old, new)
    assert found is not None
    assert (found.positions.tolist(), found.old.tolist(), found.new.tolist()) == ([position], [0], [1 << 63])


@pytest.mark.parametrize("width", [1, 2])
def test_every_pattern_of_a_narrow_element_steps_onto_every_other(width: int) -> None:
    every = np.arange(256**width).astype(f"<u{width}")
    shifts = range(256) if width == 1 else (0, 1, 2, 255, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1)
    for shift in shifts:
        other = np.roll(every, shift)
        steps = steps_of(every, other)
        assert (onto(every, steps) == other).all()
        assert [step == 0 for step in steps] == (every == other).tolist()
        assert -(128 * 256 ** (width - 1)) <= min(steps) <= max(steps) < 128 * 256 ** (width - 1)


@given(DTYPES, SEEDS)
def test_steps_are_distances_on_the_line_and_lead_back(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = random_bits(rng, dtype, 50), random_bits(rng, dtype, 50)
    steps = steps_of(old, new)
    assert onto(old, steps).tobytes() == new.tobytes()
    modulus = 1 << 8 * old.itemsize
    distances = zip(on_line(old).tolist(), on_line(new).tolist(), strict=True)
    assert [step % modulus for step in steps] == [(after - before) % modulus for before, after in distances]
    assert off_line(on_line(old)).tobytes() == old.tobytes()


@pytest.mark.parametrize(("width", "dtype"), [(2, np.float16), (4, np.float32), (8, np.float64)])
def test_neighbouring_numbers_are_one_step_apart_in_their_order(width: int, dtype: type[np.floating]) -> None:
    ones = np.array([-np.inf, -1, -0.0, 0.0, 1, 65504], dtype=dtype)
    bits = ones.view(f"<u{width}")
    assert all(step > 0 for step in steps_of(bits[:-1], bits[1:]))
    above = np.nextafter(ones[[1, 4]], dtype(np.inf)).view(bits.dtype)
    assert steps_of(bits[[1, 4]], above) == [1, 1]
    assert steps_of(bits[[2]], bits[[3]]) == [1]  # from -0 to +0


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_largest_step_is_half_the_line_downwards(width: int) -> None:
    """All ones are the lowest place and zero the middle: in 64 bits that step has no positive twin."""
    ones, zero = np.array([2 ** (8 * width) - 1], dtype=f"<u{width}"), np.array([0], dtype=f"<u{width}")
    assert steps_of(ones, zero) == steps_of(zero, ones) == [-(2 ** (8 * width - 1))]
    assert onto(ones, steps_of(ones, zero)).tolist() == [0]


@given(DTYPES, SEEDS)
def test_gathering_and_scattering_are_numpys(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = random_bits(rng, dtype, 300)
    positions = np.sort(rng.choice(300, 40, replace=False)).astype(np.uint32)
    assert gather(bits, positions).tolist() == bits[positions].tolist()
    values = random_bits(rng, dtype, 40)
    wanted = bits.copy()
    wanted[positions] = values
    scatter(bits, positions, values.astype(np.uint64))
    assert bits.tobytes() == wanted.tobytes()


def test_kernels_read_aligned_bits_and_never_the_right_to_write() -> None:
    memory = np.zeros(33, dtype=np.uint8)
    aligned = memory[:32].view("<u4")
    fixed = read_only(aligned)
    assert (fixed.flags.writeable, aligned.flags.writeable) == (False, True)
    assert np.shares_memory(fixed, aligned)
    odd = memory[1:].view("<u4")
    assert not np.shares_memory(read_only(odd), odd)
    assert read_only(odd).flags.aligned
