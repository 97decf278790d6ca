"""The commit: creating the manifest, which alone makes a version visible."""

import logging
from typing import Final, Protocol

import msgspec

from slackwater.bucket.base import Put, PutIfAbsent
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import head_key, manifest_key, signature_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, encode_manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.clock import Clock, SystemClock
from slackwater.errors import (
    CorruptError,
    LostRaceError,
    NotFoundError,
    SlackwaterError,
    UnavailableError,
    UnsupportedError,
)
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import ONE_TRAINER, HeadBucket, HeadHint, Tip, check_tip, find_head, read_manifest

LOOK_AGAIN_S: Final = 900.0
"""Seconds without a commit after which a publisher looks for the head before the next one. Less than the minimum age of
what `slackwater gc` deletes, an hour: so no number that was taken meanwhile has been collected yet."""
OPENING_BYTES: Final = 1024
"""How much of a manifest tells it from every other: its state, its time and its first objects lie there."""

_LOG: Final = logging.getLogger(__name__)


class CommitBucket(HeadBucket, Put, PutIfAbsent, Protocol):
    """What a bucket must do to take a commit."""

    @property
    def url(self) -> str:
        """Its name, for messages."""
        ...


class Signs(Protocol):
    """Something that signs manifests: `slackwater.checkpoint.signature.Signer` is one."""

    def sign(self, manifest: bytes) -> bytes:
        """The bytes of the signature object for a manifest's bytes."""
        ...


def encode_checked(manifest: Manifest) -> bytes:
    """A manifest's bytes, read as readers will: one that they refuse is never committed.

    Raises:
        CorruptError: They would refuse it.
        InvalidInputError: It is larger than they hold.
    """
    body = encode_manifest(manifest)
    decode_manifest(body)
    return body


def commit(
    bucket: CommitBucket, manifest: Manifest, body: bytes, signer: Signs | None = None, *, after: Tip | None = None
) -> None:
    """Create a manifest, once all its objects are there, its signature among them.

    Args:
        bucket: Where to.
        manifest: The version.
        body: Its bytes.
        signer: Signs it; None leaves it unsigned.
        after: The version before it, which must still be what it was; that costs a read of its manifest. None asks
            nothing.

    Raises:
        ConflictError: The version before is gone, or another one: nothing is committed.
        CorruptError: Its manifest can't be read any more; likewise.
        LostRaceError: Another publisher committed this version.
        UnavailableError: The bucket doesn't answer: the chain tells whether it happened.
    """
    if after is not None:
        check_tip(bucket, manifest.run, after)
    _create(bucket, manifest, body, signer)


