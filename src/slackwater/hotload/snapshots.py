"""Which snapshots a lineage has, read from the bucket."""

from collections import deque
from typing import Annotated, Final, Literal, Protocol

import msgspec

from slackwater.bucket.base import Get
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import CorruptError, NotFoundError
from slackwater.ids import RunId, StateDigest, Version, snapshot_name

_MAX_HINT_BYTES: Final = 4096


class _Hint(msgspec.Struct, frozen=True):
    """The part of the head hint that is read here."""

    version: Annotated[int, msgspec.Meta(ge=0)]


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
        """Every snapshot up to the newest, from the first one or, where some were collected, after the last gap."""
        ...

    def newest(self) -> Version | None:
        """The newest committed version, for people; None where none is found."""
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
        found: deque[Snapshot] = deque()
        newest = self.newest()
        for number in range(-1 if newest is None else newest, -1, -1):
            try:
                found.appendleft(self.find(Version(number)))
            except NotFoundError:
                break
        return tuple(found)

    def newest(self) -> Version | None:
        """See `SnapshotLookup.newest`: up from the head hint, or from 0 where that is of no use."""
        hinted = self._hint()
        newest = hinted if hinted is not None and self._committed(hinted) else None
        following = Version(0 if newest is None else newest + 1)
        while self._committed(following):
            newest, following = following, Version(following + 1)
        return newest

    def _hint(self) -> Version | None:
        try:
            body = self._bucket.get(head_key(self.run), max_bytes=_MAX_HINT_BYTES)
            return Version(msgspec.json.decode(body, type=_Hint).version)
        except (NotFoundError, CorruptError, msgspec.MsgspecError, UnicodeError, RecursionError):
            return None

    def _committed(self, version: Version) -> bool:
        try:
            self._bucket.get_range(manifest_key(self.run, version), 0, 1)
        except NotFoundError:
            return False
        except CorruptError:  # it is there, and empty
            return True
        return True

    def _read(self, version: Version) -> Snapshot:
        name = snapshot_name(self.run, version)
        try:
            body = self._bucket.get(manifest_key(self.run, version), max_bytes=MAX_MANIFEST_BYTES)
        except NotFoundError as error:
            # What the store says of it is a key, or a path: nothing to tell a caller.
            raise NotFoundError(f"there is no snapshot {name}") from error
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
