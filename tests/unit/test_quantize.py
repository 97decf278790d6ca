"""Quantisers: published layouts, exact rounding, and bytes that stay where values stay."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError
from slackwater.weights.quantize import quantizer as quantizer_module
from slackwater.weights.quantize.blocks import windows
from slackwater.weights.quantize.codes import E2M1, E4M3, Codes
from slackwater.weights.quantize.formats import (
    FP8_E8M0,
    FP8_F32,
    MXFP4,
    MXFP4_I8,
    NVFP4,
    NVFP4_PACKED,
    QUANTIZERS,
    find_quantizer,
)
from slackwater.weights.quantize.quantizer import Quantizer
from slackwater.weights.quantize.scales import E4M3_SCALES, E8M0_SCALES, F32_SCALES, Scales

ALL = list(QUANTIZERS.values())
every_quantizer = pytest.mark.parametrize("quantizer", ALL, ids=lambda quantizer: quantizer.name)
NAME = "a.weight"


def weights(rows: int = 160, cols: int = 224, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def same(one: Mapping[str, Bits], other: Mapping[str, Bits]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def parts_of(quantizer: Quantizer, *parts: Bits) -> dict[str, Bits]:
    return dict(zip(quantizer.parts(NAME, (1, 32)), parts, strict=True))


def nearest(codes: Codes, value: float) -> int:
    """By the definition: the code of the nearest magnitude, of two as near the even one, with the value's sign."""
    half = 2 ** (8 // codes.per_byte - 1)
    magnitudes = codes.table.reshape(256, -1)[:half, 0].double().nan_to_num(math.inf).tolist()
    code = min(range(half), key=lambda index: (abs(magnitudes[index] - abs(value)), index % 2))
    return code + half * (math.copysign(1, value) < 0)


# Layouts


def test_mxfp4_reads_two_e2m1_a_byte_low_nibble_first_times_a_power_of_two() -> None:
    codes = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, np.uint8)
    for exponent in (0, 1, 126, 127, 130, 250):
        parts = parts_of(MXFP4, codes, np.array([exponent], np.uint8))
        half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
        wanted = torch.tensor([value * 2.0 ** (exponent - 127) for value in half * 2])
        found = MXFP4.dequantize(NAME, (1, 32), parts)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32).view(1, 32))


def test_a_weight_is_written_as_kimi_k3_and_deepseek_v41_store_it() -> None:
    row = torch.zeros(1, 32)
    row[0, :5] = torch.tensor([3.0, -6.0, 0.5, 1.0, -0.25])  # -0.25 lies between -0 and -0.5: the even code
    packed = MXFP4.quantize(NAME, row)
    assert list(packed) == ["a.weight_packed", "a.weight_scale"]
    assert packed["a.weight_packed"].tolist() == [0xF5, 0x21, 0x08] + [0] * 13
    assert packed["a.weight_scale"].tolist() == [127]
    signed = MXFP4_I8.quantize(NAME, row)
    assert list(signed) == ["a.weight", "a.scale"]
    assert all(np.array_equal(*pair) for pair in zip(packed.values(), signed.values(), strict=True))
    assert [spec.dtype for spec in MXFP4_I8.parts(NAME, (1, 32)).values()] == ["I8", "F8_E8M0"]


def test_fp8_is_torchs_cast_of_the_weight_over_its_scale() -> None:
    values = weights(200, 300)
    parts = FP8_F32.quantize(NAME, values)
    scales = torch.from_numpy(parts["a.weight_scale_inv"].view(np.float32)).view(2, 3)
    for down, top in enumerate((0, 128)):
        for across, left in enumerate((0, 128, 256)):
            block = values[top : top + 128, left : left + 128].float()
            assert scales[down, across] == block.abs().max() / torch.tensor(448.0)
            wanted = (block / scales[down, across]).to(torch.float8_e4m3fn).view(torch.uint8)
            found = torch.from_numpy(parts[NAME]).view(200, 300)[top : top + 128, left : left + 128]
            assert torch.equal(found, wanted)


