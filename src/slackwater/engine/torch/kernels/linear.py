"""Products with weights as they lie, by AMX: bf16 in and out, sums in float32.

Weights are read once, in the layout of the checkpoint, so nothing is packed and a swap has nothing to refresh. Every
sum has the same order, whatever shares the pass: a token's result doesn't depend on its company.
"""

from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from slackwater.checkpoint.jit import array_at, entry, float_of, kernel
from slackwater.engine.torch.kernels import tiles
from slackwater.engine.torch.kernels.bf16 import rounded
from slackwater.engine.torch.kernels.team import Team, share
from slackwater.engine.torch.kernels.transposing import transpose

_WEIGHT, _BIAS, _DEPTH, _WIDTH, _TOKENS, _PACKED, _OUT, _SHAPES, _SCRATCH = range(9)
"""Words of the job."""
_STRIP: Final = 32
"""Rows of the weight in a block of the job."""
_SCRATCH_BYTES: Final = 5120
"""Of a thread: four tiles of sums, and one of what is made of half of them."""


@kernel
def _pack(x: int, tokens: int, depth: int, packed: int) -> None:
    """Put ``[tokens, depth]`` into tiles of 16 tokens, ``[depth / 2, 16]`` words of two neighbours; zeros fill up."""
    pairs, whole = depth // 2, tokens // 16 * 16
    for first in range(0, whole, 16):
        for pair in range(0, pairs, 16):
            transpose(x + (first * pairs + pair) * 4, pairs * 4, packed + (first * pairs + pair * 16) * 4, 64)
    if whole < tokens:
        source = array_at(x + whole * pairs * 4, (tokens - whole) * pairs, np.uint32)
        target = array_at(packed + whole * pairs * 4, 16 * pairs, np.uint32)
        target[:] = np.uint32(0)
        for token in range(tokens - whole):
            for pair in range(pairs):
                target[pair * 16 + token] = source[token * pairs + pair]


@kernel
def _products(weight: int, depth: int, packed: int, scratch: int) -> None:
    """32 rows of the weight by 32 tokens, ``[2, 2, 16, 16]`` tiles: rows, then tokens."""
    other = packed + depth * 32
    tiles.zero(0)
    tiles.zero(1)
    tiles.zero(2)
    tiles.zero(3)
    for at in range(0, depth, 32):
        tiles.load(4, weight + at * 2, depth * 2)
        tiles.load(5, weight + (16 * depth + at) * 2, depth * 2)
        tiles.load(6, packed + at * 32, 64)
        tiles.load(7, other + at * 32, 64)
        tiles.multiply(0, 4, 6)
        tiles.multiply(1, 4, 7)
        tiles.multiply(2, 5, 6)
        tiles.multiply(3, 5, 7)
    tiles.store(0, scratch, 64)
    tiles.store(1, scratch + 1024, 64)
    tiles.store(2, scratch + 2048, 64)
    tiles.store(3, scratch + 3072, 64)


@kernel
def _few_products(weight: int, depth: int, packed: int, scratch: int) -> None:
    """As `_products`, by 16 tokens."""
    tiles.zero(0)
    tiles.zero(2)
    for at in range(0, depth, 32):
        tiles.load(4, weight + at * 2, depth * 2)
        tiles.load(5, weight + (16 * depth + at) * 2, depth * 2)
        tiles.load(6, packed + at * 32, 64)
        tiles.multiply(0, 4, 6)
        tiles.multiply(2, 5, 6)
    tiles.store(0, scratch, 64)
    tiles.store(2, scratch + 2048, 64)


