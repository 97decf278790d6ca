"""Bodies applied to tensors, or to pieces of them: a body's tiles are taken out, and copies are put back."""

from collections.abc import Callable, Iterable, Sequence

from slackwater.checkpoint.codec import Place, apply_body
from slackwater.checkpoint.manifest import BodyEntry
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.pieces import WHOLE, Pieces, locate
from slackwater.checkpoint.tensor import Bits

BitsOf = Callable[[str], Bits]
"""A tensor's flat bits by its name, or those of the piece that is held; writable where they are to be written."""


def places_at(outline: Outline, numbers: Iterable[int]) -> list[Place]:
    """The tiles of some numbers.

    Raises:
        NotFoundError: The outline has no such tile.
    """
    return [Place(spec=spec, tile=tile) for spec, tile in map(outline.place, numbers)]


def places_of(outline: Outline, entry: BodyEntry) -> list[Place]:
    """The tiles that a body makes.

    Raises:
        NotFoundError: The outline has no such tile.
    """
    return places_at(outline, (tile.number for tile in entry.tiles))


def take(places: Iterable[Place], bits_of: BitsOf, pieces: Pieces = WHOLE) -> list[Bits]:
    """The bits of some tiles: views, or copies where a tile has several rows.

    Args:
        places: The tiles.
        bits_of: The tensors.
        pieces: What is held of them.

    Raises:
        WrongBaseError: A tile isn't held.
    """
    return [locate(place.spec, place.tile, pieces).take(bits_of(place.spec.name)) for place in places]


def apply_taken(
    places: Sequence[Place],
    entry: BodyEntry,
    body: memoryview,
    held: Sequence[Bits],
    bits_of: BitsOf,
    pieces: Pieces = WHOLE,
) -> int:
    """Apply a body to the tensors that its tiles were taken from: `apply_body`, and what was copied goes back.

    Args:
        places: The tiles that the manifest lists for it.
        entry: What the manifest says of it.
        body: Its bytes, already checked as part of their object.
        held: The tiles, as `take` gave them.
        bits_of: The tensors.
        pieces: What is held of them.

    Returns:
        How many tiles were written.

    Raises:
        WrongBaseError: See `apply_body`.
        CorruptError: See `apply_body`.
        InvalidInputError: See `apply_body`.
    """
    written = apply_body(places, entry, body, held)
    if written:
        for place, tile in zip(places, held, strict=True):
            if place.tile.rows > 1:
                locate(place.spec, place.tile, pieces).put(bits_of(place.spec.name), tile)
    return written
