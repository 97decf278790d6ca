"""Tensors on an accelerator, compared where they are: only what changed crosses the bus."""

from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np
import torch

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import ConflictError, InvalidInputError
from slackwater.ids import Version
from slackwater.weights.state_dict import StateDictSource

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Holds(Protocol):
    """Who keeps the committed state on the host: `slackwater.publish.publisher.Publisher`."""

    @property
    def version(self) -> Version | None:
        """The committed version held."""
        ...

    def held_bits(self, name: str) -> Bits:
        """One tensor of it, flat.

        Raises:
            NotFoundError: There is no such tensor, or nothing is committed.
        """
        ...


class DeviceSource:
    """A state dict on a device, beside a copy there of the version that was committed last.

    A tensor is read by comparing the two as integers on the device, and by patching the host's copy of the committed
    version with what differs: 12 bytes for a changed element of 32 bits or less, instead of the tensor. Made once,
    right after an anchor was published from these tensors; the publisher keeps it up to date from then on.

    Args:
        tensors: By canonical Hugging Face name, on any device. Their copies take as much of its memory again.
        publisher: The publisher that it is given to.

    Raises:
        NotFoundError: Nothing is committed yet: publish an anchor with `StateDictSource` first.
        InvalidInputError: A tensor isn't what was committed. All of them cross the bus once, here.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], publisher: Holds) -> None:
        self._new: Final = StateDictSource(tensors)
        self._tensors: Final = tensors
        self._publisher: Final = publisher
        self._version = publisher.version
        for name in self._new.specs():
            if not np.array_equal(self._new.bits(name), publisher.held_bits(name)):
                raise InvalidInputError(
                    f"{name} on the device isn't what version {self._version} holds",
                    hint="make a DeviceSource after a publish() and before the next optimizer step",
                )
        self._committed: Final = {name: tensors[name].detach().clone() for name in self._new.specs()}

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `TensorSource.specs`."""
        return self._new.specs()

    def bits(self, name: str) -> Bits:
        """See `TensorSource.bits`: a patched copy of the host's.

        Raises:
            NotFoundError: No such tensor.
            ConflictError: The publisher holds another version than this source has copies of.
        """
        if name not in self.specs():
            return self._new.bits(name)  # raises
        if self._publisher.version != self._version:
            raise ConflictError(
                f"the device has copies of version {self._version}, and the publisher holds {self._publisher.version}",
                hint="publish once with StateDictSource, then make a new DeviceSource",
            )
        new, old = _integers(self._tensors[name]), _integers(self._committed[name])
        where = torch.nonzero(new != old).reshape(-1)
        positions, values = where.cpu().numpy(), new[where].cpu().numpy()
        bits = self._publisher.held_bits(name).copy()
        bits[positions] = values.view(bits.dtype)
        return bits

    def committed(self, version: Version) -> None:
        """Told by the publisher: these very tensors are ``version`` now."""
        for name, copy in self._committed.items():
            copy.copy_(self._tensors[name])
        self._version = version


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat.view(_INTEGERS[flat.element_size()])
