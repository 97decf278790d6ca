"""Is every token labelled with the policy that made it? The decisions of that check, as pure functions.

The check re-computes each token's log-probability by forced decoding under the version that the token claims, with
the KV cache built as it was, and compares. It is worth something only if false labels are caught, so the same check
runs once more with all labels shifted by one version.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from operator import ne
from typing import Final

from slackwater.config.in_flight import InFlight
from slackwater.errors import InvalidInputError
from slackwater.ids import StateDigest, Version
from slackwater.rollout.evidence import PolicySpan, TokenStep

TOLERANCE_FLOOR: Final = 1e-3
"""Nats. Below it two log-probabilities are equal, whatever the calibration found."""
_TOLERANCE_MARGIN: Final = 4.0
_ONE_EXCHANGE: Final = 2
"""Policy spans of an answer that crossed one exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledAnswer:
    """One answer and what it claims of itself."""

    key: int
    """Unique in its file."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-probabilities as reported, natural log; one per token."""
    policy: tuple[PolicySpan, ...]
    """Covers every token, in order."""
    replica: str
    kv: tuple[PolicySpan, ...] = ()
    """Which version built the KV of all positions but the last; empty where that wasn't told."""
    prompt_version: Version | None = None
    """The version that built the prompt's KV before the first token; None where that isn't known."""
    moved: bool = False
    """Its replica was lost and another one went on with it."""
    top_p: float = 1.0
    """What its tokens were drawn with, at temperature 1."""
    raw_logprobs: tuple[float, ...] = ()
    """Of the raw logits; empty where not told. They tell of the policy also where a token was the only one to draw."""
    masks: tuple[bytes, ...] = ()
    """What each token was drawn from, as `slackwater.rollout.evidence.pack_mask` has it; empty where not told."""
    routes: tuple[bytes, ...] = ()
    """Experts of all positions but the last, one row each; empty where not all were told."""

    def __post_init__(self) -> None:
        edges = [0, *(span.end for span in self.policy)]
        starts = [span.start for span in self.policy]
        folded = all(left.version != right.version for left, right in pairwise(self.policy))
        if not folded or starts != edges[:-1] or not len(self.token_ids) == len(self.logprobs) == edges[-1]:
            raise InvalidInputError(
                f"answer {self.key}: its policy spans don't cover its {len(self.token_ids)} tokens in order"
            )
        counts = {len(told) for told in (self.raw_logprobs, self.masks) if told}
        if counts - {edges[-1]} or len(self.routes) not in (0, len(self.prompt_ids) + edges[-1] - 1):
            raise InvalidInputError(f"answer {self.key}: its masks, routes or raw log-probabilities don't cover it")

    @property
    def kept_kv(self) -> tuple[PolicySpan, ...]:
        """Its KV spans if no row was computed again or had been there before it: each version built the rows in front
        of its own tokens.
        """
        shift = len(self.prompt_ids) - 1
        first, *later = self.policy
        return (
            replace(first, end=first.end + shift),
            *(replace(span, start=span.start + shift, end=span.end + shift) for span in later),
        )

    @property
    def rises(self) -> bool:
        """Whether its versions rise, as they do unless a rollback or a hot-load to an older version came between."""
        return all(left.version < right.version for left, right in pairwise(self.policy))

    def span_of(self, version: Version) -> PolicySpan | None:
        """The tokens that claim ``version``; None where none does."""
        return next((span for span in self.policy if span.version == version), None)

    def routes_of(self, span: PolicySpan) -> tuple[bytes, ...]:
        """The rows that came with a span's tokens: the position's before each, and the prompt's with the first."""
        shift = len(self.prompt_ids) - 1
        return self.routes[span.start + shift if span.start else 0 : span.end + shift]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelCheck:
    """What re-scoring every token found."""

    tokens: int
    mislabelled: int
    largest_difference: float
    """Nats, over all tokens, under the labels as reported; those that are infinitely far off left out."""
    tolerance: float
    """Nats."""
    answers: int = 0
    unchecked: int = 0
    """Answers that a walk along the chain can't re-score."""
    shifted: int = 0
    """Answers that have a falsely labelled twin: one version off, with other weights."""
    shifted_caught: int = 0
    """Twins that the same check flags when all labels are one version off."""
    unchecked_because: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many of ``unchecked``, by the reason: a word of `LeftOut`."""
    masks: int = 0
    """Tokens whose mask was made again."""
    masks_differing: int = 0
    routes: int = 0
    """Positions whose experts were chosen again."""
    routes_differing: int = 0

    def plus(self, other: "LabelCheck") -> "LabelCheck":
        """Both checks as one."""
        return LabelCheck(
            tokens=self.tokens + other.tokens,
            mislabelled=self.mislabelled + other.mislabelled,
            largest_difference=max(self.largest_difference, other.largest_difference),
            tolerance=max(self.tolerance, other.tolerance),
            answers=self.answers + other.answers,
            unchecked=self.unchecked + other.unchecked,
            shifted=self.shifted + other.shifted,
            shifted_caught=self.shifted_caught + other.shifted_caught,
            unchecked_because=Counter(self.unchecked_because) + Counter(other.unchecked_because),
            masks=self.masks + other.masks,
            masks_differing=self.masks_differing + other.masks_differing,
            routes=self.routes + other.routes,
            routes_differing=self.routes_differing + other.routes_differing,
        )


class LeftOut(StrEnum):
    """Why a walk along the chain can't re-score an answer."""

    MOVED = "moved"
    """Another replica computed prompt and tokens so far in one piece, where the walk takes one token after the other:
    the bits may differ."""
    FALLS = "versions_fall"
    """As over a rollback."""
    OTHER_KV = "kv_of_other_versions"
    """Rows that went into its tokens were built by versions that the walk can't tell, or doesn't have in place then."""


