"""A little of each tile that was read, to see afterwards whether its owner wrote it meanwhile.

An optimizer step writes all of a model, so it is seen; a write of a few elements may not be. No check could promise
more without reading everything again: a source must not be written while it is read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from slackwater.checkpoint.tensor import Bits, Tile
from slackwater.errors import InvalidInputError
from slackwater.weights.source import TensorSource

_BLOCKS: Final = 16
_BLOCK: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Glimpse:
    """Some elements of a tile, as they were."""

    name: str
    """Of the tensor."""
    tile: Tile
    bits: Bits


def glimpse(name: str, tile: Tile, bits: Bits) -> Glimpse:
    """Look at up to 1,024 elements of a tile, or all of a smaller one.

    Args:
        name: Of the tensor.
        tile: Where it lies.
        bits: The tensor's, flat.
    """
    return Glimpse(name=name, tile=tile, bits=_some(tile, bits))


def check_unwritten(glimpses: Iterable[Glimpse], source: TensorSource) -> None:
    """Compare with what a source shows now.

    Raises:
        InvalidInputError: It was written; the message names the tensor.
    """
    for seen in glimpses:
        if not np.array_equal(_some(seen.tile, source.bits(seen.name)), seen.bits):
            raise InvalidInputError(
                f"{seen.name} was written while it was read",
                hint="let publish() return before the next optimizer step",
            )


def _some(tile: Tile, bits: Bits) -> Bits:
    if tile.count <= _BLOCKS * _BLOCK:
        return np.array(tile.take(bits))
    if tile.rows > 1:
        lines = bits.reshape(tile.rows, tile.stride)[:: -(-tile.rows // _BLOCKS), tile.start : tile.start + tile.cols]
    else:
        length = tile.cols // _BLOCKS
        lines = bits[tile.start : tile.start + _BLOCKS * length].reshape(_BLOCKS, length)
    return lines[:, :_BLOCK].copy()
