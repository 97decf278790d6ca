"""Patching weights in place: plain memory, integer views, and the old bits kept for undo.

Writes go through numpy: of the ways to scatter 16-bit elements on a CPU it is the fastest measured.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.errors import InvalidInputError, NotFoundError, SwapError

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One write, translated: where it goes, what it puts there and what it replaces."""

    target: Bits
    """The tile's own memory, or its tensor's where the tile lies in several rows."""
    positions: npt.NDArray[np.intp] | None
    """Offsets into ``target``; None: all of it."""
    new: Bits
    old: Bits
    """As long as ``new``."""

    @property
    def num_bytes(self) -> int:
        """Host memory that this patch holds of its own."""
        return self.new.nbytes + self.old.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def put(self, values: Bits) -> None:
        """Write ``values`` where this patch goes."""
        self.target[slice(None) if self.positions is None else self.positions] = values


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagedWrites:
    """Translated writes, and the state of the weights that their old bits belong to."""

    patches: tuple[Patch, ...]
    base: int

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(patch.num_bytes for patch in self.patches)


class WeightBits:
    """The bits of every parameter, where the forward pass reads them.

    ``read`` and ``stage`` may run in any thread; ``commit`` and ``undo`` between two forward passes.

    Args:
        parameters: Contiguous tensors in host memory, by canonical name.
        specs: Of ``parameters``.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]) -> None:
        self.specs: Final = specs
        self._flat: Final = {name: _bits(tensor, specs[name]) for name, tensor in parameters.items()}
        self._states: Final = count(1)
        self._state = 0
        self._last: StagedWrites | None = None

    def read(self, name: str, tile: Tile) -> Bits:
        """The bits of a tile: a view where it is contiguous, not to be written.

        Raises:
            NotFoundError: No such tensor.
            InvalidInputError: The tile ends outside of it.
        """
        view = tile.take(self._tensor(name, tile)).view()
        view.flags.writeable = False
        return view

    def stage(self, writes: Sequence[TileWrite]) -> StagedWrites:
        """Check writes and save the bits that they will replace. Nothing changes yet.

        Raises:
            NotFoundError: No such tensor.
            InvalidInputError: A write doesn't fit its tensor.
        """
        # Read before the old bits are: a commit in between makes this staging stale, never wrong.
        base = self._state
        return StagedWrites(patches=tuple(self._translate(write) for write in writes), base=base)

    def commit(self, staged: StagedWrites) -> int:
        """Write everything, all or nothing. Returns bytes written.

        Raises:
            SwapError: The weights changed since the staging, or a write failed; the old bits are in place.
        """
        if staged.base != self._state:
            raise SwapError("the weights changed since these writes were staged", hint="stage them again")
        try:
            written = _apply(staged.patches)
        except (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, ValueError) as error:
            raise SwapError(f"writing the weights failed, the old ones are back: {error}") from error
        self._state, self._last = next(self._states), staged
        return written

    def undo(self, staged: StagedWrites) -> int:
        """Put back what the last commit replaced. Returns bytes written.

        Raises:
            SwapError: ``staged`` isn't the last commit.
        """
        if staged is not self._last:
            raise SwapError("only the last commit can be undone", hint="load the version that you want instead")
        written = _revert(staged.patches)
        self._state, self._last = staged.base, None
        return written

    def _translate(self, write: TileWrite) -> Patch:
        tensor = self._tensor(write.name, write.tile)
        _check(write, tensor.dtype)
        if write.tile.rows == 1:
            target = write.tile.take(tensor)
            positions = None if write.positions is None else write.positions.astype(np.intp)
        else:
            target = tensor
            inside = np.arange(write.tile.count, dtype=np.uint32) if write.positions is None else write.positions
            positions = write.tile.in_tensor(inside)
        old = target.copy() if positions is None else target[positions]
        return Patch(target=target, positions=positions, new=write.values, old=old)

    def _tensor(self, name: str, tile: Tile) -> Bits:
        flat = self._flat.get(name)
        if flat is None:
            raise NotFoundError(f"the engine holds no tensor {name!r}", hint="compare with tensors()")
        if not tile.fits(flat.size):
            raise InvalidInputError(f"{name}: tile {tile.index} ends outside of its {flat.size} elements")
        return flat


def _apply(patches: Sequence[Patch]) -> int:
    with ExitStack() as undo:
        for patch in patches:
            undo.callback(patch.put, patch.old)
            patch.put(patch.new)
        undo.pop_all()
    return sum(patch.new.nbytes for patch in patches)


def _revert(patches: Sequence[Patch]) -> int:
    # Any order will do, even where patches overlap: all old bits were saved before the first write.
    for patch in patches:
        patch.put(patch.old)
    return sum(patch.old.nbytes for patch in patches)


def _bits(tensor: torch.Tensor, spec: TensorSpec) -> Bits:
    integers = tensor.view(-1).view(_INTEGERS[tensor.element_size()]).numpy()
    bits: npt.NDArray[np.unsignedinteger[Any]] = integers.view(spec.bits_dtype)
    return bits


def _check(write: TileWrite, dtype: np.dtype[Any]) -> None:
    where = f"{write.name}: the write to tile {write.tile.index}"
    if write.values.dtype != dtype:
        raise InvalidInputError(f"{where} carries {write.values.dtype}, the tensor holds {dtype}")
    wanted = write.tile.count if write.positions is None else write.positions.size
    if write.values.shape != (wanted,):
        raise InvalidInputError(f"{where} carries {write.values.shape} values for {wanted} positions")
    if write.positions is None or not write.positions.size:
        return
    rising = bool(np.all(write.positions[1:] > write.positions[:-1]))
    if not rising or int(write.positions[-1]) >= write.tile.count:
        raise InvalidInputError(f"{where} has positions out of order or outside of its {write.tile.count} elements")
