"""Patching weights in place: plain memory, integer views, and the old bits kept for undo."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Final

import torch

from slackwater.checkpoint.tensor import Bits, TensorSpec, Tile, TileWrite
from slackwater.engine.base import Proof
from slackwater.engine.scatter import Aim, StagedScatter
from slackwater.errors import InvalidInputError, NotFoundError, SwapError

_NO_STATE: Final = object()
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagedWrites:
    """Translated writes, and the state of the weights that their old bits belong to."""

    scatter: StagedScatter
    places: tuple[str, ...]
    """Where each write goes, in words."""
    base: object

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return self.scatter.num_bytes


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
        self._state = object()  # of these weights alone: what was staged on another engine's is refused
        self._moves = 0  # odd from a commit's first write until it is known whether it stands
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
        begun, base = self._moves, self._state
        aims = [aim for _, group in groupby(sorted(writes, key=_name), _name) for aim in self._aims(list(group))]
        places = tuple(f"{aim.write.name}, tile {aim.write.tile.index}," for aim in aims)
        scatter = StagedScatter.of(aims)
        # A commit or an undo meanwhile makes this staging stale, never wrong: perhaps it read bits of both states.
        still = begun == self._moves and not begun % 2
        return StagedWrites(scatter=scatter, places=places, base=base if still else _NO_STATE)

    def commit(self, staged: StagedWrites, proof: Proof | None = None) -> int:
        """Write everything, all or nothing. Returns bytes written.

        Raises:
            SwapError: The weights aren't those that it was staged on, or ``proof`` finds what is written wrong. They
                are as they were, as after whatever ``proof`` itself raises.
        """
        if staged.base is not self._state:
            raise SwapError("the weights changed since these writes were staged", hint="stage them again")
        with self._moving():
            differed = staged.scatter.commit()
            wrong = _wrong(staged.scatter, proof) if proof and differed is None else None
        if differed is not None:
            raise SwapError(
                f"{staged.places[differed]} was changed by somebody else since these writes were staged; "
                "nothing is written",
                hint="stage them again; if it happens again, look at this machine's memory",
            )
        if wrong is not None:
            raise SwapError(f"{wrong} was not what it should be once it was written; it was put back")
        self._state, self._last = object(), staged
        return staged.scatter.bytes_written

    def undo(self, staged: StagedWrites) -> int:
        """Put back what the last commit replaced. Returns bytes written.

        Raises:
            SwapError: ``staged`` isn't the last commit.
        """
        if staged is not self._last:
            raise SwapError("only the last commit can be undone", hint="load the version that you want instead")
        with self._moving():
            staged.scatter.undo()
        self._state, self._last = staged.base, None
        return staged.scatter.bytes_written

    @contextmanager
    def _moving(self) -> Generator[None]:
        self._moves += 1
        try:
            yield
        finally:
            self._moves += 1

    def _aims(self, writes: list[TileWrite]) -> list[Aim]:
        """Writes to one tensor; as a single one where they overlap, which no manifest's tiles do."""
        tensors = [self._tensor(write.name, write.tile) for write in writes]
        aims = [Aim(tensor, write) for tensor, write in zip(tensors, writes, strict=True)]
        if _are_apart([write.tile for write in writes]):
            return aims
        for aim in aims:
            aim.check()
        held, values = tensors[0], tensors[0].copy()
        for write in writes:
            write.put(values)
        whole = Tile(index=0, start=0, cols=held.size)
        return [Aim(held, TileWrite(name=writes[0].name, tile=whole, positions=None, values=values))]

    def _tensor(self, name: str, tile: Tile) -> Bits:
        flat = self._flat.get(name)
        if flat is None:
            raise NotFoundError(f"the engine holds no tensor {name!r}", hint="compare with tensors()")
        if not tile.fits(flat.size):
            raise InvalidInputError(f"{name}: tile {tile.index} ends outside of its {flat.size} elements")
        return flat


def _wrong(scatter: StagedScatter, proof: Proof) -> str | None:
    """What a proof says of writes that are in place; unless that is nothing, they are put back."""
    wrong: str | None = "a proof that didn't end"
    try:
        wrong = proof()
    finally:
        if wrong is not None:
            scatter.undo()
    return wrong


def _name(write: TileWrite) -> str:
    return write.name


def _are_apart(tiles: Sequence[Tile]) -> bool:
    """Whether no two tiles of a tensor have an element in common, as far as is easily seen."""
    alike = len({(tile.rows, tile.stride) for tile in tiles}) == 1
    ordered = sorted(tiles, key=lambda tile: tile.start)
    return alike and all(one.start + one.cols <= other.start for one, other in pairwise(ordered))


def _bits(tensor: torch.Tensor, spec: TensorSpec) -> Bits:
    integers: Any = tensor.view(-1).view(_INTEGERS[tensor.element_size()]).numpy()
    return integers.view(spec.bits_dtype)
