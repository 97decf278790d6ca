"""How much an app takes on at once. Whether a request is taken is pure; `Admission` counts."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from slackwater.errors import InvalidInputError, OverloadedError

MAX_REQUESTS: Final = 1024
"""Most answers that an app has under way, unless it is told otherwise."""
WAITING_PER_SLOT: Final = 4
"""Most answers that wait for a replica's slots, for each of them, unless it is told otherwise."""
_LONGEST_WAIT_S: Final = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Bounds of an app."""

    places: int = MAX_REQUESTS
    """Answers that are asked for and haven't ended, at most."""
    at_once: int = MAX_REQUESTS
    """Of these, how many are made at the same time; the others wait."""
    prompt_tokens: int | None = None
    """Tokens of all prompts under way, at most, each counted once whatever its answers; None: no bound."""


def replica_capacity(
    slots: int, max_waiting: int | None, max_requests: int, max_prompt_tokens: int | None = None
) -> Capacity:
    """What a replica takes on.

    Args:
        slots: Answers decoded at once.
        max_waiting: Answers that wait for a slot, at most; None: `WAITING_PER_SLOT` for each slot.
        max_requests: Answers of the process, at most.
        max_prompt_tokens: Tokens of all prompts under way, at most.
    """
    waiting = WAITING_PER_SLOT * slots if max_waiting is None else max_waiting
    places = min(max_requests, slots + waiting)
    return Capacity(places=places, at_once=min(slots, places), prompt_tokens=max_prompt_tokens)


def refusal(capacity: Capacity, *, taken: int, wanted: int) -> InvalidInputError | OverloadedError | None:
    """Why a request of ``wanted`` answers isn't taken where ``taken`` places are; None: it is."""
    if wanted > capacity.places:
        return InvalidInputError(
            f"n is out of range: the request needs {wanted} places",
            hint=f"this server has {capacity.places}, one for each answer and scored prompt",
        )
    over = taken + wanted - capacity.places
    if over <= 0:
        return None
    more = "not one more answer fits" if wanted == 1 else f"{wanted} more answers don't fit"
    return OverloadedError(
        f"{taken} of {capacity.places} places are taken here: {more} in",
        hint="ask again in a moment",
        retry_after_s=retry_after_s(over, capacity.at_once),
    )


def too_many_tokens(capacity: Capacity, *, others: int, own: int) -> OverloadedError | None:
    """Why a request isn't gone on with; None: it is, as one that is alone always is.

    Args:
        capacity: Of the app.
        others: Tokens of other requests' prompts.
        own: Tokens of this one's prompts.
    """
    most = capacity.prompt_tokens
    if most is None or not others or others + own <= most:
        return None
    return OverloadedError(
        f"prompts of {others} tokens are under way here, and {own} more would be over {most}",
        hint="ask again in a moment",
    )


def retry_after_s(over: int, at_once: int) -> int:
    """Seconds after which asking again may help: one for each round of answers that has to end first, 1 to 30.

    Args:
        over: Places that have to come free.
        at_once: Answers of one round.
    """
    return min(_LONGEST_WAIT_S, max(1, -(-over // max(1, at_once))))


class Admission:
    """Counts the places that are taken. For one event loop."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._taken = 0
        self._tokens = 0

    @property
    def taken(self) -> int:
        """Places taken now."""
        return self._taken

    @property
    def tokens(self) -> int:
        """Tokens of prompts under way now."""
        return self._tokens

    @contextmanager
    def taking(self, wanted: int) -> Generator["Places"]:
        """Take all places that a request needs, until the exit at most.

        Raises:
            InvalidInputError: They are more than there are.
            OverloadedError: They aren't free; none is taken.
        """
        refused = refusal(self.capacity, taken=self._taken, wanted=wanted)
        if refused is not None:
            raise refused
        self._taken += wanted
        places = Places(self, wanted, _Load())
        try:
            yield places
        finally:
            places.keep(0)

    def give_back(self, count: int) -> None:
        """Of `Places`: so many are free again."""
        self._taken -= count

    def count_tokens(self, count: int) -> None:
        """Of `Places`: so many more are under way, or fewer."""
        self._tokens += count


@dataclass(slots=True)
class _Load:
    """What one request has under way."""

    tokens: int = 0


class Places:
    """Some places, until they are given back."""

    def __init__(self, admission: Admission, count: int, load: _Load) -> None:
        self._admission = admission
        self._count = count
        self._load = load

    def keep(self, most: int) -> None:
        """Give all but ``most`` back."""
        freed = max(0, self._count - most)
        self._count -= freed
        self._admission.give_back(freed)

    @contextmanager
    def part(self, count: int) -> Generator["Places"]:
        """Put ``count`` of these, or as many as there are, aside as places of their own, until the exit at most."""
        count = min(count, self._count)
        self._count -= count
        places = Places(self._admission, count, self._load)
        try:
            yield places
        finally:
            places.keep(0)

    @contextmanager
    def prompting(self, tokens: int) -> Generator[None]:
        """Count a prompt of the request as under way, until the exit.

        Raises:
            OverloadedError: With those of other requests, its prompts would have too many tokens.
        """
        own = self._load.tokens
        refused = too_many_tokens(self._admission.capacity, others=self._admission.tokens - own, own=own + tokens)
        if refused is not None:
            raise refused
        self._count_tokens(tokens)
        try:
            yield
        finally:
            self._count_tokens(-tokens)

    def _count_tokens(self, count: int) -> None:
        self._load.tokens += count
        self._admission.count_tokens(count)
