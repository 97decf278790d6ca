"""``slackwater verify``: whether a snapshot is whole, with an exit status for each class of damage."""

from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

from slackwater.cli.absent import newest
from slackwater.cli.attended import Attended
from slackwater.cli.snapshot import FoldName, Shelf, VersionName
from slackwater.errors import AuthError, CorruptError, InvalidInputError, NotFoundError, UnavailableError
from slackwater.publish.audit import Auditor
from slackwater.publish.damage import Damage, Depth, Report
from slackwater.weights.delta_folder import is_delta_folder

STATUSES: Final = MappingProxyType[Damage, int](
    {"missing": 3, "manifest": 4, "lineage": 5, "object": 6, "tensor": 7, "unavailable": 8}
)
"""Exit status of each class of damage; 0 where there is none. 1 and 2 are errors of the call, as everywhere."""


def status_of(report: Report) -> int:
    """The exit status: the lowest of what was found."""
    return min((STATUSES[damage] for damage in report.counts), default=0)


def verify_snapshot(text: str, base: str | None, depth: Depth, *, threads: int, shelf: Shelf, work: Attended) -> Report:
    """Check a version, a fold, a delta folder or a model folder.

    Args:
        text: Which one.
        base: The state that a delta folder was made on; its tensors can't be checked without.
        depth: How much is read.
        threads: Tiles read at once.
        shelf: Where things are found.
        work: The command's folders and bars.

    Raises:
        InvalidInputError: It is nothing of these, or ``base`` is missing or out of place.
        NotFoundError: The bucket, the run or the fold isn't there, or the version is above the newest one or was
            collected.
    """
    if base is not None and depth != "tensors":
        raise InvalidInputError(f"the depth {depth} reads no base", hint="add --depth tensors, or leave --base out")
    auditor = Auditor(depth=depth, scratch=work.scratch.folder(), threads=threads, progress=work.tell)
    name = shelf.name(text)
    if isinstance(name, Path) and is_delta_folder(name):
        return auditor.delta(name, None if base is None else shelf.state(base))
    if base is not None:
        raise InvalidInputError(f"{text} is no delta folder and has no base", hint="leave --base out")
    if isinstance(name, Path):
        return auditor.folder(name)
    with suppress(UnavailableError, AuthError):  # the audit tells of these
        _check_named(shelf, name)
    if isinstance(name, VersionName):
        return auditor.version(shelf.bucket, name.run, name.version)
    return auditor.fold(shelf.bucket, name.run, name.start, name.end)


def _check_named(shelf: Shelf, name: VersionName | FoldName) -> None:
    """Tell a slip in a name from damage: a version below the newest must be there, a fold need not."""
    try:
        shelf.manifest(name)
    except CorruptError:
        return
    except NotFoundError:
        head = newest(shelf.bucket, name.run)
        if isinstance(name, FoldName) or head is None or name.version > head:
            raise
