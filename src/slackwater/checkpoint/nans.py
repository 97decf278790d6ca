"""Bits that stand for no number: published as they are, and told."""

from typing import Final

from slackwater.checkpoint.tensor import Bits, Words

_LAST_NUMBER: Final = {
    "F8_E4M3": 0x7E,
    "F8_E5M2": 0x7C,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F32": 0x7F80_0000,
    "F64": 0x7FF0_0000_0000_0000,
}
"""The highest bits without a sign that aren't NaN: infinity, where the dtype has one."""
_STRETCH: Final = 1 << 16
"""Elements looked at together: they and what is made of them stay in the processor's cache."""


def has_nan(dtype: str, bits: Bits | Words) -> bool:
    """Whether one of some elements is no number; False for dtypes that have none.

    Args:
        dtype: safetensors' name.
        bits: Their bits, or these widened to 64.
    """
    last = _LAST_NUMBER.get(dtype)
    if last is None:
        return False
    unsigned = bits.dtype.type((1 << last.bit_length()) - 1)
    limit = bits.dtype.type(last)
    return any(
        bool(((bits[start : start + _STRETCH] & unsigned) > limit).any()) for start in range(0, bits.size, _STRETCH)
    )
