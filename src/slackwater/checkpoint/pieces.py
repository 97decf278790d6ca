"""Pieces of tensors: the lines that one of several ranks holds, and where tiles lie in them.

Ranks that share a tensor out along the axis at which its tiles are cut hold whole tiles each, and so need nothing of
one another: a tile is the unit of bodies and digests, and element sums of parts add up.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import WIDTHS, Bits, TensorSpec, Tile, tile_at, tile_count
from slackwater.errors import InvalidInputError, WrongBaseError


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Lines of a tensor, along `cut_axis`: rows, or columns of a weight that is split by column."""

    begin: int
    end: int
    """The line after its last one."""


Pieces = Mapping[str, Piece]
"""What is held of tensors, by name; those that aren't named are held whole."""

WHOLE: Final[Pieces] = MappingProxyType({})
"""Every tensor is held whole."""


def cut_axis(spec: TensorSpec) -> int:
    """The axis along which a tensor's tiles are cut: docs/format.md, section 2.1. It is 0 for one that isn't cut."""
    return 1 if tile_count(spec) and tile_at(spec, 0).stride else 0


def num_lines(spec: TensorSpec) -> int:
    """The length of that axis; 1 for a scalar."""
    return spec.shape[cut_axis(spec)] if spec.shape else 1


def piece_shape(spec: TensorSpec, piece: Piece) -> tuple[int, ...]:
    """The shape of a piece: its tensor's, but for the axis that is cut."""
    axis = cut_axis(spec)
    return (*spec.shape[:axis], piece.end - piece.begin, *spec.shape[axis + 1 :])


def tiles_in(spec: TensorSpec, piece: Piece | None) -> range:
    """The indexes of the tiles in a piece; None is the whole tensor.

    Raises:
        InvalidInputError: It is empty or not inside the tensor, or one of its edges is no tile's: the message names
            the tensor and the edges beside it.
    """
    count = tile_count(spec)
    if piece is None:
        return range(count)
    lines, axis = num_lines(spec), cut_axis(spec)
    what = f"lines {piece.begin} to {piece.end} of axis {axis} of {spec.name}"
    if not 0 <= piece.begin < piece.end <= lines:
        raise InvalidInputError(
            f"{what} are no piece of it: it has {lines}",
            hint="a piece has a line or more; leave a tensor out of which a rank has none",
        )
    if piece.end - piece.begin == lines:
        return range(count)
    if count <= 1:
        raise InvalidInputError(
            f"{what} can't be published alone: it has a single tile",
            hint="put the tensor together and give it whole to one rank",
        )
    return range(_tile_from(spec, piece.begin), _tile_from(spec, piece.end))


def _tile_from(spec: TensorSpec, edge: int) -> int:
    """The tile that begins at a line, or their number at the last one's end."""
    count, lines = tile_count(spec), num_lines(spec)
    line = _rectangle(spec, Piece(begin=0, end=1)).cols

    def first_line(index: int) -> int:
        return tile_at(spec, index).start // line if index < count else lines

    found = bisect_left(range(count), edge, key=first_line)
    if first_line(found) != edge:
        raise InvalidInputError(
            f"a piece of {spec.name} ends at line {edge} of axis {cut_axis(spec)}, inside a tile: that has lines "
            f"{first_line(found - 1)} to {first_line(found)}",
            hint="share the lines out evenly over 2, 4, 8 or 16 ranks, or give the whole tensor to one",
        )
    return found


def _rectangle(spec: TensorSpec, piece: Piece | None) -> Tile:
    """Where a piece lies in its tensor."""
    if piece is None:
        return Tile(index=0, start=0, cols=spec.num_elements)
    rows, lines = spec.shape[0] if cut_axis(spec) else 1, num_lines(spec)
    line = spec.num_elements // (rows * lines)
    cols = (piece.end - piece.begin) * line
    return Tile(index=0, start=piece.begin * line, rows=rows, cols=cols, stride=lines * line if rows > 1 else 0)


def cut_out(spec: TensorSpec, piece: Piece, bits: Bits) -> Bits:
    """A copy of a piece out of its tensor's flat bits."""
    return _rectangle(spec, piece).take(bits).copy()


def held_tile(spec: TensorSpec, tile: Tile, pieces: Pieces) -> Tile | None:
    """Where a tile lies in the flat bits that are held of its tensor; None where what is held hasn't all of it.

    Args:
        spec: The tensor.
        tile: Where it lies in the tensor.
        pieces: What is held.
    """
    if spec.name not in pieces:
        return tile
    held = _rectangle(spec, pieces[spec.name])
    start = tile.start - held.start
    if start < 0 or start + tile.cols > held.cols:
        return None
    return Tile(
        index=tile.index, start=start, rows=tile.rows, cols=tile.cols, stride=held.cols if tile.rows > 1 else 0
    )  # fmt: skip


def locate(spec: TensorSpec, tile: Tile, pieces: Pieces) -> Tile:
    """`held_tile`, of a tile that is held.

    Raises:
        WrongBaseError: It isn't.
    """
    found = held_tile(spec, tile, pieces)
    if found is None:
        held = pieces[spec.name]
        raise WrongBaseError(f"{spec.name} tile {tile.index} isn't held: lines {held.begin} to {held.end} are")
    return found


def held_elements(spec: TensorSpec, pieces: Pieces) -> int:
    """How many elements of a tensor are held."""
    return _rectangle(spec, pieces.get(spec.name)).count


def held_numbers(outline: Outline, name: str, pieces: Pieces) -> range:
    """The numbers of a tensor's tiles that are held.

    Raises:
        InvalidInputError: See `tiles_in`.
    """
    index = outline.by_name[name]
    first, end = outline.first_tiles[index : index + 2]
    if name not in pieces:
        return range(first, end)
    held = tiles_in(outline.specs[index], pieces[name])
    return range(first + held.start, first + held.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stripe:
    """A part of a piece that lies close together in its tensor."""

    span: slice
    """The elements of the tensor, in flat order, among which it lies."""
    tile: Tile
    """Where it lies among these."""
    held: slice
    """Its elements, in the piece's own flat order."""


def stripes(spec: TensorSpec, piece: Piece | None, most: int) -> Iterator[Stripe]:
    """Cut a piece into stripes, in flat order, for handling it with bounded memory.

    Args:
        spec: The tensor.
        piece: None is the whole tensor.
        most: Bytes of a span; where columns are held a span has at least one whole row.
    """
    rect, width = _rectangle(spec, piece), WIDTHS[spec.dtype]
    if rect.rows == 1:
        for begin in range(0, rect.cols, step := max(1, most // width)):
            cols = min(step, rect.cols - begin)
            span = slice(rect.start + begin, rect.start + begin + cols)
            yield Stripe(span=span, tile=Tile(index=0, start=0, cols=cols), held=slice(begin, begin + cols))
        return
    for row in range(0, rect.rows, step := max(1, most // (rect.stride * width))):
        rows = min(step, rect.rows - row)
        tile = Tile(index=0, start=rect.start, rows=rows, cols=rect.cols, stride=rect.stride)
        span = slice(row * rect.stride, (row + rows) * rect.stride)
        yield Stripe(span=span, tile=tile, held=slice(row * rect.cols, (row + rows) * rect.cols))
