"""What a model can't be asked for. Pure."""

from collections.abc import Sequence

from slackwater.errors import ContextLengthError, InvalidInputError, UnsupportedError
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing


def check_request(request: CompletionRequest, *, window: int, vocab_size: int, routing: Routing | None) -> None:
    """Refuse what can't be answered.

    Raises:
        ContextLengthError: The prompt fills the window.
        InvalidInputError: A token id is outside of the vocabulary, or routes to force don't fit.
        UnsupportedError: There are routes to force, and no router.
    """
    length = len(request.prompt_ids)
    if length >= window:
        raise ContextLengthError(
            f"the prompt's {length} tokens leave no room in the window of {window}", hint="send a shorter prompt"
        )
    check_ids("prompt", request.prompt_ids, vocab_size)
    check_ids("forced_token_ids", request.forced_ids, vocab_size)
    check_ids("logit_bias", request.sampling.named_ids, vocab_size)
    if request.forced_routes:
        _check_routes(request, routing)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that no token has.

    Args:
        name: Of the field that has them.
        ids: Of tokens.
        vocab_size: How many ids there are.

    Raises:
        InvalidInputError: One is outside of the vocabulary.
    """
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise InvalidInputError(
            f"{name} is out of range: token {bad} is outside of the vocabulary of {vocab_size}",
            hint="use this model's tokenizer",
        )


def _check_routes(request: CompletionRequest, routing: Routing | None) -> None:
    if routing is None:
        raise UnsupportedError("this model has no router to force", hint="send no routes")
    rows, most = routing.check(request.forced_routes), len(request.prompt_ids) + len(request.forced_ids)
    if rows > most:
        raise InvalidInputError(
            f"routes of {rows} positions, prompt and forced tokens have {most}", hint="send at most as many"
        )
