"""Tensors of ``torch.distributed`` that lie over a mesh of ranks, as the pieces that they are."""

from collections.abc import Mapping
from typing import Final

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from slackwater.checkpoint.pieces import Piece, cut_axis
from slackwater.checkpoint.tensor import TensorSpec, tile_count
from slackwater.errors import InvalidInputError
from slackwater.weights.parted import PartedSource
from slackwater.weights.state_dict import StateDictSource

_PUT_TOGETHER: Final = "or put it together with full_tensor() on all ranks, and give it whole to one"


def read_dtensors(tensors: Mapping[str, torch.Tensor]) -> PartedSource:
    """What this rank publishes of a state dict with DTensors, without a copy or a word to other ranks.

    Of ranks that hold the same of a tensor, the first one along each axis of the mesh publishes it: elsewhere it is
    left out. Plain tensors are taken as this rank's own, so give each to one rank.

    Args:
        tensors: By canonical Hugging Face name, in the serving dtype.

    Raises:
        InvalidInputError: A tensor is sharded along another axis than its tiles are cut at, or not evenly at tiles'
            edges, or is a single tile, or isn't plainly sharded or replicated; the message names it.
    """
    held: dict[str, torch.Tensor] = {}
    pieces: dict[str, Piece] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            held[name] = tensor
        elif _is_first(name, tensor):
            local = tensor.to_local()
            piece = _piece(_spec(name, local, tensor), tensor)
            if piece is None or piece.begin < piece.end:
                held[name] = local
            if piece is not None and piece.begin < piece.end:
                pieces[name], shapes[name] = piece, tuple(tensor.shape)
    return PartedSource(held, pieces, shapes)


def _spec(name: str, local: torch.Tensor, tensor: DTensor) -> TensorSpec:
    dtype = StateDictSource({name: local}).specs()[name].dtype
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))


def _is_first(name: str, tensor: DTensor) -> bool:
    """Whether no rank before this one holds the same."""
    for placement in tensor.placements:
        if not isinstance(placement, Shard | Replicate):
            raise InvalidInputError(
                f"{name} is placed as {placement}, which isn't lines in a row",
                hint=f"redistribute it to Shard or Replicate, {_PUT_TOGETHER}",
            )
    at = tensor.device_mesh.get_coordinate()
    return at is not None and all(
        place == 0 for place, placement in zip(at, tensor.placements, strict=True) if isinstance(placement, Replicate)
    )


def _piece(spec: TensorSpec, tensor: DTensor) -> Piece | None:
    """The lines that this rank has; None where it has all of them.

    Each sharded axis of the mesh cuts what the axes before it have left as `torch.chunk` does: in equal lengths,
    rounded up, of which the last ones may be short or empty.
    """
    axis, mesh = cut_axis(spec), tensor.device_mesh
    at = mesh.get_coordinate() or []
    begin, end, is_cut = 0, spec.shape[axis] if spec.shape else 1, False
    for index, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard) or mesh.size(index) == 1:
            continue
        if placement.dim % len(spec.shape) != axis or tile_count(spec) <= 1:
            raise InvalidInputError(_why(spec, placement, axis), hint=_advice(spec, axis))
        length = -(-(end - begin) // mesh.size(index))
        begin, end, is_cut = min(end, begin + at[index] * length), min(end, begin + (at[index] + 1) * length), True
    return Piece(begin=begin, end=end) if is_cut else None


def _why(spec: TensorSpec, placement: Shard, axis: int) -> str:
    what = f"{spec.name} {list(spec.shape)} is sharded along axis {placement.dim}"
    if tile_count(spec) <= 1:
        return f"{what}, and is too small to be cut: it has a single tile"
    return f"{what}, and its tiles are cut along axis {axis}"


def _advice(spec: TensorSpec, axis: int) -> str:
    if tile_count(spec) <= 1:
        return f"redistribute it to Replicate, {_PUT_TOGETHER}"
    return f"redistribute it to Shard({axis}), {_PUT_TOGETHER}"
