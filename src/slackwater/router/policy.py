"""Which replica answers a request. Pure: the request's wishes and the table in, a choice or a refusal out."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from slackwater.ids import ReplicaId, RunId, Version
from slackwater.rollout.request import ANY_POLICY, PolicyConstraint


class Health(StrEnum):
    """What the router believes of a replica."""

    UNKNOWN = "unknown"
    """No probe has been answered yet: gets nothing."""
    GOOD = "good"
    SUSPECT = "suspect"
    """A connection to it broke since its last good probe: chosen only where no good one is left."""
    EJECTED = "ejected"
    """It failed several probes in a row: gets nothing until it answers several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingContext:
    """What a request asks of its replica."""

    model: str = ""
    """Empty: any."""
    policy: PolicyConstraint = ANY_POLICY
    excluded: frozenset[ReplicaId] = frozenset()
    """Replicas that have failed this request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One replica as the table shows it."""

    replica: ReplicaId
    health: Health
    serving: bool
    """Whether it says that it takes requests."""
    draining: bool = False
    """It keeps new requests waiting until others have ended."""
    version: Version | None
    """None: it has no weights yet."""
    run: RunId | None = None
    in_flight: int = 0
    """Requests that it works on, other gateways' too."""
    last_chosen: int = 0
    """When it was last chosen, as a running number; 0 for never."""
    model: str = ""
    """Empty: whatever is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The replica that answers."""

    replica: ReplicaId
    reason: str
    """For logs and people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """No replica can answer."""

    kind: Literal["not_found", "unavailable", "policy_unmet"]
    versions: tuple[Version, ...] = ()
    """Versions held by the replicas that could answer otherwise; rising, each once."""


def choose(context: RoutingContext, candidates: Sequence[Candidate]) -> Choice | Refusal:
    """Choose the least loaded replica that may answer; of equals the one not chosen for longest.

    One that drains is chosen where all others are suspect or can't answer.
    """
    named = [one for one in candidates if not context.model or one.model in ("", context.model)]
    if candidates and not named:
        return Refusal(kind="not_found")
    able = [one for one in named if _is_able(one) and one.replica not in context.excluded]
    if not able:
        return Refusal(kind="unavailable")
    admitted = [one for one in able if one.version is not None and context.policy.admits(one.version)]
    if not admitted:
        versions = sorted({one.version for one in able if one.version is not None})
        return Refusal(kind="policy_unmet", versions=tuple(versions))
    best = min(admitted, key=_rank)
    return Choice(
        replica=best.replica,
        reason=f"{best.health}, {best.in_flight} in flight, least of {len(admitted)} that hold {context.policy}",
    )


def _is_able(candidate: Candidate) -> bool:
    return candidate.serving and candidate.health in (Health.GOOD, Health.SUSPECT)


def _rank(candidate: Candidate) -> tuple[bool, bool, int, int]:
    suspect = candidate.health is Health.SUSPECT
    return suspect, candidate.draining, candidate.in_flight, candidate.last_chosen
