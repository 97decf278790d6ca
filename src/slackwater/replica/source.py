"""The source seam: what a replica asks of delivery. `slackwater.delivery.fetcher.Fetcher` is one.

Every call blocks and may be made from any thread; what it gives is verified against the manifest.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from slackwater.checkpoint.manifest import BodyEntry, Manifest
from slackwater.errors import SlackwaterError
from slackwater.ids import Version


class TileBodies(Protocol):
    """The verified packs of one delta."""

    def of(self, entry: BodyEntry) -> memoryview:
        """One body."""
        ...


class VersionSource(Protocol):
    """One lineage's versions.

    Errors: those of the bucket seam, and CorruptError for bytes that don't verify.
    """

    def head(self, known: Version | None) -> Version | None:
        """The newest committed version, at least ``known``; None while the lineage is empty."""
        ...

    def manifest(self, version: Version) -> Manifest:
        """The manifest of a committed version; NotFoundError where there is none."""
        ...

    def anchor(self, manifest: Manifest) -> Path:
        """A local Hugging Face folder with the anchor's files."""
        ...

    def bodies(self, manifest: Manifest) -> TileBodies:
        """The tile bodies of a delta."""
        ...


class HeadWatch(Protocol):
    """Tells of new heads. `slackwater.delivery.watcher.Watcher` is one."""

    @property
    def trouble(self) -> SlackwaterError | None:
        """Why the last look failed; None where it didn't."""
        ...

    @property
    def receded(self) -> bool:
        """Whether the bucket was set back below the version known, which is refused."""
        ...

    @property
    def looked_at(self) -> float | None:
        """When the last look that was answered began, in monotonic seconds; None before the first."""
        ...

    def versions(self, after: Version | None) -> AsyncIterator[Version]:
        """Each newer head once it is seen, the newest only; ends by cancellation."""
        ...
