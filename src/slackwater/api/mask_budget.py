"""Bounds what the sampling masks of an answer hold: each draw may have thousands of ids, and an answer many draws."""

from typing import Final

from slackwater.rollout.evidence import MASK_ID_BYTES

MAX_REPLY_MASK_IDS: Final = 8 * 1024 * 1024
"""Most token ids of all masks of one reply; each answer has an equal share."""


class MaskBudget:
    """What an answer's masks may still hold.

    Args:
        ids: Most ids of all of them together.
    """

    def __init__(self, ids: int = MAX_REPLY_MASK_IDS) -> None:
        self._left = ids * MASK_ID_BYTES

    def told(self, mask: bytes | None) -> bytes | None:
        """The next mask; empty, as one that is too wide, from the first on that is too much."""
        if not mask:
            return mask
        if len(mask) > self._left:
            self._left = 0
            return b""
        self._left -= len(mask)
        return mask
