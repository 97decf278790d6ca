"""Which snapshots a lineage has, read from the bucket."""

from typing import Final, Literal, Protocol

import msgspec

from slackwater.bucket.base import Get
from slackwater.checkpoint.keys import manifest_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import CorruptError, NotFoundError
from slackwater.ids import RunId, StateDigest, Version, snapshot_name


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One committed version, for people."""

    name: str
    """``<run>/<version>``."""
    version: Version
    kind: Literal["anchor", "delta"]
    state: StateDigest
    bytes: int
    """Of all its objects."""
    step: int
    """The trainer's."""
    created_at: str
    """RFC 3339."""


class SnapshotLookup(Protocol):
    """Finds snapshots of one lineage. Calls block."""

    @property
    def run(self) -> RunId:
        """The lineage."""
        ...

    def find(self, version: Version) -> Snapshot:
        """One snapshot.

        Raises:
            NotFoundError: It isn't committed.
            CorruptError: Its manifest doesn't verify.
        """
        ...

    def chain(self) -> tuple[Snapshot, ...]:
        """Every snapshot from the first to the newest."""
        ...


class BucketSnapshots:
    """A `SnapshotLookup` over a bucket. Manifests never change, so each is read once. Any thread."""

    def __init__(self, bucket: Get, run: RunId) -> None:
        self.run: Final = run
        self._bucket = bucket
        self._known: dict[Version, Snapshot] = {}

    def find(self, version: Version) -> Snapshot:
        """See `SnapshotLookup.find`."""
        if version not in self._known:
            self._known[version] = self._read(version)
        return self._known[version]

    def chain(self) -> tuple[Snapshot, ...]:
        """See `SnapshotLookup.chain`."""
        found: list[Snapshot] = []
        while True:
            try:
                found.append(self.find(Version(len(found))))
            except NotFoundError:
                return tuple(found)

    def _read(self, version: Version) -> Snapshot:
        name = snapshot_name(self.run, version)
        try:
            body = self._bucket.get(manifest_key(self.run, version), max_bytes=MAX_MANIFEST_BYTES)
        except NotFoundError as error:
            raise NotFoundError(f"there is no snapshot {name}: {error.message}", hint=error.hint) from error
        manifest = decode_manifest(body)
        if (manifest.run, manifest.version) != (self.run, version):
            raise CorruptError(f"the manifest of {name} says it is {manifest.run}/{manifest.version}")
        return Snapshot(
            name=name,
            version=version,
            kind=manifest.kind,
            state=manifest.state,
            bytes=manifest.num_bytes,
            step=manifest.step,
            created_at=manifest.created_at,
        )
