"""How far a delta moves the elements of its base."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np

from slackwater.checkpoint.application import places_of
from slackwater.checkpoint.changes import steps_between
from slackwater.checkpoint.codec import decode_body
from slackwater.checkpoint.manifest import BodyEntry
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import WIDTHS, Bits, TensorSpec
from slackwater.errors import WrongBaseError
from slackwater.weights.patch import Delta
from slackwater.weights.source import TensorSource

_Moved = list[tuple[int, int]]
"""Tensors, and how far elements of them move."""


def distances(
    source: TensorSource, outline: Outline, delta: Delta, *, threads: int, progress: Callable[[int], None]
) -> Counter[int]:
    """Add up, for each tensor, the magnitudes of the steps that its elements make on the line of the numbers.

    Args:
        source: The base; it is only read.
        outline: Of its tensors.
        delta: Made on it.
        threads: Bodies decoded at once.
        progress: Told how many bodies are done.

    Returns:
        By index of the tensor, places that its elements move.

    Raises:
        WrongBaseError: A tile isn't as before the delta.
        CorruptError: An object or a body is damaged.
        NotFoundError: An object is missing.
    """
    found, done = Counter[int](), 0
    with ThreadPoolExecutor(threads, thread_name_prefix="tiles") as pool:
        for index, entries in groupby(delta.manifest.listed(), lambda entry: entry.object):
            pack = delta.pack(delta.manifest.objects[index])
            for moved in pool.map(lambda entry, pack=pack: _moved(source, outline, entry, pack), entries):
                for tensor, places in moved:
                    found[tensor] += places
                done += 1
                progress(done)
    return found


def _moved(source: TensorSource, outline: Outline, entry: BodyEntry, pack: memoryview) -> _Moved:
    places = places_of(outline, entry)
    olds = [place.tile.take(source.bits(place.spec.name)) for place in places]
    body = pack[entry.offset : entry.offset + entry.length]
    result: _Moved = []
    for place, old, write in zip(places, olds, decode_body(places, entry, body, olds), strict=True):
        if write is None:
            raise WrongBaseError(f"{place} of the base is as after the delta", hint="name the state before it")
        held = old if write.positions is None else old[write.positions]
        result.append((outline.by_name[place.spec.name], _distance(place.spec, held, write.values)))
    return result


def _distance(spec: TensorSpec, old: Bits, new: Bits) -> int:
    steps = np.empty(old.size, dtype=np.int64)
    steps_between(old.astype(np.uint64), new.astype(np.uint64), 8 * WIDTHS[spec.dtype], steps)
    magnitudes = np.abs(steps).view(np.uint64)
    high, low = magnitudes >> np.uint64(32), magnitudes & np.uint64(0xFFFFFFFF)  # their sum may need more than 64 bits
    return (int(high.sum()) << 32) + int(low.sum())
