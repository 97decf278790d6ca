"""The publisher: diff, upload, commit, and only then move on.

The order is the safety. Objects go up under names made from their content, where nobody looks yet; creating
the manifest makes the version visible, whole; the baseline moves after that. A publisher that dies anywhere
leaves the lineage at the version before or at this one.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self, get_args

from slackwater.bucket.base import Bucket
from slackwater.bucket.open import probe
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.clock import Clock, SystemClock
from slackwater.errors import InternalError, InvalidInputError
from slackwater.ids import Version, run_id
from slackwater.publish.background import Background, Handle, Withdrawal
from slackwater.publish.baseline import Baseline, MemoryStore, check_unwritten
from slackwater.publish.commit import Signs, commit, encode_checked, write_hint
from slackwater.publish.delta import Progress, tell_nobody
from slackwater.publish.draft import Draft, Label, draft_anchor, draft_delta
from slackwater.publish.mapped import MappedStore
from slackwater.publish.plan import check_config, check_fits, check_side_files, decide
from slackwater.publish.published import Published as Published  # noqa: PLC0414 (a part of this interface)
from slackwater.publish.published import report
from slackwater.publish.restore import Restored
from slackwater.publish.upload import Uploads
from slackwater.weights.image import CONFIG, FolderImage, take_image
from slackwater.weights.source import Follows, TensorSource

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A version of which everything is read: its draft, or the image that an anchor is drafted from."""

    label: Label
    held: Restored | None
    """What it follows."""
    draft: Draft | None = None
    image: FolderImage | None = None
    uploads: Uploads
    began: float

    @property
    def files(self) -> FolderImage:
        """The image.

        Raises:
            InternalError: It is a delta's.
        """
        if self.image is None:
            raise InternalError(f"version {self.label.version} has neither a draft nor an image")
        return self.image


