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
from slackwater.checkpoint.canary import Canary
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.clock import Clock, SystemClock
from slackwater.errors import InvalidInputError
from slackwater.ids import Version, run_id
from slackwater.publish.anchor import send_anchor
from slackwater.publish.background import ROOM_BYTES, Background, Handle, Withdrawal, check_may_wait
from slackwater.publish.baseline import Baseline, MemoryStore, check_unwritten
from slackwater.publish.commit import Committer, Signs, encode_checked
from slackwater.publish.delta import Effort, Progress, tell_nobody
from slackwater.publish.draft import DeltaDraft, Draft, Label
from slackwater.publish.folding import Folding
from slackwater.publish.hint import HintWriter
from slackwater.publish.mapped import MappedStore
from slackwater.publish.model_files import fitting_canary, folder_of, read_model_files
from slackwater.publish.plan import (
    Anchors,
    check_config,
    check_fits,
    check_side_files,
    check_step,
    decide,
)
from slackwater.publish.published import Published as Published  # noqa: PLC0414 (a part of this interface)
from slackwater.publish.published import report
from slackwater.publish.restore import Restored, tip_before
from slackwater.publish.upload import Uploads
from slackwater.weights.completed import CompletedSource
from slackwater.weights.file_digests import FileDigests
from slackwater.weights.image import CONFIG, FolderImage, take_image
from slackwater.weights.source import Follows, TensorSource, pieces_of, side_files

_LOG: Final = logging.getLogger(__name__)
_TOKENIZERS: Final = ("tokenizer", "vocab", "tiktoken", "spiece")
"""How the names of files begin of which a model has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What a call asks for."""

    source: TensorSource
    step: int
    folder: Path | None
    canary: Canary | None
    is_anchor: bool
    room: int | None
    """See `slackwater.publish.delta.Effort.room`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A version of which everything is read: what a delta holds of it, or the image that an anchor is drafted from."""

    label: Label
    held: Restored | None
    """What it follows."""
    is_forced: bool
    """An anchor that was asked for: nothing that is in the bucket is trusted."""
    read: DeltaDraft | FolderImage
    uploads: Uploads
    began: float


