"""A core, stepped by hand, and other weights for it."""

from collections.abc import Iterable

import numpy as np

from slackwater.checkpoint.tensor import WIDTHS, TileWrite, tiles
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.sequence import Event, Made
from slackwater.engine.torch.weights import WeightBits
from slackwater.rollout.evidence import TokenStep


def run(core: Core) -> list[Event]:
    """Step it until nothing is left to do."""
    events: list[Event] = []
    while core.busy:
        events += core.step()
    return events


def steps(events: Iterable[Event], key: int) -> list[TokenStep]:
    """An answer's tokens."""
    return [event.step for event in events if isinstance(event, Made) and event.key == key]


def flips(weights: WeightBits, seed: int = 0) -> list[TileWrite]:
    """Other signs for three tenths of all elements."""
    random = np.random.default_rng(seed)
    made: list[TileWrite] = []
    for name, spec in weights.specs.items():
        sign = spec.bits_dtype.type(1 << (8 * WIDTHS[spec.dtype] - 1))
        for tile in tiles(spec):
            positions = np.flatnonzero(random.random(tile.count) < 0.3).astype(np.uint32)
            values = weights.read(name, tile)[positions] ^ sign
            made.append(TileWrite(name=name, tile=tile, positions=positions, values=values))
    return made
