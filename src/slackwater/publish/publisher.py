"""The publisher: diff, upload, commit, and only then move on.

The order is the safety. Objects go up under names made from their content, where nobody looks yet; creating
the manifest makes the version visible, whole; the baseline moves after that. A publisher that dies anywhere
leaves the lineage at the version before or at this one.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, Self

import msgspec

from slackwater.bucket.base import Bucket
from slackwater.bucket.open import probe
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.digest import object_digest, tile_digest
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, ObjectRef, encode_manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.clock import Clock, SystemClock
from slackwater.errors import CorruptError, InvalidInputError, LostRaceError, NotFoundError, SlackwaterError
from slackwater.ids import RunId, StateDigest, Version, run_id
from slackwater.publish.delta import Progress
from slackwater.publish.draft import Draft, Label, draft_anchor, draft_delta
from slackwater.publish.lineage import HeadHint, find_head, read_manifest
from slackwater.publish.plan import check_config, check_fits, check_side_files, decide
from slackwater.publish.restore import Restored, outline, restore
from slackwater.weights.image import CONFIG, take_image
from slackwater.weights.source import Follows, TensorSource

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A committed version and what it cost."""

    run: RunId
    version: Version
    kind: Literal["anchor", "delta"]
    state: StateDigest
    changed: int
    """Elements whose bits differ from the version before; in an anchor all."""
    total: int
    """Elements of the whole state."""
    uploaded_bytes: int
    """Bytes of this version's objects and manifest."""
    full_bytes: int
    """Bytes of all tensors."""
    encode_s: float
    """Seconds from the call to the finished draft: reading, comparing, encoding, hashing."""
    upload_s: float
    """Seconds from there to the commit."""

    @property
    def ratio(self) -> float:
        """``uploaded_bytes`` as a share of ``full_bytes``; 0 in a model without elements."""
        return self.uploaded_bytes / self.full_bytes if self.full_bytes else 0.0


