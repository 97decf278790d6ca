"""Log-probabilities of given tokens: forced decoding at temperature 1, so that they are the model's own."""

from collections.abc import Sequence

from slackwater.api.reading import Reading
from slackwater.api.text import TextStream
from slackwater.errors import ContextLengthError, InvalidInputError
from slackwater.ids import RequestId
from slackwater.rollout.request import CompletionRequest, PolicyConstraint, SamplingSpec


def scoring_request(
    prompt_ids: tuple[int, ...],
    token_ids: tuple[int, ...],
    *,
    window: int,
    request_id: str,
    policy: PolicyConstraint,
    model: str,
    top_logprobs: int = 0,
    cache_salt: str = "",
    forced_routes: bytes = b"",
) -> CompletionRequest:
    """The request whose answer is ``token_ids`` with their log-probabilities after ``prompt_ids``.

    Raises:
        ContextLengthError: They don't fit into the window.
        InvalidInputError: One of them is empty.
    """
    if not token_ids:
        raise InvalidInputError("token_ids is empty", hint="send at least one token to score")
    if len(prompt_ids) + len(token_ids) > window:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens, {len(token_ids)} follow it, and the window has {window}",
            hint="send less",
        )
    return CompletionRequest(
        request_id=RequestId(request_id),
        prompt_ids=prompt_ids,
        sampling=SamplingSpec(max_tokens=len(token_ids), top_logprobs=top_logprobs),
        policy=policy,
        forced_ids=token_ids,
        model=model,
        cache_salt=cache_salt,
        forced_routes=forced_routes,
    )


def prompt_scoring(ask: CompletionRequest, start: int, *, window: int, text: TextStream, top_logprobs: int) -> Reading:
    """Reads the log-probabilities of a prompt's tokens after position ``start``, each after all tokens before it.

    Args:
        ask: The request that has the prompt.
        start: The first position whose distribution is asked for; there is a token after it.
        window: In tokens.
        text: Of no use, but to be a reading.
        top_logprobs: Alternatives per position.
    """
    before, scored = _split(ask.prompt_ids, start)
    request = scoring_request(
        before,
        scored,
        window=window,
        request_id=f"{ask.request_id}-prompt",
        policy=ask.policy,
        model=ask.model,
        top_logprobs=top_logprobs,
        cache_salt=ask.cache_salt,
    )
    return Reading(0, request, text)


def _split(ids: Sequence[int], start: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(ids[: start + 1]), tuple(ids[start + 1 :])
