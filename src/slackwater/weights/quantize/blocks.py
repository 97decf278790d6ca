"""A matrix as windows of whole blocks: what bounds the memory of quantising, whatever the tensor's size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from slackwater.checkpoint.tensor import Bits

HOST_WINDOW: Final = 512 * 1024
"""Most elements of a window on a CPU: one float32 copy is 2 MiB, so that the few in use stay in its cache."""

DEVICE_WINDOW: Final = 64 * 1024 * 1024
"""Most elements of a window on an accelerator: enough to keep it busy."""

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A rectangle of a matrix that begins at a block's corner, and ends at one or at the matrix's edge."""

    rows: slice
    cols: slice
    blocks: tuple[slice, slice]
    """The same rectangle, in blocks."""

    def of_packed(self, per_byte: int) -> tuple[slice, slice]:
        """The same rectangle of a matrix with ``per_byte`` elements in each byte of a row."""
        return self.rows, slice(self.cols.start // per_byte, self.cols.stop // per_byte)


def windows(shape: tuple[int, int], block: tuple[int, int], limit: int) -> Iterator[Window]:
    """Cut a matrix into windows of at most ``limit`` elements, or of one block where that is more."""
    (rows, cols), (height, width) = shape, block
    across = _stride(cols, width, limit // height)
    down = _stride(rows, height, limit // min(across, max(cols, 1)))
    for top in range(0, rows, down):
        for left in range(0, cols, across):
            bottom, right = min(top + down, rows), min(left + across, cols)
            yield Window(
                rows=slice(top, bottom),
                cols=slice(left, right),
                blocks=(slice(top // height, -(-bottom // height)), slice(left // width, -(-right // width))),
            )


def _stride(length: int, block: int, limit: int) -> int:
    """A multiple of ``block`` within ``limit``, and no longer than the length asks for."""
    return max(block, min(limit // block, -(-length // block)) * block)


def blocked(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[rows, cols] as [block rows, height, block columns, width], filled up with zeros at the edges."""
    rows, cols = matrix.shape
    height, width = block
    right, bottom = -cols % width, -rows % height
    if right or bottom:
        matrix = torch.nn.functional.pad(matrix, (0, right, 0, bottom))
    return matrix.reshape((rows + bottom) // height, height, (cols + right) // width, width)


def unblocked(blocks: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Undo `blocked`."""
    down, height, across, width = blocks.shape
    return blocks.reshape(down * height, across * width)[:rows, :cols]


def spread(per_block: torch.Tensor) -> torch.Tensor:
    """[block rows, block columns] as a view that broadcasts over `blocked`."""
    return per_block[:, None, :, None]


def same_blocks(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two blocked tensors of one dtype have the same bits: bool [block rows, block columns]."""
    integers = _INTEGERS[one.element_size()]
    moved = one.contiguous().view(integers) ^ other.contiguous().view(integers)
    return _fold(_fold(moved, torch.bitwise_or, 1), torch.bitwise_or, 2) == 0


def _fold(tensor: torch.Tensor, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], axis: int) -> torch.Tensor:
    """Reduce an axis whose length is a power of two by halves: torch has no reduction by bits."""
    while tensor.shape[axis] > 1:
        first, second = tensor.chunk(2, axis)
        tensor = join(first, second)
    return tensor.squeeze(axis)


def from_bits(bits: Bits) -> torch.Tensor:
    """A tensor of unsigned integers over the same memory, read-only memory too; not to be written."""
    # torch.from_numpy warns of memory that can't be written, as mapped files can't; DLPack doesn't.
    return torch.from_dlpack(bits)
