"""How an answer goes on once its replica has failed: what another one is asked, or that nobody is. Pure.

Draws depend on the seed and the position in the sequence alone. So a replica that is given the prompt and the tokens so
far as its prompt, under the seed that drew them, draws what would have been drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slackwater.ids import Version
from slackwater.rollout.evidence import TokenStep
from slackwater.rollout.request import CompletionRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Another replica is asked."""

    request: CompletionRequest
    kept: int
    """Tokens so far that stay, the first ones; what it samples follows them. 0: the answer begins again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """No other replica is asked."""

    reason: str
    """For logs and people."""
    complete: bool = False
    """The answer is whole; otherwise it failed."""


def after_failure(
    request: CompletionRequest, steps: Sequence[TokenStep], seed: int | None, *, kept: int = 0, lost: bool
) -> Ask | Over:
    """Decide how an answer goes on.

    Args:
        request: As the caller made it.
        steps: All tokens so far, whoever sampled them.
        seed: What drew them; not needed where there is none.
        kept: How many of them were there before the replica that failed was asked.
        lost: Whether it is gone. Otherwise it took its tokens back: no token of an answer with such ones is trusted.
    """
    stays = _standing(steps, kept, lost=lost)
    if request.streamed and stays < len(steps):
        doubt = "aren't confirmed" if lost else "were taken back"
        return Over(reason=f"tokens from number {stays} on {doubt} and were passed on already")
    if not stays:
        return Ask(request=request, kept=0)
    if steps[stays - 1].finish is not None:
        return Over(reason="its last token was received", complete=True)
    if request.forced_ids and stays >= len(request.forced_ids):
        return Over(reason="all forced tokens were received, and no end")
    return Ask(request=_rest(request, steps[:stays], seed), kept=stays)


def _standing(steps: Sequence[TokenStep], kept: int, *, lost: bool) -> int:
    """How many of the tokens so far can be gone on from."""
    if not lost:
        return kept if len(steps) == kept else 0
    stays, proven = len(steps), set[Version]()
    for index in reversed(range(len(steps))):
        step = steps[index]
        if not step.provisional:
            proven.add(step.version)  # with the tokens of it that the same replica gave before
        elif step.version not in proven:
            stays = index
        if step.moved is not None:
            proven.clear()
    return stays


def _rest(request: CompletionRequest, steps: Sequence[TokenStep], seed: int | None) -> CompletionRequest:
    """What is left of a request after ``steps``. Versions don't fall: the last token's bounds the next one's."""
    sampling, policy = request.sampling, request.policy
    left = max(1, sampling.max_tokens - len(steps))  # forced tokens may be more than ``max_tokens``
    least = max(0, sampling.min_tokens - len(steps))
    exact = policy.exact_version is not None
    prompt = (*request.prompt_ids, *(step.token_id for step in steps))
    return replace(
        request,
        prompt_ids=prompt,
        sampling=replace(sampling, max_tokens=left, min_tokens=least, seed=seed),
        policy=policy if exact else replace(policy, min_version=steps[-1].version),
        forced_ids=request.forced_ids[len(steps) :],
        continued=request.continued + len(steps),
        # The last token's own row is the first that hasn't been told.
        routes_from=None if request.routes_from is None else len(prompt) - 1,
    )
