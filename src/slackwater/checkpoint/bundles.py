"""Which tiles share a body, and which bodies share an object: what has to be loaded together lies together."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from slackwater.checkpoint.filling import filled
from slackwater.checkpoint.groups import Group, groups
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.pieces import WHOLE, Pieces, held_elements, held_numbers
from slackwater.checkpoint.tensor import TILE_BYTES, WIDTHS, expert_of

Bundle = tuple[int, ...]
"""Numbers of tiles of one dtype that share a body: one large tile, or small ones of `TILE_BYTES` together at most."""

Batch = tuple[Bundle, ...]
"""Bundles whose bodies share an object: all the tiles of one group or of several."""


def batches(outline: Outline, names: Iterable[str], pieces: Pieces = WHOLE) -> Iterator[Batch]:
    """Cut the tiles of some tensors into bundles, without parting a group of `slackwater.checkpoint.groups`.

    What one tensor-parallel or expert-parallel rank needs alone lies in bodies of its own: the tiles of a tensor that
    is cut, and each expert.

    Args:
        outline: The run's.
        names: Tensors of it.
        pieces: What is held of them: other tiles are left out.
    """

    def size_of(group: Group) -> int:
        alone = expert_of(group.names[0]) is not None
        return TILE_BYTES if alone else sum(map(bytes_of, group.names))

    def bytes_of(name: str) -> int:
        spec = outline.specs[outline.by_name[name]]
        return held_elements(spec, pieces) * WIDTHS[spec.dtype]

    for batch in filled(groups(names), size_of, TILE_BYTES):
        yield tuple(_bundles(outline, [name for group in batch for name in group.names], pieces))


def _bundles(outline: Outline, names: Iterable[str], pieces: Pieces) -> Iterator[Bundle]:
    small: defaultdict[str, list[int]] = defaultdict(list)
    for name in names:
        tensor, numbers = outline.by_name[name], held_numbers(outline, name, pieces)
        if len(numbers) == 1 and name not in pieces:
            small[outline.specs[tensor].dtype].append(tensor)
        else:
            yield from ((number,) for number in numbers)
    for alike in small.values():
        for joined in filled(alike, lambda tensor: outline.specs[tensor].num_bytes, TILE_BYTES):
            yield tuple(outline.first_tiles[tensor] for tensor in joined)
