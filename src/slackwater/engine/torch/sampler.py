"""From logits to tokens: processed distributions, draws by (seed, position) alone, and their evidence.

Each row is computed from itself alone, by operations that treat rows alike: who shares the batch changes no bit.
`slackwater.engine.torch.adjust` changes logits by what an answer has so far, `slackwater.engine.torch.support` cuts
and draws.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slackwater.engine.torch.adjust import Tally, adjust, changes
from slackwater.engine.torch.support import support
from slackwater.rollout.evidence import MAX_MASK_IDS, pack_mask
from slackwater.rollout.request import SamplingSpec

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy: dividing by them says nothing more."""

_AT_ONCE: Final = 1 << 18
"""Logits that are worked on at once: what is made of them stays in the processor's caches."""
_PLAIN: Final = SamplingSpec(max_tokens=1)
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
    banned: tuple[int, ...] = ()
    """Tokens that can't be drawn unless nothing else can."""
    tally: Tally | None = None
    """The tokens so far; needed where ``spec`` penalises them."""
    allowed: npt.NDArray[np.bool_] | None = None
    """``[vocabulary]``: what a grammar lets come next; None: there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One token and its evidence, of the processed distribution."""

    token_id: int
    logprob: float
    """Natural log; minus infinity for a forced token outside of the support."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    raw_logprob: float | None = None
    """Of the raw logits; None where it isn't asked for."""
    raw_top_ids: tuple[int, ...] = ()
    raw_top_logprobs: tuple[float, ...] = ()
    mask: bytes | None = None
    """See `slackwater.rollout.evidence.TokenStep.mask`."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 52 random bits, from its arguments alone (splitmix64, counter-based)."""
    return (_mix(_mix(seed + _GOLDEN) + _GOLDEN * (position + 1)) >> 12) * 2.0**-52


def sample(logits: Tensor, asks: Sequence[Ask]) -> list[Drawn | None]:
    """Draw one token per row; None where a row has no finite largest logit, or its grammar leaves none.

    Args:
        logits: ``[rows, vocabulary]``, any float dtype, not changed.
        asks: One per row.
    """
    step = max(1, _AT_ONCE // logits.shape[1])
    parts = [slice(begin, begin + step) for begin in range(0, len(asks), step)]
    return [drawn for part in parts for drawn in _sample(logits[part], asks[part])]


def warm() -> None:
    """Have what a draw compiles compiled."""
    sample(torch.zeros(1, 2), [Ask(spec=_PLAIN, seed=0, position=0)])


def _sample(logits: Tensor, asks: Sequence[Ask]) -> list[Drawn | None]:
    raw = logits.float()
    sound: list[bool] = raw.amax(dim=-1).isfinite().tolist()
    wide = _adjusted(raw, asks)
    for row, ask in enumerate(asks):
        if ask.allowed is not None:
            sound[row] = sound[row] and bool(wide[row].amax() > -torch.inf)
    drawn: dict[int, Drawn] = {}
    for greedy, draw in ((True, _take), (False, _draw)):
        rows = [row for row, ask in enumerate(asks) if sound[row] and is_greedy(ask.spec) is greedy]
        if rows:
            drawn.update(zip(rows, draw(_some(wide, rows), [asks[row] for row in rows]), strict=True))
    _add_raw(raw, asks, drawn)
    return [drawn.get(row) for row in range(len(asks))]


def is_greedy(spec: SamplingSpec) -> bool:
    """Whether the largest logit is taken."""
    return spec.temperature < GREEDY_BELOW


def _adjusted(raw: Tensor, asks: Sequence[Ask]) -> Tensor:
    rows = [row for row, ask in enumerate(asks) if changes(ask.spec, ask.banned, ask.allowed)]
    if not rows:
        return raw
    wide = raw.clone()
    for row in rows:
        adjust(wide[row], asks[row].spec, asks[row].banned, asks[row].tally, asks[row].allowed)
    return wide


def _some(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[list(rows)]


def _relative(logits: Tensor) -> Tensor:
    return logits - logits.amax(dim=-1, keepdim=True)


def _take(logits: Tensor, asks: Sequence[Ask]) -> Iterator[Drawn]:
    """Greedy rows: a one-point distribution each, of the lowest id among the largest."""
    best: list[int] = logits.numpy().argmax(axis=-1).tolist()
    for largest, ask in zip(best, asks, strict=True):
        some = bool(ask.spec.top_logprobs)
        forced = ask.forced is not None and ask.forced != largest
        yield Drawn(
            token_id=largest if ask.forced is None else ask.forced,
            logprob=-torch.inf if forced else 0.0,
            top_ids=(largest,) if some else (),
            top_logprobs=(0.0,) if some else (),
            mask=pack_mask((largest,)) if ask.spec.sampling_mask else None,
        )


def _draw(logits: Tensor, asks: Sequence[Ask]) -> Iterator[Drawn]:
    relative = _relative(logits)
    temperatures = [ask.spec.temperature for ask in asks]
    if any(temperature != 1.0 for temperature in temperatures):
        relative.div_(torch.tensor(temperatures)[:, None])
    kept = support(relative, [ask.spec for ask in asks])
    drawn = kept.draw([uniform(ask.seed, ask.position) for ask in asks]).tolist()
    tokens = [token if ask.forced is None else ask.forced for token, ask in zip(drawn, asks, strict=True)]
    logprobs = kept.logprobs(torch.tensor(tokens))
    for row, ask in enumerate(asks):
        top_ids, top_logprobs = kept.top(row, ask.spec.top_logprobs) if ask.spec.top_logprobs else ((), ())
        yield Drawn(
            token_id=tokens[row],
            logprob=logprobs[row],
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            mask=_mask(kept.ids(row)) if ask.spec.sampling_mask else None,
        )


def _mask(ids: npt.NDArray[np.int32]) -> bytes:
    return pack_mask(ids.tolist() if len(ids) <= MAX_MASK_IDS else ())


def _add_raw(raw: Tensor, asks: Sequence[Ask], drawn: dict[int, Drawn]) -> None:
    rows = [row for row, ask in enumerate(asks) if row in drawn and ask.spec.raw_logprobs]
    if not rows:
        return
    whole = support(_relative(_some(raw, rows)), [_PLAIN] * len(rows))
    tokens = torch.tensor([drawn[row].token_id for row in rows])
    for at, (row, logprob) in enumerate(zip(rows, whole.logprobs(tokens), strict=True)):
        count = asks[row].spec.top_logprobs
        ids, logs = whole.top(at, count) if count else ((), ())
        drawn[row] = replace(drawn[row], raw_logprob=logprob, raw_top_ids=ids, raw_top_logprobs=logs)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
