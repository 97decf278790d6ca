"""Which tiles share a body, and which bodies share an object: what has to be loaded together lies together."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from slackwater.checkpoint.groups import groups
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import TILE_BYTES, is_expert

Bundle = tuple[int, ...]
"""Numbers of tiles of one dtype that share a body: one large tile, or small ones of `TILE_BYTES` together at most."""

Batch = tuple[Bundle, ...]
"""Bundles whose bodies share an object: all the tiles of one group or of several."""


def batches(outline: Outline, names: Iterable[str]) -> Iterator[Batch]:
    """Cut the tiles of some tensors into bundles, without parting a group of `slackwater.checkpoint.groups`.

    What one tensor-parallel or expert-parallel rank needs alone lies in bodies of its own: the tiles of a tensor that
    is cut, and each expert.

    Args:
        outline: The run's.
        names: Tensors of it.
    """
    gathered: list[int] = []
    size = 0
    for group in groups(names):
        tensors = [outline.by_name[name] for name in group.names]
        num_bytes = sum(outline.specs[tensor].num_bytes for tensor in tensors)
        alone = is_expert(group.names[0])
        if gathered and (alone or size + num_bytes > TILE_BYTES):
            yield tuple(_bundles(outline, gathered))
            gathered, size = [], 0
        gathered += tensors
        size += TILE_BYTES if alone else num_bytes
    if gathered:
        yield tuple(_bundles(outline, gathered))


def _bundles(outline: Outline, tensors: Iterable[int]) -> Iterator[Bundle]:
    small: defaultdict[str, list[int]] = defaultdict(list)
    for tensor in tensors:
        first, end = outline.first_tiles[tensor : tensor + 2]
        if end - first == 1:
            small[outline.specs[tensor].dtype].append(tensor)
        else:
            yield from ((number,) for number in range(first, end))
    for alike in small.values():
        yield from _joined(outline, alike)


def _joined(outline: Outline, tensors: Iterable[int]) -> Iterator[Bundle]:
    gathered: list[int] = []
    size = 0
    for tensor in tensors:
        num_bytes = outline.specs[tensor].num_bytes
        if gathered and size + num_bytes > TILE_BYTES:
            yield tuple(gathered)
            gathered, size = [], 0
        gathered.append(outline.first_tiles[tensor])
        size += num_bytes
    if gathered:
        yield tuple(gathered)
