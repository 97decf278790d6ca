"""What became of replicas between two looks at them, as events for the ledger. Values in, values out."""

import msgspec

from slackwater.hotload.target import TargetStatus
from slackwater.ids import ReplicaId, Version


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened."""

    at: float
    """When it was noticed; seconds since the epoch."""
    kind: str
    """``serves``, ``rolled_back``, ``follows``, ``manual``, ``restarted``, ``retired``, ``failed``,
    ``lagging`` or ``group``."""
    replica: ReplicaId | None = None
    version: Version | None = None
    """What it serves, or failed to reach."""
    operation: str | None = None
    """The operation in whose course it was noticed."""
    detail: str = ""


def changes(
    before: TargetStatus | None, after: TargetStatus, at: float, operation: str | None = None
) -> tuple[FleetEvent, ...]:
    """What differs between two statuses of one replica; ``before`` is None at the first look."""

    def event(kind: str, detail: str = "", version: Version | None = after.version) -> FleetEvent:
        return FleetEvent(at=at, kind=kind, replica=after.replica, version=version, operation=operation, detail=detail)

    found: list[FleetEvent] = []
    if before is not None and before.boot_id != after.boot_id:
        found.append(event("restarted"))
    held = _served(before)
    if after.version is not None and _served(after) not in (None, held):
        back = before is not None and held is not None and after.version < held and before.boot_id == after.boot_id
        found.append(event("rolled_back" if back else "serves", "" if held is None else f"from {held}"))
    if before is None or before.mode != after.mode:
        found.append(event("follows" if after.mode == "follow" else "manual"))
    if after.state == "retired" and (before is None or before.state != "retired"):
        found.append(event("retired", "" if after.last_error is None else after.last_error.message))
    failed = after.waiting and (before is None or not before.waiting) and after.last_error is not None
    if failed and after.last_error is not None:
        found.append(event("failed", f"{after.last_error.kind}: {after.last_error.message}", after.target))
    return tuple(found)


def _served(status: TargetStatus | None) -> Version | None:
    """What a replica serves: one that starts, or is retired, has a version and serves nothing."""
    return None if status is None or status.state != "serving" else status.version
