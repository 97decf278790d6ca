"""Bits of a version in memory: a delta applied to them, and whether they are what a state says."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from slackwater.checkpoint.application import apply_taken, places_of, take
from slackwater.checkpoint.codec import Place
from slackwater.checkpoint.digest import tile_digest
from slackwater.checkpoint.manifest import Manifest, ObjectRef
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.pieces import WHOLE, Pieces, held_numbers, held_tile, locate
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits
from slackwater.errors import WrongBaseError


def apply(
    manifest: Manifest,
    outline: Outline,
    pack: Callable[[ObjectRef], bytes | bytearray],
    bits: Mapping[str, Bits],
    pieces: Pieces = WHOLE,
) -> None:
    """Apply a delta to bits in place: tile by tile, each checked before and after; done ones are left.

    Args:
        manifest: The delta.
        outline: The run's.
        pack: One of its objects, checked. Asked in order, for those alone that change what is held.
        bits: Flat and writable; bodies of other tensors are left out.
        pieces: What they are of the tensors; bodies of other tiles are left out.

    Raises:
        WrongBaseError: The bits are neither its old ones nor its new ones, or a body makes tiles of which some aren't
            held.
        CorruptError: A body doesn't make what the manifest says.
    """
    fetched = lru_cache(maxsize=1)(pack)
    for entry in manifest.listed():
        places = places_of(outline, entry)
        absent = [place for place in places if not _is_held(place, bits, pieces)]
        if len(absent) == len(places):
            continue
        if absent:
            raise WrongBaseError(
                f"{absent[0].spec.name} isn't held, and shares a body with {len(places) - len(absent)} tiles"
            )
        body = memoryview(fetched(manifest.objects[entry.object]))[entry.offset : entry.offset + entry.length]
        held = take(places, bits.__getitem__, pieces)
        apply_taken(places, entry, body, held, bits.__getitem__, pieces)


def _is_held(place: Place, bits: Mapping[str, Bits], pieces: Pieces) -> bool:
    return place.spec.name in bits and held_tile(place.spec, place.tile, pieces) is not None


def first_wrong(table: StateTable, bits: Mapping[str, Bits], pieces: Pieces = WHOLE) -> Place | None:
    """A tile that isn't what a state says; None where all that are held are.

    Args:
        table: The state.
        bits: Some of its tensors, flat.
        pieces: What they are of the tensors.
    """
    for name, held in bits.items():
        for number in held_numbers(table.outline, name, pieces):
            spec, tile = table.outline.place(number)
            if tile_digest(locate(spec, tile, pieces).take(held)) != int(table.tiles[number]):
                return Place(spec=spec, tile=tile)
    return None
