"""A delta encoded as a stream: packs leave as they fill, and what a manifest says of them stays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slackwater.checkpoint.codec import EncodedBody, EncodedTile, Level
from slackwater.checkpoint.columns import to_column
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import blob_key
from slackwater.checkpoint.manifest import ENCODINGS, MAX_NANS, Bodies, ObjectRef, Tiles
from slackwater.checkpoint.pieces import held_elements
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import WIDTHS, Bits
from slackwater.errors import CorruptError
from slackwater.ids import RunId
from slackwater.publish.plan import BLOB_BYTES
from slackwater.weights.diff import Compared, compare, encode
from slackwater.weights.glimpse import Glimpse, check_unwritten
from slackwater.weights.source import TensorSource, pieces_of

Progress = Callable[[str, int, int], None]
"""Told the stage, how much is done, and of how much."""


def tell_nobody(stage: str, done: int, total: int) -> None:
    """Progress that nobody asked for."""


PutObject = Callable[[ObjectRef, bytes], None]
"""Takes an object of a delta."""

_AHEAD: Final = 4
"""Bundles for each thread that are encoded together."""
_LETTERS: Final = {encoding: letter for letter, encoding in ENCODINGS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A delta's part of its manifest."""

    objects: tuple[ObjectRef, ...]
    bodies: Bodies
    tiles: Tiles
    nans: tuple[str, ...]
    """The first tensors in which a NaN was written, by rising name."""
    table: StateTable
    """The state after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How a delta is encoded."""

    level: Level = "fast"
    """How much time to spend for how many bytes."""
    threads: int = 2
    """Tiles read, and bodies encoded, at once."""
    room: int | None = None
    """Bytes of changes that are held before they are encoded, so that reading is over soon. None encodes, and sends,
    while later tensors are still read."""


def bits_of(source: TensorSource) -> Mapping[str, Bits]:
    """Every tensor of a source: what `DeltaEncoder` takes for a baseline."""
    return {name: source.bits(name) for name in source.specs()}


def encode_delta(
    run: RunId,
    source: TensorSource,
    held: StateTable,
    baseline: Mapping[str, Bits],
    *,
    level: Level,
    threads: int,
    put: PutObject,
    progress: Progress,
) -> Encoded:
    """Read and encode what leads from ``held`` to ``source``: `DeltaEncoder`, for a source that stays as it is."""
    effort = Effort(level=level, threads=threads)
    encoder = DeltaEncoder(run, source, held, baseline, effort=effort, put=put, progress=progress)
    encoder.read()
    return encoder.finish()


class DeltaEncoder:
    """Encodes what leads from ``held``, whose bits are ``baseline``, to ``source``. Tensors that it lacks stay.

    Used once: `read` looks at the source, in one pass at about the speed of memory, and `finish` encodes what changed.
    Holds a pack, a few tiles for each thread, and ``effort.room`` bytes of changes at most.

    Args:
        run: Under which the objects' keys lie.
        source: The state after.
        held: The state before; it has all of the source's tensors with equal specs.
        baseline: Its bits; they stay as they are until `finish` returns. Of tensors that the source has in pieces, the
            same pieces.
        effort: How.
        put: Takes each object once its bytes are known.
        progress: Told the stage ``encode`` in bytes that were read.

    Raises:
        InvalidInputError: A piece that the source has ends inside a tile.
    """

    def __init__(
        self,
        run: RunId,
        source: TensorSource,
        held: StateTable,
        baseline: Mapping[str, Bits],
        *,
        effort: Effort,
        put: PutObject,
        progress: Progress,
    ) -> None:
        self._source: Final = source
        self._pieces: Final = pieces_of(source)
        self._held: Final = held
        self._baseline: Final = baseline
        self._effort: Final = effort
        self._progress: Final = progress
        self._packs: Final = Packer(run, put)
        self._listed: Final = _Listed()
        self._waiting: Final[list[Compared]] = []

    def read(self) -> None:
        """Read the source; it may be written once this returns.

        Raises:
            InvalidInputError: It was written meanwhile, or its bits aren't those of its specs.
        """
        outline, source = self._held.outline, self._source
        total = sum(held_elements(spec, self._pieces) * WIDTHS[spec.dtype] for spec in source.specs().values())
        seen: list[Glimpse] = []
        done = bundles = held = 0
        found = compare(source, outline, self._baseline, threads=self._effort.threads, pieces=self._pieces)
        for compared in found:
            tiles = (outline.place(number) for bundle in compared.batch for number in bundle)
            done += sum(tile.count * spec.bits_dtype.itemsize for spec, tile in tiles)
            self._progress("encode", done, total)
            seen += compared.glimpses
            self._waiting.append(compared)
            bundles, held = bundles + len(compared.bundles), held + compared.num_bytes
            if self._is_full(bundles, held):
                self._encode()
                bundles = held = 0
        check_unwritten(seen, source)

    def finish(self) -> Encoded:
        """Encode what is left.

        Raises:
            CorruptError: The baseline isn't what ``held`` says.
        """
        self._encode()
        listed, table = self._listed, self._listed.table(self._held)
        return Encoded(
            objects=self._packs.close(),
            bodies=listed.bodies(),
            tiles=listed.tiles(table),
            nans=listed.nans(),
            table=table,
        )

    def _is_full(self, bundles: int, num_bytes: int) -> bool:
        if self._effort.room is None:
            return bundles >= _AHEAD * self._effort.threads
        return num_bytes > self._effort.room

    def _encode(self) -> None:
        level, threads = self._effort.level, self._effort.threads
        outline, pieces = self._held.outline, self._pieces
        for bodies in encode(self._waiting, outline, self._baseline, level=level, threads=threads, pieces=pieces):
            if bodies:
                self._listed.add(self._held, self._packs.add([body.body for body in bodies]), bodies)
        self._waiting.clear()


