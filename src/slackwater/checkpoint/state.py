"""What a whole state is, by digests alone: the outline, a digest for each tile, an element sum for each tensor.

Publisher and replica each keep one table, follow a chain with it, and compare digests instead of weights.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.columns import from_column
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import TILE_BYTES, Words
from slackwater.errors import CorruptError, WrongBaseError
from slackwater.ids import StateDigest

_DOMAIN: Final = b"slackwater/2 state\n"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateTable:
    """A state. Its arrays are read-only."""

    outline: Outline
    tiles: Words
    """`slackwater.checkpoint.digest.tile_digest` of every tile, by number."""
    sums: Words
    """`slackwater.checkpoint.element_sum` of every tensor, by rising name."""
    digest: StateDigest = field(init=False)
    """SHA-256 over all of it: docs/format.md, section 2."""

    def __post_init__(self) -> None:
        for array in (self.tiles, self.sums):
            array.flags.writeable = False
        hasher = hashlib.sha256(_DOMAIN + self.outline.digest)
        hasher.update(self.tiles.astype("<u8").data)
        hasher.update(self.sums.astype("<u8").data)
        object.__setattr__(self, "digest", StateDigest(hasher.hexdigest()))

    @classmethod
    def of_anchor(cls, manifest: Manifest) -> Self:
        """Read an anchor's table.

        Raises:
            CorruptError: It is no anchor, or its tiles don't make the state that it names.
        """
        if manifest.kind != "anchor":
            raise CorruptError(f"version {manifest.version} of {manifest.run} is a {manifest.kind}, not an anchor")
        outline = manifest.outline
        columns = [
            from_column(tensor.digests, outline.first_tiles[index + 1] - outline.first_tiles[index] + 1, tensor.name)
            for index, tensor in enumerate(manifest.tensors)
        ]
        table = cls(
            outline=outline,
            tiles=np.concatenate([np.empty(0, dtype=np.uint64), *(column[:-1] for column in columns)]),
            sums=np.array([column[-1] for column in columns], dtype=np.uint64),
        )
        _check_result(manifest, table.digest)
        return table

    def after(self, manifest: Manifest) -> Self:
        """The table after a delta or a fold.

        Raises:
            WrongBaseError: It was made on another state.
            CorruptError: It is an anchor, or it contradicts its own parent: a tile that isn't there, another digest
                before, or tiles that don't make the state that it names.
        """
        if manifest.parent is None or manifest.tiles is None:
            raise CorruptError(f"version {manifest.version} of {manifest.run} is an anchor, not a delta")
        if manifest.parent.state != self.digest:
            raise WrongBaseError(
                f"version {manifest.version} of {manifest.run} was made on {manifest.parent.state[:12]}, "
                f"and the state held is {self.digest[:12]}",
                hint="catch up from an anchor",
            )
        numbers = np.array(manifest.tiles.number, dtype=np.int64)
        if numbers.size and int(numbers.max()) >= self.outline.num_tiles:
            raise CorruptError(f"the delta names tile {numbers.max()}, and its parent has {self.outline.num_tiles}")
        _check_shared(manifest, self.outline, numbers)
        wrong = np.flatnonzero(self.tiles[numbers] != manifest.tiles.pre)
        if wrong.size:
            raise CorruptError(f"tile {numbers[wrong[0]]}: the delta's digest before isn't its parent's")
        result = self._with(manifest, numbers)
        _check_result(manifest, result.digest)
        return result

    def _with(self, manifest: Manifest, numbers: npt.NDArray[np.int64]) -> Self:
        tensors = np.unique(np.searchsorted(self.outline.first_tiles, numbers, side="right") - 1)
        tiles, sums = self.tiles.copy(), self.sums.copy()
        if manifest.tiles is not None:
            tiles[numbers] = manifest.tiles.post
            sums[tensors] = from_column(manifest.tiles.sums, tensors.size, "tiles.sums")
        return type(self)(outline=self.outline, tiles=tiles, sums=sums)


def _check_shared(manifest: Manifest, outline: Outline, numbers: npt.NDArray[np.int64]) -> None:
    """Several tiles share a body only while they are small: readers decode a body at a time."""
    if manifest.bodies is None or not numbers.size:
        return
    counts = np.array(manifest.bodies.tiles, dtype=np.int64)
    sizes = np.add.reduceat(outline.tile_bytes[numbers], np.cumsum(counts) - counts)
    if sizes[counts > 1].max(initial=0) > TILE_BYTES:
        raise CorruptError(f"a body of several tiles makes more than {TILE_BYTES} bytes")


def _check_result(manifest: Manifest, found: StateDigest) -> None:
    if found != manifest.state:
        raise CorruptError(
            f"the tiles of version {manifest.version} of {manifest.run} make state {found[:12]}, "
            f"and the manifest names {manifest.state[:12]}"
        )
