"""A delta applied to a folder of safetensors in place, over threads, a few tiles in memory at a time."""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from slackwater.checkpoint.application import apply_taken, places_of, take
from slackwater.checkpoint.columns import from_column
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import BodyEntry, Manifest, ObjectRef
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.errors import CorruptError, SlackwaterError, WrongBaseError
from slackwater.ids import StateDigest
from slackwater.weights.delta_folder import RUN
from slackwater.weights.source import FolderSource, ShardSource
from slackwater.weights.undo import Pairs, UndoLog

_COPIED_BYTES: Final = 16 * 1024 * 1024
"""Read and written at once where files are copied."""

Refused = Callable[[BodyEntry, SlackwaterError], None]
"""Told of a body that can't be applied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """A delta at hand."""

    manifest: Manifest
    pack: Callable[[ObjectRef], memoryview]
    """One of its objects, checked.

    Raises:
        NotFoundError: It isn't there.
        CorruptError: Its size or SHA-256 is another.
    """

    @property
    def pairs(self) -> Pairs:
        """The digests before and after of each tile that it changes, by number."""
        tiles = self.manifest.tiles
        if tiles is None:
            return {}
        return dict(zip(tiles.number, zip(tiles.pre.tolist(), tiles.post.tolist(), strict=True), strict=True))


class WritableFolder(ShardSource):
    """A model folder whose files are mapped for writing: what is written into its bits is written into them.

    Args:
        source: The folder, checked.
    """

    def __init__(self, source: FolderSource) -> None:
        self._maps = {file: np.memmap(path, np.uint8, "r+") for file, path in source.shards.items()}
        super().__init__(self._maps)

    def flush(self) -> None:
        """Return once the disk has everything that was written."""
        for mapped in self._maps.values():
            mapped.flush()


def folder_bytes(source: FolderSource) -> int:
    """Bytes of a model's files."""
    return sum(path.stat().st_size for path in (*source.shards.values(), *source.files.values()))


def copy_folder(source: FolderSource, target: Path) -> Iterator[int]:
    """Copy a model's files into an empty folder; yields from time to time how many bytes are done."""
    done = 0
    for file, path in {**source.shards, **source.files}.items():
        with path.open("rb") as old, (target / file).open("xb") as new:
            while part := old.read(_COPIED_BYTES):
                new.write(part)
                done += len(part)
                yield done


def made_on(manifest: Manifest) -> str:
    """The state that a delta was made on, for a message: with its version, where that is a version of a run."""
    if manifest.parent is None:
        return "nothing"
    version = "" if manifest.run == RUN else f" (version {manifest.parent.version})"
    return f"state {manifest.parent.state[:12]}{version}"


def wrong_base(manifest: Manifest, held: StateDigest, what: str) -> WrongBaseError:
    """The error that a delta was made on another state.

    Args:
        manifest: The delta's.
        held: The state at hand.
        what: Where they differ.
    """
    named = "" if manifest.run == RUN or manifest.parent is None else f", {manifest.run}/{manifest.parent.version}"
    return WrongBaseError(
        f"the delta is made on {made_on(manifest)}; the model held is state {held[:12]}: {what}",
        hint=f"name the model that the delta was made on{named}",
    )


def state_after(table: StateTable, manifest: Manifest) -> StateTable:
    """The state that a delta makes of a state, some of whose tiles may have been changed by it already.

    Raises:
        WrongBaseError: A tile is neither as before the delta nor as after it; it is named if the delta changes it.
        CorruptError: The delta contradicts itself.
    """
    tiles = manifest.tiles
    if tiles is None:
        raise CorruptError(f"version {manifest.version} of {manifest.run} is an anchor, not a delta")
    outline, numbers = table.outline, np.array(tiles.number, dtype=np.int64)
    if numbers.size and int(numbers.max()) >= outline.num_tiles:
        what = f"the delta changes tile {numbers.max()}, and the base has {outline.num_tiles}"
        raise wrong_base(manifest, table.digest, what)
    held = table.tiles[numbers]
    wrong = np.flatnonzero((held != tiles.pre) & (held != tiles.post))
    if wrong.size:
        spec, tile = outline.place(int(numbers[wrong[0]]))
        more = f" and {wrong.size - 1} more" if wrong.size > 1 else ""
        raise wrong_base(manifest, table.digest, f"{spec.name} tile {tile.index}{more} differ{'' if more else 's'}")
    tensors = np.unique(np.searchsorted(outline.first_tiles, numbers, side="right") - 1)
    posts, sums = table.tiles.copy(), table.sums.copy()
    posts[numbers] = tiles.post
    sums[tensors] = from_column(tiles.sums, tensors.size, "tiles.sums")
    result = StateTable(outline=outline, tiles=posts, sums=sums)
    if result.digest != manifest.state:
        what = "all tiles that the delta changes are as it expects, and another tile isn't"
        raise wrong_base(manifest, table.digest, what)
    return result


def _raise(_entry: BodyEntry, error: SlackwaterError) -> NoReturn:
    raise error


def apply_delta(
    source: ShardSource, outline: Outline, delta: Delta, *, threads: int, undo: UndoLog | None = None
) -> Generator[int]:
    """Apply a delta to a writable source; yields how many of its bodies are done.

    Applying is idempotent: tiles that have their new bits stay. One object of the delta is held at a time.

    Args:
        source: Of exactly the outline's tensors.
        outline: Numbers the tiles.
        delta: What to apply.
        threads: Bodies decoded at once.
        undo: Where to keep tiles while they are written; None where nobody would read a half-written source.

    Raises:
        WrongBaseError: A tile is neither as before the delta nor as after it.
        CorruptError: An object or a body is damaged.
        NotFoundError: An object is missing.
    """
    done = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="tiles") as pool:
        for index, entries in groupby(delta.manifest.listed(), lambda entry: entry.object):
            pack = delta.pack(delta.manifest.objects[index])
            for _ in apply_pack(source, outline, entries, pack, pool=pool, undo=undo):
                done += 1
                yield done


def apply_pack(
    source: ShardSource,
    outline: Outline,
    entries: Iterable[BodyEntry],
    pack: memoryview,
    *,
    pool: ThreadPoolExecutor,
    undo: UndoLog | None = None,
    refused: Refused = _raise,
) -> Generator[None]:
    """Apply the bodies of one object; yields after each. See `apply_delta`.

    Args:
        source: Of exactly the outline's tensors.
        outline: Numbers the tiles.
        entries: The bodies in the object.
        pack: The object.
        pool: Where to decode.
        undo: See `apply_delta`.
        refused: Told of each body that can't be applied; what it raises ends the work.
    """

    def apply(entry: BodyEntry) -> tuple[BodyEntry, SlackwaterError | None]:
        try:
            _apply(source, outline, entry, pack[entry.offset : entry.offset + entry.length], undo)
        except SlackwaterError as error:
            return entry, error
        return entry, None

    for entry, error in pool.map(apply, entries):
        if error is not None:
            refused(entry, error)
        yield


def _apply(source: ShardSource, outline: Outline, entry: BodyEntry, body: memoryview, undo: UndoLog | None) -> None:
    places = places_of(outline, entry)
    held = take(places, source.bits)
    if undo is not None and all(tile_digest(bits) == tile.post for bits, tile in zip(held, entry.tiles, strict=True)):
        return  # nothing to keep
    with nullcontext() if undo is None else undo.keeping([tile.number for tile in entry.tiles], held):
        apply_taken(places, entry, body, held, source.bits)
