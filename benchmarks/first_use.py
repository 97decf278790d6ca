"""What a process pays when it first encodes and applies: compiling the kernels, or reading them from the disk.

python benchmarks/first_use.py     seconds of this process's first use, imports apart
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from slackwater.checkpoint.codec import Level, Place, apply_body, encode_body
from slackwater.checkpoint.manifest import BodyEntry, TileEntry
from slackwater.checkpoint.tensor import Bits, TensorSpec, tile_at
from slackwater.errors import InternalError

_ELEMENTS: Final = 1 << 16
_BODIES: Final[tuple[tuple[Level, float], ...]] = (("fast", 0.01), ("wan", 0.01), ("fast", 0.3))
"""A body of each kind: sparse, sparse by exponent, dense; and the share of elements that change."""
_SPREAD: Final = 0.02
_LARGER: Final = 5
"""Every so many changes, a larger step."""


class FirstUse(NamedTuple):
    """Seconds of two processes' first use."""

    compiling: float
    """Where no machine code was kept yet."""
    reading: float
    """Where it was."""


def measure() -> FirstUse:
    """Start two processes one after the other that share a cache, empty at first."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
        return FirstUse(*(_start(environment) for _ in range(2)))


def _start(environment: dict[str, str]) -> float:
    command = [sys.executable, str(Path(__file__))]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


def _states(share: float) -> tuple[Bits, Bits]:
    rng = np.random.default_rng(0)
    values = rng.normal(0, _SPREAD, _ELEMENTS).astype(np.float32)
    old = (values.view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    where = np.flatnonzero(rng.random(old.size) < share)
    new[where] += 1
    new[where[::_LARGER]] += _LARGER
    return old, new


def _round_trip(level: Level, share: float) -> None:
    spec = TensorSpec(name="w", dtype="BF16", shape=(_ELEMENTS,))
    places = [Place(spec=spec, tile=tile_at(spec, 0))]
    old, new = _states(share)
    encoded = encode_body(places, [old], [new], level)
    if encoded is None:
        raise InternalError("a changed tile has no body")
    tiles = tuple(TileEntry(0, tile.changed, tile.pre, tile.post) for tile in encoded.tiles)
    entry = BodyEntry(object=0, offset=0, length=len(encoded.body), encoding=encoded.encoding, tiles=tiles)
    apply_body(places, entry, memoryview(encoded.body), [old])


def main() -> None:
    """Use the codec once."""
    begun = time.perf_counter()
    for level, share in _BODIES:
        _round_trip(level, share)
    print(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
