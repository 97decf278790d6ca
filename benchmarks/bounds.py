"""What a delta of bf16 tensors could cost at least: entropy bounds of a memoryless coder, in bits per change.

A delta says where elements changed and by what step. A step is the distance between two patterns in the order of the
values they stand for: 1 is the next representable number. With ``p`` the share of elements that change, no coder that
ignores everything else gets below ``H(p) / p + H(step)`` bits per change. A coder whose reader holds the old values may
condition both on an element's old exponent, which AdamW makes worth while: its steps are about equally long everywhere,
and small numbers have their neighbours nearer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger[Any]]
_Counts = npt.NDArray[np.int64]

_MANTISSA_BITS: Final = 7
_EXPONENTS: Final = 256
_STEP_SPAN: Final = 1 << 17
"""More than twice the largest distance between two patterns of 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Statistics of one delta. Bits are per changed element, and shares are of the changed elements."""

    elements: int
    changes: int
    steps: tuple[float, float, float, float]
    """Shares of steps of length 1, 2, 3 and more."""
    order0: float
    """Positions and steps, each coded alike everywhere."""
    positions: float
    """Positions, given every element's old exponent."""
    values: float
    """Steps, given every element's old exponent."""

    @property
    def density(self) -> float:
        """Share of all elements that changed."""
        return self.changes / max(self.elements, 1)

    @property
    def by_exponent(self) -> float:
        """Positions and steps, given every element's old exponent."""
        return self.positions + self.values


def measure(pairs: Iterable[tuple[Bits, Bits]]) -> Bounds:
    """Take a delta's statistics over all of its tensors at once.

    Args:
        pairs: Each tensor's old and new bf16 patterns: uint16, flat, of one length.
    """
    totals = np.zeros(_EXPONENTS, np.int64)
    changed: list[_Counts] = [np.empty(0, np.int64)]
    moved: list[_Counts] = [np.empty(0, np.int64)]
    for old, new in pairs:
        exponents = (old >> _MANTISSA_BITS).astype(np.uint8)
        where = np.flatnonzero(old != new)
        totals += np.bincount(exponents, minlength=_EXPONENTS)
        changed.append(exponents[where].astype(np.int64))
        moved.append(ordered(new[where]) - ordered(old[where]))
    return _summarise(totals, np.concatenate(changed), np.concatenate(moved))


def ordered(bits: Bits) -> _Counts:
    """Number bf16 patterns in the order of their values: neighbours differ by 1, -0 comes just before 0."""
    wide = bits.astype(np.int64)
    return np.where(wide & 0x8000, 0xFFFF - wide, wide | 0x8000)


def _summarise(totals: _Counts, exponents: _Counts, steps: _Counts) -> Bounds:
    elements, changes = int(totals.sum()), int(steps.size)
    if changes == 0:
        return Bounds(elements=elements, changes=0, steps=(0.0, 0.0, 0.0, 0.0), order0=0.0, positions=0.0, values=0.0)
    changed = np.bincount(exponents, minlength=_EXPONENTS)
    lengths = np.bincount(np.minimum(np.abs(steps), 4), minlength=5)[1:] / changes
    together = entropy(_counts(exponents * _STEP_SPAN + steps))
    return Bounds(
        elements=elements,
        changes=changes,
        steps=(float(lengths[0]), float(lengths[1]), float(lengths[2]), float(lengths[3])),
        order0=_places(np.array([elements]), np.array([changes])) + entropy(_counts(steps)),
        positions=_places(totals, changed),
        values=together - entropy(changed),
    )


def _counts(keys: _Counts) -> _Counts:
    return np.unique(keys, return_counts=True)[1]


def entropy(counts: _Counts) -> float:
    """Shannon's entropy of a source with these counts, in bits per symbol; 0 for one without any."""
    shares = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(shares * np.log2(shares)).sum())


def _places(totals: _Counts, changed: _Counts) -> float:
    """Bits per change that say which elements change, where each class has a density of its own."""
    pairs = np.stack([changed, totals - changed]).T
    bits = sum(int(pair.sum()) * entropy(pair) for pair in pairs)
    return bits / int(changed.sum())