class Publisher:
    """Publishes one lineage's versions. For one thread; holds a copy of the committed weights.

    Args:
        bucket: Where to.
        run: The lineage. Its names are never used again: a new training run takes a new one.
        anchor_every: Versions from one anchor to the next, at most.
        anchor_share: Bytes of deltas since an anchor, as a share of the model's, after which the next one comes.
        level: ``fast``, or ``wan`` for the fewest bytes: see `slackwater.checkpoint.codec.Level`.
        threads: Threads that encode, and as many that upload.
        baseline_dir: A folder of this publisher's own that holds the committed weights instead of memory, and keeps
            them over a restart: see `slackwater.publish.mapped.MappedStore`.
        fold_every: Make folds in the background, for late joiners: see `slackwater.publish.folding.due_folds`. Each one
            reads its versions from the bucket, and takes two models on the disk meanwhile. None makes none.
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
        anchor_share: float = 2.0,
        level: Level = "fast",
        threads: int = 2,
        baseline_dir: Path | str | None = None,
        fold_every: int | None = None,
        signer: Signs | None = None,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> None:
        if threads < 1:
            raise InvalidInputError(f"threads={threads} must be 1 or more")
        if level not in get_args(Level):
            raise InvalidInputError(f"there is no level {level!r}", hint="take fast, or wan for fewer bytes")
        self._bucket = bucket
        self._run = run_id(run)
        self._anchors = Anchors(every=anchor_every, share=anchor_share)
        self._level: Level = level
        self._threads = threads
        self._clock: Clock = clock or SystemClock()
        self._committer = Committer(bucket, signer, self._clock)
        self._progress: Progress = progress or tell_nobody
        memory = MemoryStore(bucket, self._run)
        self._mapped = None if baseline_dir is None else MappedStore(Path(baseline_dir), bucket, self._run, memory)
        self._baseline = Baseline(bucket, self._run, self._mapped or memory)
        self._digests = FileDigests()
        self._hint = HintWriter(bucket, self._run, self._clock)
        self._folding = (
            None if fold_every is None else Folding(bucket, self._run, every=fold_every, level=level, signer=signer)
        )
        self._background = Background[Published]()

    @classmethod
    def open(
        cls,
        bucket: Bucket,
        run: str,
        *,
        anchor_every: int = 50,
        anchor_share: float = 2.0,
        level: Level = "fast",
        threads: int = 2,
        baseline_dir: Path | str | None = None,
        fold_every: int | None = None,
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
            anchor_share=anchor_share,
            level=level,
            threads=threads,
            baseline_dir=baseline_dir,
            fold_every=fold_every,
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """See `close`. Where the block failed no more folds are made."""
        if kind is not None and self._folding is not None:
            self._folding.close()
        self.close()

    def close(self) -> None:
        """Wait for what is on its way, folds that are due included, and publish no more.

        Raises:
            SlackwaterError: What was on its way failed, and its handle hasn't told that.
        """
        try:
            self._background.close()
        finally:
            self._hint.flush()
            if self._folding is not None:
                self._folding.wait()
                self._folding.close()
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
        self,
        source: TensorSource,
        *,
        step: int,
        folder_files: Path | str | None = None,
        anchor: bool = False,
        canary: Canary | None = None,
    ) -> Published:
        """Publish the next version; it is committed when this returns.

        Args:
            source: The weights in the serving dtype, not to be written until this returns. In a delta,
                tensors that it lacks are unchanged.
            step: The trainer's step, for people; 0 or more.
            folder_files: A model folder that gives an anchor its config, tokenizer and chat template; a
                `FolderSource` has its own.
            anchor: Publish an anchor now. The first version is one anyway, and every ``anchor_every``-th.
            canary: What replicas have to compute with these weights.

        Raises:
            InvalidInputError: The source doesn't fit the lineage, or was written meanwhile; or the canary has a token
                id that the folder's config doesn't.
            ConflictError: The bucket was set back under this publisher: nothing is committed.
            UnsupportedError: The store ignores create-if-absent; a first version is committed all the same.
            LostRaceError: Another publisher committed this version; it stays so for this publisher.
            UnavailableError: The bucket doesn't answer. If the commit itself was not answered, the next call
                reads the chain to learn whether it happened.
        """
        self._background.take_turn()
        withdrawal = Withdrawal()
        wanted = _wanted(source, step, folder_files, canary, is_anchor=anchor, room=None)
        return self._finish(self._begin(wanted, withdrawal), withdrawal, source)

    def publish_async(
        self,
        source: TensorSource,
        *,
        step: int,
        folder_files: Path | str | None = None,
        anchor: bool = False,
        canary: Canary | None = None,
    ) -> Handle[Published]:
        """Publish the next version in the background. The source may be written once this returns.

        What changed is taken before this returns, in one pass over the source, and an anchor copied. Changes of more
        than `ROOM_BYTES` are encoded, and begin to be sent, meanwhile. Waits for the version before, if that is still
        on its way.

        Args:
            source: As for `publish`.
            step: As for `publish`.
            folder_files: As for `publish`.
            anchor: As for `publish`.
            canary: As for `publish`.

        Returns:
            Tells when the version is committed, or why it isn't.

        Raises:
            InvalidInputError: The source doesn't fit the lineage, or can be published by `publish` alone.
            SlackwaterError: The version before failed, and its handle hasn't told that.
        """
        check_may_wait(source)
        self._background.take_turn()
        withdrawal = Withdrawal()
        wanted = _wanted(source, step, folder_files, canary, is_anchor=anchor, room=ROOM_BYTES)
        work = self._begin(wanted, withdrawal)
        return self._background.start(lambda: self._finish(work, withdrawal, None), withdrawal)

    def _begin(self, wanted: _Wanted, withdrawal: Withdrawal) -> _Work:
        """All that reads the source: an anchor is copied, and of a delta what changed."""
        _check_whole(wanted.source)
        self._baseline.sync(with_bits=not wanted.is_anchor)
        held, began = self._baseline.held, self._clock.monotonic()
        kind = decide(self._anchors, None if held is None else held.since, forced=wanted.is_anchor)
        if held is not None:  # an anchor in turn takes over what it lacks; a forced one trusts nothing that is there
            check_fits("anchor" if wanted.is_anchor else "delta", self.held_specs(), wanted.source.specs())
        label = Label(
            run=self._run,
            version=Version(0 if held is None else held.version + 1),
            step=wanted.step,
            created_at=datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(),
            canary=wanted.canary,
        )
        uploads = Uploads(self._bucket, threads=self._threads, check=withdrawal.check)
        with uploads.or_stop():
            if held is None or kind == "anchor":
                read = self._take_image(wanted, held)
            else:
                read = self._compare(wanted, label, held, uploads)
            return _Work(
                label=label, held=held, is_forced=wanted.is_anchor, read=read, uploads=uploads, began=began
            )  # fmt: skip

    def _take_image(self, wanted: _Wanted, held: Restored | None) -> FolderImage:
        source = wanted.source
        files = read_model_files(self._bucket, source, wanted.folder, held)
        if held is not None and _tell_absent(self.held_specs(), source.specs()):
            source = CompletedSource(source, self.held_specs(), self._baseline.bits)
        image = take_image(source, files)
        if held is None and not any(name.startswith(_TOKENIZERS) for name in image.files):
            _LOG.warning("run %s has no tokenizer, and all its versions have the files of this anchor", self._run)
        check_config(image.files[CONFIG], source.specs())
        return image

    def _compare(self, wanted: _Wanted, label: Label, held: Restored, uploads: Uploads) -> DeltaDraft:
        _tell_absent(self.held_specs(), wanted.source.specs())
        folder = folder_of(wanted.source, wanted.folder)
        if folder is not None:
            check_side_files(held.side_files, self._digests.of(side_files(folder)))
        effort = Effort(level=self._level, threads=self._threads, room=wanted.room)
        draft = DeltaDraft(
            label, wanted.source, held.table, held.bits, effort=effort, put=uploads.put, progress=self._progress
        )  # fmt: skip
        return draft.read()

    def _finish(self, work: _Work, withdrawal: Withdrawal, source: TensorSource | None) -> Published:
        """All that doesn't: the last uploads, the commit, and the baseline's move.

        Args:
            work: What was begun.
            withdrawal: Asked before the commit.
            source: What was read, where it hasn't been written since.
        """
        with work.uploads.or_stop():
            draft = self._draft(work)
            encoded = self._clock.monotonic()
            body = encode_checked(draft.manifest)
            work.uploads.finish(self._progress)
        withdrawal.begin_commit()
        with self._baseline.committing():
            self._committer.commit(draft.manifest, body, after=tip_before(work.held, is_forced=work.is_forced))
        done = self._clock.monotonic()
        self._move(work, draft, source)
        self._tell(draft.manifest.version)
        return report(draft.manifest, draft.table, len(body), encode_s=encoded - work.began, upload_s=done - encoded)

    def _draft(self, work: _Work) -> Draft:
        if not isinstance(work.read, FolderImage):
            return work.read.finish()
        return send_anchor(
            self._bucket, work.label, work.read, work.held, work.uploads,
            is_forced=work.is_forced, threads=self._threads,
        )  # fmt: skip

    def _tell(self, version: Version) -> None:
        """Let readers know of a committed version."""
        self._hint.wrote(version)
        if self._folding is not None and self._baseline.held is not None:
            self._folding.committed(version, self._baseline.held.anchor)

    def _move(self, work: _Work, draft: Draft, source: TensorSource | None) -> None:
        image = work.read
        if isinstance(image, FolderImage):
            self._baseline.replace(draft.manifest, draft.table, {name: image.bits(name) for name in image.specs()})
        elif work.held is not None:
            if isinstance(source, Follows):
                with self._baseline.moving():
                    check_unwritten(draft.manifest, draft.table.outline, source)
            self._baseline.advance(work.held, draft, draft.table, draft.manifest.num_bytes)
        if isinstance(source, Follows):
            source.committed(draft.manifest.version)


def _tell_absent(held: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> bool:
    """Whether a source lacks tensors."""
    absent = sorted(held.keys() - new.keys())
    if absent:
        _LOG.warning("absent tensors stay as they are: %d, %s among them", len(absent), absent[0])
    return bool(absent)


def _check_whole(source: TensorSource) -> None:
    for name in pieces_of(source):
        raise InvalidInputError(
            f"a single publisher was given a piece of {name}",
            hint="publish pieces with slackwater.publish.ranks.RankPublisher, on all ranks together",
        )


def _wanted(
    source: TensorSource,
    step: int,
    folder: Path | str | None,
    canary: Canary | None,
    *,
    is_anchor: bool,
    room: int | None,
) -> _Wanted:
    if not isinstance(source, TensorSource):  # pyright: ignore[reportUnnecessaryIsInstance] : a caller's slip
        raise InvalidInputError(
            f"{type(source).__name__} is no source of tensors", hint="wrap a state dict: StateDictSource(tensors)"
        )
    return _Wanted(
        source=source,
        step=check_step(step),
        folder=None if folder is None else Path(folder),
        canary=fitting_canary(canary, folder_of(source, folder)),
        is_anchor=is_anchor,
        room=room,
    )
