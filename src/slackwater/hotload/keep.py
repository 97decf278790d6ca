"""At which version a manual replica is to be, and who has strayed from it by a restart. Values in, values out.

The rules:

1. The newest operation that has told a replica anything decides. While one is open, that one moves it.
2. A hot-load that it or another replica carried out is what it is to be at. So is one that it may have carried out.
3. Where none did, or a canary was stopped, or it was told nothing, the operation before decides. A cancelled one left
   it where it was.
4. Only a restart strays, and who wasn't heard at all by the deadline: who was moved by hand since it was last told
   stays where it is. An operation that told a replica nothing hides no restart of it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slackwater.config.in_flight import InFlight
from slackwater.hotload.operation import Operation, OperationState, ReplicaProgress, ReplicaStage
from slackwater.hotload.rollout import Phase
from slackwater.hotload.target import TargetStatus
from slackwater.ids import ReplicaId, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Where one replica is to be."""

    version: Version
    in_flight: InFlight | None
    boot_id: str | None
    """The start of it that was last heard; None where it wasn't heard since the order: any start has to be told."""


def kept(newest: Sequence[Operation], names: Collection[ReplicaId]) -> Mapping[ReplicaId, Kept]:
    """Where replicas are to be that no open operation moves; who was never told anything is missing.

    Args:
        newest: The operations, newest first.
        names: The replicas asked about.
    """
    left = set(names)
    boots: dict[ReplicaId, str | None] = {}
    found: dict[ReplicaId, Kept] = {}
    for operation in newest:
        if not left:
            break
        for part in operation.replicas:
            if part.replica not in left:
                continue
            if _answered(part):
                boots[part.replica] = boots.get(part.replica) or part.boot_id
            version = None if not operation.ended else left_at(operation, part)
            if version is not None:
                unheard = part.stage is ReplicaStage.UNKNOWN and part.told_at is None
                boot = None if unheard else boots.get(part.replica)
                found[part.replica] = Kept(version=version, in_flight=operation.order.in_flight, boot_id=boot)
            if version is not None or not operation.ended:
                left.discard(part.replica)
    return found


def left_at(operation: Operation, part: ReplicaProgress) -> Version | None:
    """The version at which an ended operation left one replica; None where the one before it decides."""
    order = operation.order
    if part.stage is ReplicaStage.SKIPPED or (part.stage is ReplicaStage.PENDING and part.told_at is None):
        return None
    if order.standing or order.version is None:
        return part.version if order.version is None else order.version
    if part.stage is ReplicaStage.DONE:
        return order.version
    if operation.state is OperationState.CANCELLED:
        return part.version
    if part.stage is ReplicaStage.FAILED:
        went_on = operation.phase is not Phase.STOPPED
        others = any(each.stage is ReplicaStage.DONE for each in operation.replicas)
        return order.version if went_on and others else None
    return order.version


def _answered(part: ReplicaProgress) -> bool:
    """Whether it took the order or refused it: only then it was the start that is noted which was told."""
    return part.told_at is not None or part.stage in (ReplicaStage.DONE, ReplicaStage.FAILED)


def strays(
    statuses: Sequence[TargetStatus], where: Mapping[ReplicaId, Kept]
) -> Mapping[tuple[Version, InFlight | None], tuple[TargetStatus, ...]]:
    """Who serves after a restart without being, or going, where it is to be: by that version and its mode."""
    found: dict[tuple[Version, InFlight | None], tuple[TargetStatus, ...]] = {}
    for status in statuses:
        place = where.get(status.replica)
        if place is None or status.state != "serving" or status.boot_id == place.boot_id:
            continue
        if status.mode != "manual" or status.target != place.version:
            key = (place.version, place.in_flight)
            found[key] = (*found.get(key, ()), status)
    return found
