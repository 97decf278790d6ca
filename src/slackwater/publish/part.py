"""Some tensors of a version, or pieces, rebuilt from the bucket and proved: what one rank of several diffs against."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import numpy as np

from slackwater.bucket.base import Get
from slackwater.checkpoint.manifest import AnchorTensor, Manifest
from slackwater.checkpoint.pieces import (
    WHOLE,
    Pieces,
    held_elements,
    held_numbers,
    held_tile,
    stripes,
)
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import CorruptError
from slackwater.ids import RunId, Version
from slackwater.publish.baseline import narrowed
from slackwater.publish.in_memory import apply, first_wrong
from slackwater.publish.objects import PIECE_BYTES, fetch_object
from slackwater.publish.path import Reads, along
from slackwater.publish.restore import Restored


class PartStore:
    """A `slackwater.publish.baseline.Store` in memory that fetches no anchor's bytes but those of its own tensors.

    Of a piece that is columns, it fetches the rows whole, a few at a time.

    Args:
        bucket: Where the run lies.
        run: The run.
    """

    def __init__(self, bucket: Reads, run: RunId) -> None:
        self._bucket: Final = bucket
        self._run: Final = run

    def load(self, version: Version, names: Collection[str] | None, pieces: Pieces = WHOLE) -> Restored:
        """See `slackwater.publish.baseline.Store.load`."""
        return along(self._bucket, self._run, version, partial(_load, self._bucket, names, pieces))

    def keep(self, held: Restored) -> Restored:
        """See `slackwater.publish.baseline.Store.keep`."""
        return held

    def moved(self, held: Restored) -> None:
        """See `slackwater.publish.baseline.Store.moved`."""


def _load(bucket: Get, names: Collection[str] | None, pieces: Pieces, path: list[Manifest]) -> Restored:
    anchor = path[0]
    first = table = StateTable.of_anchor(anchor)
    for manifest in path[1:]:
        table = table.after(manifest)
    outline = table.outline
    wanted = frozenset(outline.by_name if names is None else names) & outline.by_name.keys()
    numbers = frozenset(number for name in wanted for number in held_numbers(outline, name, pieces))
    more = [outline.place(number) for number in _sharing(path[1:], numbers) - numbers]
    read_names = wanted.union(spec.name for spec, _ in more)
    beyond = {spec.name for spec, tile in more if held_tile(spec, tile, pieces) is None}
    read_pieces = {name: piece for name, piece in pieces.items() if name in read_names - beyond}
    bits = {t.name: _fetch(bucket, anchor, t, first, read_pieces) for t in anchor.tensors if t.name in read_names}
    for manifest in path[1:]:
        apply(manifest, outline, partial(fetch_object, bucket), bits, read_pieces)
    held = Restored(
        version=path[-1].version,
        anchor=anchor.version,
        files=anchor.folder,
        delta_bytes=sum(manifest.num_bytes for manifest in path[1:]),
        table=table,
        bits=bits,
        pieces=read_pieces,
    )
    return narrowed(held, names, pieces)


def _sharing(deltas: Sequence[Manifest], numbers: frozenset[int]) -> frozenset[int]:
    """The tiles without which these can't be made: bodies are decoded whole."""
    bodies = [
        frozenset(tile.number for tile in entry.tiles)
        for manifest in deltas
        for entry in manifest.listed()
        if len(entry.tiles) > 1
    ]
    while True:
        more = numbers.union(*(body for body in bodies if body & numbers))
        if more == numbers:
            return numbers
        numbers = more


def _fetch(bucket: Get, anchor: Manifest, tensor: AnchorTensor, table: StateTable, pieces: Pieces) -> Bits:
    """A tensor, or a piece of it, out of its file; its tiles' digests prove it."""
    spec, key = tensor.spec, anchor.objects[tensor.object].key
    bits, width = np.empty(held_elements(spec, pieces), dtype=spec.bits_dtype), spec.bits_dtype.itemsize
    for stripe in stripes(spec, pieces.get(spec.name), PIECE_BYTES):
        begin, end = stripe.span.start * width, stripe.span.stop * width
        body = bucket.get_range(key, tensor.offset + begin, end - begin)
        bits[stripe.held] = stripe.tile.take(np.frombuffer(body, dtype=spec.bits_dtype))
    wrong = first_wrong(table, {spec.name: bits}, pieces)
    if wrong is not None:
        raise CorruptError(f"{wrong} isn't that of anchor {anchor.version}")
    return bits
