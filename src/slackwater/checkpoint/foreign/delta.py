"""What every foreign delta is, whatever its layout: patches by tensor name; and what is written from: changes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import InvalidInputError, NotFoundError

Files = Mapping[str, bytes | bytearray | memoryview]
"""The files of one delta: name below its folder to content."""


class Patch(Protocol):
    """What a delta says of one tensor."""

    def apply(self, spec: TensorSpec, old: Bits) -> Bits:
        """The tensor's new bits; ``old`` is only read."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignDelta:
    """A delta as another program wrote it: its outside has been checked, its bodies haven't been decoded."""

    version: str | None
    """What it makes, in its writer's words; None where the layout doesn't say."""
    base_version: str | None
    """What it was made on; None where the layout doesn't say."""
    checksum: str | None
    """Name of the checksum that proves each tensor's result; None: the layout has none, and nothing does."""
    patches: Mapping[str, Patch]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that it lists, rising; all others are unchanged."""
        return tuple(sorted(self.patches))

    def decode(self, spec: TensorSpec, old: Bits) -> Bits:
        """Make one tensor's new bits.

        Decoding onto the new bits gives them back: applying a delta twice is harmless, an XOR included, as far as its
        checksum can tell old from new.

        Args:
            spec: The tensor as it is held.
            old: Its ``spec.num_elements`` elements as held now; only read.

        Returns:
            As many elements of the same dtype; it may be ``old`` itself where that is the result already.

        Raises:
            NotFoundError: The delta doesn't list this tensor.
            InvalidInputError: ``old`` isn't ``spec``'s.
            CorruptError: The body breaks the layout.
            WrongBaseError: The result isn't what the delta's checksum names: the tensor held is another than the
                delta was made on, or the body is damaged.
        """
        patch = self.patches.get(spec.name)
        if patch is None:
            raise NotFoundError(f"the delta doesn't list {spec.name}: it is unchanged")
        check_bits(spec, old)
        return patch.apply(spec, old)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One tensor before and after."""

    spec: TensorSpec
    old: Bits
    """``spec.num_elements`` elements of ``spec.bits_dtype``."""
    new: Bits

    def __post_init__(self) -> None:
        check_bits(self.spec, self.old)
        check_bits(self.spec, self.new)

    @property
    def changed(self) -> bool:
        """Whether any bit differs."""
        return not np.array_equal(self.old, self.new)


def each_once(changes: Iterable[Change]) -> Iterator[Change]:
    """The same changes, one by one.

    Raises:
        InvalidInputError: A tensor comes twice.
    """
    seen: set[str] = set()
    for change in changes:
        if change.spec.name in seen:
            raise InvalidInputError(f"{change.spec.name} comes twice", hint="give each tensor once")
        seen.add(change.spec.name)
        yield change


def check_bits(spec: TensorSpec, bits: Bits) -> None:
    """Check that an array is the flat integer view of a tensor.

    Raises:
        InvalidInputError: Its dtype or its shape is another.
    """
    if bits.dtype != spec.bits_dtype or bits.shape != (spec.num_elements,):
        raise InvalidInputError(
            f"{spec.name} has {spec.num_elements} elements of {spec.dtype}, not {bits.dtype} {bits.shape}",
            hint="give its flat integer view",
        )