def test_both_nvfp4_layouts_stand_for_code_times_scale_times_unit() -> None:
    codes, scale = np.array([0x21] + [0] * 15, np.uint8), np.array([0x40, 0x38], np.uint8)  # e4m3: 2, 1
    for quantizer, unit in ((NVFP4, 0.25), (NVFP4_PACKED, 4.0)):
        parts = parts_of(quantizer, codes, scale, np.array([unit], np.float32).view(np.uint32))
        assert quantizer.dequantize(NAME, (1, 32), parts)[0, :3].tolist() == [0.25, 0.5, 0.0]
    assert NVFP4.parts(NAME, (1, 32))["a.weight_scale_2"].shape == ()
    assert NVFP4_PACKED.parts(NAME, (1, 32))["a.weight_global_scale"].shape == (1,)


@every_quantizer
def test_a_layout_is_found_by_its_own_quantiser_alone(quantizer: Quantizer) -> None:
    serving = quantizer.parts("x.y.weight", (130, 96))
    assert find_quantizer(serving, "x.y.weight") == (quantizer, (130, 96))
    assert find_quantizer(serving, "x.z.weight") is None
    assert [other.name for other in ALL if other.shape_in(serving, "x.y.weight")] == [quantizer.name]
    for name, spec in serving.items():
        assert find_quantizer({other: serving[other] for other in serving if other != name}, "x.y.weight") is None
        wider = TensorSpec(name=name, dtype=spec.dtype, shape=(*spec.shape, 2))
        assert find_quantizer({**serving, name: wider}, "x.y.weight") is None


# Rounding


@pytest.mark.parametrize("codes", [E4M3, E2M1])
def test_codes_round_to_the_nearest_and_ties_to_even_and_saturate(codes: Codes) -> None:
    table = codes.table.reshape(-1).double()
    levels = torch.unique(table[~torch.isnan(table)])
    middles = (levels[1:] + levels[:-1]) / 2
    near = [middles.float().nextafter(torch.tensor(end)) for end in (math.inf, -math.inf)]
    values = torch.cat([levels.float(), middles.float(), *near, torch.tensor([1e6, -1e6, 464, 465, 1e-40, -0.0])])
    values = torch.cat([values, values[: len(values) % 2]])
    found = codes.encode(values)
    if codes is E2M1:
        found = torch.stack([found & 15, found >> 4], dim=1).reshape(-1)
    assert found.tolist() == [nearest(codes, value) for value in values.tolist()]


@pytest.mark.parametrize("codes", [E4M3, E2M1])
def test_every_byte_that_is_no_nan_is_encoded_as_it_was(codes: Codes) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[~torch.isnan(codes.decode(every).view(256, -1)).any(1)]
    assert len(finite) == (254 if codes is E4M3 else 256)
    assert torch.equal(codes.encode(codes.decode(finite)), finite)


@pytest.mark.parametrize("maximum", [6.0, 448.0])
def test_a_power_of_two_scale_steps_just_where_the_maximum_no_longer_reaches(maximum: float) -> None:
    exponents = torch.arange(-110, 110)
    amax = maximum * torch.exp2(exponents.float())
    over = amax.nextafter(torch.tensor(math.inf))
    assert torch.equal(E8M0_SCALES.encode(amax, maximum).int(), exponents.int() + 127)
    assert torch.equal(E8M0_SCALES.encode(over, maximum).int(), exponents.int() + 128)


@given(st.floats(min_value=2.0**-140, max_value=2.0**120, width=32), st.sampled_from([6.0, 448.0]))
def test_a_power_of_two_scale_is_the_smallest_that_reaches(amax: float, maximum: float) -> None:
    exponent = int(E8M0_SCALES.encode(torch.tensor([amax]), maximum)) - 127
    assert maximum * 2.0**exponent >= amax
    assert exponent == -127 or maximum * 2.0 ** (exponent - 1) < amax


