"""Some tensors of a version, rebuilt from the bucket and proved: what one rank of several diffs against."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import numpy as np

from slackwater.bucket.base import Get
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import AnchorTensor, Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import CorruptError
from slackwater.ids import RunId, Version
from slackwater.publish.baseline import apply
from slackwater.publish.objects import PIECE_BYTES, fetch_object
from slackwater.publish.path import Reads, along
from slackwater.publish.restore import Restored


class PartStore:
    """A `slackwater.publish.baseline.Store` in memory that fetches no anchor's bytes but those of its own tensors.

    Args:
        bucket: Where the run lies.
        run: The run.
    """

    def __init__(self, bucket: Reads, run: RunId) -> None:
        self._bucket: Final = bucket
        self._run: Final = run

    def load(self, version: Version, names: Collection[str] | None) -> Restored:
        """See `slackwater.publish.baseline.Store.load`."""
        return along(self._bucket, self._run, version, partial(_load, self._bucket, names))

    def keep(self, held: Restored) -> Restored:
        """See `slackwater.publish.baseline.Store.keep`."""
        return held

    def moved(self, held: Restored) -> None:
        """See `slackwater.publish.baseline.Store.moved`."""


def _load(bucket: Get, names: Collection[str] | None, path: list[Manifest]) -> Restored:
    anchor = path[0]
    first = table = StateTable.of_anchor(anchor)
    for manifest in path[1:]:
        table = table.after(manifest)
    wanted = frozenset(table.outline.by_name if names is None else names)
    sharing = _sharing(path[1:], table.outline, wanted)
    bits = {t.name: _fetch(bucket, anchor, t, first) for t in anchor.tensors if t.name in sharing}
    for manifest in path[1:]:
        apply(manifest, table.outline, partial(fetch_object, bucket), bits)
    return Restored(
        version=path[-1].version,
        anchor=anchor.version,
        files=anchor.folder,
        table=table,
        bits={name: tensor for name, tensor in bits.items() if name in wanted},
    )


def _sharing(deltas: Sequence[Manifest], outline: Outline, names: frozenset[str]) -> frozenset[str]:
    """The tensors without which these can't be made: bodies are decoded whole."""
    bodies = [
        frozenset(outline.place(tile.number)[0].name for tile in entry.tiles)
        for manifest in deltas
        for entry in manifest.listed()
        if len(entry.tiles) > 1
    ]
    while True:
        more = names.union(*(body for body in bodies if body & names))
        if more == names:
            return names
        names = more


def _fetch(bucket: Get, anchor: Manifest, tensor: AnchorTensor, table: StateTable) -> Bits:
    """A tensor out of its file; its tiles' digests prove it."""
    spec, outline = tensor.spec, table.outline
    body = np.empty(spec.num_bytes, dtype=np.uint8)
    for start in range(0, spec.num_bytes, PIECE_BYTES):
        length = min(PIECE_BYTES, spec.num_bytes - start)
        piece = bucket.get_range(anchor.objects[tensor.object].key, tensor.offset + start, length)
        body[start : start + length] = np.frombuffer(piece, dtype=np.uint8)
    bits = body.view(spec.bits_dtype)
    index = outline.by_name[spec.name]
    for number in range(*outline.first_tiles[index : index + 2]):
        _, tile = outline.place(number)
        if tile_digest(tile.take(bits)) != int(table.tiles[number]):
            raise CorruptError(f"{spec.name} tile {tile.index} isn't that of anchor {anchor.version}")
    return bits
