"""What becomes of the answers under way when weights are exchanged."""

from enum import StrEnum


class InFlight(StrEnum):
    """A replica has a default; a hot-load may name another. An answer without a token always begins anew."""

    CONTINUE = "continue"
    """They keep their KV and go on under the new weights."""
    RECOMPUTE = "recompute"
    """They go on, after their prompt and tokens so far were computed again by the new weights."""
    DRAIN = "drain"
    """They end under the old weights, and later ones wait. What hasn't ended in time is cut, as in ``abort``."""
    ABORT = "abort"
    """They end at once with the tokens that they have."""
