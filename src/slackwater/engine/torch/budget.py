"""How much KV answers may hold together, and which of them give theirs up. Pure.

Answers are told in the order in which they were seated, the oldest first. The oldest that isn't idle is never chosen:
it fits alone, so there is always one that gets on until it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What an answer in a slot holds."""

    key: int
    rows: int
    """Positions that are in place or that prefill has to put there, and the one that its next token takes."""
    idle: bool = False
    """No step does anything for it: a drain keeps it from its first token, or it is held and has no token to take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bounds on all answers in slots together."""

    slots: int
    """Answers."""
    rows: int
    """Positions; each answer alone fits."""

    @classmethod
    def of(cls, *, slots: int, window: int, kv_tokens: int | None) -> "Budget":
        """The bound that was asked for; None: that of the slots, whose windows may all be full."""
        most = slots * window
        return cls(slots=slots, rows=most if kv_tokens is None else min(kv_tokens, most))

    def preempted(self, held: Sequence[Holding]) -> tuple[int, ...]:
        """Who leaves so that the rest is within the bounds: keys, in order. Idle ones first, then the youngest."""
        youngest = held[::-1]
        leaving = [*(one for one in youngest if one.idle), *(one for one in youngest if not one.idle)]
        gone = next(count for count in range(len(held) + 1) if self._fits(leaving[count:]))
        return tuple(one.key for one in leaving[:gone])

    def displaced(self, held: Sequence[Holding], rows: int) -> tuple[int, ...] | None:
        """Which idle answers leave for one that comes, and holds so many positions. None: it has to wait."""
        idle = [one for one in held[::-1] if one.idle]
        busy = [one for one in held if not one.idle]
        comes = Holding(key=-1, rows=rows)
        for gone in range(len(idle) + 1):
            if self._fits([comes, *busy, *idle[gone:]]):
                return tuple(one.key for one in idle[:gone])
        return None

    def _fits(self, held: Sequence[Holding]) -> bool:
        return len(held) <= self.slots and sum(one.rows for one in held) <= self.rows
