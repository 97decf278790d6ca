"""What a replica says of itself: values that travel as JSON to operators, routers and the conductor."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from slackwater.config.in_flight import InFlight
from slackwater.ids import BootId, ReplicaId, RunId, StateDigest, Version
from slackwater.replica.swap import Stage


class State(StrEnum):
    """What a router needs to know. Only ``serving`` gets requests."""

    STARTING = "starting"
    """Loading its anchor or catching up with its first target."""
    SERVING = "serving"
    """Answers, also while an exchange is prepared or verified."""
    RETIRED = "retired"
    """What its memory holds is unknown: restart it."""
    CLOSED = "closed"


class Mode(StrEnum):
    """Who moves the target."""

    FOLLOW = "follow"
    """The newest committed version of the lineage."""
    MANUAL = "manual"
    """Whoever calls `Replica.set_target`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastError:
    """Why the target isn't reached."""

    kind: str
    """Machine code of `slackwater.errors`."""
    message: str
    version: Version | None
    """The version that was being made; None before the first was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapReport:
    """One exchange that succeeded. Times are seconds of the replica's clock; a roll-back prepares nothing."""

    version: Version
    from_version: Version
    kind: Literal["delta", "anchor", "rollback"]
    deltas: int = 0
    """How many deltas on the version before it took at once; 0 for an anchor and a roll-back."""
    fetch_s: float = 0.0
    """Waiting for the versions' bytes, digests checked."""
    decode_s: float = 0.0
    """Making writes of them, old and new bits checked."""
    stage_s: float = 0.0
    """Handing these to the engine."""
    prepare_s: float = 0.0
    """All of that, while the old version served."""
    drain_s: float = 0.0
    """Waiting for answers to end, while those that came later waited; 0 in other modes than ``drain``."""
    pause_s: float
    """No token was made in it; measured by the engine between its two steps."""
    verify_s: float
    """Reading back and comparing, and the canary: while the new version served provisionally. Where the bits are proven
    before it serves, that part is in ``pause_s``."""
    bytes_fetched: int = 0
    """Bytes of the versions' objects, cached or not."""
    bytes_written: int
    tiles: int
    """Tiles written and verified, each once."""
    mode: InFlight
    """What it did with answers in flight."""
    in_flight: int
    """Answers that went on across the exchange."""
    ended: int
    """Answers that it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStatus:
    """One moment of a replica."""

    replica: ReplicaId
    boot_id: BootId
    run: RunId
    state: State
    stage: Stage
    """Where the exchange under way stands."""
    version: Version | None
    """The label of the weights in place; None before the first anchor is loaded."""
    target: Version | None
    """Where it is going; None before it knows."""
    head: Version | None
    """The newest version that it knows of."""
    receded: bool
    """The bucket shows an older head than that: it was set back, and what it shows is refused."""
    trouble: str
    """Why the last look at the bucket failed; empty where it didn't."""
    mode: Mode
    swap_mode: InFlight
    """What a swap on the way to the target does with answers in flight."""
    provisional: bool
    """The bits of ``version`` are not compared with its manifest yet."""
    state_digest: StateDigest | None
    """Digest of the state that ``version`` has by its manifest."""
    in_flight: int
    """Answers admitted and not ended."""
    kv_tokens: int | None
    """Most positions of KV in use; None where the engine doesn't tell, or isn't open."""
    kv_used: int
    """Positions of KV in use, those kept for later prompts too."""
    preemptions: int
    """How often an answer under way had to leave its slot to others, to go on later."""
    waiting: bool
    """The last attempt failed, and the next one waits: in follow mode for a while, else for a call."""
    last_error: LastError | None
    """Of the attempts since the target was last reached or set; None where there was none."""
    swaps: tuple[SwapReport, ...]
    """The most recent ones, oldest first."""
