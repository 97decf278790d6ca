"""Bodies of a delta, to bytes and back. Normative page: docs/format.md.

A body makes one tile, or several small ones of one dtype. Nothing decoded is given out before it has been checked
against the digests that the manifest names.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
import xxhash

from slackwater.checkpoint.changes import STRETCH, Changes, find_changes, sampled_share, scatter
from slackwater.checkpoint.dense import decode_dense, encode_dense
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.element_sum import compare_all, seed_of, sum_change
from slackwater.checkpoint.manifest import BodyEntry, Encoding, TileEntry
from slackwater.checkpoint.nans import has_nan
from slackwater.checkpoint.refusal import refuse_body
from slackwater.checkpoint.sparse import contexts_of, decode_sparse, encode_sparse
from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.errors import InvalidInputError, WrongBaseError

Level = Literal["fast", "wan"]
"""``fast``: at memory-like speed, and readers touch changed elements alone. ``wan``: the fewest bytes that we know;
readers walk the old bits."""

DENSE_SHARE: Final = 8
"""Above one changed element in this many, a dense write is cheaper than a scattered one."""

_DENSE_ELEMENTS: Final = 4
"""Most elements in a byte of a dense body: a sparse body with more elements for each byte is taken at once."""

_SPARSE_SHARE: Final[dict[Level, tuple[int, ...]]] = {"fast": (12,), "wan": (12, 6)}
"""Above one changed element in so many a sparse body takes more than three times as long as at 1.4 %: ``wan`` first
takes one context, and at last both take bodies whose time doesn't depend on what changes."""