class Publisher:
    """Publishes one lineage's versions. For one thread; holds a copy of the committed weights.

    Args:
        bucket: Where to.
        run: The lineage. Its names are never used again: a new training run takes a new one.
        anchor_every: Versions from one anchor to the next.
        level: ``fast``, or ``wan`` for the fewest bytes: see `slackwater.checkpoint.codec.Level`.
        threads: Threads that encode, and as many that upload.
        baseline_dir: A folder of this publisher's own that holds the committed weights instead of memory, and keeps
            them over a restart: see `slackwater.publish.mapped.MappedStore`.
        signer: Signs each manifest, for readers that trust its key alone: see `slackwater.checkpoint.signature`.
        clock: For the durations in `Published` and the manifest's time.
        progress: Told how far it is, from the thread that encodes or uploads.

    Raises:
        InvalidInputError: ``run`` can't name a run, a number is below 1, or the folder is another publisher's.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: str,
        *,
        anchor_every: int = 50,
        level: Level = "fast",
        threads: int = 2,
        baseline_dir: Path | str | None = None,
        signer: Signs | None = None,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> None:
        if min(anchor_every, threads) < 1:
            raise InvalidInputError(f"anchor_every={anchor_every} and threads={threads} are both 1 or more")
        if level not in get_args(Level):
            raise InvalidInputError(f"there is no level {level!r}", hint="take fast, or wan for fewer bytes")
        self._bucket = bucket
        self._run = run_id(run)
        self._anchor_every = anchor_every
        self._level: Level = level
        self._threads = threads
        self._signer = signer
        self._clock: Clock = clock or SystemClock()
        self._progress: Progress = progress or tell_nobody
        memory = MemoryStore(bucket, self._run)
        self._mapped = None if baseline_dir is None else MappedStore(Path(baseline_dir), bucket, self._run, memory)
        self._baseline = Baseline(bucket, self._run, self._mapped or memory)
        self._background = Background[Published]()

    @classmethod
    def open(
        cls,
        bucket: Bucket,
        run: str,
        *,
        anchor_every: int = 50,
        level: Level = "fast",
        threads: int = 2,
        baseline_dir: Path | str | None = None,
        signer: Signs | None = None,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Construct a publisher and read the chain at once, instead of at the first `publish`.

        Raises:
            CorruptError: The chain can't be rebuilt.
            NotFoundError: The chain has no anchor, or the bucket doesn't exist.
        """
        publisher = cls(
            bucket,
            run,
            anchor_every=anchor_every,
            level=level,
            threads=threads,
            baseline_dir=baseline_dir,
            signer=signer,
            clock=clock,
            progress=progress,
        )
        probe(bucket)
        publisher._baseline.sync(with_bits=True)
        return publisher

    def __enter__(self) -> Self:
        """Close it at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    def close(self) -> None:
        """Wait for what is on its way, and publish no more.

        Raises:
            SlackwaterError: What was on its way failed, and its handle hasn't told that.
        """
        try:
            self._background.close()
        finally:
            if self._mapped is not None:
                self._mapped.close()

    @property
    def version(self) -> Version | None:
        """The newest version known to be committed; None before the first."""
        return self._baseline.version

    def held_bits(self, name: str) -> Bits:
        """One tensor as it was last committed, flat. Not to be written. Waits for a version that is on its way.

        Raises:
            NotFoundError: Nothing is committed yet, or there is no such tensor.
        """
        self._background.settle()
        return self._baseline.bits(name)

    def held_specs(self) -> Mapping[str, TensorSpec]:
        """The lineage's tensors as replicas serve them; empty before the first anchor."""
        return self._baseline.specs

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
        self._background.take_turn()
        withdrawal = Withdrawal()
        return self._finish(self._begin(source, step, folder_files, withdrawal, anchor=anchor), withdrawal, source)

    def publish_async(
        self, source: TensorSource, *, step: int, folder_files: Path | str | None = None, anchor: bool = False
    ) -> Handle[Published]:
        """Publish the next version in the background. The source may be written once this returns.

        A delta is encoded before this returns, in one pass over the source, and an anchor copied; uploads begin
        meanwhile. Waits for the version before, if that is still on its way.

        Args:
            source: As for `publish`.
            step: As for `publish`.
            folder_files: As for `publish`.
            anchor: As for `publish`.

        Returns:
            Tells when the version is committed, or why it isn't.

        Raises:
            InvalidInputError: The source doesn't fit the lineage, or can be published by `publish` alone.
            SlackwaterError: The version before failed, and its handle hasn't told that.
        """
        if isinstance(source, Follows):
            raise InvalidInputError(
                "this source takes over what was committed, so it must not be written before that",
                hint="use publish(), or publish a StateDictSource in the background",
            )
        self._background.take_turn()
        withdrawal = Withdrawal()
        work = self._begin(source, step, folder_files, withdrawal, anchor=anchor)
        return self._background.start(lambda: self._finish(work, withdrawal, None), withdrawal)

    def _begin(
        self,
        source: TensorSource,
        step: int,
        folder_files: Path | str | None,
        withdrawal: Withdrawal,
        *,
        anchor: bool,
    ) -> _Work:
        """All that reads the source: a delta is encoded, an anchor copied."""
        if step < 0:
            raise InvalidInputError(f"step {step} is below 0")
        self._baseline.sync(with_bits=not anchor)
        held, began = self._baseline.held, self._clock.monotonic()
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
        uploads = Uploads(self._bucket, threads=self._threads, check=withdrawal.check)
        with uploads.or_stop():
            if held is None or kind == "anchor":
                image = take_image(source, None if folder_files is None else Path(folder_files))
                check_config(image.files[CONFIG], source.specs())
                return _Work(label=label, held=held, image=image, uploads=uploads, began=began)
            draft = self._draft_delta(label, source, held, uploads)
            return _Work(label=label, held=held, draft=draft, uploads=uploads, began=began)

    def _draft_delta(self, label: Label, source: TensorSource, held: Restored, uploads: Uploads) -> Draft:
        absent = sorted(held.table.outline.by_name.keys() - source.specs().keys())
        if absent:
            _LOG.warning("%d tensors are absent and stay as they are, %s among them", len(absent), absent[0])
        return draft_delta(
            label,
            source,
            held.table,
            held.bits,
            level=self._level,
            threads=self._threads,
            put=uploads.put,
            progress=self._progress,
        )

    def _finish(self, work: _Work, withdrawal: Withdrawal, source: TensorSource | None) -> Published:
        """All that doesn't: the last uploads, the commit, and the baseline's move.

        Args:
            work: What was begun.
            withdrawal: Asked before the commit.
            source: What was read, where it hasn't been written since.
        """
        with work.uploads.or_stop():
            draft = work.draft or self._draft_anchor(work)
            encoded = self._clock.monotonic()
            body = encode_checked(draft.manifest)
            work.uploads.finish(self._progress)
        withdrawal.begin_commit()
        with self._baseline.committing():
            commit(self._bucket, draft.manifest, body, self._signer)
        done = self._clock.monotonic()
        self._move(work, draft, source)
        write_hint(self._bucket, self._run, draft.manifest.version)
        return report(draft.manifest, draft.table, len(body), encode_s=encoded - work.began, upload_s=done - encoded)

    def _draft_anchor(self, work: _Work) -> Draft:
        draft = draft_anchor(work.label, work.files, threads=self._threads)
        if work.held is not None:
            check_side_files(work.held.side_files, draft.manifest.side_files)
        for ref in draft.manifest.objects:
            work.uploads.put(ref, draft.bodies[ref.key])
        return draft

    def _move(self, work: _Work, draft: Draft, source: TensorSource | None) -> None:
        if work.held is None or work.image is not None:
            image = work.files
            self._baseline.replace(draft.manifest, draft.table, {name: image.bits(name) for name in image.specs()})
        else:
            if isinstance(source, Follows):
                with self._baseline.moving():
                    check_unwritten(draft.manifest, draft.table.outline, source)
            self._baseline.advance(work.held, draft, draft.table)
        if isinstance(source, Follows):
            source.committed(draft.manifest.version)
