"""The next prompt of an episode, made of the ids so far and what the template writes after them. Pure."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from slackwater.errors import ForkError, UnsupportedError

_ANSWER: Final = "slackwater0answer0ends0here"
"""Stands for the assistant's last answer: one word that no template changes."""
BEFORE: Final[tuple[Mapping[str, object], ...]] = (
    {"role": "user", "content": "."},
    {"role": "assistant", "content": _ANSWER},
)
"""Messages that stand for the episode so far."""


def bridge_of(text: str) -> str:
    """What a template writes from the end of the assistant's last answer on.

    Args:
        text: `BEFORE` and the new messages, rendered.

    Raises:
        UnsupportedError: The template leaves the answer out.
    """
    _, found, bridge = text.partition(_ANSWER)
    if not found or not bridge:
        raise UnsupportedError(
            "prior_token_ids can't be extended: the chat template leaves out earlier answers",
            hint="send the whole conversation without them",
        )
    return bridge


def extended(
    prior: tuple[int, ...], bridge: tuple[int, ...], *, special: AbstractSet[int], ends: AbstractSet[int], forks: bool
) -> tuple[int, ...]:
    """The new prompt: the prior ids and the bridge, whose first id is left out where the answer ended with it.

    Args:
        prior: Ids of prompt and completion so far; at least one.
        bridge: Ids of `bridge_of`; at least one.
        special: Ids of all special tokens.
        ends: Ids that end an answer.
        forks: Whether to give up the last prior id where the template goes on from another one.

    Raises:
        ForkError: It does, and ``forks`` is false.
    """
    if prior[-1] == bridge[0] and bridge[0] in special:
        return prior + bridge[1:]
    if prior[-1] not in ends:  # the answer was cut: the bridge ends it
        return prior + bridge
    if not forks:
        raise ForkError(
            f"prior_token_ids end with {prior[-1]} where the chat template goes on with {bridge[0]}",
            hint=f'send "append": "fork" to keep the first {len(prior) - 1} ids',
            fork=len(prior) - 1,
        )
    return prior[:-1] + bridge


def kept(prior: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """How many of the prior ids a prompt begins with."""
    pairs = zip(prior, prompt, strict=False)
    return next((index for index, (old, new) in enumerate(pairs) if old != new), min(len(prior), len(prompt)))
