"""Tensors as the format sees them: a name, a serving dtype, a shape, and integer views of their bits.

Bits are compared, never values: every pattern is legal (NaN payloads, -0, e8m0), and none is a sentinel.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slackwater.errors import InvalidInputError

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""A flat array of unsigned integers, one per element, as wide as the element. Little-endian on the wire."""

TILE_ELEMENTS: Final = 4 * 1024 * 1024
"""Most elements in a tile: the unit of encoding, hashing, retry and parallelism."""

WIDTHS: Final[dict[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Element widths in bytes by safetensors' dtype name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What a tensor is, without its values."""

    name: str
    """Canonical Hugging Face name, such as ``model.layers.0.mlp.up_proj.weight``."""
    dtype: str
    """safetensors' name of the serving dtype; a key of `WIDTHS`."""
    shape: tuple[int, ...]
    """Empty for a scalar."""

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise InvalidInputError(f"{self.name}: dtype {self.dtype!r} is unknown", hint=f"one of {', '.join(WIDTHS)}")

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_elements * WIDTHS[self.dtype]

    @property
    def bits_dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The numpy dtype of the integer view."""
        return np.dtype(f"<u{WIDTHS[self.dtype]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Elements ``[start, start + count)`` of a tensor, in flat row-major order."""

    index: int
    start: int
    count: int


def tiles(spec: TensorSpec) -> Iterator[Tile]:
    """Cut a tensor into tiles: whole rows (slices of the first axis), at most `TILE_ELEMENTS` each.

    A row longer than that is a tile of its own. A tensor without elements has no tiles.
    """
    return (tile_at(spec, index) for index in range(tile_count(spec)))


def tile_count(spec: TensorSpec) -> int:
    """How many tiles `tiles` cuts. Cheap, whatever the shape claims."""
    return len(_starts(spec))


def tile_at(spec: TensorSpec, index: int) -> Tile:
    """One tile of `tiles`.

    Raises:
        InvalidInputError: The tensor has no such tile.
    """
    starts = _starts(spec)
    if not 0 <= index < len(starts):
        raise InvalidInputError(f"{spec.name} has {len(starts)} tiles, not a tile {index}")
    return Tile(index=index, start=starts[index], count=min(starts.step, spec.num_elements - starts[index]))


def _starts(spec: TensorSpec) -> range:
    row = math.prod(spec.shape[1:])
    step = max(1, TILE_ELEMENTS // max(row, 1)) * row
    return range(0, spec.num_elements, max(step, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class TileWrite:
    """New bits for one tile of one tensor, decoded and checked: what an engine stages."""

    name: str
    tile: Tile
    positions: npt.NDArray[np.uint32] | None
    """Sorted offsets inside the tile, each once; None: every element of the tile is written."""
    values: Bits
    """The new bits: one per position, or one per element of the tile."""

    @property
    def num_bytes(self) -> int:
        """Host memory that this write holds."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)
