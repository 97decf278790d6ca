"""The outline of a run: which tensors every version of it has, and the numbers of their tiles."""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.tensor import WIDTHS, TensorSpec, Tile, tile_at, tile_count, tiles
from slackwater.errors import NotFoundError

_DOMAIN: Final = b"slackwater/2 outline\n"


class Outline:
    """Tensors by rising name. Tiles are numbered through all tensors, from 0. Immutable.

    Args:
        specs: The tensors, in any order; names differ.

    Attributes:
        specs: By rising name.
        first_tiles: The number of each tensor's first tile; at the end the number of all tiles.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs: Final = tuple(sorted(specs, key=lambda spec: spec.name))
        self.first_tiles: Final = tuple(accumulate(map(tile_count, self.specs), initial=0))

    @cached_property
    def by_name(self) -> Mapping[str, int]:
        """The index of each tensor."""
        return {spec.name: index for index, spec in enumerate(self.specs)}

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over names, dtypes and shapes: docs/format.md, section 2."""
        hasher = hashlib.sha256(_DOMAIN)
        for spec in self.specs:
            hasher.update(_canonical(spec))
        return hasher.digest()

    @cached_property
    def tile_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of every tile, by number."""
        sizes = (tile.count * WIDTHS[spec.dtype] for spec in self.specs for tile in tiles(spec))
        return np.fromiter(sizes, dtype=np.int64, count=self.num_tiles)

    @property
    def num_tiles(self) -> int:
        """Tiles of all tensors."""
        return self.first_tiles[-1]

    @property
    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(spec.num_elements for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)

    def tensor_of(self, number: int) -> int:
        """The index of the tensor that has a tile.

        Raises:
            NotFoundError: There is no such tile.
        """
        if not 0 <= number < self.num_tiles:
            raise NotFoundError(f"there is no tile {number} of {self.num_tiles}")
        return bisect_right(self.first_tiles, number) - 1

    def place(self, number: int) -> tuple[TensorSpec, Tile]:
        """The tensor that has a tile, and the tile.

        Raises:
            NotFoundError: There is no such tile.
        """
        tensor = self.tensor_of(number)
        return self.specs[tensor], tile_at(self.specs[tensor], number - self.first_tiles[tensor])

    def number(self, name: str, index: int) -> int:
        """The number of a tensor's tile.

        Raises:
            NotFoundError: There is no such tensor or tile.
        """
        tensor = self.by_name.get(name)
        if tensor is None or not 0 <= index < self.first_tiles[tensor + 1] - self.first_tiles[tensor]:
            raise NotFoundError(f"the run has no tile {index} of {name}")
        return self.first_tiles[tensor] + index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outline) and self.specs == other.specs

    def __hash__(self) -> int:
        return hash(self.specs)


def _canonical(spec: TensorSpec) -> bytes:
    """Every length stands before what it counts, so that two outlines never share an encoding."""
    name, dtype, shape = spec.name.encode(), spec.dtype.encode(), spec.shape
    return b"".join((
        struct.pack("<I", len(name)), name,
        struct.pack("<I", len(dtype)), dtype,
        struct.pack(f"<I{len(shape)}Q", len(shape), *shape),
    ))  # fmt: skip
