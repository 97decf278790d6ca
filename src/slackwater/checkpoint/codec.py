"""Bodies of a delta, to bytes and back. Normative page: docs/format.md.

A body makes one tile, or several small ones of one dtype. Nothing decoded is given out before it has been checked
against the digests that the manifest names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

import numpy as np

from slackwater.checkpoint.changes import Changes, find_changes, scatter
from slackwater.checkpoint.dense import decode_dense, encode_dense
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.element_sum import element_sum, seed_of, sum_change
from slackwater.checkpoint.manifest import BodyEntry, Encoding, TileEntry
from slackwater.checkpoint.sparse import contexts_of, decode_sparse, encode_sparse
from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.errors import CorruptError, InvalidInputError, WrongBaseError

Level = Literal["fast", "wan"]
"""``fast``: at memory-like speed, and readers touch changed elements alone. ``wan``: the fewest bytes that we know;
readers walk the old bits."""

DENSE_SHARE: Final = 8
"""Above one changed element in this many, a dense write is cheaper than a scattered one."""

_DENSE_ELEMENTS: Final = 4
"""Most elements in a byte of a dense body: a sparse body with more elements for each byte is taken at once."""

_SPARSE_SHARE: Final = 10
"""Above one changed element in this many, ``fast`` takes a body whose time doesn't depend on what changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tile and the tensor that it is of."""

    spec: TensorSpec
    tile: Tile

    def __str__(self) -> str:
        return f"{self.spec.name} tile {self.tile.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTile:
    """What a body says of one of its tiles."""

    place: Place
    changed: int
    """Elements whose bits differ; at least 1."""
    pre: int
    """`tile_digest` before."""
    post: int
    """`tile_digest` after."""
    sum_change: int
    """What the tile adds to its tensor's element sum, modulo 2**64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedBody:
    """A body and the tiles that it makes."""

    encoding: Encoding
    body: bytes
    tiles: tuple[EncodedTile, ...]


def encode_body(
    places: Sequence[Place], olds: Sequence[Bits], news: Sequence[Bits], level: Level
) -> EncodedBody | None:
    """Encode what changed in some tiles of one dtype; None where no bit did. Tiles that stay are left out.

    Args:
        places: The tiles.
        olds: Their bits before, flat.
        news: Their bits after.
        level: How much time to spend for how many bytes.

    Raises:
        InvalidInputError: Dtypes or sizes differ, or ``news`` were written meanwhile.
    """
    for place, old, new in zip(places, olds, news, strict=True):
        if place.spec.dtype != places[0].spec.dtype:
            raise InvalidInputError(f"{place} is {place.spec.dtype} among tiles of {places[0].spec.dtype}")
        if not old.dtype == new.dtype == place.spec.bits_dtype or not old.shape == new.shape == (place.tile.count,):
            raise InvalidInputError(f"{place} can't go from {old.dtype} {old.shape} to {new.dtype} {new.shape} here")
    posts = [tile_digest(new) for new in news]
    changes = _find_all(olds, news, level)
    kept = [index for index in range(len(places)) if _differs(changes, index, olds, news)]
    if not kept:
        return None
    held, made = [olds[index] for index in kept], [news[index] for index in kept]
    found = None if changes is None else [changes[index] for index in kept]
    encoding, body = _smallest(places[0].spec.dtype, held, made, found, level)
    tiles = tuple(
        _encoded_tile(places[i], olds[i], news[i], posts[i], None if changes is None else changes[i]) for i in kept
    )
    return EncodedBody(encoding=encoding, body=body, tiles=tiles)


def _differs(changes: list[Changes] | None, index: int, olds: Sequence[Bits], news: Sequence[Bits]) -> bool:
    if changes is not None:
        return changes[index].count > 0
    return not np.array_equal(olds[index], news[index])


def _find_all(olds: Sequence[Bits], news: Sequence[Bits], level: Level) -> list[Changes] | None:
    """What changed in each tile; None where a sparse body would take too long."""
    left = sum(old.size for old in olds)
    if level == "fast":
        left = max(left // _SPARSE_SHARE, 1)
    result: list[Changes] = []
    for old, new in zip(olds, news, strict=True):
        found = find_changes(old, new, left)
        if found is None:
            return None
        left -= found.count
        result.append(found)
    return result


def _smallest(
    dtype: str, olds: Sequence[Bits], news: Sequence[Bits], changes: list[Changes] | None, level: Level
) -> tuple[Encoding, bytes]:
    size = sum(new.nbytes for new in news)
    best: tuple[Encoding, bytes] | None = None
    if changes is not None:
        best = "sparse", encode_sparse(dtype, olds, changes, by_exponent=level == "wan")
    if best is None or len(best[1]) * _DENSE_ELEMENTS > sum(new.size for new in news):
        dense = encode_dense(olds, news)
        if dense is not None and (best is None or len(dense) < len(best[1])):
            best = "dense", dense
    if best is None or len(best[1]) >= size:
        best = "full", b"".join(np.ascontiguousarray(new).data for new in news)
    return best


def _encoded_tile(place: Place, old: Bits, new: Bits, post: int, changes: Changes | None) -> EncodedTile:
    seed = seed_of(place.spec.name)
    if changes is None:
        changed = int(np.count_nonzero(old != new))
        moved = (element_sum(seed, place.tile, new) - element_sum(seed, place.tile, old)) % (1 << 64)
    else:
        changed, moved = changes.count, sum_change(seed, place.tile, changes)
    if tile_digest(new) != post:
        raise InvalidInputError(
            f"{place} was written while it was encoded", hint="let publish() return before the next optimizer step"
        )
    return EncodedTile(place=place, changed=changed, pre=tile_digest(old), post=post, sum_change=moved)


def decode_body(
    places: Sequence[Place], entry: BodyEntry, body: memoryview, olds: Sequence[Bits]
) -> list[TileWrite | None]:
    """Decode a body against the bits now held, and prove the result before giving it out.

    Args:
        places: The tiles that the manifest lists for it.
        entry: What the manifest says of it.
        body: Its bytes, already checked as part of their object.
        olds: Each tile's elements as held now, flat; only read.

    Returns:
        A write for each tile, or None where it already has its new bits: applying a delta twice is harmless.

    Raises:
        WrongBaseError: The bits held are neither the delta's old ones nor its new ones.
        CorruptError: The body breaks the format, or doesn't make what the manifest says.
        InvalidInputError: ``olds`` aren't these tiles.
    """
    done = _check_held(places, entry, body, olds)
    if all(done):
        return [None] * len(done)
    parts = _decode(places, entry, body, olds)
    return [
        None if is_done else _prove(place, tile, old, part)
        for place, tile, old, part, is_done in zip(places, entry.tiles, olds, parts, done, strict=True)
    ]


def apply_body(places: Sequence[Place], entry: BodyEntry, body: memoryview, held: Sequence[Bits]) -> int:
    """Decode a body into the bits that it was made for, in place, without a copy of them.

    Args:
        places: The tiles that the manifest lists for it.
        entry: What the manifest says of it.
        body: Its bytes, already checked as part of their object.
        held: Each tile's elements, flat and writable. They are as before if an error is raised.

    Returns:
        How many tiles were written; those that have their new bits already are not.

    Raises:
        WrongBaseError: The bits held are neither the delta's old ones nor its new ones.
        CorruptError: The body breaks the format, or doesn't make what the manifest says.
        InvalidInputError: ``held`` aren't these tiles, or can't be written.
    """
    done = _check_held(places, entry, body, held)
    if all(done):
        return 0
    for place, bits in zip(places, held, strict=True):
        if not bits.flags.writeable:
            raise InvalidInputError(f"the bits held of {place} can't be written", hint="pass writable bits")
    parts = _decode(places, entry, body, held)
    undo = [part if isinstance(part, Changes) else bits.copy() for part, bits in zip(parts, held, strict=True)]
    for bits, part, is_done in zip(held, parts, done, strict=True):
        if not is_done:
            _write(bits, part)
    try:
        for place, tile, bits in zip(places, entry.tiles, held, strict=True):
            _check_post(place, tile, bits)
    except CorruptError:
        for bits, part, is_done in zip(held, undo, done, strict=True):
            if not is_done:
                _put_back(bits, part)
        raise
    return done.count(False)


_Part = Changes | Bits
"""What a body makes of a tile: its changes, or all of its new bits."""


def _check_held(places: Sequence[Place], entry: BodyEntry, body: memoryview, olds: Sequence[Bits]) -> list[bool]:
    """Check what comes before decoding; returns which tiles have their new bits already."""
    if not len(places) == len(entry.tiles) == len(olds):
        raise InvalidInputError(f"{len(places)} places and {len(olds)} tiles for a body of {len(entry.tiles)}")
    if len(body) != entry.length:
        _corrupt(str(places[0]), "length", f"the body has {len(body)} bytes, the manifest says {entry.length}")
    for place, old in zip(places, olds, strict=True):
        if old.dtype != place.spec.bits_dtype or old.shape != (place.tile.count,):
            raise InvalidInputError(
                f"{place} has {place.tile.count} elements of {place.spec.dtype}, not {old.dtype} {old.shape}"
            )
        if place.spec.dtype != places[0].spec.dtype:
            _corrupt(str(place), "dtype", f"{place.spec.dtype} in a body of {places[0].spec.dtype}")
    done = [_is_done(place, tile, old) for place, tile, old in zip(places, entry.tiles, olds, strict=True)]
    if any(done) and not all(done) and entry.encoding == "sparse" and contexts_of(body) > 1:
        raise WrongBaseError(
            f"{places[done.index(True)]} has its new bits and {places[done.index(False)]} its old ones, "
            "and this body reads the old bits of both",
            hint="catch up from an anchor",
        )
    return done


def _is_done(place: Place, tile: TileEntry, old: Bits) -> bool:
    held = tile_digest(old)
    if held not in (tile.pre, tile.post):
        raise WrongBaseError(f"{place} isn't what the delta was made on", hint="catch up from an anchor")
    return held == tile.post


def _decode(places: Sequence[Place], entry: BodyEntry, body: memoryview, olds: Sequence[Bits]) -> Sequence[_Part]:
    where = str(places[0]) if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
    if entry.encoding == "sparse":
        parts: Sequence[_Part] = decode_sparse(where, places[0].spec.dtype, olds, body)
    elif entry.encoding == "dense":
        parts = decode_dense(where, olds, body)
    else:
        parts = _split_full(where, olds, body)
    for place, tile, old, part in zip(places, entry.tiles, olds, parts, strict=True):
        found = part.count if isinstance(part, Changes) else int(np.count_nonzero(part != old))
        if found != tile.changed and tile_digest(old) != tile.post:
            _corrupt(str(place), "changed", f"{found} elements change, the manifest says {tile.changed}")
    return parts


def _split_full(where: str, olds: Sequence[Bits], body: memoryview) -> list[Bits]:
    size = sum(old.nbytes for old in olds)
    if len(body) != size:
        _corrupt(where, "length", f"{size} bytes of elements don't fill {len(body)}")
    result, begin = list[Bits](), 0
    for old in olds:
        result.append(np.frombuffer(body[begin : begin + old.nbytes], dtype=old.dtype))
        begin += old.nbytes
    return result


def _prove(place: Place, tile: TileEntry, old: Bits, part: _Part) -> TileWrite:
    if not isinstance(part, Changes):
        _check_post(place, tile, part)
        return TileWrite(name=place.spec.name, tile=place.tile, positions=None, values=part)
    result = old.copy()
    scatter(result, part.positions, part.new)
    _check_post(place, tile, result)
    if part.count * DENSE_SHARE > old.size:
        return TileWrite(name=place.spec.name, tile=place.tile, positions=None, values=result)
    values = part.new.astype(old.dtype)
    return TileWrite(name=place.spec.name, tile=place.tile, positions=part.positions, values=values)


def _write(bits: Bits, part: _Part) -> None:
    if isinstance(part, Changes):
        scatter(bits, part.positions, part.new)
    else:
        bits[:] = part


def _put_back(bits: Bits, undo: _Part) -> None:
    if isinstance(undo, Changes):
        scatter(bits, undo.positions, undo.old)
    else:
        bits[:] = undo


def _check_post(place: Place, tile: TileEntry, bits: Bits) -> None:
    if tile_digest(bits) != tile.post:
        _corrupt(str(place), "post", "the decoded tile hasn't the digest that the manifest names")


def _corrupt(where: str, field: str, why: str) -> NoReturn:
    raise CorruptError(f"{where}: {field}: {why}", hint="fetch the object again")
