"""Which manifests lead from the version held to the version wanted."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, NoReturn

from slackwater.errors import NotFoundError
from slackwater.ids import Version

KindOf = Callable[[Version], Literal["anchor", "delta"] | None]
"""What a version is; None where it isn't committed or can't be read any more."""

FoldsTo = Callable[[Version], Iterable[Version]]
"""The earlier versions from which a fold leads to a version."""

MAX_LISTED: Final = 100_000
"""Versions that `plan_listed` goes through at most: a number far above the run's others costs no memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """Steps to a version, in order."""

    anchor: Version | None
    """Load this first; None: go on from the version held."""
    deltas: tuple[Version, ...]
    """Then apply these, rising: each a delta on the version before, or a fold where it leaves numbers out."""


def no_folds(_version: Version) -> Iterable[Version]:
    """A run without folds."""
    return ()


def plan_path(held: Version | None, target: Version, kind_of: KindOf, folds_to: FoldsTo = no_folds) -> Path:
    """Find the way to ``target`` in the fewest steps: on what is held, else on the anchor that is met first.

    No delta is skipped but by a fold, and none is applied backwards: a target below ``held`` needs an anchor. Versions
    are asked about from ``target`` downwards, each at most once, and without folds none below the first anchor or
    ``held``. An anchor isn't gone past but by a fold, on the way to ``held``.

    Args:
        held: The version at hand; None where there is none.
        target: The version wanted.
        kind_of: What each version is.
        folds_to: The folds that may be used.

    Raises:
        NotFoundError: ``target`` isn't there, or no anchor lies between it and the nearest gap below it.
    """
    following: dict[Version, Version | None] = {target: None}
    waiting = deque([target])
    anchor, gap = None, None
    while waiting:
        version = waiting.popleft()
        if version == held:
            return Path(anchor=None, deltas=_onwards(following, version))
        kind = kind_of(version)
        if kind is None:
            gap = version if gap is None else gap
            continue
        if kind == "anchor":
            anchor = version if anchor is None else anchor
            if held is None or held > target:
                break
        for before in _befores(version, kind, folds_to):
            if before not in following:
                following[before] = version
                waiting.append(before)
    if anchor is None:
        _unreachable(target, gap)
    return Path(anchor=anchor, deltas=_onwards(following, anchor))


def plan_listed(
    held: Version | None,
    target: Version,
    kind_of: Callable[[Version], Literal["anchor", "delta"]],
    folds_to: FoldsTo,
    anchors: Collection[Version],
) -> Path | None:
    """Plan as `plan_path` does, by listings, and ask no version what it is but those that may be anchors.

    The others are taken for deltas that are there: whoever goes along the path finds out. Without a way on from what is
    held, it begins with the newest anchor at or below the target, and no fold leads past that.

    Args:
        held: The version at hand; None where there is none.
        target: The version wanted.
        kind_of: What a version is.
        folds_to: The folds that may be used.
        anchors: All versions that may be anchors.

    Returns:
        The path; None where no anchor is known at or below the target, or only one more than `MAX_LISTED` below.
    """

    def onto(start: Version) -> Path | None:
        if target - start > MAX_LISTED:
            return None
        return plan_path(
            start,
            target,
            lambda version: kind_of(version) if version in anchors else "delta",
            lambda end: [before for before in folds_to(end) if before >= start],
        )

    if held is not None and held <= target:
        path = onto(held)
        if path is not None and path.anchor is None:
            return path
    below = (version for version in sorted(anchors, reverse=True) if version <= target)
    anchor = next((version for version in below if kind_of(version) == "anchor"), None)
    path = None if anchor is None else onto(anchor)
    return None if path is None else replace(path, anchor=anchor)


def _befores(version: Version, kind: Literal["anchor", "delta"], folds_to: FoldsTo) -> list[Version]:
    found = {before for before in folds_to(version) if before < version}
    if kind == "delta" and version > 0:
        found.add(Version(version - 1))
    return sorted(found, reverse=True)


def _onwards(following: dict[Version, Version | None], version: Version) -> tuple[Version, ...]:
    steps: list[Version] = []
    after = following[version]
    while after is not None:
        steps.append(after)
        after = following[after]
    return tuple(steps)


def _unreachable(target: Version, gap: Version | None) -> NoReturn:
    if gap is None:
        raise NotFoundError(f"version {target} can't be reached: there is no anchor below it", hint="publish an anchor")
    raise NotFoundError(
        f"version {target} can't be reached: version {gap} isn't there",
        hint="wait for it to be published" if gap == target else "wait for the next anchor",
    )
