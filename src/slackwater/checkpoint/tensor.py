"""Tensors as the format sees them: a name, a serving dtype, a shape, and integer views of their bits.

Bits are compared, never values: every pattern is legal (NaN payloads, -0, e8m0), and none is a sentinel.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slackwater.errors import InvalidInputError

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""A flat array of unsigned integers, one per element, as wide as the element. Little-endian on the wire."""

Words = npt.NDArray[np.uint64]
"""64-bit words: digests, bit streams, widened elements."""

TILE_BYTES: Final = 8 * 1024 * 1024
"""Most bytes in a tile, where a line fits: 4 Mi elements of bf16. The unit of hashing, writing, retry and sharding."""

SHARDS: Final = 16
"""Cuts lie at sixteenths of a tensor, so that up to so many tensor-parallel ranks need no other rank's tiles."""

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
    """A rectangle of a tensor: ``rows`` times ``cols`` elements, row by row. Most tiles are one row: contiguous."""

    index: int
    start: int
    """Its first element, in flat row-major order."""
    rows: int = 1
    cols: int
    """Elements of a row, which are contiguous."""
    stride: int = 0
    """Elements from the start of a row to that of the next; 0 where there is one row."""

    @property
    def count(self) -> int:
        """Elements of the tile."""
        return self.rows * self.cols

    def fits(self, elements: int) -> bool:
        """Whether it lies inside a tensor of so many elements."""
        end = self.start + (self.rows - 1) * self.stride + self.cols
        whole_rows = self.rows == 1 or self.rows * self.stride == elements
        return min(self.start, self.cols, self.rows - 1) >= 0 and whole_rows and end <= elements

    def take(self, bits: Bits) -> Bits:
        """The tile out of its tensor's flat bits: a view, or a copy where it has several rows."""
        if self.rows == 1:
            return bits[self.start : self.start + self.cols]
        return self._rectangle(bits).flatten()

    def put(self, bits: Bits, values: Bits) -> None:
        """Write the whole tile into its tensor's flat bits."""
        if self.rows == 1:
            bits[self.start : self.start + self.cols] = values
        else:
            self._rectangle(bits)[:] = values.reshape(self.rows, self.cols)

    def in_tensor(self, positions: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Flat indexes in the tensor of positions in the tile."""
        if self.rows == 1:
            return positions.astype(np.int64) + self.start
        rows, cols = np.divmod(positions.astype(np.int64), self.cols)
        return self.start + rows * self.stride + cols

    def _rectangle(self, bits: Bits) -> Bits:
        return bits.reshape(self.rows, self.stride)[:, self.start : self.start + self.cols]


_SPLIT_BY_COLUMN: Final = re.compile(r"(?:^|\.)(?:o_proj|down_proj|out_proj|w2|wo|wo_b|fc2)\.weight(?:_packed)?\Z")
"""Weights whose tensor-parallel ranks hold columns: the second of two multiplications in a row."""
_EXPERT: Final = re.compile(r"(?:^|\.)experts\.[0-9]+(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """How a tensor is cut along one axis: sections that no tile crosses, and tiles of equal length in each."""

    by_column: bool
    section: int
    """Lines of a section."""
    length: int
    """Lines of a tile; a section's last one may have fewer."""
    lines: int
    """Lines of the tensor."""
    line: int
    """Elements of a line."""
    cross: int
    """How often a line's parts lie apart: 1, or the rows of a tensor that is cut by column."""

    @property
    def per_section(self) -> int:
        return -(-self.section // self.length)

    @property
    def count(self) -> int:
        return self.lines // self.section * self.per_section if self.line and self.lines else 0

    def tile(self, index: int) -> Tile:
        section, place = divmod(index, self.per_section)
        begin = section * self.section + place * self.length
        cols = min(self.length, (section + 1) * self.section - begin) * self.line // self.cross
        start = begin * self.line // self.cross
        if not self.by_column:
            return Tile(index=index, start=start, cols=cols)
        return Tile(index=index, start=start, rows=self.cross, cols=cols, stride=self.lines * self.line // self.cross)


def tiles(spec: TensorSpec) -> Iterator[Tile]:
    """Cut a tensor into tiles. See docs/format.md, section 2.

    A tensor of at most `TILE_BYTES` is one tile, and one without elements has none. A larger one is cut along its
    first axis, or along its second where ranks hold columns of it, at sixteenths of that axis where it has them. An
    expert is not cut at sixteenths: its rank needs all of it.
    """
    cut = _cut(spec)
    return map(cut.tile, range(cut.count))


def tile_count(spec: TensorSpec) -> int:
    """How many tiles `tiles` cuts. Cheap, whatever the shape claims."""
    return _cut(spec).count


def tile_at(spec: TensorSpec, index: int) -> Tile:
    """One tile of `tiles`.

    Raises:
        InvalidInputError: The tensor has no such tile.
    """
    cut = _cut(spec)
    if not 0 <= index < cut.count:
        raise InvalidInputError(f"{spec.name} has {cut.count} tiles, not a tile {index}")
    return cut.tile(index)


def _cut(spec: TensorSpec) -> _Cut:
    if spec.num_bytes <= TILE_BYTES:
        return _Cut(by_column=False, section=1, length=1, lines=1, line=spec.num_elements, cross=1)
    by_column = _is_split_by_column(spec)
    lines = spec.shape[1 if by_column else 0]
    line = spec.num_elements // lines
    sections = 1 if lines % SHARDS or expert_of(spec.name) else SHARDS
    section = lines // sections
    most = min(section, max(1, TILE_BYTES // (line * WIDTHS[spec.dtype])))
    length = -(-section // -(-section // most))  # evenly
    cross = spec.shape[0] if by_column else 1
    return _Cut(by_column=by_column, section=section, length=length, lines=lines, line=line, cross=cross)


def _is_split_by_column(spec: TensorSpec) -> bool:
    return len(spec.shape) > 1 and _SPLIT_BY_COLUMN.search(spec.name) is not None and expert_of(spec.name) is None


def expert_of(name: str) -> str | None:
    """The routed expert that a tensor is part of, such as ``layers.0.mlp.experts.7``; None where it is of none."""
    found = _EXPERT.search(name)
    return None if found is None else name[: found.end()]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileWrite:
    """New bits for one tile of one tensor, decoded and checked: what an engine stages."""

    name: str
    tile: Tile
    positions: npt.NDArray[np.uint32] | None
    """Sorted offsets inside the tile, each once; None: every element of the tile is written."""
    values: Bits
    """The new bits: one per position, or one per element of the tile."""

    def put(self, bits: Bits) -> None:
        """Write it into its tensor's flat, writable bits."""
        if self.positions is None:
            self.tile.put(bits, self.values)
        else:
            bits[self.tile.in_tensor(self.positions)] = self.values

    @property
    def num_bytes(self) -> int:
        """Host memory that this write holds."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)
