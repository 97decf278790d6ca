"""How far one swap goes: a replica that is far behind takes as many deltas at once as its memory is meant to hold."""

from typing import Final

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.codec import DENSE_SHARE
from slackwater.checkpoint.manifest import ENCODINGS, Bodies, Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import WIDTHS

_POSITION_BYTES: Final = np.dtype(np.uint32).itemsize


def fitting(chain: tuple[Manifest, ...], outline: Outline, max_bytes: int) -> tuple[Manifest, ...]:
    """The first of some deltas whose writes together hold at most ``max_bytes`` in an `Overlay`; at least one.

    Told by the manifests alone, before a byte is fetched: no tile has more changes than its deltas count together.
    """
    if len(chain) < 2:  # noqa: PLR2004  # one is taken whatever its size
        return chain
    room = _Room(outline)
    for index, manifest in enumerate(chain):
        if not room.add(manifest) or room.num_bytes() > max_bytes:
            return chain[: max(index, 1)]
    return chain


class _Room:
    """How much the writes of some deltas hold at most."""

    def __init__(self, outline: Outline) -> None:
        counts = np.diff(np.array(outline.first_tiles, dtype=np.int64))
        widths = np.array([WIDTHS[spec.dtype] for spec in outline.specs], dtype=np.int64)
        self._widths = np.repeat(widths, counts)
        self._bytes = outline.tile_bytes
        self._elements = self._bytes // self._widths
        self._changed = np.zeros(outline.num_tiles, dtype=np.int64)

    def add(self, manifest: Manifest) -> bool:
        """Count a delta in; False where it isn't one on this outline, as whoever applies it will say."""
        if manifest.bodies is None or manifest.tiles is None:
            return False
        numbers = np.array(manifest.tiles.number, dtype=np.int64)
        if numbers.max(initial=-1) >= self._changed.size:
            return False
        most = self._elements[numbers]
        counted = np.minimum(np.array(manifest.tiles.changed, dtype=np.int64), most)
        changed = np.where(_are_sparse(manifest.bodies), counted, most)
        self._changed[numbers] = np.minimum(self._changed[numbers] + changed, most)
        return True

    def num_bytes(self) -> int:
        """Of a tile's write: see `TileWrite.num_bytes`."""
        scattered = self._changed * (self._widths + _POSITION_BYTES)
        return int(np.where(self._changed * DENSE_SHARE > self._elements, self._bytes, scattered).sum())


def _are_sparse(bodies: Bodies) -> npt.NDArray[np.bool_]:
    """Of each tile, whether its body says which elements change."""
    sparse = [ENCODINGS[letter] == "sparse" for letter in bodies.encoding]
    return np.repeat(np.array(sparse, dtype=np.bool_), np.array(bodies.tiles, dtype=np.int64))
