"""Rows of keys and values, and attention over them: what the layers of a model need, and how it is done everywhere."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slackwater.engine.torch.batch import Batch
from slackwater.engine.torch.kernels.attention import Held, attend, put
from slackwater.engine.torch.model import LoadedModel

_LINE: Final = 32
"""Windows are multiples of this, so that rows begin at cache lines."""
_SHARED_FROM: Final = 1 << 11
"""Keys by heads of a pass from which a second thread is worth waking."""

_Places = npt.NDArray[np.int64]


class Rows(Protocol):
    """A row per slot and position, in every layer.

    Memory is touched only as far as it is used. Rows that other weights or answers left behind are never read: a token
    sees the positions of its slot up to its own.
    """

    def aim(self, batch: Batch) -> None:
        """Make the next pass write and read the rows of ``batch``."""
        ...

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the pass's keys and values, ``[1, kv_heads, tokens, head_dim]``."""
        ...

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attention of the pass's tokens over what is written.

        Args:
            layer: Whose rows.
            query: ``[1, heads, tokens, head_dim]``.
            scaling: Of the scores.

        Returns:
            ``[1, tokens, heads, head_dim]``, in the query's dtype; zeros for padding.
        """
        ...

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """Give ``slot`` the first ``count`` rows of ``source``."""
        ...

    def close(self) -> None:
        """End the threads that it has."""
        ...


class PlainRows:
    """See `Rows`; on every machine, for bf16 and float32.

    Args:
        model: Gives the shapes.
        slots: Rows.
        window: Most positions.
        threads: That attention may use.
    """

    def __init__(self, model: LoadedModel, *, slots: int, window: int, threads: int = 1) -> None:
        self._dtype: Final = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
        self._heads: Final = model.kv_heads
        width = -(-window // _LINE) * _LINE
        rows, size = (slots, model.kv_heads), model.head_dim
        self._keys: Final = [untouched((*rows, size, width), self._dtype) for _ in range(model.layers)]
        self._values: Final = [untouched((*rows, width, size), self._dtype) for _ in range(model.layers)]
        self._scratch: Final = [np.empty(width, dtype=np.float32) for _ in range(threads)]
        self._pool: Final = ThreadPoolExecutor(threads - 1, thread_name_prefix="attention") if threads > 1 else None
        self._slots: _Places = np.empty(0, dtype=np.int64)
        self._places: _Places = np.empty(0, dtype=np.int64)
        self._parts: tuple[tuple[int, int], ...] = ()

    def aim(self, batch: Batch) -> None:
        """See `Rows.aim`."""
        self._slots, self._places = batch.slots, batch.places
        work = np.cumsum(batch.places + 1)
        threads = len(self._scratch) if work[-1] * self._heads >= _SHARED_FROM else 1
        cuts = [0, *(int(np.searchsorted(work, work[-1] * part / threads)) for part in range(1, threads)), len(work)]
        self._parts = tuple((cuts[part], cuts[part + 1]) for part in range(threads))

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `Rows.put`."""
        states = (self._bits(keys[0]), self._bits(values[0]))
        put(self._keys[layer], self._values[layer], *states, self._slots, self._places)

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """See `Rows.attend`."""
        queries = query[0].transpose(0, 1).to(torch.float32).contiguous().numpy()
        out = np.zeros_like(queries)
        rows, scale = (self._keys[layer], self._values[layer]), np.float32(scaling)

        def part(number: int) -> None:
            begin, end = self._parts[number]
            attend(queries, *rows, self._slots, self._places, begin, end, scale, out, self._scratch[number])

        others = [self._pool.submit(part, number) for number in range(1, len(self._parts))] if self._pool else []
        part(0)
        for other in others:
            other.result()
        return torch.from_numpy(out)[None].to(query.dtype)  # pyright: ignore[reportUnknownMemberType]

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """See `Rows.copy`."""
        for keys, values in zip(self._keys, self._values, strict=True):
            keys[slot, :, :, :count] = keys[source, :, :, :count]
            values[slot, :, :count] = values[source, :, :count]

    def close(self) -> None:
        """See `Rows.close`."""
        if self._pool:
            self._pool.shutdown()

    def _bits(self, states: Tensor) -> npt.NDArray[Any]:
        held = states.to(self._dtype).contiguous()
        return held.view(torch.uint16).numpy() if self._dtype == torch.bfloat16 else held.numpy()


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Held:
    """Zeros that take no memory before they are used: numpy asks the system for zeroed pages."""
    return np.zeros(math.prod(shape), np.uint16 if dtype == torch.bfloat16 else np.float32).reshape(shape)
