"""What a block's codes are multiplied by, chosen from the block's largest magnitude.

A block of zeros has scale 1. Powers of two are found on the bits of a float: no logarithm rounds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from slackwater.weights.quantize.codes import E4M3

_SMALLEST_NORMAL: Final = 2.0**-126
_MANTISSA_BITS: Final = 23
_E8M0_BIAS: Final = 127
_E4M3_SMALLEST: Final = 2.0**-9
_E4M3_OVERFLOW: Final = 464.0
"""Magnitudes up to this one round to a finite e4m3: half way from 448 to the next step."""
_LEAST_UNIT_AMAX: Final = 2.0**-100


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """One kind of scale."""

    encode: Callable[[torch.Tensor, float], torch.Tensor]
    """Each block's largest magnitude (float32) and the code's largest magnitude to scales as they are stored."""
    decode: Callable[[torch.Tensor], torch.Tensor]
    """Scales as they are stored to float32, exactly."""
    stored: torch.dtype
    """float32, or uint8 for the 8-bit kinds."""


def _encode_f32(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    return _unless_zero(amax, _divide(amax, maximum).clamp(min=_SMALLEST_NORMAL), 1.0)


def _decode_f32(scales: torch.Tensor) -> torch.Tensor:
    return scales


def _encode_e8m0(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    """The smallest power of two by which ``maximum`` reaches ``amax``: 2 ** ceil(log2(amax / maximum))."""
    fraction, exponent = math.frexp(maximum)
    mantissa = int((2 * fraction - 1) * 2**_MANTISSA_BITS)
    carried = amax.view(torch.int32) + (2**_MANTISSA_BITS - 1 - mantissa)
    biased = ((carried >> _MANTISSA_BITS) - (exponent - 1)).clamp(min=0)
    return _unless_zero(amax, biased, _E8M0_BIAS).to(torch.uint8)


def _decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.float8_e8m0fnu).float()


def _encode_e4m3(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    return E4M3.encode(_unless_zero(amax, _divide(amax, maximum).clamp(min=_E4M3_SMALLEST), 1.0))


def _decode_e4m3(scales: torch.Tensor) -> torch.Tensor:
    return E4M3.decode(scales)


def _divide(amax: torch.Tensor, maximum: float) -> torch.Tensor:
    # By a tensor: CUDA takes a plain number's rounded reciprocal, and other bytes would come out than on a CPU.
    return amax / amax.new_tensor(maximum)


def _unless_zero(amax: torch.Tensor, scales: torch.Tensor, zero: float) -> torch.Tensor:
    return scales.masked_fill(amax == 0, zero)


F32_SCALES: Final = Scales(encode=_encode_f32, decode=_decode_f32, stored=torch.float32)
"""amax / maximum in float32, at least the smallest normal number."""

E8M0_SCALES: Final = Scales(encode=_encode_e8m0, decode=_decode_e8m0, stored=torch.uint8)
"""A power of two, stored as its exponent plus 127 (255 is NaN), rounded up so that nothing saturates."""

E4M3_SCALES: Final = Scales(encode=_encode_e4m3, decode=_decode_e4m3, stored=torch.uint8)
"""amax / maximum rounded to e4m3, at least its smallest number: for use under a `Unit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One float32 per tensor that all its e4m3 block scales are multiples of.

    Fresh, it makes the largest block scale 448. One that is held stays as long as the largest block scale under
    it rounds to 448 or less: engines want fused parameters to share theirs, and a new one moves every value.
    """

    leaf: str
    """The tensor's last name."""
    shape: tuple[int, ...]
    """Of the one number: a scalar, or a vector of one."""
    inverse: bool
    """The number stored is 1 / unit."""

    def choose(self, amax: float, maximum: float, held: np.float32 | None) -> np.float32:
        """The number to store for a tensor with this largest magnitude."""
        if held is not None and self._covers(self.factor(held), amax, maximum):
            return held
        most = maximum * E4M3.maximum
        top = max(amax, _LEAST_UNIT_AMAX) if amax else most
        return np.float32(most / top if self.inverse else top / most)

    def factor(self, stored: np.float32) -> float:
        """What block scales are multiplied by, in float32; 0 for a number that can't be meant."""
        if not (np.isfinite(stored) and stored > 0):
            return 0.0
        with np.errstate(over="ignore"):
            return float(np.float32(1) / stored if self.inverse else stored)

    @staticmethod
    def _covers(factor: float, amax: float, maximum: float) -> bool:
        return 0 < factor < math.inf and amax <= factor * maximum * _E4M3_OVERFLOW
