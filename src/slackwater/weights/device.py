"""Tensors on an accelerator, compared where they are: only what changed crosses the bus."""

from collections.abc import Callable, Mapping
from typing import Final

import torch

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError
from slackwater.weights.state_dict import StateDictSource

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeviceSource:
    """A state dict on a device beside a copy of its last published state there.

    A tensor is read by comparing the two as integers on the device, and by patching the host's copy of the last
    published state with what differs: 12 bytes for a changed element of 32 bits or less, instead of the tensor.

    Args:
        tensors: By canonical Hugging Face name, on any device.
        committed: Equal tensors on the same device, as they were last published; `advance` keeps them so.
        held: The host's bits of the last published state, such as `Publisher.held_bits`.

    Raises:
        InvalidInputError: ``committed`` lacks a tensor, or has it in another shape, dtype or place.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        committed: Mapping[str, torch.Tensor],
        held: Callable[[str], Bits],
    ) -> None:
        self._new: Final = StateDictSource(tensors)
        self._tensors: Final = tensors
        self._committed: Final = committed
        self._held: Final = held
        for name in self._new.specs():
            _check_pair(name, tensors[name], committed.get(name))

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `TensorSource.specs`."""
        return self._new.specs()

    def bits(self, name: str) -> Bits:
        """See `TensorSource.bits`: a patched copy of the host's.

        Raises:
            NotFoundError: No such tensor.
        """
        if name not in self.specs():
            return self._new.bits(name)  # raises
        new, old = _integers(self._tensors[name]), _integers(self._committed[name])
        where = torch.nonzero(new != old).reshape(-1)
        positions, values = where.cpu().numpy(), new[where].cpu().numpy()
        bits = self._held(name).copy()
        bits[positions] = values.view(bits.dtype)
        return bits

    def advance(self) -> None:
        """Make the present tensors the last published ones: after `Publisher.publish` has returned."""
        for name in self.specs():
            self._committed[name].copy_(self._tensors[name])


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat.view(_INTEGERS[flat.element_size()])


def _check_pair(name: str, new: torch.Tensor, old: torch.Tensor | None) -> None:
    if old is None:
        raise InvalidInputError(f"{name} has no committed copy", hint="clone every tensor after the first publish()")
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise InvalidInputError(
            f"{name} is {new.dtype} {list(new.shape)} on {new.device}, and its committed copy {old.dtype} "
            f"{list(old.shape)} on {old.device}",
            hint="keep the copy on the same device, in the same dtype",
        )


def committed_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of all tensors where they are: what `DeviceSource` compares with."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
