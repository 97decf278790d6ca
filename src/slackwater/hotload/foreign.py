"""What both foreign fronts share: one-segment names of snapshots, and deployments that are groups."""

from collections.abc import Sequence

from slackwater.errors import InvalidInputError, NotFoundError
from slackwater.hotload.groups import DEFAULT_GROUP, Group, find_group
from slackwater.ids import RunId, Version, parse_snapshot, snapshot_name


def identity_of(run: RunId, version: Version) -> str:
    """A snapshot in one path segment, as those clients want it: ``<run>-<version>``."""
    return f"{run}-{version}"


def version_of(identity: str, run: RunId) -> Version:
    """Read `identity_of` back.

    Raises:
        InvalidInputError: It is no such name; one with leading zeros would be told back differently.
        NotFoundError: It is of another run.
    """
    name, dash, number = identity.rpartition("-")
    if not dash or (number.startswith("0") and number != "0"):
        raise InvalidInputError(f"{identity[:80]!r} is no snapshot here", hint=f"write {run}-12 for {run}/12")
    other, version = parse_snapshot(f"{name}/{number}")
    if other != run:
        raise NotFoundError(f"there is no run {other!r} here", hint=f"this fleet serves {run!r}")
    return version


def snapshot_of(identity: str, run: RunId, previous: str | None) -> str:
    """The native name of ``identity``. ``previous`` is what the client says it was made on.

    Raises:
        InvalidInputError: Either is no snapshot's name, or ``previous`` isn't older.
        NotFoundError: Either is of another run.
    """
    version = version_of(identity, run)
    if previous is not None and version_of(previous, run) >= version:
        raise InvalidInputError(f"{previous} is not older than {identity}: nothing can be made on it")
    return snapshot_name(run, version)


def group_of(deployment: str, groups: Sequence[Group]) -> str | None:
    """The group that a deployment's name means: where no groups are named, any name is the whole fleet.

    Raises:
        NotFoundError: Groups are named, and none of them is that.
    """
    if all(group.name == DEFAULT_GROUP for group in groups):
        return None
    return find_group(groups, deployment).name
