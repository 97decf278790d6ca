"""Which tiles share a body, and which bodies share an object: what has to be loaded together lies together."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from slackwater.checkpoint.groups import groups
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import TILE_BYTES, WIDTHS

Bundle = tuple[int, ...]
"""Numbers of tiles of one dtype that share a body: one large tile, or small ones of `TILE_BYTES` together at most."""

Batch = tuple[Bundle, ...]
"""Bundles whose bodies share an object: all the tiles of one group or of several."""


def batches(outline: Outline, names: Iterable[str]) -> Iterator[Batch]:
    """Cut the tiles of some tensors into bundles, without parting a group of `slackwater.checkpoint.groups`.

    Args:
        outline: The run's.
        names: Tensors of it.
    """
    gathered: list[int] = []
    size = 0
    for group in groups(names):
        tensors = [outline.by_name[name] for name in group.names]
        num_bytes = sum(outline.specs[tensor].num_bytes for tensor in tensors)
        if gathered and size + num_bytes > TILE_BYTES:
            yield tuple(_bundles(outline, gathered))
            gathered, size = [], 0
        gathered += tensors
        size += num_bytes
    if gathered:
        yield tuple(_bundles(outline, gathered))


def _bundles(outline: Outline, tensors: Iterable[int]) -> Iterator[Bundle]:
    by_dtype: defaultdict[str, list[int]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[outline.specs[tensor].dtype] += range(outline.first_tiles[tensor], outline.first_tiles[tensor + 1])
    for dtype, numbers in by_dtype.items():
        yield from _cut(outline, numbers, WIDTHS[dtype])


def _cut(outline: Outline, numbers: Iterable[int], width: int) -> Iterator[Bundle]:
    gathered: list[int] = []
    size = 0
    for number in numbers:
        num_bytes = outline.place(number)[1].count * width
        if gathered and size + num_bytes > TILE_BYTES:
            yield tuple(gathered)
            gathered, size = [], 0
        gathered.append(number)
        size += num_bytes
    if gathered:
        yield tuple(gathered)
