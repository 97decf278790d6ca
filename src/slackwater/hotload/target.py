"""The target seam: what the conductor needs of one replica, wherever it runs."""

from typing import Literal, Protocol

import msgspec

from slackwater.config.in_flight import InFlight
from slackwater.ids import ReplicaId, RunId, StateDigest, Version

Goal = Version | Literal["head", "stay"]
"""A version; whatever is newest; or the one in place, so that what is under way ends unless it is being committed."""


class TargetError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a replica isn't where it should be."""

    kind: str
    """Machine code of `slackwater.errors`."""
    message: str


class SwapTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one swap went, as far as the replica tells. Seconds; None where it doesn't."""

    version: Version
    from_version: Version | None = None
    fetch_s: float | None = None
    """Waiting for bytes, from the bucket or the cache."""
    decode_s: float | None = None
    """Making writes of them, digests compared."""
    stage_s: float | None = None
    """Handing these to the engine."""
    prepare_s: float | None = None
    """All of that together, while the old version served."""
    drain_s: float | None = None
    """Waiting for answers in flight to end, after that."""
    pause_s: float | None = None
    """Without a token; with the reading back, where bits are proven before they serve."""
    verify_s: float | None = None
    """Reading back, and the version's canary, while the new version served provisionally."""
    mode: str | None = None
    """What it did with answers in flight, see `InFlight`."""
    ended: int | None = None
    """Answers that the swap cut."""


class TargetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a replica: the part of ``GET /control/v1/status`` that hot-loads rest on.

    Fields that are not listed are ignored, so replicas may say more than this.
    """

    replica: ReplicaId
    boot_id: str
    run: RunId
    state: str
    """``starting``, ``serving``, ``retired`` or ``closed``."""
    stage: str
    """Where the exchange under way stands; ``idle`` where there is none."""
    version: Version | None
    target: Version | None
    mode: str
    """``follow`` or ``manual``."""
    provisional: bool
    waiting: bool
    """The last attempt failed and the next waits."""
    in_flight: int
    """Answers admitted and not ended."""
    swap_mode: str | None = None
    """The mode for requests in flight that swaps to ``target`` use, see `InFlight`; None where it doesn't tell."""
    state_digest: StateDigest | None = None
    last_error: TargetError | None = None
    swaps: tuple[SwapTimings, ...] = ()
    """The most recent ones, oldest first."""

    def timings(self, version: Version | None) -> SwapTimings | None:
        """Of the latest swap to ``version``; None where there was none that is remembered."""
        return next((swap for swap in reversed(self.swaps) if swap.version == version), None)


class Target(Protocol):
    """One replica. Every call ends by a deadline of its own, whatever the replica does.

    Errors of every call: UnavailableError (no answer in time), AuthError (the key was refused), CorruptError
    (the answer isn't a replica's), and what the replica itself refuses with.
    """

    @property
    def replica(self) -> ReplicaId:
        """Its name, stable over restarts."""
        ...

    async def set_target(self, goal: Goal, in_flight: InFlight | None = None) -> TargetStatus:
        """Tell it where to go; returns before it is there. The same goal again is no new work.

        Args:
            goal: A version, the head, or to stay.
            in_flight: What its swaps there do with answers in flight; None: its own default.

        Raises:
            ConflictError: It can't take a target now; it says in which state it is.
            NotFoundError: It doesn't find that version.
            UnsupportedError: Its engine lacks what that takes.
        """
        ...

    async def status(self) -> TargetStatus:
        """Ask how it is."""
        ...
