"""Rows of keys and values as AMX's tiles want them, and attention over them."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from slackwater.engine.torch.batch import Batch
from slackwater.engine.torch.kernels import tile_attention as job
from slackwater.engine.torch.kernels import tiles
from slackwater.engine.torch.kernels.team import Team, share
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.rows import untouched

_MARGIN: Final = 48
"""Positions beyond the window: tiles are whole, and rows don't begin a power of two apart."""
_NONE: Final = np.zeros(1, dtype=np.int64)


class TileRows:
    """See `slackwater.engine.torch.rows.Rows`, for bf16.

    Args:
        model: Gives the shapes; it `fits`.
        slots: Rows.
        window: Most positions.
        team: Who shares the work.
    """

    def __init__(self, model: LoadedModel, *, slots: int, window: int, team: Team) -> None:
        self._team: Final = team
        self._most: Final = tiles.ROWS // _shared(model)
        self._size: Final = model.head_dim
        self._width: Final = -(-window // 32) * 32 + _MARGIN
        shape = (slots, model.kv_heads)
        keys, values = (*shape, self._size // 2, self._width, 2), (*shape, self._width // 2, self._size, 2)
        self._keys: Final = [untouched(keys, torch.bfloat16) for _ in range(model.layers)]
        self._values: Final = [untouched(values, torch.bfloat16) for _ in range(model.layers)]
        scratch = job.scratch_bytes(self._size, self._width)
        self._scratch: Final = np.zeros(scratch * team.threads + 64, dtype=np.uint8)
        self._shapes: Final = tiles.shapes()
        self._words: Final = np.zeros(job.WORDS, dtype=np.int64)
        self._slots = self._places = self._stretches = _NONE
        self._words[job.SHAPES] = self._shapes.ctypes.data
        self._words[job.SCRATCH] = -(-self._scratch.ctypes.data // 64) * 64
        self._words[job.SCRATCH_BYTES] = scratch
        self._words[job.KV_HEADS] = model.kv_heads
        self._words[job.SIZE], self._words[job.WIDTH] = self._size, self._width
        self._address: Final = int(self._words.ctypes.data)
        self._put: Final = job.put_entry()
        self._attend: Final = job.attend_entry()

    @staticmethod
    def fits(model: LoadedModel) -> bool:
        """Whether a model's rows can lie so."""
        return (
            model.dtype == torch.bfloat16
            and model.head_dim % tiles.DEPTH == 0
            and _shared(model) <= tiles.ROWS
            and tiles.available()
        )

    def aim(self, batch: Batch) -> None:
        """See `Rows.aim`."""
        begins = (0, *(end + 1 for end in batch.ends[:-1]))
        pieces = zip(begins, batch.ends, strict=True)
        stretches = [part for begin, end in pieces for part in self._cut(begin, end + 1, int(batch.places[begin]))]
        self._slots, self._places = batch.slots, batch.places
        self._stretches = np.array(stretches, dtype=np.int64)
        self._words[job.SLOTS], self._words[job.PLACES] = self._slots.ctypes.data, self._places.ctypes.data
        self._words[job.STRETCHES] = self._stretches.ctypes.data

    def _cut(self, begin: int, end: int, place: int) -> Iterator[tuple[int, int]]:
        """Tokens that follow each other, the first at ``place``, as stretches: first token and how many."""
        while begin < end:
            count = min(self._most, end - begin, job.BLOCK - place % job.BLOCK)
            yield begin, count
            begin, place = begin + count, place + count

    def close(self) -> None:
        """See `Rows.close`: the team is its owner's."""

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `Rows.put`."""
        held, states = _dense(keys), _dense(values)
        if held.stride() != states.stride():
            held, states = held.contiguous(), states.contiguous()
        words = self._words
        words[job.KEYS], words[job.VALUES] = self._keys[layer].ctypes.data, self._values[layer].ctypes.data
        words[job.KEY_IN], words[job.VALUE_IN] = held.data_ptr(), states.data_ptr()
        words[job.IN_HEAD], words[job.IN_TOKEN] = held.stride(0), held.stride(1)
        share(self._team.words, self._address, self._put, len(self._slots) * held.shape[0])

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """See `Rows.attend`."""
        held = _dense(query)
        heads, tokens, size = held.shape
        out = torch.zeros(1, tokens, heads, size, dtype=torch.bfloat16)
        words = self._words
        words[job.KEYS], words[job.VALUES] = self._keys[layer].ctypes.data, self._values[layer].ctypes.data
        words[job.QUERY] = held.data_ptr()
        words[job.QUERY_HEAD], words[job.QUERY_TOKEN] = held.stride(0), held.stride(1)
        words[job.HEADS] = heads
        words[job.OUT], words[job.SCALE] = out.data_ptr(), int(np.float32(scaling).view(np.uint32))
        share(self._team.words, self._address, self._attend, len(self._stretches) * int(words[job.KV_HEADS]))
        return out.to(query.dtype)

    def copy(self, slot: int, *, source: int, count: int) -> None:
        """See `Rows.copy`."""
        for keys, values in zip(self._keys, self._values, strict=True):
            keys[slot, :, :, :count] = keys[source, :, :, :count]
            values[slot, :, : (count + 1) // 2] = values[source, :, : (count + 1) // 2]


def _shared(model: LoadedModel) -> int:
    """Heads that share a key."""
    config: Any = model.module.config
    return int(config.num_attention_heads) // model.kv_heads


def _dense(states: Tensor) -> Tensor:
    """``[1, heads, tokens, size]`` without the first, each head's numbers side by side."""
    held = states[0]
    return held if held.stride(2) == 1 and held.dtype == torch.bfloat16 else held.to(torch.bfloat16).contiguous()
