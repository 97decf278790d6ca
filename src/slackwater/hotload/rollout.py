"""How an operation goes over its replicas: everyone at once, or a canary first. Values in, values out.

The rules:

1. Without a canary everyone is told at once.
2. With one, the first ``count`` replicas are told alone. If each of them gets there, they serve for ``hold_s``;
   if each is still there then, and hasn't restarted, the rest is told.
3. A canary that fails, or falls ill in the hold, stops the rollout: nobody else is told.
4. A hold that is interrupted by a restart of this process begins anew: it is never shorter than asked.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Final

import msgspec

from slackwater.ids import ReplicaId

MAX_HOLD_S: Final = 86_400.0
"""Longest hold of a canary."""


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who goes first, and for how long alone."""

    count: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    """Replicas that go first."""
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_HOLD_S)] = 30.0
    """Seconds for which they serve the version before the rest is told."""


class Phase(StrEnum):
    """How far a rollout is."""

    CANARY = "canary"
    """The first replicas are told and watched."""
    HOLDING = "holding"
    """They serve the version alone."""
    FLEET = "fleet"
    """Everyone is told and watched."""
    STOPPED = "stopped"
    """The canary did badly: the rest is left where it is."""


MOVES: Final[Mapping[tuple[Phase, bool], Phase]] = MappingProxyType({
    (Phase.CANARY, True): Phase.HOLDING,
    (Phase.CANARY, False): Phase.STOPPED,
    (Phase.HOLDING, True): Phase.FLEET,
    (Phase.HOLDING, False): Phase.STOPPED,
})  # fmt: skip
"""The next phase by phase and whether each canary did well. `Phase.FLEET` and `Phase.STOPPED` are the last ones."""


def first_phase(canary: Canary | None) -> Phase:
    """Where a rollout begins."""
    return Phase.FLEET if canary is None else Phase.CANARY


def told_in(phase: Phase, replicas: Sequence[ReplicaId], canary: Canary | None) -> tuple[ReplicaId, ...]:
    """Who has been told once ``phase`` has begun; the order of ``replicas`` decides who goes first."""
    return tuple(replicas if canary is None or phase is Phase.FLEET else replicas[: canary.count])
