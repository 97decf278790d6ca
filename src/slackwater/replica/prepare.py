"""Turn a version into writes for one engine, and read back what it holds. Blocking: drivers use threads.

Everything is checked here, before anything is staged: that the version's tensors are the engine's, that
the bits in place are those that the delta was made on, and that what comes out has the manifest's digests.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slackwater.checkpoint.application import places_of
from slackwater.checkpoint.codec import decode_body
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.element_sum import element_sum, seed_of
from slackwater.checkpoint.manifest import BodyEntry, Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import TensorSpec, Tile, TileWrite
from slackwater.engine.base import Engine, TileReader
from slackwater.errors import ConflictError, CorruptError, SpoiltError, WrongBaseError
from slackwater.replica.race import Stop
from slackwater.replica.source import TileBodies
from slackwater.weights.diff import table_of
from slackwater.weights.source import FolderSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The digest that one tile must have."""

    name: str
    tile: Tile
    digest: int
    """`slackwater.checkpoint.digest.tile_digest`."""

    @property
    def place(self) -> str:
        """Where, for people."""
        return f"{self.name}, tile {self.tile.index},"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """One version's writes for one engine, with the proofs of both sides."""

    writes: tuple[TileWrite, ...]
    after: tuple[Check, ...]
    """What the written tiles hold once committed."""
    before: tuple[Check, ...]
    """What they hold now, and again after an undo."""


_Made = tuple[TileWrite, Check, Check]


def prepare_delta(
    engine: TileReader, outline: Outline, manifest: Manifest, bodies: TileBodies, threads: int, stop: Stop
) -> Prepared | None:
    """Decode a delta against the bits in place. None: ``stop`` was raised meanwhile.

    Raises:
        WrongBaseError: The bits in place are not those that the delta was made on.
        CorruptError: A body doesn't decode to the manifest's digests.
    """

    def decode(entry: BodyEntry) -> list[_Made]:
        places = places_of(outline, entry)
        olds = [engine.read(place.spec.name, place.tile) for place in places]
        writes = decode_body(places, entry, bodies.of(entry), olds)
        return [_made(write, tile.post, tile.pre) for write, tile in zip(writes, entry.tiles, strict=True) if write]

    return _gather(manifest.listed(), decode, threads, stop)


def prepare_anchor(
    engine: TileReader, held: StateTable, table: StateTable, folder: Path, threads: int, stop: Stop
) -> Prepared | None:
    """Take from an anchor's folder the tiles that the engine holds otherwise. None: ``stop`` was raised.

    Args:
        engine: Whose bits they are compared with.
        held: What these bits should be.
        table: The anchor's.
        folder: The anchor's files.
        threads: Tiles at once.
        stop: Ends it early.

    Raises:
        WrongBaseError: The bits in place are not ``held``.
        CorruptError: The folder's bits don't have the table's digests.
    """
    source = FolderSource(folder)

    def take(pair: tuple[Check, Check]) -> list[_Made]:
        before, check = pair
        found = tile_digest(engine.read(check.name, check.tile))
        if found != before.digest:
            raise WrongBaseError(f"{check.place} isn't what the version in place has")
        if found == check.digest:
            return []
        values = check.tile.take(source.bits(check.name))
        if tile_digest(values) != check.digest:
            raise CorruptError(
                f"{check.place} in {folder} is not the anchor's",
                hint="delete the replica's cache folder; if that does not help, publish a new anchor",
            )
        return [_made(TileWrite(name=check.name, tile=check.tile, positions=None, values=values), check.digest, found)]

    return _gather(zip(all_tiles(held), all_tiles(table), strict=True), take, threads, stop)


def state_after(engine: Engine, table: StateTable, manifest: Manifest) -> StateTable:
    """The state that ``manifest`` makes of ``table``, before a byte of it is fetched.

    Raises:
        ConflictError: The engine can't hold it; as WrongBaseError, the delta was made on another state.
        CorruptError: The manifest contradicts itself or its parent.
    """
    check_tensors(engine.tensors(), manifest)
    return StateTable.of_anchor(manifest) if manifest.kind == "anchor" else table.after(manifest)


