"""Turn a version into writes for one engine, and read back what it holds. Blocking: drivers use threads.

Everything is checked here, before anything is staged: that the version's tensors are the engine's, that
the bits in place are those that the delta was made on, and that what comes out has the manifest's digests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slackwater.checkpoint.codec import decode_tile
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import Manifest, TensorEntry, TileEntry
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import TensorSpec, Tile, TileWrite, tiles
from slackwater.engine.base import Engine, TileReader
from slackwater.errors import ConflictError, CorruptError
from slackwater.replica.race import Stop
from slackwater.replica.source import TileBodies
from slackwater.weights.source import FolderSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The digest that one tile must have."""

    name: str
    tile: Tile
    digest: str
    """XXH3-128 in hex of the tile's bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """One version's writes for one engine, with the proofs of both sides."""

    writes: tuple[TileWrite, ...]
    after: tuple[Check, ...]
    """What the written tiles hold once committed."""
    before: tuple[Check, ...]
    """What they hold now, and again after an undo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Item:
    """One listed tile."""

    entry: TensorEntry
    tile: Tile
    tile_entry: TileEntry


_Made = tuple[TileWrite, Check, Check]


def prepare_delta(
    engine: TileReader, manifest: Manifest, bodies: TileBodies, threads: int, stop: Stop
) -> Prepared | None:
    """Decode a delta against the bits in place. None: ``stop`` was raised meanwhile.

    Raises:
        WrongBaseError: The bits in place are not those that the delta was made on.
        CorruptError: A body doesn't decode to the manifest's digest.
    """

    def decode(item: _Item) -> _Made | None:
        old = engine.read(item.entry.name, item.tile)
        body = bodies.of(item.tile_entry)
        write = decode_tile(item.entry, item.tile, item.tile_entry, body, old)
        return None if write is None else _made(item, write, tile_digest(old))

    return _gather(_items(manifest), decode, threads, stop)


def prepare_anchor(engine: TileReader, manifest: Manifest, folder: Path, threads: int, stop: Stop) -> Prepared | None:
    """Take from an anchor's folder the tiles that the engine holds otherwise. None: ``stop`` was raised.

    Raises:
        CorruptError: The folder's bits don't have the manifest's digest.
    """
    source = FolderSource(folder)

    def take(item: _Item) -> _Made | None:
        held = tile_digest(engine.read(item.entry.name, item.tile))
        if held == item.tile_entry.post:
            return None
        end = item.tile.start + item.tile.count
        values = source.bits(item.entry.name)[item.tile.start : end]
        if tile_digest(values) != item.tile_entry.post:
            raise CorruptError(
                f"{item.entry.name}, tile {item.tile.index}, is not that of anchor {manifest.version}",
                hint="delete the replica's cache folder; if that does not help, publish a new anchor",
            )
        write = TileWrite(name=item.entry.name, tile=item.tile, positions=None, values=values)
        return _made(item, write, held)

    return _gather(_items(manifest), take, threads, stop)


def state_after(engine: Engine, table: StateTable, manifest: Manifest) -> StateTable:
    """The state that ``manifest`` makes of ``table``, before a byte of it is fetched.

    Raises:
        ConflictError: The engine can't hold it; as WrongBaseError, the delta was made on another state.
        CorruptError: The manifest contradicts itself or its parent.
    """
    check_tensors(engine.tensors(), manifest)
    return StateTable.of_anchor(manifest) if manifest.kind == "anchor" else table.after(manifest)


def check_tensors(held: Mapping[str, TensorSpec], manifest: Manifest) -> None:
    """Refuse a version whose tensors are not the engine's: a delta may list fewer, an anchor must list all.

    Raises:
        ConflictError: Names the first tensor that is unknown, missing, or has another shape or dtype.
    """
    for entry in manifest.tensors:
        spec = held.get(entry.name)
        if spec is None:
            raise _misfit(manifest, f"has tensor {entry.name!r}, which the engine lacks")
        if (spec.dtype, spec.shape) != (entry.dtype, entry.shape):
            theirs, ours = f"{entry.dtype}{list(entry.shape)}", f"{spec.dtype}{list(spec.shape)}"
            raise _misfit(manifest, f"has {entry.name!r} as {theirs}, the engine as {ours}")
    missing = held.keys() - {entry.name for entry in manifest.tensors}
    if manifest.kind == "anchor" and missing:
        raise _misfit(manifest, f"lacks tensor {min(missing)!r}, which the engine holds")


def _misfit(manifest: Manifest, what: str) -> ConflictError:
    return ConflictError(
        f"version {manifest.version} of {manifest.run!r} {what}",
        hint="publish another model under another run; this replica stays as it is",
    )


def listed(manifest: Manifest) -> tuple[Check, ...]:
    """The digests of every tile that a version lists, after it."""
    return tuple(Check(name=item.entry.name, tile=item.tile, digest=item.tile_entry.post) for item in _items(manifest))


def first_difference(engine: Engine, checks: Sequence[Check], threads: int, stop: Stop) -> Check | None:
    """Read tiles back, one at a time per thread, and return one that differs; None where all agree.

    A raised ``stop`` ends it early, with None.
    """

    def differs(check: Check) -> bool:
        return not stop.is_set() and tile_digest(engine.read(check.name, check.tile)) != check.digest

    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        verdicts = zip(checks, pool.map(differs, checks), strict=True)
        return next((check for check, bad in verdicts if bad), None)


def read_state(engine: Engine) -> StateTable:
    """The state that the engine holds, every tensor read from its own memory."""
    specs = engine.tensors()
    digests = {name: [tile_digest(engine.read(name, tile)) for tile in tiles(spec)] for name, spec in specs.items()}
    return StateTable.of_digests(specs, digests)


def _items(manifest: Manifest) -> Iterator[_Item]:
    for entry in manifest.tensors:
        cut = {tile.index: tile for tile in tiles(entry.spec)}
        for tile_entry in entry.tiles:
            yield _Item(entry=entry, tile=cut[tile_entry.index], tile_entry=tile_entry)


def _made(item: _Item, write: TileWrite, held: str) -> _Made:
    def check(digest: str) -> Check:
        return Check(name=item.entry.name, tile=item.tile, digest=digest)

    return write, check(item.tile_entry.post), check(held)


def _gather(items: Iterator[_Item], make: Callable[[_Item], _Made | None], threads: int, stop: Stop) -> Prepared | None:
    """Make every tile in a bounded pool: at most one tile of scratch memory per thread."""

    def guarded(item: _Item) -> _Made | None:
        return None if stop.is_set() else make(item)

    with ThreadPoolExecutor(threads, thread_name_prefix="prepare") as pool:
        results = pool.map(guarded, items)
        made = [result for result in results if result is not None]
    if stop.is_set():
        return None
    return Prepared(
        writes=tuple(write for write, _, _ in made),
        after=tuple(after for _, after, _ in made),
        before=tuple(before for _, _, before in made),
    )
