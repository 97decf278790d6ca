"""The codec where it isn't at home: any share of elements changed, by steps like an optimizer's or to random bits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from measure import Speed
from ours import Speeds, publish, speeds
from pairs import Pair
from slackwater.checkpoint.changes import steps_onto
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import Bits
from slackwater.weights.diff import hash_source

SHARES: Final = (0.0, 0.001, 0.005, 0.0142, 0.0356, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Shares of elements that change."""
USUAL: Final = 0.0142
"""The share that others are compared with."""
LEVELS: Final[tuple[Level, ...]] = ("fast", "wan")

_LENGTHS: Final = (1, 2, 3)
_LENGTH_SHARES: Final = (0.9, 0.05, 0.015)
"""Shares of steps of these lengths; the rest is longer, as real ones are."""
_LONGER: Final = 0.1
"""Chance that a longer step ends at each place."""
_BITS: Final = 16

Change = Callable[[Bits, np.random.Generator], Bits]
"""Old bits of the elements that change to new bits, all of which differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One kind of change at one share and one level."""

    kind: str
    share: float
    level: Level
    size: float
    """Bytes of the bodies as a share of the tensors' bytes."""
    speeds: Speeds


def by_steps(old: Bits, rng: np.random.Generator) -> Bits:
    """Move by a few places on the line of bf16 numbers, as AdamW does: most by one, some by more, up or down."""
    chosen = rng.choice(np.array([*_LENGTHS, 0]), old.size, p=[*_LENGTH_SHARES, 1 - sum(_LENGTH_SHARES)])
    lengths = np.where(chosen == 0, len(_LENGTHS) + rng.geometric(_LONGER, old.size), chosen)
    steps = np.where(rng.random(old.size) < 0.5, -lengths, lengths).astype(np.int64)  # noqa: PLR2004 - a fair coin
    made = np.empty(old.size, dtype=np.uint64)
    steps_onto(old.astype(np.uint64), steps, _BITS, made)
    return made.astype(old.dtype)


def to_random(old: Bits, rng: np.random.Generator) -> Bits:
    """Replace by any other pattern."""
    return old ^ rng.integers(1, 1 << _BITS, old.size, dtype=old.dtype)


KINDS: Final[Mapping[str, Change]] = MappingProxyType({"steps": by_steps, "random bits": to_random})


def part_of(pair: Pair, elements: int) -> Pair:
    """The first tensors of the layers, about so many elements of them, at their old state."""
    specs, found = list[str](), 0
    for spec in pair.outline.specs:
        if found < elements and "embed" not in spec.name:
            specs.append(spec.name)
            found += spec.num_elements
    chosen = [pair.outline.specs[pair.outline.by_name[name]] for name in specs]
    old = {name: pair.old[name] for name in specs}
    return Pair(outline=Outline(chosen), old=old, new=old)


def changed(pair: Pair, share: float, change: Change, rng: np.random.Generator) -> Pair:
    """The same old state, and a new one in which a random share of the elements changed."""
    new = {name: bits.copy() for name, bits in pair.old.items()}
    for bits in new.values():
        where = np.flatnonzero(rng.random(bits.size, dtype=np.float32) < share)
        bits[where] = change(bits[where], rng)
    return Pair(outline=pair.outline, old=pair.old, new=new)


def sweep(pair: Pair, elements: int, runs: int) -> Iterator[Point]:
    """Measure every kind, share and level."""
    rng = np.random.default_rng(0)
    base = part_of(pair, elements)
    held = hash_source(base.before, threads=1)
    for kind, change in KINDS.items():
        for share in SHARES:
            made = changed(base, share, change, rng)
            for level in LEVELS:
                delta = publish(made, level, held)
                yield Point(
                    kind=kind,
                    share=share,
                    level=level,
                    size=delta.size.bodies / made.num_bytes,
                    speeds=speeds(made, delta, level, runs),
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The worst of a sweep at one level."""

    size: float
    """The largest body bytes, as a share of the tensors'."""
    encode: float
    """The lowest encoding speed, as a share of that at `USUAL` of the same kind."""
    decode: float
    """The lowest applying speed, likewise."""


def worst(points: Sequence[Point], level: Level) -> Worst:
    """Find the worst points of a level."""
    own = [point for point in points if point.level == level]
    return Worst(
        size=max(point.size for point in own),
        encode=min(_shares(own, lambda point: point.speeds.encode)),
        decode=min(_shares(own, lambda point: point.speeds.decode)),
    )


def _shares(points: Sequence[Point], speed: Callable[[Point], Speed]) -> Iterator[float]:
    usual = {point.kind: speed(point).gbps for point in points if point.share == USUAL}
    return (speed(point).gbps / usual[point.kind] for point in points)
