"""The distribution that `SamplingSpec` defines, in plain float64: what fakes draw from, and samplers are held to."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

from slackwater.rollout.request import SamplingSpec

Ranked = list[tuple[int, float]]
"""(token id, log-probability) of a support, falling; ties by rising id."""


def adjusted(
    logits: Sequence[float],
    sampling: SamplingSpec,
    *,
    prompt_ids: Collection[int] = (),
    token_ids: Sequence[int] = (),
    ends: Collection[int] = (),
) -> list[float]:
    """Logits before the temperature divides them.

    Args:
        logits: Raw ones, by token id.
        sampling: What is asked for.
        prompt_ids: The prompt, without tokens of the answer.
        token_ids: The answer so far.
        ends: What would end it, while that is banned.
    """
    banned = [-math.inf if token in ends else logit for token, logit in enumerate(logits)]
    start = list(logits) if max(banned) == -math.inf else banned
    biases, counts = dict(sampling.logit_bias), Counter(token_ids)
    seen = {*prompt_ids, *token_ids}
    made: list[float] = []
    for token, logit in enumerate(start):
        value, factor = logit + biases.get(token, 0.0), sampling.repetition_penalty if token in seen else 1.0
        value = value / factor if value > 0.0 else value * factor
        value -= sampling.frequency_penalty * counts[token] + sampling.presence_penalty * (counts[token] > 0)
        made.append(value)
    return made


def processed(logits: Sequence[float], sampling: SamplingSpec) -> Ranked:
    """The distribution that a token is drawn from.

    Args:
        logits: As `adjusted` makes them.
        sampling: What is asked for.
    """
    ranked = sorted(enumerate(logits), key=lambda pair: (-pair[1], pair[0]))
    if sampling.temperature == 0:
        return [(ranked[0][0], 0.0)]
    scaled = [(token, (logit - ranked[0][1]) / sampling.temperature) for token, logit in ranked]
    likely = [pair for pair in scaled if not sampling.min_p or pair[1] >= math.log(sampling.min_p)]
    kept = _normalised(likely[: sampling.top_k or None])
    before = accumulate((math.exp(logprob) for _, logprob in kept), initial=0.0)
    nucleus = [pair for pair, mass in zip(kept, before, strict=False) if mass < sampling.top_p]
    return _normalised(nucleus) if sampling.top_p < 1.0 else kept


def raw_logprob(logits: Sequence[float], token_id: int) -> float:
    """Of one token, by the raw logits."""
    return dict(_normalised(list(enumerate(logits)))).get(token_id, -math.inf)


def raw_ranked(logits: Sequence[float]) -> Ranked:
    """All tokens, by the raw logits."""
    return _normalised(sorted(enumerate(logits), key=lambda pair: (-pair[1], pair[0])))


def _normalised(scores: Ranked) -> Ranked:
    peak = max(score for _, score in scores)
    total = peak + math.log(sum(math.exp(score - peak) for _, score in scores))
    return [(token, score - total) for token, score in scores if score > -math.inf]