class Committer:
    """Commits one run's versions, each on the one before it, and finds out whether the store can be trusted with them.

    The first commit is made a second time, with the same bytes: a store that makes it again ignores create-if-absent.
    That is one request for each committer.

    Args:
        bucket: Where to.
        signer: Signs each manifest; None leaves them unsigned.
        clock: Its monotonic time says when the head has to be looked for again.
    """

    def __init__(self, bucket: CommitBucket, signer: Signs | None = None, clock: Clock | None = None) -> None:
        self._bucket: Final = bucket
        self._signer: Final = signer
        self._clock: Final[Clock] = clock or SystemClock()
        self._looked_s: float | None = None
        """When it was last known that nobody had gone on; None: not yet."""
        self._is_kept: bool | None = None
        """Whether the store keeps create-if-absent; None: it wasn't told yet."""
        self._made: tuple[Tip, bytes] | None = None
        """What was committed last, and how its manifest begins."""

    def commit(self, manifest: Manifest, body: bytes, *, after: Tip | None) -> None:
        """Create a manifest, once all its objects are there, its signature among them.

        That the version before is still what it was is one request: for `OPENING_BYTES` where it was made here, else,
        as after a start, for its whole manifest. After `LOOK_AGAIN_S` without a commit the head is looked for, with a
        listing: others may have gone on, and retention have taken the very number that comes next.

        Args:
            manifest: The version.
            body: Its bytes.
            after: The version before it; None for a first one.

        Raises:
            ConflictError: The version before is gone, or another one: nothing is committed.
            CorruptError: Its manifest can't be read any more; likewise.
            LostRaceError: Another publisher committed this version.
            UnsupportedError: The store ignores create-if-absent. The first time the version is committed all the same,
                and whole; from then on nothing is.
            UnavailableError: The bucket doesn't answer: the chain tells whether it happened.
        """
        if self._is_kept is False:
            raise self._refusal(f"version {manifest.version} of {manifest.run} isn't committed")
        now_s = self._clock.monotonic()
        if self._looked_s is None or now_s - self._looked_s >= LOOK_AGAIN_S:
            self._check_newest(manifest.run, after)
        if after is not None and not self._made_it(manifest.run, after):
            check_tip(self._bucket, manifest.run, after)
        is_new = _create(self._bucket, manifest, body, self._signer)
        self._looked_s = now_s
        self._made = Tip(version=manifest.version, state=manifest.state), body[:OPENING_BYTES]
        if self._is_kept is None:
            self._is_kept = not is_new or self._finds_it(manifest, body)
        if self._is_kept is False:
            raise self._refusal(f"version {manifest.version} of {manifest.run} is committed and whole")

    def _check_newest(self, run: RunId, after: Tip | None) -> None:
        known = None if after is None else after.version
        head = find_head(self._bucket, run, at_least=known)
        if head is not None and head != known:
            raise LostRaceError(
                f"others have gone on with {run} to version {head}, and this publisher stood at "
                f"{'its beginning' if known is None else f'version {known}'}",
                hint=ONE_TRAINER,
            )

    def _made_it(self, run: RunId, tip: Tip) -> bool:
        """Whether a version was made here and lies as it was made, by its state, its time and its first objects."""
        if self._made is None or self._made[0] != tip:
            return False
        opening = self._made[1]
        try:
            return self._bucket.get_range(manifest_key(run, tip.version), 0, len(opening)) == opening
        except (NotFoundError, CorruptError):
            return False

    def _finds_it(self, manifest: Manifest, body: bytes) -> bool | None:
        """Whether the store finds a version there that is created again; None where it doesn't answer."""
        try:
            return not self._bucket.put_if_absent(manifest_key(manifest.run, manifest.version), body)
        except UnavailableError as error:
            _LOG.info(
                "whether %s keeps create-if-absent is asked again at the next commit: %s", self._bucket.url, error
            )
            return None

    def _refusal(self, done: str) -> UnsupportedError:
        url = self._bucket.url
        return UnsupportedError(
            f"{done}: {url} ignores create-if-absent, so two publishers could overwrite each other's versions",
            hint=f"`slackwater doctor {url}` tells more; publish to a store that passes it",
        )


def _create(bucket: CommitBucket, manifest: Manifest, body: bytes, signer: Signs | None) -> bool:
    """Whether this very call made it; an earlier attempt of it may have, and its answer was lost."""
    key = manifest_key(manifest.run, manifest.version)
    if signer is not None:
        put_signature(bucket, manifest.run, body, signer)
    if bucket.put_if_absent(key, body):
        return True
    if bucket.get(key, max_bytes=MAX_MANIFEST_BYTES) == body:
        return False
    winner = read_manifest(bucket, manifest.run, manifest.version)
    raise LostRaceError(
        f"another publisher committed version {manifest.version} of {manifest.run}: "
        f"state {winner.state[:12]}, step {winner.step}",
        hint=ONE_TRAINER,
    )


def put_signature(bucket: Put, run: RunId, body: bytes, signer: Signs) -> None:
    """Put the signature of a manifest or a fold where readers look for it: before what it signs is there.

    Args:
        bucket: Where to.
        run: The run that the manifest names.
        body: The manifest's bytes.
        signer: Signs them.
    """
    bucket.put(signature_key(run, object_digest(body)), signer.sign(body))


def write_hint(bucket: Put, run: RunId, version: Version) -> bool:
    """Tell readers where to begin looking, best effort; returns whether it was written."""
    try:
        bucket.put(head_key(run), msgspec.json.encode(HeadHint(version=version)))
    except SlackwaterError as error:
        _LOG.warning("the head hint of %s wasn't written; readers find version %d: %s", run, version, error)
        return False
    return True
