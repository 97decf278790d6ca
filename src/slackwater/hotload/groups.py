"""Groups of replicas: a name, a mode, and who is meant by a hot-load. Values in, values out.

A replica is in one group. Those that no group names make up `DEFAULT_GROUP`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from slackwater.config.in_flight import InFlight
from slackwater.errors import ConflictError, InvalidInputError, NotFoundError
from slackwater.hotload.operation import Operation, Order
from slackwater.ids import ReplicaId, Version

DEFAULT_GROUP: Final = "default"
"""Every replica that no other group has."""


class Mode(StrEnum):
    """Who moves the replicas of a group."""

    FOLLOW = "follow"
    """The newest version of the run does: a standing operation."""
    MANUAL = "manual"
    """Hot-loads do."""
    PINNED = "pinned"
    """Nobody: a standing operation keeps one snapshot. Hot-loads pass it by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Some replicas and how they are to be moved."""

    name: str
    replicas: tuple[ReplicaId, ...]
    mode: Mode = Mode.MANUAL
    version: Version | None = None
    """The version that it is pinned to."""
    in_flight: InFlight | None = None
    """What the swaps of one that follows or is pinned do with answers in flight; None: each replica's default."""

    def __post_init__(self) -> None:
        if (self.mode is Mode.PINNED) != (self.version is not None):
            raise InvalidInputError(f"group {self.name}: a pinned group names its snapshot, and no other does")
        if self.mode is Mode.MANUAL and self.in_flight is not None:
            raise InvalidInputError(
                f"group {self.name}: in_flight goes with follow and pinned", hint="hot-loads name their own"
            )

    @property
    def words(self) -> str:
        """The mode with all that belongs to it, such as ``pinned:7`` or ``follow drain``."""
        mode = self.mode.value if self.version is None else f"{self.mode.value}:{self.version}"
        return mode if self.in_flight is None else f"{mode} {self.in_flight}"


def arrange(named: Sequence[Group], fleet: Sequence[ReplicaId]) -> tuple[Group, ...]:
    """The groups of a fleet: those named, and one for the rest.

    Raises:
        InvalidInputError: A name comes twice or is `DEFAULT_GROUP`; a group is empty; a replica is in two groups
            or isn't in the fleet.
    """
    names = [group.name for group in named]
    if len(set(names)) != len(names) or DEFAULT_GROUP in names:
        raise InvalidInputError(f"groups need names of their own, and not {DEFAULT_GROUP!r}: {', '.join(names)}")
    taken = [replica for group in named for replica in group.replicas]
    if len(set(taken)) != len(taken) or any(not group.replicas for group in named):
        raise InvalidInputError("a group has at least one replica, and a replica is in one group")
    strangers = sorted(set(taken) - set(fleet))
    if strangers:
        raise InvalidInputError(f"there is no replica {strangers[0]!r} here", hint="name it with --replica, too")
    rest = tuple(replica for replica in fleet if replica not in taken)
    return (*named, Group(name=DEFAULT_GROUP, replicas=rest)) if rest else tuple(named)


def find_group(groups: Sequence[Group], name: str) -> Group:
    """The group of that name.

    Raises:
        NotFoundError: There is none.
    """
    for group in groups:
        if group.name == name:
            return group
    raise NotFoundError(f"there is no group {name[:80]!r}", hint=f"there are {', '.join(g.name for g in groups)}")


def as_ordered(group: Group, operations: Sequence[Operation]) -> tuple[Group, Operation | None]:
    """A group in the mode that its open standing operation gives it; manual where there is none."""
    for operation in operations:
        order = operation.order
        if order.standing and order.group == group.name and not operation.ended:
            mode = Mode.FOLLOW if order.version is None else Mode.PINNED
            ordered = Group(
                name=group.name, replicas=group.replicas, mode=mode, version=order.version, in_flight=order.in_flight
            )
            return ordered, operation
    return Group(name=group.name, replicas=group.replicas), None


def meant(order: Order, groups: Sequence[Group]) -> tuple[ReplicaId, ...]:
    """The replicas that a hot-load is about, in the fleet's order. ``groups`` are in their present modes.

    Raises:
        NotFoundError: It names a group or a replica that isn't there.
        InvalidInputError: It names a replica twice, or one of another group, or none, or a canary of all.
        ConflictError: It names what is pinned, or a part of what follows the head.
    """
    scope = [group for group in groups if group.mode is not Mode.PINNED]
    if order.group is not None:
        scope = [find_group(groups, order.group)]
    elif order.replicas is not None:
        scope = list(groups)
    chosen = tuple(replica for group in scope for replica in group.replicas)
    if order.replicas is not None:
        chosen = _named(order.replicas, chosen, groups)
    _check_modes(order, [group for group in groups if set(group.replicas) & set(chosen)])
    if not chosen:
        raise ConflictError("every replica is pinned", hint="name a group, after making it manual")
    if order.canary is not None and order.canary.count >= len(chosen):
        raise InvalidInputError(f"a canary of {order.canary.count} leaves nobody of {len(chosen)} replicas for later")
    return chosen


def _named(names: Sequence[ReplicaId], scope: Sequence[ReplicaId], groups: Sequence[Group]) -> tuple[ReplicaId, ...]:
    fleet = {replica for group in groups for replica in group.replicas}
    missing = [name for name in names if name not in fleet]
    if missing:
        raise NotFoundError(f"there is no replica {missing[0][:80]!r} here", hint="GET /v1/fleet lists them")
    if not names or len(set(names)) != len(names) or set(names) - set(scope):
        raise InvalidInputError("replicas must be named once each, at least one, and all of the group")
    return tuple(names)


def _check_modes(order: Order, groups: Sequence[Group]) -> None:
    partly = order.replicas is not None or order.canary is not None
    for group in groups:
        if group.mode is Mode.PINNED:
            raise ConflictError(f"group {group.name} is pinned to version {group.version}", hint="set its mode first")
        if partly and group.mode is Mode.FOLLOW:
            raise ConflictError(
                f"group {group.name} follows the head: the rest of it would move on by itself",
                hint="make the group manual first; its replicas then stay where they are",
            )
