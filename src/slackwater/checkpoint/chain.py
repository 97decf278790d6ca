"""Which manifests lead from the version held to the version wanted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slackwater.errors import NotFoundError
from slackwater.ids import Version

KindOf = Callable[[Version], Literal["anchor", "delta"] | None]
"""What a version is; None where it isn't committed or can't be read any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """Steps to a version, in order."""

    anchor: Version | None
    """Load this first; None: go on from the version held."""
    deltas: tuple[Version, ...]
    """Then apply these, rising and without gaps."""


def plan_path(held: Version | None, target: Version, kind_of: KindOf) -> Path:
    """Find the way to ``target``: deltas on what is held, else the newest anchor below and its deltas.

    A delta is never skipped, and none is applied backwards: a target below ``held`` needs an anchor. Versions
    are asked about from ``target`` downwards, each at most once, and none below the first anchor or ``held``.

    Raises:
        NotFoundError: ``target`` isn't there, or no anchor lies between it and the nearest gap below it.
    """
    deltas: list[Version] = []
    for version in map(Version, range(target, -1, -1)):
        if version == held:
            return Path(anchor=None, deltas=tuple(reversed(deltas)))
        kind = kind_of(version)
        if kind == "anchor":
            return Path(anchor=version, deltas=tuple(reversed(deltas)))
        if kind is None:
            raise NotFoundError(
                f"version {target} can't be reached: version {version} isn't there",
                hint="wait for it to be published" if version == target else "wait for the next anchor",
            )
        deltas.append(version)
    raise NotFoundError(f"version {target} can't be reached: there is no anchor below it", hint="publish an anchor")
