"""What rows may draw, and the draw: ``min_p``, ``top_k`` and ``top_p`` for many rows at once.

A row's support is what is at or above its *floor*, but for some ties at the floor with high ids. Floors come from the
largest logits by value, so nothing sorts ids. A draw sums the masses in blocks, picks a block, then a token in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slackwater.checkpoint.jit import summing_kernel
from slackwater.rollout.request import SamplingSpec

_Floats = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]

_BLOCK: Final = 256
"""Tokens whose masses are summed first."""
_LIKELY: Final = 2048
"""Largest logits that are sorted first: nearly always more than the cuts keep, and far fewer than all."""
_LEAST: Final = float(np.finfo(np.float32).min)
"""At or above it is every logit but minus infinity."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cuts:
    """What rows are cut by: arrays of shape ``[rows]``."""

    least: _Floats
    """What ``min_p`` keeps is at or above it."""
    top_k: _Counts
    """0 keeps all."""
    top_p: _Doubles
    """Infinity keeps all."""
    totals: _Doubles
    """Mass of the whole row."""

    @property
    def is_open(self) -> npt.NDArray[np.bool_]:
        """Whether ``top_p`` alone cuts, which then is a share of the whole row."""
        return (self.top_k == 0) & (self.least <= _LEAST)

    def of(self, rows: _Counts) -> "_Cuts":
        """Of some rows."""
        return _Cuts(least=self.least[rows], top_k=self.top_k[rows], top_p=self.top_p[rows], totals=self.totals[rows])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Support:
    """The softmax that each row is drawn from. `support` makes it."""

    relative: Tensor
    """``[rows, vocabulary]`` float32: processed logits less their row's largest, minus infinity for dropped ties."""
    floors: _Floats
    """``[rows]``: what is below isn't kept."""
    mass: Tensor
    """``[rows, vocabulary]`` float32: the exponential of what is kept, else 0."""
    reached: Tensor
    """``[rows, blocks]`` float64: mass up to the end of each block."""

    def draw(self, uniforms: Sequence[float]) -> Tensor:
        """One token per row, ``[rows]`` int64, each by its own number in [0, 1)."""
        total = self.reached[:, -1:]
        target = total * torch.tensor(uniforms, dtype=torch.float64)[:, None]
        block = _first_above(self.reached, target)
        before = torch.where(block > 0, self.reached.gather(1, (block - 1).clamp(min=0)), 0.0)
        places = block * _BLOCK + torch.arange(_BLOCK)
        size = self.mass.shape[1]
        masses = self.mass.gather(1, places.clamp(max=size - 1)).double().masked_fill_(places >= size, 0.0)
        return (block * _BLOCK + _first_above(masses.cumsum(dim=-1), target - before))[:, 0]

    def logprobs(self, tokens: Tensor) -> list[float]:
        """Natural logs for one token per row; minus infinity outside of the support."""
        chosen = self.relative.gather(1, tokens[:, None])[:, 0]
        inside = chosen >= torch.from_numpy(self.floors)
        logs = chosen.double() - self.reached[:, -1].log()
        return torch.where(inside, logs, -math.inf).tolist()

    def top(self, row: int, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The ``count`` most probable tokens of a row and their logs, falling; ties by rising id."""
        values = self.relative[row].numpy()
        count = min(count, len(values))
        least = max(np.partition(values, len(values) - count)[-count], self.floors[row])
        ids = np.flatnonzero(values >= least)
        ids = ids[np.argsort(-values[ids], kind="stable")][:count]
        logs = values[ids].astype(np.float64) - float(self.reached[row, -1].log())
        return tuple(ids.tolist()), tuple(logs.tolist())

    def ids(self, row: int) -> npt.NDArray[np.int32]:
        """The support of a row, rising."""
        return np.flatnonzero(self.relative[row].numpy() >= self.floors[row]).astype("<i4")


def support(relative: Tensor, specs: Sequence[SamplingSpec]) -> Support:
    """Cut each row to what its spec keeps.

    Args:
        relative: ``[rows, vocabulary]`` float32, processed logits less their row's largest; the support keeps it, and
            changes it in place.
        specs: One per row; none is greedy.
    """
    mass = relative.exp()
    floors = np.full(len(specs), _LEAST, dtype=np.float32)
    cut = [row for row, spec in enumerate(specs) if spec.top_k or spec.top_p < 1.0 or spec.min_p > 0.0]
    if cut:
        values, masses = relative.numpy(), mass.numpy()
        rows = slice(None) if len(cut) == len(specs) else cut
        whole = any(spec.top_p < 1.0 for spec in specs)
        totals = _reached(mass)[:, -1].numpy()[rows] if whole else np.ones(len(cut))
        kept = np.full(len(specs), relative.shape[1])
        floors[cut], kept[cut] = _floors(values[rows], [specs[row] for row in cut], totals)
        inside = values >= floors[:, None]
        _drop_ties(values, inside, floors, kept)
        np.multiply(masses, inside, out=masses)
    return Support(relative=relative, floors=floors, mass=mass, reached=_reached(mass))


def _floors(values: _Floats, specs: Sequence[SamplingSpec], totals: _Doubles) -> tuple[_Floats, _Counts]:
    """Each row's floor, and how many tokens it keeps at most."""
    size = values.shape[1]
    floors = np.array([_least(spec.min_p) for spec in specs], dtype=np.float32)
    kept = np.full(len(specs), size)
    cuts = _Cuts(
        least=floors.copy(),
        top_k=np.array([spec.top_k if spec.top_k < size else 0 for spec in specs]),
        top_p=np.array([spec.top_p if spec.top_p < 1.0 else math.inf for spec in specs]),
        totals=totals,
    )
    width = _LIKELY
    rows = np.flatnonzero((cuts.top_k > 0) | (cuts.top_p < 1.0))
    while len(rows):
        width = min(size, max(width, int(cuts.top_k.max())))
        some = values if len(rows) == len(values) else values[rows]
        floors[rows], kept[rows], sure = _ranked(some, cuts.of(rows), width)
        rows, width = rows[~sure], size
    return floors, kept


def _least(min_p: float) -> float:
    """The least float32 whose exponential is at least ``min_p``."""
    if min_p <= 0.0:
        return _LEAST
    exact = math.log(min_p)
    near = np.float32(exact)
    return float(near if near >= exact else np.nextafter(near, np.float32(0.0)))


def _ranked(values: _Floats, cuts: _Cuts, width: int) -> tuple[_Floats, _Counts, npt.NDArray[np.bool_]]:
    """As `_floors`, by the ``width`` largest logits of each row, and whether these are enough to tell."""
    size = values.shape[1]
    falling = np.sort(np.partition(values, size - width, axis=-1)[:, size - width :], axis=-1)[:, ::-1]
    masses = torch.from_numpy(falling.copy()).exp().double()
    sums = masses.cumsum(dim=-1).numpy()
    found = (falling >= cuts.least[:, None]).sum(axis=-1)
    limit = np.where(cuts.top_k > 0, np.minimum(found, cuts.top_k), found)
    rows = np.arange(len(values))
    total = np.where(cuts.is_open, cuts.totals, sums[rows, limit - 1])
    reaching = (sums - masses.numpy() < (cuts.top_p * total)[:, None]).sum(axis=-1)
    kept = np.maximum(1, np.minimum(reaching, limit))
    more = (kept == width) | (~cuts.is_open & (found == width))
    return falling[rows, kept - 1], kept, (width == size) | (cuts.top_k > 0) | ~more


def _drop_ties(values: _Floats, inside: npt.NDArray[np.bool_], floors: _Floats, kept: _Counts) -> None:
    """Where more tokens than ``kept`` are inside, which ties at the floor make, put the last ones outside."""
    surplus = np.maximum(np.count_nonzero(inside, axis=-1) - kept, 0)
    rows = np.flatnonzero(surplus)
    if not len(rows):
        return
    index, ids = np.nonzero(values[rows] == floors[rows][:, None])
    left = np.searchsorted(index, index, side="right") - np.arange(len(index))
    last = left <= surplus[rows][index]
    index, ids = rows[index[last]], ids[last]
    values[index, ids] = -math.inf
    inside[index, ids] = False


@summing_kernel
def _sum_blocks(mass: Any, sums: Any) -> None:
    for row in range(mass.shape[0]):
        for block in range(sums.shape[1]):
            total = 0.0
            for at in range(block * _BLOCK, min((block + 1) * _BLOCK, mass.shape[1])):
                total += np.float64(mass[row, at])
            sums[row, block] = total


def _reached(mass: Tensor) -> Tensor:
    sums = torch.empty(len(mass), -(-mass.shape[1] // _BLOCK), dtype=torch.float64)
    _sum_blocks(mass.numpy(), sums.numpy())
    return sums.cumsum(dim=-1)


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """Per row, the first place whose sum is above the target; the last one that adds something where none is."""
    found = torch.searchsorted(sums, target, right=True)
    return torch.minimum(found, torch.searchsorted(sums, sums[:, -1:].contiguous()))
