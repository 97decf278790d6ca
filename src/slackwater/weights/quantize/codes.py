"""The small floats that weights are stored as: e4m3, one to a byte, and e2m1, two to a byte.

Both round to the nearest code, ties to the even code, and saturate: no finite input becomes infinite or NaN.
The sign of a zero is kept. Sources: OCP's 8-bit floating point (E4M3) and microscaling (E2M1) specifications.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Codes:
    """One kind of code."""

    maximum: float
    """The largest magnitude."""
    per_byte: int
    """Codes in a byte, along the last axis, the low bits first."""
    table: torch.Tensor
    """float32 [256], or [256, per_byte] where that is more than one: the values of each byte."""
    encode: Callable[[torch.Tensor], torch.Tensor]
    """float32 [..., n] to uint8 [..., n / per_byte], n a multiple of ``per_byte``; the input is finite."""

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 [..., n] to float32 [..., n * per_byte], exactly."""
        table = self.table.to(codes.device)
        return table.index_select(0, codes.reshape(-1).int()).view(*codes.shape[:-1], -1)


_E4M3_MAXIMUM: Final = 448.0


def _encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    # torch's cast rounds to nearest even; what it does beyond the maximum has changed and differs by device.
    return values.clamp(-_E4M3_MAXIMUM, _E4M3_MAXIMUM).to(torch.float8_e4m3fn).view(torch.uint8)


def _encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    codes = _nearest_e2m1(values.abs()).to(torch.uint8)
    codes |= (values.view(torch.int32) >> 28).to(torch.uint8) & 8
    pairs = codes.view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _nearest_e2m1(magnitudes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 7 of 0, 0.5, 1, 1.5, 2, 3, 4, 6: a sum of three ramps, each of even steps and each exact."""
    codes = magnitudes.clamp(max=2).mul_(2).round_()
    codes += magnitudes.clamp(2, 4).sub_(2).round_()
    codes += magnitudes.clamp(4, 6).sub_(4).div_(2).round_()
    return codes


def _e2m1_table() -> torch.Tensor:
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.cat([positive, -positive])
    return torch.stack([codes.repeat(16), codes.repeat_interleave(16)], dim=1)


E4M3: Final = Codes(
    maximum=_E4M3_MAXIMUM,
    per_byte=1,
    table=torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    encode=_encode_e4m3,
)
"""Four bits of exponent (bias 7), three of mantissa, no infinities."""

E2M1: Final = Codes(maximum=6.0, per_byte=2, table=_e2m1_table(), encode=_encode_e2m1)
"""Two bits of exponent (bias 1), one of mantissa."""
