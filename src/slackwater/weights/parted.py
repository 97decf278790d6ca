"""A rank's state dict of which some tensors are pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from slackwater.checkpoint.pieces import Piece, cut_axis, piece_shape, tiles_in
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError
from slackwater.weights.state_dict import StateDictSource


class PartedSource:
    """What one rank holds, in the serving dtype: whole tensors, and pieces of tensors that ranks share out.

    A piece is rows, or columns of a weight that is split by column, such as ``o_proj`` and ``down_proj``; its edges are
    those of tiles, as even shares of up to 16 ranks are. See docs/format.md, section 2.1.

    Args:
        tensors: By canonical Hugging Face name, each as this rank has it.
        pieces: Which lines of its tensor each piece is.
        shapes: Shapes of the whole tensors that there are pieces of.

    Raises:
        InvalidInputError: A tensor's dtype has no safetensors name; or a piece has no shape, another shape than its
            lines, or an edge inside a tile. The message names the tensor.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self._held: Final = StateDictSource(tensors)
        specs = dict(self._held.specs())
        for name in sorted(pieces.keys() | shapes.keys()):
            if name not in tensors or name not in pieces or name not in shapes:
                raise InvalidInputError(
                    f"{name} needs all of a tensor, a piece and the whole one's shape",
                    hint="leave a tensor out of which this rank has nothing",
                )
            if name in specs:  # a tied output head is left out
                specs[name] = _whole(specs[name], pieces[name], tuple(shapes[name]))
        self._specs: Final = specs
        self._pieces: Final = {name: piece for name, piece in pieces.items() if name in specs}

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `slackwater.weights.source.TensorSource.specs`: the whole tensors."""
        return self._specs

    def bits(self, name: str) -> Bits:
        """See `slackwater.weights.source.TensorSource.bits`: those of this rank's piece, where it has one."""
        return self._held.bits(name)

    def pieces(self) -> Mapping[str, Piece]:
        """See `slackwater.weights.source.Parted.pieces`."""
        return self._pieces

    def shows(self, name: str) -> bool:
        """See `slackwater.weights.source.Shows.shows`."""
        return self._held.shows(name)


def _whole(held: TensorSpec, piece: Piece, shape: tuple[int, ...]) -> TensorSpec:
    """The spec of a tensor by that of a piece."""
    spec = replace(held, shape=shape)
    tiles_in(spec, piece)
    wanted = piece_shape(spec, piece)
    if shape and held.shape != wanted:
        raise InvalidInputError(
            f"{spec.name} is {list(held.shape)} on this rank, and lines {piece.begin} to {piece.end} along axis "
            f"{cut_axis(spec)} of {list(shape)} are {list(wanted)}",
            hint="a piece is rows, or columns of a weight that is split by column: docs/format.md, section 2.1",
        )
    return spec
