"""What a new conductor takes up: its ledger's operations, or what replicas are at. Values in, values out."""

from collections.abc import Sequence
from dataclasses import replace

from slackwater.config.in_flight import InFlight
from slackwater.errors import NotFoundError
from slackwater.hotload.groups import Group, find_group
from slackwater.hotload.operation import Operation, OperationEvent, Order, ReplicaProgress
from slackwater.hotload.target import TargetStatus
from slackwater.ids import ReplicaId, RunId, Version


def take_up(operation: Operation, groups: Sequence[Group]) -> Operation:
    """An operation that hadn't ended, as it goes on: a standing one is about its group as that is today.

    One whose group is gone is superseded.
    """
    if not operation.order.standing:
        return operation
    try:
        group = find_group(groups, operation.order.group or "")
    except NotFoundError:
        return operation.after(OperationEvent.SUPERSEDE)
    known = {part.replica: part for part in operation.replicas}
    parts = tuple(known.get(name, ReplicaProgress(replica=name)) for name in group.replicas)
    return replace(operation, replicas=parts)


def apart(newest: Sequence[Operation]) -> list[Operation]:
    """Operations that go on, the newest first: one that shares a replica with a newer one is superseded by it.

    A process may have died between writing the one and the end of the other.
    """
    kept: list[Operation] = []
    busy = set[ReplicaId]()
    for operation in newest:
        names = frozenset(operation.names)
        kept.append(operation.after(OperationEvent.SUPERSEDE) if names & busy and not operation.ended else operation)
        if not kept[-1].ended:
            busy |= names
    return kept


def under_way(statuses: Sequence[TargetStatus], run: RunId) -> tuple[Order, ...]:
    """What replicas were told and haven't reached, as orders: one for each version and mode, with its replicas."""
    found: dict[tuple[Version, InFlight | None], list[ReplicaId]] = {}
    for status in statuses:
        settled = status.version == status.target and status.stage == "idle" and not status.provisional
        if status.mode == "manual" and status.target is not None and not settled:
            mode = next((each for each in InFlight if each == status.swap_mode), None)
            found.setdefault((status.target, mode), []).append(status.replica)
    return tuple(
        Order(run=run, version=version, replicas=tuple(names), in_flight=mode)
        for (version, mode), names in found.items()
    )