@kernel
def _round(sums: Any, bias: Any, biased: bool, pairs: Any) -> None:
    """32 rows by 16 tokens of `_products` as bf16, two neighbouring rows in a word: ``[16, 16]``, pairs by tokens."""
    for pair in range(16):
        base = (pair // 8) * 512 + (pair % 8) * 32
        low = float_of(bias[2 * pair]) if biased else np.float32(0.0)
        high = float_of(bias[2 * pair + 1]) if biased else np.float32(0.0)
        for token in range(16):
            first, second = np.uint32(rounded(sums[base + token] + low)), rounded(sums[base + 16 + token] + high)
            pairs[pair * 16 + token] = first | np.uint32(second) << np.uint32(16)


@kernel
def _write(scratch: int, row: int, first: int, job: Any) -> None:
    """Put what `_products` made where it belongs; its first row is ``row``, its first token ``first``."""
    width, biased = job[_WIDTH], job[_BIAS] != 0
    bias = array_at(job[_BIAS] + 2 * row if biased else scratch, 32, np.uint16)
    pairs = array_at(scratch + 4096, 256, np.uint32)
    for begin in range(first, min(job[_TOKENS], first + 32), 16):
        _round(array_at(scratch + (begin - first) * 64, 768, np.float32), bias, biased, pairs)
        target, count = job[_OUT] + (begin * width + row) * 2, min(job[_TOKENS] - begin, 16)
        if count == tiles.ROWS:
            transpose(scratch + 4096, 64, target, width * 2)
            continue
        for token in range(count):
            out = array_at(target + token * width * 2, 16, np.uint32)
            for pair in range(16):
                out[pair] = pairs[pair * 16 + token]


def _block(address: int, number: int, thread: int) -> None:
    job = array_at(address, 9, np.int64)
    depth, tokens, row = job[_DEPTH], job[_TOKENS], number * _STRIP
    scratch = job[_SCRATCH] + thread * _SCRATCH_BYTES
    weight = job[_WEIGHT] + row * depth * 2
    tiles.configure(job[_SHAPES])
    for first in range(0, tokens, 32):
        packed = job[_PACKED] + first * depth * 2
        if tokens - first > tiles.ROWS:
            _products(weight, depth, packed, scratch)
        else:
            _few_products(weight, depth, packed, scratch)
        _write(scratch, row, first, job)
    tiles.release()


@kernel
def _multiply(
    words: Any, job: Any, at: int, function: int, weight: int, bias: int, depth: int, width: int,
    x: int, tokens: int, out: int,
) -> None:  # fmt: skip
    job[_WEIGHT], job[_BIAS], job[_DEPTH], job[_WIDTH] = weight, bias, depth, width
    job[_TOKENS], job[_OUT] = tokens, out
    _pack(x, tokens, depth, job[_PACKED])
    share(words, at, function, width // _STRIP)


@cache
def _entry() -> int:
    return entry(_block)


class Linear:
    """What multiplies by weights of bf16.

    Args:
        team: Who shares a product.
    """

    def __init__(self, team: Team) -> None:
        self._team: Final = team
        self._shapes: Final = tiles.shapes()
        self._scratch: Final = np.zeros(team.threads * _SCRATCH_BYTES, dtype=np.uint8)
        self._packed = np.zeros(0, dtype=np.uint8)
        self._job: Final = np.zeros(16, dtype=np.int64)
        self._job[_SHAPES], self._job[_SCRATCH] = self._shapes.ctypes.data, self._scratch.ctypes.data
        self._entry: Final = _entry()

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a weight, ``[out, in]`` or several of them, can be multiplied by so."""
        width, depth = weight.shape[-2:]
        sizes = depth % tiles.DEPTH == 0 and width % _STRIP == 0
        return weight.dtype == torch.bfloat16 and weight.is_contiguous() and sizes

    def install(self, module: nn.Linear) -> None:
        """Have a module whose weight `fits` run so from now on."""
        given: Any = module.bias  # None without one, though torch's types don't say so
        weight, bias = module.weight.data_ptr(), 0 if given is None else given.data_ptr()
        depth, width = module.in_features, module.out_features

        def forward(input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
            return self._run(input, weight, bias, depth, width)

        module.forward = forward

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """``[..., in]`` by a weight that `fits`."""
        return self._run(x, weight.data_ptr(), 0, weight.shape[1], weight.shape[0])

    def _run(self, x: Tensor, weight: int, bias: int, depth: int, width: int) -> Tensor:
        held = x.contiguous()
        tokens = held.numel() // depth
        out = torch.empty(*x.shape[:-1], width, dtype=torch.bfloat16)
        self._make_room(-(-tokens // 32) * 32 * depth * 2)
        team = self._team
        _multiply(
            team.words, self._job, int(self._job.ctypes.data), self._entry, weight, bias, depth, width,
            held.data_ptr(), tokens, out.data_ptr(),
        )  # fmt: skip
        return out

    def _make_room(self, size: int) -> None:
        if len(self._packed) < size:
            self._packed = np.zeros(size, dtype=np.uint8)
            self._job[_PACKED] = self._packed.ctypes.data
