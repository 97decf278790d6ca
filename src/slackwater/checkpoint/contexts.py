"""Contexts of a sparse body: elements whose old bits have a similar exponent change about equally often.

A weight moves to a neighbour when its step is larger than half its spacing, and the spacing doubles with the exponent.
So the share of changed elements about halves from one exponent to the next, and a reader, who holds the old bits,
knows each element's exponent. One context needs no old bits at all; more contexts save about a third of the bytes.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.changes import Positions
from slackwater.checkpoint.jit import kernel
from slackwater.checkpoint.rice import Numbers
from slackwater.checkpoint.tensor import Bits

CLASSES: Final = 256
"""An exponent is cut to its lowest 8 bits' range; dtypes without one have class 0 alone."""

EXPONENTS: Final[dict[str, tuple[int, int]]] = {
    "BF16": (7, 8), "F16": (10, 5), "F32": (23, 8), "F64": (55, 8), "F8_E4M3": (3, 4), "F8_E5M2": (2, 5),
}  # fmt: skip
"""Where a dtype's exponent lies: its lowest bit, and how many bits of it count (F64: the upper 8)."""

Classes = npt.NDArray[np.uint8]

_WORTH_A_ROW: Final = 80
"""Fewest changes in a context of its own: a row has about 52 bits, and a better width saves a part of a bit in each."""

_NEVER: Final = 1 << 62


def field(dtype: str) -> tuple[int, int]:
    """Shift and mask that give an element's class."""
    shift, bits = EXPONENTS.get(dtype, (0, 0))
    return shift, (1 << bits) - 1


def cut(changes_of_class: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """The last class of each context: neighbours are joined until there are enough changes for a row.

    Args:
        changes_of_class: How many changed elements each of the `CLASSES` has.

    Returns:
        Rising; the last one is ``CLASSES - 1``.
    """
    lasts: list[int] = []
    gathered = 0
    for index in np.flatnonzero(changes_of_class):
        gathered += int(changes_of_class[index])
        if gathered >= _WORTH_A_ROW:
            lasts.append(int(index))
            gathered = 0
    return (*lasts[: len(lasts) - 1], CLASSES - 1)


def table(lasts: tuple[int, ...]) -> Classes:
    """The context of each class."""
    return np.searchsorted(np.array(lasts), np.arange(CLASSES)).astype(np.uint8)


def classes_of(bits: npt.NDArray[np.uint64], dtype: str) -> npt.NDArray[np.int64]:
    """How often each class occurs."""
    shift, mask = field(dtype)
    return np.bincount(((bits >> np.uint64(shift)) & np.uint64(mask)).astype(np.int64), minlength=CLASSES)


@kernel
def rank_changes(
    old: Bits, shift: int, mask: int, context_of: Classes, seen: Numbers, positions: Positions, ranks: Numbers,
    contexts: Classes,
) -> None:  # fmt: skip
    """Number the changed elements of a tile among all elements of their context.

    Args:
        old: The tile before.
        shift: Where an element's class begins.
        mask: How much of it is the class.
        context_of: Of each class.
        seen: Elements of each context in the tiles before; updated.
        positions: The tile's changed elements, rising.
        ranks: Written, one per position.
        contexts: Written, one per position.
    """
    at = 0
    for index in range(positions.size):
        position = np.int64(positions[index])
        for other in range(at, position):
            seen[context_of[(np.int64(old[other]) >> shift) & mask]] += 1
        context = context_of[(np.int64(old[position]) >> shift) & mask]
        contexts[index] = context
        ranks[index] = seen[context]
        seen[context] += 1
        at = position + 1
    for other in range(at, old.size):
        seen[context_of[(np.int64(old[other]) >> shift) & mask]] += 1


@kernel
def merge_changes(
    old: Bits, shift: int, mask: int, context_of: Classes, left: Numbers, following: Numbers, ends: Numbers,
    ranks: Numbers, positions: Any, order: Numbers,
) -> int:  # fmt: skip
    """Undo `rank_changes`: walk a tile and find where the next change of each context falls.

    Args:
        old: The tile before.
        shift: Where an element's class begins.
        mask: How much of it is the class.
        context_of: Of each class.
        left: Elements of each context still to come before its next change; updated.
        following: Index into ``ranks`` of each context's next change; updated.
        ends: Index after each context's last change.
        ranks: By context, rising inside each.
        positions: Written: the changed elements of this tile, rising.
        order: Written: the index into ``ranks`` of each.

    Returns:
        How many were written.
    """
    count = 0
    for position in range(old.size):
        context = context_of[(np.int64(old[position]) >> shift) & mask]
        left[context] -= 1
        if left[context] < 0:
            index = following[context]
            positions[count] = position
            order[count] = index
            count += 1
            following[context] = index + 1
            left[context] = ranks[index + 1] - ranks[index] - 1 if index + 1 < ends[context] else _NEVER
    return count


def countdown(ranks: Numbers, begins: Numbers, ends: Numbers) -> Numbers:
    """Where `merge_changes` begins: elements of each context before its first change."""
    return np.array(
        [ranks[begin] if begin < end else _NEVER for begin, end in zip(begins, ends, strict=True)], dtype=np.int64
    )