_SURELY: Final = 1.5
"""How far a sample has to be above that share for the changes not to be looked for."""


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
    makes_nan: bool
    """Whether a changed element is NaN now; where most of the tile changes, whether any is."""


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
        news: Their bits after. They must not be written meanwhile: compare `EncodedTile.post` with `tile_digest`
            afterwards where that is not certain.
        level: How much time to spend for how many bytes.

    Raises:
        InvalidInputError: Dtypes or sizes differ, or bits don't lie side by side.
    """
    for place, old, new in zip(places, olds, news, strict=True):
        if place.spec.dtype != places[0].spec.dtype:
            raise InvalidInputError(f"{place} is {place.spec.dtype} among tiles of {places[0].spec.dtype}")
        if not old.dtype == new.dtype == place.spec.bits_dtype or not old.shape == new.shape == (place.tile.count,):
            raise InvalidInputError(f"{place} can't go from {old.dtype} {old.shape} to {new.dtype} {new.shape} here")
        _check_contiguous(place, old, new)
    compared = _compare(places, olds, news, _SPARSE_SHARE[level][-1])
    if not compared:
        return None
    encoding, body = _shortest(places[0].spec.dtype, compared, level)
    return EncodedBody(encoding=encoding, body=body, tiles=tuple(map(_encoded_tile, compared)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compared:
    """A tile that changes."""

    place: Place
    old: Bits
    new: Bits
    changes: Changes | None
    """None: more than a sparse body is for."""
    pre: int
    post: int


def _compare(places: Sequence[Place], olds: Sequence[Bits], news: Sequence[Bits], most: int) -> list[_Compared]:
    elements = sum(old.size for old in olds)
    sampled = sum(sampled_share(old, new) * old.size for old, new in zip(olds, news, strict=True))
    compare = _without_looking if sampled * most > _SURELY * elements else _looking
    limit = max(1, elements // most)
    tiles = (compare(*tile, limit) for tile in zip(places, olds, news, strict=True))
    return [tile for tile in tiles if tile is not None]


def _without_looking(place: Place, old: Bits, new: Bits, _: int) -> _Compared | None:
    pre, post = tile_digest(old), tile_digest(new)
    if pre == post and np.array_equal(old, new):
        return None
    return _Compared(place=place, old=old, new=new, changes=None, pre=pre, post=post)


def _looking(place: Place, old: Bits, new: Bits, limit: int) -> _Compared | None:
    pre, post = xxhash.xxh3_64(), xxhash.xxh3_64()

    def watch(before: Bits, after: Bits) -> None:
        pre.update(before.data)
        post.update(after.data)

    changes = find_changes(old, new, limit, watch)
    if changes is not None and not changes.count:
        return None
    return _Compared(place=place, old=old, new=new, changes=changes, pre=pre.intdigest(), post=post.intdigest())


def _shortest(dtype: str, tiles: Sequence[_Compared], level: Level) -> tuple[Encoding, bytes]:
    """The shortest body that the level has time for."""
    olds, news = [tile.old for tile in tiles], [tile.new for tile in tiles]
    size = sum(new.nbytes for new in news)
    best: tuple[Encoding, bytes] | None = None
    changes = [tile.changes for tile in tiles if tile.changes is not None]
    contexts = _contexts(changes, sum(old.size for old in olds), level) if len(changes) == len(tiles) else None
    if contexts is not None:
        best = "sparse", encode_sparse(dtype, olds, changes, by_exponent=contexts == "by exponent")
    if best is None or len(best[1]) * _DENSE_ELEMENTS > sum(new.size for new in news):
        dense = encode_dense(olds, news)
        if dense is not None and (best is None or len(dense) < len(best[1])):
            best = "dense", dense
    if best is None or len(best[1]) >= size:
        best = "full", b"".join(np.ascontiguousarray(new).data for new in news)
    return best


def _contexts(changes: Sequence[Changes], elements: int, level: Level) -> Literal["one", "by exponent"] | None:
    """How a sparse body is written; None where it would take too long."""
    count = sum(part.count for part in changes)
    *_, most = _SPARSE_SHARE[level]
    if count * most > max(elements, most):
        return None
    return "by exponent" if level == "wan" and count * _SPARSE_SHARE["wan"][0] <= elements else "one"


def _encoded_tile(tile: _Compared) -> EncodedTile:
    seed = seed_of(tile.place.spec.name)
    if tile.changes is None:
        changed, moved = compare_all(seed, tile.place.tile, tile.old, tile.new)
    else:
        changed, moved = tile.changes.count, sum_change(seed, tile.place.tile, tile.changes)
    makes_nan = has_nan(tile.place.spec.dtype, tile.new if tile.changes is None else tile.changes.new)
    return EncodedTile(
        place=tile.place, changed=changed, pre=tile.pre, post=tile.post, sum_change=moved, makes_nan=makes_nan
    )


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
    with ExitStack() as undo:
        for place, tile, bits, part, is_done in zip(places, entry.tiles, held, parts, done, strict=True):
            if is_done:
                continue
            if isinstance(part, Changes):
                undo.callback(scatter, bits, part.positions, part.old)
                found = _scatter_all(bits, part)
            else:
                found = tile_digest(part)
            if found != tile.post:
                refuse_body(str(place), "post", "the decoded tile hasn't the digest that the manifest names")
        undo.pop_all()
    for bits, part, is_done in zip(held, parts, done, strict=True):
        if not is_done and not isinstance(part, Changes):
            bits[:] = part
    return done.count(False)


def _scatter_all(bits: Bits, changes: Changes) -> int:
    """Write changes and take the result's digest, stretch by stretch, while it is in the processor's cache."""
    if bits.size <= STRETCH:
        scatter(bits, changes.positions, changes.new)
        return tile_digest(bits)
    digest = xxhash.xxh3_64()
    edges = [*range(0, bits.size, STRETCH), bits.size]
    cuts = np.searchsorted(changes.positions, edges).tolist()
    for (begin, end), (first, last) in zip(pairwise(edges), pairwise(cuts), strict=True):
        scatter(bits, changes.positions[first:last], changes.new[first:last])
        digest.update(bits[begin:end].data)
    return digest.intdigest()


def _check_contiguous(place: Place, *arrays: Bits) -> None:
    if not all(array.flags.c_contiguous for array in arrays):
        raise InvalidInputError(f"{place}: its bits lie apart in memory", hint="take them by Tile.take")


_Part = Changes | Bits
"""What a body makes of a tile: its changes, or all of its new bits."""


def _check_held(places: Sequence[Place], entry: BodyEntry, body: memoryview, olds: Sequence[Bits]) -> list[bool]:
    """Check what comes before decoding; returns which tiles have their new bits already."""
    if not len(places) == len(entry.tiles) == len(olds):
        raise InvalidInputError(f"{len(places)} places and {len(olds)} tiles for a body of {len(entry.tiles)}")
    if len(body) != entry.length:
        refuse_body(str(places[0]), "length", f"the body has {len(body)} bytes, the manifest says {entry.length}")
    for place, old in zip(places, olds, strict=True):
        if old.dtype != place.spec.bits_dtype or old.shape != (place.tile.count,):
            raise InvalidInputError(
                f"{place} has {place.tile.count} elements of {place.spec.dtype}, not {old.dtype} {old.shape}"
            )
        _check_contiguous(place, old)
        if place.spec.dtype != places[0].spec.dtype:
            refuse_body(str(place), "dtype", f"{place.spec.dtype} in a body of {places[0].spec.dtype}")
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
            refuse_body(str(place), "changed", f"{found} elements change, the manifest says {tile.changed}")
    return parts


def _split_full(where: str, olds: Sequence[Bits], body: memoryview) -> list[Bits]:
    size = sum(old.nbytes for old in olds)
    if len(body) != size:
        refuse_body(where, "length", f"{size} bytes of elements don't fill {len(body)}")
    result, begin = list[Bits](), 0
    for old in olds:
        result.append(np.frombuffer(body[begin : begin + old.nbytes], dtype=old.dtype))
        begin += old.nbytes
    return result


def _prove(place: Place, tile: TileEntry, old: Bits, part: _Part) -> TileWrite:
    if not isinstance(part, Changes):
        if tile_digest(part) != tile.post:
            refuse_body(str(place), "post", "the decoded tile hasn't the digest that the manifest names")
        return TileWrite(name=place.spec.name, tile=place.tile, positions=None, values=part)
    result = old.copy()
    if _scatter_all(result, part) != tile.post:
        refuse_body(str(place), "post", "the decoded tile hasn't the digest that the manifest names")
    if part.count * DENSE_SHARE > old.size:
        return TileWrite(name=place.spec.name, tile=place.tile, positions=None, values=result)
    values = part.new.astype(old.dtype)
    return TileWrite(name=place.spec.name, tile=place.tile, positions=part.positions, values=values)