class Publisher:
    """Publishes one lineage's versions. Blocking, for one thread; holds a copy of the committed weights.

    Args:
        bucket: Where to.
        run: The lineage. Its names are never used again: a new training run takes a new one.
        anchor_every: Versions from one anchor to the next.
        level: ``fast``, or ``wan`` for the fewest bytes: see `slackwater.checkpoint.codec.Level`.
        threads: Threads that encode and upload.
        clock: For the durations in `Published` and the manifest's time.
        progress: Told how far it is, from the thread that publishes.

    Raises:
        InvalidInputError: ``run`` can't name a run, or a number is below 1.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: str,
        *,
        anchor_every: int = 50,
        level: Level = "fast",
        threads: int = 2,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> None:
        if min(anchor_every, threads) < 1:
            raise InvalidInputError(f"anchor_every={anchor_every} and threads={threads} are both 1 or more")
        self._bucket = bucket
        self._run = run_id(run)
        self._anchor_every = anchor_every
        self._level: Level = level
        self._threads = threads
        self._clock: Clock = clock or SystemClock()
        self._progress: Progress = progress or _tell_nobody
        self._held: Restored | None = None
        self._is_current = False
        """Whether ``_held`` is the chain's head: not at the start, nor after a commit without an answer."""

    @classmethod
    def open(
        cls,
        bucket: Bucket,
        run: str,
        *,
        anchor_every: int = 50,
        level: Level = "fast",
        threads: int = 2,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Construct a publisher and read the chain at once, instead of at the first `publish`.

        Raises:
            CorruptError: The chain can't be rebuilt.
            NotFoundError: The chain has no anchor, or the bucket doesn't exist.
        """
        publisher = cls(
            bucket, run, anchor_every=anchor_every, level=level, threads=threads, clock=clock, progress=progress
        )
        probe(bucket)
        publisher._sync(with_bits=True)
        return publisher

    @property
    def version(self) -> Version | None:
        """The newest version known to be committed; None before the first."""
        return None if self._held is None else self._held.version

    def held_bits(self, name: str) -> Bits:
        """One tensor as it was last committed, flat. Not to be written.

        Raises:
            NotFoundError: Nothing is committed yet, or there is no such tensor.
        """
        if self._held is None or name not in self._held.bits:
            raise NotFoundError(f"{self._run} has no committed {name}", hint="publish an anchor first")
        return self._held.bits[name]

    def held_specs(self) -> Mapping[str, TensorSpec]:
        """The lineage's tensors as replicas serve them; empty before the first anchor."""
        return {} if self._held is None else {spec.name: spec for spec in self._held.table.outline.specs}

    def publish(
        self, source: TensorSource, *, step: int, folder_files: Path | str | None = None, anchor: bool = False
    ) -> Published:
        """Publish the next version; it is committed when this returns.

        Args:
            source: The weights in the serving dtype, not to be written until this returns. In a delta,
                tensors that it lacks are unchanged.
            step: The trainer's step, for people; 0 or more.
            folder_files: A model folder that gives an anchor its config, tokenizer and chat template; a
                `FolderSource` has its own.
            anchor: Publish an anchor now. The first version is one anyway, and every ``anchor_every``-th.

        Raises:
            InvalidInputError: The source doesn't fit the lineage, or was written meanwhile.
            LostRaceError: Another publisher committed this version; it stays so for this publisher.
            UnavailableError: The bucket doesn't answer. If the commit itself was not answered, the next call
                reads the chain to learn whether it happened.
        """
        if step < 0:
            raise InvalidInputError(f"step {step} is below 0")
        self._sync(with_bits=not anchor)
        began = self._clock.monotonic()
        folder = None if folder_files is None else Path(folder_files)
        draft, bits = self._draft(source, step, folder, anchor=anchor)
        encoded = self._clock.monotonic()
        body = encode_manifest(draft.manifest)
        decode_manifest(body)  # what readers will do: a manifest that they refuse is never committed
        self._upload(draft)
        self._commit(draft.manifest, body)
        done = self._clock.monotonic()
        self._advance(draft, source, bits)
        self._write_hint(draft.manifest.version)
        return _report(draft, len(body), encode_s=encoded - began, upload_s=done - encoded)

    def _sync(self, *, with_bits: bool) -> None:
        """Learn the chain's head. A forced anchor needs no bits of it, so it heals a chain whose objects are broken."""
        if self._is_current:
            return
        head = find_head(self._bucket, self._run)
        rebuild = restore if with_bits else outline
        self._held = None if head is None else rebuild(self._bucket, self._run, head)
        self._is_current = with_bits or head is None

    def _draft(
        self, source: TensorSource, step: int, folder_files: Path | None, *, anchor: bool
    ) -> tuple[Draft, Mapping[str, Bits] | None]:
        """Draft the next version; an anchor comes with the copy of its bits that becomes the baseline."""
        held = self._held
        since = None if held is None else held.version - held.anchor
        kind = decide(anchor_every=self._anchor_every, since_anchor=since, forced=anchor)
        if held is not None:
            check_fits(kind, self.held_specs(), source.specs())
        label = Label(
            run=self._run,
            version=Version(0 if held is None else held.version + 1),
            step=step,
            created_at=datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(),
        )
        if held is None or kind == "anchor":
            image = take_image(source, folder_files)
            check_config(image.files[CONFIG], source.specs())
            draft = draft_anchor(label, image, threads=self._threads)
            if held is not None:
                check_side_files(held.side_files, draft.manifest.side_files)
            return draft, {name: image.bits(name) for name in image.specs()}
        absent = sorted(held.table.outline.by_name.keys() - source.specs().keys())
        if absent:
            _LOG.warning("%d tensors are absent and stay as they are, %s among them", len(absent), absent[0])
        draft = draft_delta(
            label,
            source,
            held.table,
            held.bits,
            level=self._level,
            threads=self._threads,
            progress=self._progress,
        )
        return draft, None

    def _upload(self, draft: Draft) -> None:
        total = draft.manifest.num_bytes
        done = 0
        with ThreadPoolExecutor(self._threads, thread_name_prefix="upload") as pool:
            for size in pool.map(lambda ref: self._put(ref, draft.bodies[ref.key]), draft.manifest.objects):
                done += size
                self._progress("upload", done, total)

    def _put(self, ref: ObjectRef, body: bytes | bytearray) -> int:
        """Upload an object, unless an earlier attempt did: its name is made from its content."""
        if not self._is_there(ref):
            self._bucket.put(ref.key, memoryview(body))
        return ref.size

    def _is_there(self, ref: ObjectRef) -> bool:
        """Whether the object is there and right. Its name alone proves nothing: it may have been spoilt since."""
        try:
            return object_digest(self._bucket.get(ref.key, max_bytes=ref.size)) == ref.sha256
        except (NotFoundError, CorruptError):
            return False

    def _commit(self, manifest: Manifest, body: bytes) -> None:
        key = manifest_key(self._run, manifest.version)
        self._is_current = False
        created = self._bucket.put_if_absent(key, body)
        # An earlier attempt of the same call may have made it, and its answer was lost.
        won = created or self._bucket.get(key, max_bytes=MAX_MANIFEST_BYTES) == body
        self._is_current = True
        if not won:
            winner = read_manifest(self._bucket, self._run, manifest.version)
            raise LostRaceError(
                f"another publisher committed version {manifest.version} of {self._run}: "
                f"state {winner.state[:12]}, step {winner.step}",
                hint="one trainer publishes a run: stop the other one, or open the publisher again",
            )

    def _advance(self, draft: Draft, source: TensorSource, image: Mapping[str, Bits] | None) -> None:
        version = draft.manifest.version
        if image is not None:
            self._held = Restored(
                version=version, anchor=version, side_files=draft.manifest.side_files, table=draft.table, bits=image
            )
            self._is_current = True
        elif self._held is not None:
            self._is_current = False
            _copy_tiles(draft.manifest, draft.table.outline, source, self._held.bits)
            held = self._held
            self._held = replace(held, version=version, table=draft.table)
            self._is_current = True
        if isinstance(source, Follows):
            source.committed(version)

    def _write_hint(self, version: Version) -> None:
        try:
            self._bucket.put(head_key(self._run), msgspec.json.encode(HeadHint(version=version)))
        except SlackwaterError as error:
            _LOG.warning("the head hint of %s wasn't written; readers find version %d: %s", self._run, version, error)


def _tell_nobody(stage: str, done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _copy_tiles(manifest: Manifest, outline: Outline, source: TensorSource, baseline: Mapping[str, Bits]) -> None:
    read = lru_cache(maxsize=1)(source.bits)
    for listed in (tile for body in manifest.listed() for tile in body.tiles):
        spec, tile = outline.place(listed.number)
        new = tile.take(read(spec.name))
        tile.put(baseline[spec.name], new)
        if tile_digest(tile.take(baseline[spec.name])) != listed.post:
            raise InvalidInputError(
                f"{spec.name} was written while it was published; the version is committed as it was read",
                hint="let publish() return before the next optimizer step",
            )


def _report(draft: Draft, manifest_bytes: int, *, encode_s: float, upload_s: float) -> Published:
    return Published(
        run=draft.manifest.run,
        version=draft.manifest.version,
        kind=draft.manifest.kind,
        state=draft.manifest.state,
        changed=draft.manifest.num_changed,
        total=draft.table.outline.num_elements,
        uploaded_bytes=draft.manifest.num_bytes + manifest_bytes,
        full_bytes=draft.table.outline.num_bytes,
        encode_s=encode_s,
        upload_s=upload_s,
    )
