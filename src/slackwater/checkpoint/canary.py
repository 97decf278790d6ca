"""Canaries: a prompt whose continuation a version's weights are known to score so and so, checked after a swap.

Digests prove that an engine holds a version's bits; a canary proves that it computes with them. The trainer scores some
tokens by its own forward pass and publishes the numbers in the manifest. They are no part of the state.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from slackwater.errors import InvalidInputError

MAX_PROMPT: Final = 512
"""Most tokens of a canary's prompt."""

MAX_TOKENS: Final = 64
"""Most tokens that a canary scores."""

MAX_TOLERANCE: Final = 100.0
"""Largest tolerance, in nats."""

DEFAULT_TOLERANCE: Final = 0.25
"""Nats: what two roundings of a bf16 logit come to."""

_MAX_ID: Final = 2**31 - 1


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, tokens after it, and the log-probabilities that the version's weights give them.

    Whoever reads one from JSON gets msgspec's error around what is raised here, for that is a `ValueError` too.

    Raises:
        InvalidInputError: A part is no tuple, or out of its bounds; the message names it.
    """

    prompt: tuple[int, ...]
    """1 to `MAX_PROMPT` token ids, each from 0 to 2**31 - 1."""
    tokens: tuple[int, ...]
    """1 to `MAX_TOKENS` token ids that follow the prompt."""
    logprobs: tuple[float, ...]
    """One for each of ``tokens``, finite and 0 or less: the natural log of its probability given the prompt and the
    tokens before it, of the raw distribution (temperature 1, nothing cut off)."""
    tolerance: float = DEFAULT_TOLERANCE
    """Nats, above 0, at most `MAX_TOLERANCE`: how far each log-probability may be from what is expected."""

    def __post_init__(self) -> None:
        _check_ids("prompt", self.prompt, MAX_PROMPT)
        _check_ids("tokens", self.tokens, MAX_TOKENS)
        logprobs = _items("logprobs", self.logprobs)
        if len(logprobs) != len(self.tokens):
            raise _refusal("logprobs", f"{len(logprobs)} for {len(self.tokens)} tokens")
        for index, number in enumerate(logprobs):
            if type(number) is not float or not -math.inf < number <= 0:
                raise _refusal("logprobs", f"number {index} is no finite float of 0 or less")
        tolerance: object = self.tolerance
        if type(tolerance) is not float or not 0 < tolerance <= MAX_TOLERANCE:
            raise _refusal("tolerance", f"it is a float above 0 and at most {MAX_TOLERANCE}")


def first_unknown(canary: Canary, vocabulary: int) -> str | None:
    """Say which token id is the first that a model doesn't have; None: it has them all.

    Args:
        canary: Whose ids.
        vocabulary: How many the model has, from 0.
    """
    for field, ids in (("prompt", canary.prompt), ("tokens", canary.tokens)):
        for index, item in enumerate(ids):
            if item >= vocabulary:
                return (
                    f"canary.{field}: number {index} is token id {item}, and the model has ids up to {vocabulary - 1}"
                )
    return None


def first_off(canary: Canary, found: Sequence[float]) -> str | None:
    """Say which token's log-probability is the first that isn't as expected; None: they all are.

    Args:
        canary: What is expected.
        found: Log-probabilities of the canary's tokens as an engine computes them, in nats. NaN and infinities are off,
            and so are too many or too few.
    """
    expected, count = canary.logprobs, len(canary.tokens)
    if len(found) != count:
        return f"{len(found)} log-probabilities were found for the canary's {count} tokens"
    for index, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        if not abs(got - wanted) <= canary.tolerance:  # NaN is in no order
            return (
                f"the canary's token {index + 1} of {count}, id {canary.tokens[index]}, has log-probability "
                f"{got:.6g} instead of {wanted:.6g}: off by {abs(got - wanted):.3g} nats, where {canary.tolerance:g} "
                "are tolerated"
            )
    return None


def _check_ids(field: str, ids: Iterable[object], most: int) -> None:
    found = _items(field, ids)
    if not 1 <= len(found) <= most:
        raise _refusal(field, f"{len(found)} token ids, and 1 to {most} are admitted")
    for index, item in enumerate(found):
        if type(item) is not int or not 0 <= item <= _MAX_ID:  # a bool is an int, and no id
            raise _refusal(field, f"number {index} is no token id: an int from 0 to {_MAX_ID}")


def _items(field: str, items: Iterable[object]) -> tuple[object, ...]:
    if not isinstance(items, tuple):
        raise _refusal(field, f"it is a {type(items).__name__}, not a tuple")
    return items


def _refusal(field: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"canary.{field}: {why}")