def check_tensors(held: Mapping[str, TensorSpec], manifest: Manifest) -> None:
    """Refuse an anchor whose tensors are not the engine's. A delta has its anchor's.

    Raises:
        ConflictError: Names the first tensor that is unknown, missing, or has another shape or dtype.
    """
    if manifest.kind != "anchor":
        return
    for theirs in manifest.outline.specs:
        ours = held.get(theirs.name)
        if ours is None:
            raise _misfit(manifest, f"has tensor {theirs.name!r}, which the engine lacks")
        if ours != theirs:
            kinds = f"{theirs.dtype}{list(theirs.shape)}, the engine as {ours.dtype}{list(ours.shape)}"
            raise _misfit(manifest, f"has {theirs.name!r} as {kinds}")
    missing = held.keys() - manifest.outline.by_name.keys()
    if missing:
        raise _misfit(manifest, f"lacks tensor {min(missing)!r}, which the engine holds")


def _misfit(manifest: Manifest, what: str) -> ConflictError:
    return ConflictError(
        f"version {manifest.version} of {manifest.run!r} {what}",
        hint="publish another model under another run; this replica stays as it is",
    )


def all_tiles(table: StateTable) -> Iterator[Check]:
    """The digest of every tile of a state."""
    return iter(checks_of(table, range(table.outline.num_tiles)))


def checks_of(table: StateTable, numbers: range) -> tuple[Check, ...]:
    """The digests of some of its tiles."""
    places = map(table.outline.place, numbers)
    digests = table.tiles[numbers.start : numbers.stop].tolist()
    return tuple(
        Check(name=spec.name, tile=tile, digest=digest) for (spec, tile), digest in zip(places, digests, strict=True)
    )


def first_difference(engine: Engine, checks: Iterable[Check], threads: int, stop: Stop) -> Check | None:
    """Read tiles back, one at a time per thread, and return one that differs; None where all agree.

    A raised ``stop`` ends it early, with None.
    """

    def differs(check: Check) -> bool:
        return not stop.is_set() and tile_digest(engine.read(check.name, check.tile)) != check.digest

    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        verdicts = pool.map(lambda check: (check, differs(check)), checks)
        return next((check for check, bad in verdicts if bad), None)


def read_state(engine: Engine) -> StateTable:
    """The state that the engine holds, every tensor read from its own memory."""
    outline = Outline(engine.tensors().values())
    found: list[tuple[int, int]] = []
    for number in range(outline.num_tiles):
        spec, tile = outline.place(number)
        bits = engine.read(spec.name, tile)
        found.append((tile_digest(bits), element_sum(seed_of(spec.name), tile, bits)))
    return table_of(outline, found)


def _made(write: TileWrite, after: int, before: int) -> _Made:
    def check(digest: int) -> Check:
        return Check(name=write.name, tile=write.tile, digest=digest)

    return write, check(after), check(before)


def memory_spoilt(what: str) -> SpoiltError:
    """The error of an engine whose memory isn't what it was given: ``what`` was found, in words."""
    return SpoiltError(what, hint="restart the replica; look at its memory, and don't trust its last answers")


_Item = TypeVar("_Item")


def _gather(items: Iterable[_Item], make: Callable[[_Item], list[_Made]], threads: int, stop: Stop) -> Prepared | None:
    """Make every tile in a bounded pool: at most one body's tiles of scratch memory per thread."""

    def guarded(item: _Item) -> list[_Made]:
        return [] if stop.is_set() else make(item)

    with ThreadPoolExecutor(threads, thread_name_prefix="prepare") as pool:
        made = [result for results in pool.map(guarded, items) for result in results]
    if stop.is_set():
        return None
    return Prepared(
        writes=tuple(write for write, _, _ in made),
        after=tuple(after for _, after, _ in made),
        before=tuple(before for _, _, before in made),
    )
