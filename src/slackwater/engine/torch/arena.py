"""One area of memory for all weights, in huge pages where the system has them.

A sparse swap touches a cache line here and there in all of it: with pages of 4 KiB it waits for address translations as
long as for the lines themselves. Reading goes faster too.
"""

import mmap
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch

_PAGE: Final = 2 * 1024 * 1024
_ALIGNMENT: Final = 64
"""Of each tensor: a cache line."""


def gather(tensors: Sequence[torch.Tensor]) -> None:
    """Move tensors, parameters among them, into one area of host memory, one after the other. It lives as long as any
    of them.

    Each becomes contiguous, and its old memory is let go before the next is copied.
    """
    ends = list(accumulate((_rounded(tensor.nbytes) for tensor in tensors), initial=0))
    area = _area(ends[-1])
    for tensor, (begin, _) in zip(tensors, pairwise(ends), strict=True):
        place = area[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor.data)


def _area(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes that begin with a page, of shape [num_bytes]."""
    mapped = mmap.mmap(-1, num_bytes + 2 * _PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -whole.data_ptr() % _PAGE
    return whole[begin : begin + num_bytes]


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
