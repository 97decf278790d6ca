"""What an exchange of a table engine writes, and what a test has go wrong in it."""

from collections.abc import Mapping
from dataclasses import dataclass

from slackwater.checkpoint.tensor import Bits, TileWrite
from slackwater.engine.base import Staged
from slackwater.errors import SlackwaterError, SwapError


@dataclass(eq=False)
class TableStaged:
    """Copies of the writes, and the bits that they replace."""

    writes: tuple[TileWrite, ...]
    saved: tuple[Bits, ...]
    generation: object
    """Of the weights that it was staged on; on others it is refused."""

    @property
    def num_bytes(self) -> int:
        """See `Staged.num_bytes`."""
        return sum(write.num_bytes for write in self.writes) + sum(bits.nbytes for bits in self.saved)

    def put(self, weights: Mapping[str, Bits], count: int | None = None) -> None:
        """Write the new bits: of the first ``count`` writes, or of all."""
        for write in self.writes[:count]:
            write.put(weights[write.name])

    def put_back(self, weights: Mapping[str, Bits], count: int | None = None) -> None:
        """Write the old bits likewise."""
        for write, bits in zip(self.writes[:count], self.saved[:count], strict=True):
            write.tile.put(weights[write.name], bits)

    def spoil(self, weights: Mapping[str, Bits]) -> None:
        """Flip a bit of the first write."""
        for write in self.writes[:1]:
            weights[write.name][write.tile.start] ^= 1


@dataclass(eq=False, kw_only=True)
class EngineFaults:
    """What is to go wrong; a test sets fields, each fires once unless it says otherwise."""

    stage: SlackwaterError | None = None
    """The next stage raises this."""
    commit_at_write: int | None = None
    """The next commit raises before this write; the writes before it are put back."""
    commit_dies_at_write: int | None = None
    """Before this write of the next commit, or after its last where there are fewer, a rank of the engine's group dies.
    What the others wrote stands, the label too, and the engine is dead (see `TableEngine.die`)."""
    undo_dies_at_write: int | None = None
    """The same in the next undo: so many tiles are put back."""
    flip_bit: bool = False
    """The next commit flips one bit of its first write: corruption between decoding and applying."""
    undo: bool = False
    """The next undo raises."""
    flip_undo: bool = False
    """The next undo puts back a wrong bit."""
    stall: bool = False
    """Commits and undos begin and never end, until this is unset and `TableEngine.release` is called."""


def write_all(staged: TableStaged, weights: Mapping[str, Bits], faults: EngineFaults) -> None:
    """Write all, or none where a fault is scripted.

    Raises:
        SwapError: One is.
    """
    fail_at, faults.commit_at_write = faults.commit_at_write, None
    flip, faults.flip_bit = faults.flip_bit, False
    staged.put(weights, fail_at)
    if fail_at is not None:
        staged.put_back(weights)
        left = staged.writes[fail_at:]
        raise SwapError(f"the commit failed at write {fail_at}, {left[0].name!r}" if left
                        else "the commit failed after its last write")  # fmt: skip
    if flip:
        staged.spoil(weights)


def ours(staged: Staged) -> TableStaged:
    """Staged writes as a table engine's own.

    Raises:
        SwapError: They are another engine's.
    """
    if not isinstance(staged, TableStaged):
        raise SwapError("these writes were staged by another engine")
    return staged
