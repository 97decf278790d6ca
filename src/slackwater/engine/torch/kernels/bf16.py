"""Bf16 as kernels write it."""

from typing import Any

import numpy as np

from slackwater.checkpoint.jit import kernel


@kernel
def rounded(value: Any) -> Any:
    """The bits of the bf16 next to a float32, ties to even; NaN stays NaN."""
    bits = np.float32(value).view(np.uint32)
    near = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(near if value == value else np.uint32(0x7FC0))  # noqa: PLR0124  # NaN differs from itself