class Packer:
    """Lays batches of bodies end to end, in order; a pack leaves once the next batch doesn't fit.

    Args:
        run: Under which the packs' keys lie.
        put: Takes each pack.
        limit: Most bytes of a pack; a larger batch gets one of its own.
    """

    def __init__(self, run: RunId, put: PutObject, limit: int = BLOB_BYTES) -> None:
        self._run = run
        self._put = put
        self._limit = limit
        self._refs: list[ObjectRef] = []
        self._open: list[bytes] = []
        self._size = 0

    def add(self, batch: Sequence[bytes]) -> int:
        """Take a batch; returns the index of its pack."""
        size = sum(map(len, batch))
        if self._size + size > self._limit:
            self._flush()
        self._open += batch
        self._size += size
        return len(self._refs)

    def close(self) -> tuple[ObjectRef, ...]:
        """Let the last pack go; returns all of them."""
        self._flush()
        return tuple(self._refs)

    def _flush(self) -> None:
        if not self._open:
            return
        body = b"".join(self._open)
        digest = object_digest(body)
        ref = ObjectRef(key=blob_key(self._run, digest), size=len(body), sha256=digest)
        self._put(ref, body)
        self._refs.append(ref)
        self._open, self._size = [], 0


class _Listed:
    """What bodies and tiles there are, without their bytes."""

    def __init__(self) -> None:
        self._objects: list[int] = []
        self._lengths: list[int] = []
        self._letters: list[str] = []
        self._counts: list[int] = []
        self._tiles: list[tuple[int, EncodedTile]] = []

    def add(self, held: StateTable, item: int, bodies: Sequence[EncodedBody]) -> None:
        for body in bodies:
            self._objects.append(item)
            self._lengths.append(len(body.body))
            self._letters.append(_LETTERS[body.encoding])
            self._counts.append(len(body.tiles))
            for tile in body.tiles:
                self._tiles.append((held.outline.number(tile.place.spec.name, tile.place.tile.index), tile))

    def table(self, held: StateTable) -> StateTable:
        tiles, sums = held.tiles.copy(), held.sums.copy()
        for number, tile in self._tiles:
            if tile.pre != int(tiles[number]):
                raise CorruptError(
                    f"{tile.place} of the baseline isn't what its state says: its memory was written",
                    hint="compare again; a publisher that is opened again rebuilds its baseline from the bucket",
                )
            tiles[number] = tile.post
            tensor = held.outline.tensor_of(number)
            sums[tensor] = (int(sums[tensor]) + tile.sum_change) % (1 << 64)
        return StateTable(outline=held.outline, tiles=tiles, sums=sums)

    def nans(self) -> tuple[str, ...]:
        return tuple(sorted({tile.place.spec.name for _, tile in self._tiles if tile.makes_nan})[:MAX_NANS])

    def bodies(self) -> Bodies:
        return Bodies(
            object=tuple(self._objects),
            length=tuple(self._lengths),
            encoding="".join(self._letters),
            tiles=tuple(self._counts),
        )

    def tiles(self, table: StateTable) -> Tiles:
        pairs = [digest for _, tile in self._tiles for digest in (tile.pre, tile.post)]
        tensors = sorted({table.outline.tensor_of(number) for number, _ in self._tiles})
        return Tiles(
            number=tuple(number for number, _ in self._tiles),
            changed=tuple(tile.changed for _, tile in self._tiles),
            digests=to_column(np.array(pairs, dtype=np.uint64)),
            sums=to_column(table.sums[tensors] if tensors else np.empty(0, dtype=np.uint64)),
        )