def test_a_kimi_k3_block_uses_more_than_half_of_its_range() -> None:
    values = weights(64, 256)
    scales = MXFP4.quantize(NAME, values)["a.weight_scale"].astype(np.float64).reshape(64, 8)
    ratio = values.view(64, 8, 32).abs().amax(-1).double().numpy() / 2.0 ** (scales - 127)
    assert ((ratio > 3) & (ratio <= 6)).all()


@every_quantizer
def test_zeros_have_scale_one_and_stay_zero(quantizer: Quantizer) -> None:
    parts = quantizer.quantize(NAME, torch.zeros(3, 40))
    codes, scales, *unit = parts.values()
    assert not codes.any()
    one = {"F32": 0x3F800000, "F8_E4M3": 0x38}
    dtype = quantizer.layout.scales_dtype
    assert set(scales.tolist()) == {one.get(dtype, 127)}
    assert [number.view(np.float32).tolist() for number in unit] == [[1.0]] * len(unit)


@every_quantizer
@pytest.mark.parametrize("size", [2.0**-149, 2.0**-126, 2.0**-60, 1.0, 2.0**120])
def test_any_magnitude_survives_within_a_codes_step(quantizer: Quantizer, size: float) -> None:
    values = torch.tensor([[size, -size, size / 2, 0.0] * 8])
    found = quantizer.dequantize(NAME, (1, 32), quantizer.quantize(NAME, values))
    assert torch.isfinite(found).all()
    assert ((found - values).abs() <= max(size * 0.1, 2.0**-120)).all()
    assert torch.equal(torch.signbit(found), torch.signbit(values))


# Bytes that stay


