"""For how long a process believes that the newest committed version it has seen is the newest one. Pure."""

from typing import Final

GOOD_FOR_S: Final = 30.0
"""Seconds after a look at the bucket, or two of its polls where these take longer."""


def is_stale(looked_at: float | None, now: float, poll_s: float) -> bool:
    """Whether nobody knows what is newest.

    Args:
        looked_at: When the last look that the bucket answered began, in monotonic seconds; None: there was none.
        now: Monotonic seconds.
        poll_s: Seconds between two looks.
    """
    return looked_at is None or now - looked_at > max(GOOD_FOR_S, 2 * poll_s)
