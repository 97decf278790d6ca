"""The KV store: fixed memory, one row per slot, which the model's layers write in place and read as views.

Shapes never depend on who else is served: decoding runs all slots, prefill runs one slot in whole chunks, and
the keys that attention sees end at a multiple of `KV_STEP`. So no logit depends on the batch.
"""

import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from slackwater.engine.torch.model import LoadedModel

KV_STEP: Final = 64
"""Keys that attention sees are a multiple of this."""
CHUNK: Final = 32
"""Tokens of one prefill call; the last one of a prompt is padded."""


def round_up(count: int, step: int) -> int:
    """The least multiple of ``step`` that isn't below ``count``."""
    return -(-count // step) * step


class SlotStore(Cache):
    """Keys and values of every layer, ``[slots, kv_heads, window, head_dim]`` each, in the model's dtype.

    Aim it (`aim_decode`, `aim_prefill`), then run the model with it as ``past_key_values``.

    Args:
        model: Gives the shapes.
        slots: Rows.
        window: Most positions; memory is touched only as far as it is used.
    """

    def __init__(self, model: LoadedModel, *, slots: int, window: int) -> None:
        super().__init__(layers=[])
        shape = (slots, model.kv_heads, round_up(window, KV_STEP), model.head_dim)
        self._keys: Final = [_zeros(shape, model.dtype) for _ in range(model.layers)]
        self._values: Final = [_zeros(shape, model.dtype) for _ in range(model.layers)]
        self._used: Final = [0] * slots
        self._rows = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, dtype=torch.long)
        self._width = 0
        self._chunk: tuple[int, int] | None = None

    def aim_decode(self, rows: list[int], positions: Tensor) -> Tensor:
        """Make the next forward pass append a token to each of ``rows``; other slots run along unwritten.

        Args:
            rows: Slots to write.
            positions: ``[slots]``, int64: where each slot's token goes.

        Returns:
            The attention mask, ``[slots, 1, 1, width]``.
        """
        self._chunk = None
        self._rows = torch.tensor(rows)
        self._positions = positions[self._rows]
        self._width = round_up(int(self._positions.max()) + 1, KV_STEP)
        for row in rows:
            self._used[row] = max(self._used[row], int(positions[row]) + 1)
        return (torch.arange(self._width)[None] <= positions[:, None])[:, None, None]

    def aim_prefill(self, row: int, start: int) -> Tensor:
        """Make the next forward pass write `CHUNK` tokens from position ``start`` into slot ``row``.

        Returns:
            The attention mask, ``[1, 1, CHUNK, width]``.
        """
        self._chunk = (row, start)
        self._width = round_up(start + CHUNK, KV_STEP)
        self._used[row] = max(self._used[row], start + CHUNK)
        positions = torch.arange(start, start + CHUNK)
        return (torch.arange(self._width)[None] <= positions[:, None])[None, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write where the store is aimed; return the views that attention reads. Called by each layer."""
        del args, kwargs
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._chunk is None:
            keys[self._rows, :, self._positions] = key_states[self._rows, :, 0]
            values[self._rows, :, self._positions] = value_states[self._rows, :, 0]
            return keys[:, :, : self._width], values[:, :, : self._width]
        row, start = self._chunk
        keys[row, :, start : start + CHUNK] = key_states[0]
        values[row, :, start : start + CHUNK] = value_states[0]
        return keys[row : row + 1, :, : self._width], values[row : row + 1, :, : self._width]

    def reset_row(self, row: int, *, source: int, shared: int) -> None:
        """Begin slot ``row`` anew with the first ``shared`` positions of slot ``source``.

        Everything else that was written is zeroed: a masked NaN of an earlier answer would still poison sums.
        """
        used = self._used[row]
        for store in (*self._keys, *self._values):
            if source != row:
                store[row, :, :shared] = store[source, :, :shared]
            store[row, :, shared:used] = 0
        self._used[row] = shared

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not asked for: positions and masks are always given. 0 keeps transformers from guessing."""
        del layer_idx
        return 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # numpy asks the system for zeroed pages and torch writes zeros: only the former costs nothing until used.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
