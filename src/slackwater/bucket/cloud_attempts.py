"""What happens around one call to an object store: attempts, waits between them, and errors in our words."""

from collections.abc import Callable
from typing import Final, TypeVar

import stamina
from obstore import exceptions

from slackwater.bucket.cloud_errors import is_outdated, may_pass, translate
from slackwater.bucket.patience import Patience
from slackwater.errors import SlackwaterError

T = TypeVar("T")

_SIGNATURES: Final = 3
"""Attempts of one call whose signature the store finds out of date."""


class Attempts:
    """Makes attempts until one settles a call. For any number of threads.

    obstore repeats by itself what may be repeated as it is: 429, 5xx, broken connections. What is repeated here is
    made anew, with its own signature and, where a role gives them, its own credentials.

    Args:
        patience: How often and how long.
    """

    def __init__(self, patience: Patience) -> None:
        waiting = stamina.RetryingCaller(
            attempts=patience.attempts,
            timeout=patience.deadline_s,
            wait_initial=patience.first_wait_s,
            wait_max=patience.longest_wait_s,
            wait_jitter=patience.first_wait_s,
        )
        renewing = stamina.RetryingCaller(
            attempts=_SIGNATURES, wait_initial=patience.renewal_s, wait_jitter=patience.renewal_s
        )
        self._waiting = waiting.on(PassingError)
        self._renewing = renewing.on(_OutdatedError)

    def settle(self, where: str, attempt: Callable[[], T]) -> T:
        """The attempt's result.

        Args:
            where: The object's URL, for messages.
            attempt: Raises what obstore raises, `PassingError`, or an error of ours, which is final.

        Raises:
            SlackwaterError: What the last attempt ended with.
        """
        try:
            return self._waiting(lambda: self._renewing(lambda: _once(where, attempt)))
        except _AgainError as again:
            raise again.final from None


class _AgainError(Exception):
    """An attempt that failed so that another may do better.

    Args:
        final: What to raise if none does.
    """

    def __init__(self, final: SlackwaterError) -> None:
        super().__init__(final)
        self.final = final


class PassingError(_AgainError):
    """The store was busy, or the answer was lost: wait, then come again."""


class _OutdatedError(_AgainError):
    """The signature or the token was out of date: come again with a new one."""


def _once(where: str, attempt: Callable[[], T]) -> T:
    """The one place where obstore's errors become ours. Their text may hold a signed URL: no chaining."""
    try:
        return attempt()
    except (exceptions.BaseError, OSError) as error:
        final = translate(error, where)
        if may_pass(error):
            raise PassingError(final) from None
        if is_outdated(error):
            raise _OutdatedError(final) from None
        raise final from None
