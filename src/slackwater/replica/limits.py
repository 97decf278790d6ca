"""Bounds of a replica's work."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeLimits:
    """Bounds of one exchange."""

    lease_s: float = 30.0
    """Seconds for each call that asks the engine to stage, commit or undo. The pause is a lease: one that
    isn't over by then retires the replica."""
    drain_s: float = 120.0
    """Seconds for answers in flight to end by themselves, in the mode ``drain``; those that haven't are cut."""
    canary_s: float = 60.0
    """Seconds after which a canary that waits for a slot is warned of, and again after so many."""
    strict: bool = False
    """Every bit that is written is read back and compared in the pause, before the version serves."""
    threads: int = 2
    """Threads that decode and read back."""
    max_deltas: int = 32
    """Deltas that are put together into one swap at most."""
    max_bytes: int = 2 * 1024**3
    """Host memory that the writes of a swap of several deltas hold at most; a single delta takes what it needs. While
    the next delta is prepared its own writes come on top, at most as much again, and its packs."""
