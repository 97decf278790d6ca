"""Compile, or load from the disk, the kernels that a model's dtypes need: before it matters how long that takes."""

from collections.abc import Iterable
from typing import Final

import numpy as np

from slackwater.checkpoint.capture import capture
from slackwater.checkpoint.codec import Place, apply_body, decode_body, encode_body
from slackwater.checkpoint.element_sum import element_sum
from slackwater.checkpoint.manifest import BodyEntry, TileEntry
from slackwater.checkpoint.tensor import WIDTHS, TensorSpec, tile_at

_ELEMENTS: Final = 8192
_SPARSE: Final = 128
"""One changed element in this many is far below what any level writes densely."""


def warm_kernels(dtypes: Iterable[str]) -> None:
    """Encode and decode a small tile of each width in each way. Takes seconds on a machine's first run, then little.

    Args:
        dtypes: safetensors' names; unknown ones are refused where they are used.
    """
    for width in sorted({WIDTHS[dtype] for dtype in dtypes}):
        by_exponent = next(dtype for dtype in ("BF16", "F8_E4M3", "F32", "F64") if WIDTHS[dtype] == width)
        _round_trip(by_exponent, every=_SPARSE)
        _round_trip(by_exponent, every=1)


def _round_trip(dtype: str, *, every: int) -> None:
    spec = TensorSpec(name="warm", dtype=dtype, shape=(_ELEMENTS,))
    place = Place(spec=spec, tile=tile_at(spec, 0))
    old = (np.arange(_ELEMENTS) * 7).astype(spec.bits_dtype)
    new = old.copy()
    new[::every] += 1
    new[:: 16 * every] += 2
    element_sum(0, place.tile, old)
    captured = capture(place.tile, old, new)
    if captured is not None:
        captured.onto(old)
    for level in ("fast", "wan"):
        encoded = encode_body([place], [old], [new], level)
        if encoded is None:
            continue
        tiles = tuple(TileEntry(0, tile.changed, tile.pre, tile.post) for tile in encoded.tiles)
        entry = BodyEntry(0, 0, len(encoded.body), encoded.encoding, tiles)
        decode_body([place], entry, memoryview(encoded.body), [old])
        apply_body([place], entry, memoryview(encoded.body), [old.copy()])