def replayed_as(answer: LabelledAnswer) -> InFlight | LeftOut:
    """The mode of the exchanges that an answer crossed, as its KV spans tell it; `LeftOut` where they don't.

    The spans tell of the last rows alone. So they explain each token if nothing was computed again, or if the only
    exchange computed everything again and the prompt had been of the first token's version.
    """
    if answer.moved:
        return LeftOut.MOVED
    if not answer.rises:
        return LeftOut.FALLS
    if not answer.kv or answer.kv == answer.kept_kv:
        return InFlight.CONTINUE
    first, last = answer.policy[0].version, answer.policy[-1]
    anew = (PolicySpan(version=last.version, start=0, end=answer.kept_kv[-1].end),)
    if len(answer.policy) == _ONE_EXCHANGE and answer.kv == anew and answer.prompt_version == first:
        return InFlight.RECOMPUTE
    return LeftOut.OTHER_KV


def tolerance(noise: float) -> float:
    """The largest difference that counts as equal, in nats.

    Args:
        noise: Largest difference that a freshly loaded engine shows between two ways of computing the same thing.
    """
    return max(TOLERANCE_FLOOR, _TOLERANCE_MARGIN * noise)


def shifted(answer: LabelledAnswer, states: Sequence[StateDigest]) -> LabelledAnswer | None:
    """The same answer with every label one version too high or, where that can't be told apart, one too low.

    Args:
        answer: Whose versions rise.
        states: The state digest of every version, from 0: a version that changed nothing can't be told from its
            neighbour.

    Returns:
        None where neither shift begins with another state inside the chain.
    """
    first, last = answer.policy[0].version, answer.policy[-1].version
    for step in (1, -1):
        if first + step >= 0 and last + step < len(states) and states[first + step] != states[first]:
            moved = tuple(replace(span, version=Version(span.version + step)) for span in answer.policy)
            return replace(answer, policy=moved)
    return None


def mislabelled(reported: Sequence[float], recomputed: Sequence[float], limit: float) -> int:
    """How many tokens differ by more than ``limit``. A NaN on either side differs."""
    return sum(not abs(left - right) <= limit for left, right in zip(reported, recomputed, strict=True))


def compared(answer: LabelledAnswer, span: PolicySpan, steps: Sequence[TokenStep], limit: float) -> LabelCheck:
    """What re-scoring the tokens of ``span`` found; the answer itself is not counted.

    Args:
        answer: As reported.
        span: Of its policy.
        steps: One for each of the span's tokens, as made again.
        limit: As in `mislabelled`.
    """
    tokens = list(zip(_told(answer, span), _made(answer, steps), strict=True))
    masks, rows = answer.masks[span.start : span.end], answer.routes_of(span)
    chosen = b"".join(step.routes or b"" for step in steps)
    return LabelCheck(
        tokens=len(tokens),
        mislabelled=sum(mislabelled(told, made, limit) > 0 for told, made in tokens),
        largest_difference=max(filter(math.isfinite, _gaps(tokens)), default=0.0),
        tolerance=limit,
        masks=len(masks),
        masks_differing=sum(mask != step.mask for mask, step in zip(masks, steps, strict=False)),
        routes=len(rows),
        routes_differing=_rows_differing(rows, chosen),
    )


def _told(answer: LabelledAnswer, span: PolicySpan) -> list[tuple[float, ...]]:
    """Of each token its log-probability, and the raw one where that was told."""
    kinds = (answer.logprobs, answer.raw_logprobs) if answer.raw_logprobs else (answer.logprobs,)
    return list(zip(*(kind[span.start : span.end] for kind in kinds), strict=True))


def _made(answer: LabelledAnswer, steps: Sequence[TokenStep]) -> list[tuple[float, ...]]:
    """The same, as made again: a token without a raw one has a NaN there, which differs from everything."""
    if not answer.raw_logprobs:
        return [(step.logprob,) for step in steps]
    return [(step.logprob, math.nan if step.raw_logprob is None else step.raw_logprob) for step in steps]


def _gaps(tokens: Iterable[tuple[Sequence[float], Sequence[float]]]) -> Iterator[float]:
    return (abs(left - right) for told, made in tokens for left, right in zip(told, made, strict=True))


def _rows_differing(rows: Sequence[bytes], chosen: bytes) -> int:
    if not rows:
        return 0
    width = len(rows[0])
    again = [chosen[start : start + width] for start in range(0, len(chosen), width)]
    return len(rows) if len(again) != len(rows) else sum(map(ne, rows, again))


def touching(answers: Iterable[LabelledAnswer], version: Version) -> list[LabelledAnswer]:
    """The answers with tokens of ``version``: those that began earlier first, then those that end in it, then those
    that go on. So what must stay resident over the next swap comes last.
    """
    found = [answer for answer in answers if answer.span_of(version)]
    return sorted(found, key=lambda answer: (answer.policy[0].version == version, answer.policy[-1].version > version))
