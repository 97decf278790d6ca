"""The way to a target: which version comes next, around what is broken."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Literal

from slackwater.checkpoint.chain import plan_path
from slackwater.checkpoint.manifest import Manifest
from slackwater.errors import CorruptError, NotFoundError, SlackwaterError, WrongBaseError
from slackwater.ids import Version
from slackwater.replica.source import VersionSource


class Route:
    """Plans over one lineage, and remembers which versions to go around. Its calls block.

    A version that could not be decoded is avoided until nothing else leads to the target; then it gets
    another chance, for its bytes may have been repaired. A state that no delta fits is left through an
    anchor.
    """

    def __init__(self, source: VersionSource) -> None:
        self._source = source
        self._kinds: dict[Version, Literal["anchor", "delta"]] = {}
        self._avoided: dict[Version, SlackwaterError] = {}
        self._distrusted = False

    def next(self, held: Version | None, target: Version, most: int = 1) -> tuple[Manifest, ...]:
        """What comes next on the way from ``held`` (None: nothing) to ``target``, another version.

        Args:
            held: The version at hand.
            target: Where to.
            most: Deltas to give at most; at least 1.

        Returns:
            An anchor, or the first deltas on ``held`` as far as their manifests can be read.

        Raises:
            NotFoundError: No anchor leads to the target.
            CorruptError: The only way there goes through a version that could not be decoded.
        """
        start = None if self._distrusted else held
        try:
            path = plan_path(start, target, self._kind_of)
        except NotFoundError:
            raise self._give_up(target) from None
        if path.anchor is not None:
            return (self._source.manifest(path.anchor),)
        first, *others = path.deltas[:most]
        return (self._source.manifest(first), *self._readable(others))

    def detour(self, version: Version, error: SlackwaterError) -> None:
        """Learn from the failure of ``version``."""
        if isinstance(error, CorruptError):
            self._avoided[version] = error
        elif isinstance(error, WrongBaseError):
            self._distrusted = True

    def trust(self) -> None:
        """The state in place is a verified one: deltas may be applied to it."""
        self._distrusted = False

    def _readable(self, versions: Iterable[Version]) -> Iterator[Manifest]:
        """Manifests, up to one that can't be read now: who gets there will be told why."""
        with suppress(SlackwaterError):
            for version in versions:
                yield self._source.manifest(version)

    def _kind_of(self, version: Version) -> Literal["anchor", "delta"] | None:
        if version in self._avoided:
            return None
        if version not in self._kinds:
            try:
                self._kinds[version] = self._source.manifest(version).kind
            except NotFoundError:
                return None
            except CorruptError as error:
                self._avoided[version] = error
                return None
        return self._kinds[version]

    def _give_up(self, target: Version) -> SlackwaterError:
        if not self._avoided:
            return NotFoundError(
                f"no anchor leads to version {target}", hint="publish an anchor, or choose a later version"
            )
        _, error = max(self._avoided.items(), key=lambda item: item[0])
        self._avoided.clear()
        return error
