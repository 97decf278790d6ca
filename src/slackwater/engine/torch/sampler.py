"""From logits to tokens: processed distributions, draws by (seed, position) alone, and their evidence.

Each row is computed from itself alone, by operations that treat rows alike: who shares the batch changes no
bit. Ties go to the lower token id: a stable sort by falling logit fixes what ``top_k`` and ``top_p`` keep.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from slackwater.rollout.request import SamplingSpec

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy: dividing by them says nothing more."""

_LIKELY: Final = 1024
"""Tokens that are sorted first: nearly always more than ``top_p`` keeps, and far fewer than all."""
_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What one row is asked for."""

    spec: SamplingSpec
    seed: int
    position: int
    """Of the token to draw, counted from the start of the prompt."""
    forced: int | None = None
    """This token is taken instead of a draw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One token and its evidence, of the processed distribution."""

    token_id: int
    logprob: float
    """Natural log; minus infinity for a forced token outside of the support."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 52 random bits, from its arguments alone (splitmix64, counter-based)."""
    return (_mix(_mix(seed + _GOLDEN) + _GOLDEN * (position + 1)) >> 12) * 2.0**-52


def sample(logits: Tensor, asks: Sequence[Ask]) -> list[Drawn | None]:
    """Draw one token per row; None where a row has no finite largest logit.

    Args:
        logits: ``[rows, vocabulary]``, any float dtype, not changed.
        asks: One per row.
    """
    wide = logits.float()
    best = wide.amax(dim=-1, keepdim=True)
    finite = best.isfinite()
    sound: list[bool] = finite[:, 0].tolist()
    relative = wide - best
    if not all(sound):
        relative.masked_fill_(~finite, 0.0)
    _process(relative, asks)
    mass = relative.exp().cumsum(dim=-1, dtype=torch.float64)
    total = mass[:, -1:]
    uniforms = torch.tensor([uniform(ask.seed, ask.position) for ask in asks], dtype=torch.float64)
    drawn = torch.searchsorted(mass, total * uniforms[:, None], right=True)[:, 0]
    tokens = _force(drawn, asks)
    logs = total.log()
    chosen = (relative.gather(1, tokens[:, None]).double() - logs)[:, 0].tolist()
    ids = tokens.tolist()
    tops = [_top(relative[row], logs[row], ask.spec.top_logprobs) for row, ask in enumerate(asks)]
    return [
        Drawn(token_id=ids[row], logprob=chosen[row], top_ids=top[0], top_logprobs=top[1]) if good else None
        for row, (good, top) in enumerate(zip(sound, tops, strict=True))
    ]


def _process(relative: Tensor, asks: Sequence[Ask]) -> None:
    """Make processed logits of logits less their row's largest, in place: -inf outside of the support."""
    temperatures = [1.0 if is_greedy(ask.spec) else ask.spec.temperature for ask in asks]
    if any(temperature != 1.0 for temperature in temperatures):
        relative.div_(torch.tensor(temperatures)[:, None])
    for row, ask in enumerate(asks):
        if is_greedy(ask.spec) or ask.spec.top_k or ask.spec.top_p < 1.0:
            support = _support(relative[row], ask.spec)
            kept = relative[row, support]
            relative[row] = -math.inf
            relative[row, support] = kept


def is_greedy(spec: SamplingSpec) -> bool:
    """Whether the largest logit is taken."""
    return spec.temperature < GREEDY_BELOW


def _support(scaled: Tensor, spec: SamplingSpec) -> Tensor:
    """Token ids that a row may draw, by falling probability."""
    if is_greedy(spec):
        return scaled.argmax(dim=-1, keepdim=True)
    if spec.top_k:
        ids = _leading(scaled, spec.top_k)[: spec.top_k]
        return _nucleus(scaled, ids, spec.top_p, scaled[ids].double().exp().sum())
    total = scaled.double().exp().sum()
    kept = _nucleus(scaled, ids := _leading(scaled, _LIKELY), spec.top_p, total)
    if len(kept) < len(ids):
        return kept
    return _nucleus(scaled, _leading(scaled, len(scaled)), spec.top_p, total)


def _leading(scaled: Tensor, count: int) -> Tensor:
    """The ``count`` most probable ids and those tied with the last of them, falling; ties by rising id."""
    floor = scaled.topk(min(count, len(scaled))).values[-1]
    ids = (scaled >= floor).nonzero()[:, 0]
    return ids[scaled[ids].sort(descending=True, stable=True).indices]


def _nucleus(scaled: Tensor, ids: Tensor, top_p: float, total: Tensor) -> Tensor:
    """The shortest beginning of ``ids`` whose weight reaches ``top_p`` of ``total``; all if none does."""
    weights = scaled[ids].double().exp()
    before = weights.cumsum(dim=-1) - weights
    return ids[before < top_p * total] if top_p < 1.0 else ids


def _force(drawn: Tensor, asks: Sequence[Ask]) -> Tensor:
    if all(ask.forced is None for ask in asks):
        return drawn
    kept = drawn.tolist()
    return torch.tensor([kept[row] if ask.forced is None else ask.forced for row, ask in enumerate(asks)])


def _top(relative: Tensor, log_total: Tensor, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if not count:
        return (), ()
    values, ids = relative.topk(min(count, relative.shape[0]))
    inside = values > -math.inf
    logprobs = values[inside].double() - log_total
    return tuple(ids[inside].tolist()), tuple(logprobs.tolist())


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