def _floor(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    """The microscaling specification's own rule: the power of two below the maximum's."""
    biased = (amax.view(torch.int32) >> 23) - int(math.log2(maximum))
    return biased.masked_fill(amax == 0, 127).to(torch.uint8)


def _wide(scales: Scales) -> Scales:
    """Scales a third larger than need be: as calibration or another rule may leave them."""
    return replace(scales, encode=lambda amax, maximum: scales.encode(amax * 1.37, maximum))


def _twice(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    return E8M0_SCALES.encode(amax, maximum) + 1


OTHER_RULES = [
    *(replace(quantizer, scales=replace(E8M0_SCALES, encode=_floor)) for quantizer in (FP8_E8M0, MXFP4, MXFP4_I8)),
    *(replace(quantizer, scales=replace(E8M0_SCALES, encode=_twice)) for quantizer in (FP8_E8M0, MXFP4, MXFP4_I8)),
    replace(FP8_F32, scales=_wide(F32_SCALES)),
    *(replace(quantizer, scales=_wide(E4M3_SCALES)) for quantizer in (NVFP4, NVFP4_PACKED)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("maker", [*ALL, *OTHER_RULES])
def test_weights_that_nobody_trained_keep_every_byte_by_whatever_rule_they_were_made(
    maker: Quantizer, dtype: torch.dtype
) -> None:
    held = maker.quantize(NAME, weights())
    values = maker.dequantize(NAME, (160, 224), held).to(dtype)
    assert same(QUANTIZERS[maker.name].quantize(NAME, values, held), held)


def test_without_the_held_bytes_unchanged_mxfp4_would_be_a_large_delta() -> None:
    held = MXFP4.quantize(NAME, weights())
    again = MXFP4.quantize(NAME, MXFP4.dequantize(NAME, (160, 224), held))
    assert np.mean(again["a.weight_packed"] != held["a.weight_packed"]) > 0.1
    assert torch.equal(
        MXFP4.dequantize(NAME, (160, 224), again),
        MXFP4.dequantize(NAME, (160, 224), held),
    )


@every_quantizer
def test_only_the_block_that_moved_changes(quantizer: Quantizer) -> None:
    held = quantizer.quantize(NAME, weights())
    values = quantizer.dequantize(NAME, (160, 224), held)
    row, col = (129, 130)
    values[row, col] += values.abs().max() / 2
    found = quantizer.quantize(NAME, values, held)
    height, width = quantizer.block
    moved = torch.zeros(160, 224, dtype=torch.bool)
    moved[row // height * height :, col // width * width :][:height, :width] = True
    codes, scales, *unit = found
    changed = torch.from_numpy(found[codes] != held[codes]).view(160, -1)
    changed = changed.repeat_interleave(quantizer.codes.per_byte, 1)
    assert changed.any()
    assert not (changed & ~moved).any()
    assert np.count_nonzero(found[scales] != held[scales]) <= 1
    assert all(np.array_equal(found[name], held[name]) for name in unit)


@pytest.mark.parametrize("maker", [q for q in OTHER_RULES if q.scales.encode is _twice], ids=lambda q: q.name)
def test_a_step_too_small_to_move_a_code_moves_no_byte(maker: Quantizer) -> None:
    held = maker.quantize(NAME, weights(dtype=torch.float32))
    values = maker.dequantize(NAME, (160, 224), held) * (1 - 2.0**-12)
    ours = QUANTIZERS[maker.name]
    assert not same(ours.quantize(NAME, values), held)
    assert same(ours.quantize(NAME, values, held), held)


@every_quantizer
def test_held_bytes_that_decode_to_nan_are_replaced(quantizer: Quantizer) -> None:
    fresh = quantizer.quantize(NAME, weights())
    broken = {name: np.full_like(bits, ~bits.dtype.type(0)) for name, bits in fresh.items()}
    assert same(quantizer.quantize(NAME, weights(), broken), fresh)


@pytest.mark.parametrize("quantizer", [NVFP4, NVFP4_PACKED], ids=lambda quantizer: quantizer.name)
def test_the_unit_of_a_tensor_stays_while_it_reaches(quantizer: Quantizer) -> None:
    values = weights()
    held = quantizer.quantize(NAME, values)
    *_, unit = held
    for grown in (0.1, 0.5, 1.0, 1.03):
        assert np.array_equal(quantizer.quantize(NAME, values.float() * grown, held)[unit], held[unit])
    grown = quantizer.quantize(NAME, values.float() * 2, held)
    assert not np.array_equal(grown[unit], held[unit])
    assert same(grown, quantizer.quantize(NAME, values.float() * 2))


@pytest.mark.parametrize("quantizer", [NVFP4, NVFP4_PACKED], ids=lambda quantizer: quantizer.name)
@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan, 1e-45])
def test_a_held_unit_that_cannot_be_meant_is_replaced(quantizer: Quantizer, number: float) -> None:
    fresh = quantizer.quantize(NAME, weights())
    *_, unit = fresh
    held = {**fresh, unit: np.array([number], np.float32).view(np.uint32)}
    assert same(quantizer.quantize(NAME, weights(), held), fresh)


# Bounds


@every_quantizer
@pytest.mark.parametrize("shape", [(0, 0), (0, 32), (3, 0), (1, 2), (1, 32), (130, 70), (33, 258)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_shape_gives_the_parts_that_are_promised(
    quantizer: Quantizer, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    values = weights(*shape, dtype=dtype)
    parts = quantizer.quantize(NAME, values)
    specs = quantizer.parts(NAME, shape)
    assert list(parts) == list(specs)
    assert all(parts[name].shape == (spec.num_elements,) for name, spec in specs.items())
    assert all(parts[name].dtype == spec.bits_dtype for name, spec in specs.items())
    found = quantizer.dequantize(NAME, shape, parts)
    assert found.shape == shape
    assert same(quantizer.quantize(NAME, found, parts), parts)
    assert (found - values.float()).abs().sum() <= 0.2 * values.float().abs().sum()


@every_quantizer
def test_the_bytes_depend_neither_on_threads_nor_on_windows_nor_on_strides(
    quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = weights(400, 700)
    wanted = quantizer.quantize(NAME, values)
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            assert same(quantizer.quantize(NAME, values), wanted)
        finally:
            torch.set_num_threads(threads)
    assert same(quantizer.quantize(NAME, values.t().contiguous().t()), wanted)
    assert same(quantizer.quantize(NAME, values.clone().requires_grad_()), wanted)
    monkeypatch.setattr(quantizer_module, "HOST_WINDOW", 1000)
    assert same(quantizer.quantize(NAME, values), wanted)
    assert same(quantizer.quantize(NAME, quantizer.dequantize(NAME, (400, 700), wanted), wanted), wanted)


@given(
    shape=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    block=st.sampled_from([(1, 16), (1, 32), (32, 32), (8, 4)]),
    limit=st.integers(1, 5000),
)
def test_windows_cover_a_matrix_once_within_their_bound(
    shape: tuple[int, int], block: tuple[int, int], limit: int
) -> None:
    seen, grid = (
        np.zeros(shape, int),
        np.zeros([-(-size // unit) for size, unit in zip(shape, block, strict=True)], int),
    )
    for window in windows(shape, block, limit):
        seen[window.rows, window.cols] += 1
        grid[window.blocks] += 1
        assert seen[window.rows, window.cols].size <= max(limit, block[0] * block[1])
        assert (window.rows.start % block[0], window.cols.start % block[1]) == (0, 0)
        assert (window.blocks[0].start, window.blocks[1].start) == (
            window.rows.start // block[0],
            window.cols.start // block[1],
        )
    assert (seen == 1).all()
    assert (grid == 1).all()


@every_quantizer
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 2.0**121])
def test_values_that_no_training_means_are_refused_by_name(quantizer: Quantizer, wrong: float) -> None:
    values = weights(130, 64)
    values[129, 63] = wrong
    with pytest.raises(InvalidInputError, match=r"^x\.weight holds NaN, infinity"):
        quantizer.quantize("x.weight", values)


@pytest.mark.parametrize(
    "values",
    [torch.zeros(2, 2, dtype=torch.int8), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(4), torch.ones(())],
)
def test_what_is_no_matrix_of_floats_is_refused_by_name(values: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match=r"^x\.weight is torch\.\w+ .*no matrix of floats"):
        MXFP4.quantize("x.weight", values)


def test_names_and_parts_that_do_not_fit_are_refused_by_name() -> None:
    for name in ("a.bias", "weight", "a.weight_packed"):
        with pytest.raises(InvalidInputError, match=f"^{name} can't be quantised"):
            MXFP4.quantize(name, weights())
    with pytest.raises(InvalidInputError, match=r"^a\.weight: .* packs 2 columns, and it has 33"):
        MXFP4.quantize(NAME, weights(2, 33))
    held = MXFP4.quantize(NAME, weights())
    for wrong in ({}, {**held, "a.weight_scale": held["a.weight_scale"][1:]}):
        with pytest.raises(InvalidInputError, match=r"^a\.weight: mxfp4-\S+ needs a\.weight"):
            MXFP4.quantize(NAME, weights(), wrong)
        with pytest.raises(InvalidInputError, match=r"^a\.weight: mxfp4-\S+ needs a\.weight"):
            MXFP4.dequantize(NAME, (160, 224), wrong)


def test_held_bytes_may_lie_in_memory_that_cannot_be_written() -> None:
    held = MXFP4.quantize(NAME, weights())
    for bits in held.values():
        bits.flags.writeable = False
    assert same(MXFP4.quantize(NAME, weights(), held), held)


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=lambda quantizer: quantizer.name)
def test_strides_make_no_difference(quantizer: Quantizer) -> None:
    values = torch.randn(96, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    plain = quantizer.quantize("a.weight", values.t().contiguous())
    strided = quantizer.quantize("a.weight", values.t())
    assert all(np.array_equal(plain[name], strided[name]) for name in plain)
