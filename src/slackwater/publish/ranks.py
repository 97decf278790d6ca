"""A version published by all ranks of a trainer: each one compares, encodes and uploads its own tensors, or pieces.

No weight moves between ranks, only manifests; for an anchor alone, pieces are brought together at rank 0, which merges
the manifests and commits. Each rank moves its own baseline once it has been told so. Where any rank fails nobody
commits, and all of them raise.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from slackwater.bucket.base import Bucket
from slackwater.checkpoint.canary import Canary
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key
from slackwater.checkpoint.manifest import Manifest, ObjectRef
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.clock import Clock, SystemClock
from slackwater.errors import InternalError, InvalidInputError, LostRaceError, SlackwaterError
from slackwater.ids import RunId, Version, run_id
from slackwater.publish.agreement import agree, check_none_failed, tell
from slackwater.publish.anchor import send_anchor
from slackwater.publish.background import ROOM_BYTES, Background, Handle, Withdrawal, check_may_wait
from slackwater.publish.baseline import Baseline, check_unwritten
from slackwater.publish.commit import Committer, Signs, encode_checked
from slackwater.publish.delta import Effort, Progress, tell_nobody
from slackwater.publish.draft import DeltaDraft, Draft, Label
from slackwater.publish.exchange import Exchange
from slackwater.publish.gather import Gathering, plan_gathers
from slackwater.publish.hint import HintWriter
from slackwater.publish.mapped import MappedStore
from slackwater.publish.merge import check_shares, merge_anchors, merge_deltas
from slackwater.publish.model_files import fitting_canary, folder_of, read_model_files
from slackwater.publish.part import PartStore
from slackwater.publish.plan import Anchors, check_config, check_fits, check_step, decide
from slackwater.publish.published import Published, report
from slackwater.publish.rank_files import index_of, take_rank_image
from slackwater.publish.restore import Restored, tip_before
from slackwater.publish.turn import STOPPED, Failure, Offer, Outcome, Part, Plan, Turn
from slackwater.publish.upload import Uploads
from slackwater.weights.image import CONFIG, FolderImage
from slackwater.weights.source import INDEX_FILE, Follows, TensorSource, pieces_of


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arranged:
    """What ranks have agreed on."""

    turn: Turn
    plan: Plan
    mine: Offer
    all: Sequence[Offer]
    """By rank; on rank 0 alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A rank's part, of which everything is read."""

    label: Label
    held: Restored | None
    is_forced: bool
    """An anchor that was asked for: nothing that is in the bucket is trusted."""
    read: DeltaDraft | FolderImage
    offer: Offer
    """The rank's tensors and pieces."""
    kept: Mapping[str, Bits]
    """Of an anchor, the rank's pieces."""
    uploads: Uploads


@dataclass(frozen=True, kw_only=True, slots=True)
class _Started:
    """A version that all ranks are at: this rank's part, or why it has none; neither where it stopped for another."""

    work: _Work | None = None
    failed: SlackwaterError | None = None
    began: float


class RankPublisher:
    """One rank's publisher of a lineage. Every rank makes the same calls; each holds a copy of its own tensors.

    A rank owns whole tensors, and whole groups of them: `slackwater.publish.merge.share_out` deals them out. Tensors
    that a trainer keeps in pieces are published so, by a source that is `slackwater.weights.source.Parted`.

    Args:
        bucket: Where to; each rank opens it itself.
        run: The lineage.
        rank: This rank, from 0.
        world: How many there are.
        exchange: How they talk.
        anchor_every: As for `slackwater.publish.publisher.Publisher`; rank 0's counts.
        anchor_share: As there; rank 0's counts.
        level: As there.
        threads: As there, for each rank.
        baseline_dir: As there; each rank has a folder ``rank-<rank>`` in it.
        signer: As there; rank 0's signs.
        clock: As there.
        progress: As there.

    Raises:
        InvalidInputError: ``run`` can't name a run, a number is out of range, or the folder is another publisher's.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: str,
        rank: int,
        world: int,
        exchange: Exchange,
        *,
        anchor_every: int = 50,
        anchor_share: float = 2.0,
        level: Level = "fast",
        threads: int = 2,
        baseline_dir: Path | str | None = None,
        signer: Signs | None = None,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> None:
        if min(threads, world) < 1 or not 0 <= rank < world:
            raise InvalidInputError(
                f"rank={rank} of world={world} with threads={threads}: a rank is below world, and both are 1 or more"
            )
        self._bucket: Final = bucket
        self._run: Final[RunId] = run_id(run)
        self._rank: Final = rank
        self._exchange: Final = exchange
        self._anchors: Final = Anchors(every=anchor_every, share=anchor_share)
        self._level: Final[Level] = level
        self._threads: Final = threads
        self._clock: Final[Clock] = clock or SystemClock()
        self._progress: Final[Progress] = progress or tell_nobody
        memory = PartStore(bucket, self._run)
        folder = None if baseline_dir is None else Path(baseline_dir) / f"rank-{rank}"
        self._mapped: Final = None if folder is None else MappedStore(folder, bucket, self._run, memory)
        self._baseline: Final = Baseline(bucket, self._run, self._mapped or memory)
        self._background: Final = Background[Published]()
        self._committer: Final = Committer(bucket, signer, self._clock)
        self._hint: Final = HintWriter(bucket, self._run, self._clock)

    @property
    def version(self) -> Version | None:
        """The newest version known to be committed; None before the first."""
        return self._baseline.version

    def held_bits(self, name: str) -> Bits:
        """One of this rank's tensors, or its piece, as last committed, flat. Not to be written.

        Waits for a version on its way.

        Raises:
            NotFoundError: Nothing is committed yet, or there is no such tensor here.
        """
        self._background.settle()
        return self._baseline.bits(name)

    def held_specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of all ranks; empty before the first anchor."""
        return self._baseline.specs

    def close(self) -> None:
        """Wait for what is on its way, publish no more, and let another publisher have the baseline's folder.

        Raises:
            SlackwaterError: What was on its way failed, and its handle hasn't told that.
        """
        try:
            self._background.close()
        finally:
            self._hint.flush()
            if self._mapped is not None:
                self._mapped.close()

    def publish(
        self,
        source: TensorSource,
        *,
        step: int,
        folder_files: Path | str | None = None,
        anchor: bool = False,
        canary: Canary | None = None,
    ) -> Published:
        """Publish the next version, with all other ranks; it is committed when this returns.

        Args:
            source: This rank's tensors, or pieces, in the serving dtype: all that it owns, each time.
            step: The trainer's step; rank 0's counts.
            folder_files: Rank 0's model folder, which gives an anchor its config, tokenizer and chat template.
            anchor: Publish an anchor now; rank 0's counts.
            canary: What replicas have to compute with all ranks' weights; rank 0's counts.

        Raises:
            InvalidInputError: A source doesn't fit the lineage, or the ranks' tensors aren't together the model, or
                a piece ends inside a tile, or this source can be published by a single rank alone.
            ConflictError: The bucket was set back under this publisher: nothing is committed.
            UnsupportedError: The store ignores create-if-absent; a first version is committed all the same.
            LostRaceError: Another publisher committed this version.
            UnavailableError: The bucket doesn't answer, or a rank is gone.
            SlackwaterError: What another rank failed of.
        """
        self._background.take_turn()
        started = self._start(source, step, folder_files, canary, anchor=anchor, room=None)
        return self._finish(started, source)

    def publish_async(
        self,
        source: TensorSource,
        *,
        step: int,
        folder_files: Path | str | None = None,
        anchor: bool = False,
        canary: Canary | None = None,
    ) -> Handle[Published]:
        """Publish the next version in the background, with all other ranks: they call this too.

        The source may be written once this returns, as with `slackwater.publish.publisher.Publisher.publish_async`.
        The ranks talk meanwhile, so the exchange is theirs alone. What goes wrong on any rank is told by all handles.

        Args:
            source: As for `publish`.
            step: As for `publish`.
            folder_files: As for `publish`.
            anchor: As for `publish`.
            canary: As for `publish`.

        Returns:
            Tells when the version is committed, or why it isn't. It can't be cancelled: the others are at it.

        Raises:
            InvalidInputError: The source can be published by `publish` alone.
            SlackwaterError: The version before failed, and its handle hasn't told that; or rank 0 can't begin.
        """
        check_may_wait(source)
        self._background.take_turn()
        withdrawal = Withdrawal()
        withdrawal.begin_commit()
        started = self._start(source, step, folder_files, canary, anchor=anchor, room=ROOM_BYTES)
        return self._background.start(lambda: self._finish(started, None), withdrawal)

    def _start(
        self,
        source: TensorSource,
        step: int,
        folder_files: Path | str | None,
        canary: Canary | None,
        *,
        anchor: bool,
        room: int | None,
    ) -> _Started:
        """Agree on the version and read the source; what that fails of is kept, for the others wait to be told."""
        began = self._clock.monotonic()
        fitting = partial(fitting_canary, canary, folder_of(source, folder_files))
        turn = self._agree(step, fitting, anchor=anchor)
        with ExitStack() as interrupted:
            interrupted.callback(self._settle, Part(failure=STOPPED), None)
            try:
                work = self._begin(source, self._arrange(source, turn), folder_files, room)
                started = _Started(work=work, began=began)
            except SlackwaterError as error:
                started = _Started(failed=error, began=began)
            interrupted.pop_all()
        return started

    def _finish(self, started: _Started, source: TensorSource | None) -> Published:
        """All that doesn't read the source: encode, upload, settle, and move the baseline.

        Args:
            started: What was begun.
            source: What was read, where it hasn't been written since.
        """
        work, failed = started.work, started.failed
        part, draft = Part(), None
        try:
            if work is not None:
                part = Part(failure=STOPPED)
                draft = self._complete(work)
                part = Part(manifest=draft.manifest)
        except SlackwaterError as error:
            failed = error
        finally:  # whatever happened: the others wait
            encoded = self._clock.monotonic()
            outcome = self._settle(part if failed is None else Part(failure=Failure.of(failed)), work)
        if failed is not None:
            raise failed
        if work is None or draft is None or outcome.failure is not None:
            raise (outcome.failure or STOPPED).error()
        done = self._clock.monotonic()
        manifest, table = self._move(work, draft, body := bytes(outcome.manifest), source)
        return report(manifest, table, len(body), encode_s=encoded - started.began, upload_s=done - encoded)

    def _agree(self, step: int, canary: Callable[[], Canary | None], *, anchor: bool) -> Turn:
        """What rank 0 knows of the chain, and wants."""
        propose = (lambda: self._propose(step, canary, anchor=anchor)) if self._rank == 0 else None
        turn = tell(self._exchange, Turn, propose)
        if turn.failure is not None:
            raise turn.failure.error()
        return turn

    def _propose(self, step: int, canary: Callable[[], Canary | None], *, anchor: bool) -> Turn:
        number, checked = check_step(step), canary()
        created_at = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat()
        head = self._baseline.find_head()
        return Turn(head=head, label=(number, created_at), canary=checked, anchor=anchor)

    def _arrange(self, source: TensorSource, turn: Turn) -> _Arranged:
        """Hold the version before, and agree on what all ranks do."""
        offer, failed, heard = Offer(failure=STOPPED), None, list[Offer]()

        def plan(offers: Sequence[Offer]) -> Plan:
            heard.extend(offers)
            return self._plan(offers, turn)

        try:
            offer = self._offer(source, turn)
        except SlackwaterError as error:
            offer, failed = Offer(failure=Failure.of(error)), error
        finally:  # whatever happened: the others wait
            agreed = agree(self._exchange, offer, Plan, plan)
        if failed is not None:
            raise failed
        if agreed.failure is not None:
            raise agreed.failure.error()
        return _Arranged(turn=turn, plan=agreed, mine=offer, all=heard)

    def _offer(self, source: TensorSource, turn: Turn) -> Offer:
        specs, pieces = source.specs(), pieces_of(source)
        self._baseline.sync_to(turn.head, frozenset(specs), pieces, with_bits=not turn.anchor)
        if self._baseline.held is not None:  # that all of them are there is seen once all ranks' are together
            check_fits("delta", self.held_specs(), specs)
        return Offer(
            names=tuple(name for name in specs if name not in pieces),
            pieces=tuple((specs[name], piece) for name, piece in pieces.items()),
        )

    def _plan(self, offers: Sequence[Offer], turn: Turn) -> Plan:
        check_none_failed(offers)
        held = self._baseline.held
        wanted = None if held is None else held.table.outline.by_name
        check_shares([offer.names for offer in offers], wanted, [offer.pieces for offer in offers])
        kind = decide(self._anchors, None if held is None else held.since, forced=turn.anchor)
        return Plan(kind=kind, gathers=plan_gathers(offers) if kind == "anchor" else ())

    def _begin(
        self, source: TensorSource, arranged: _Arranged, folder_files: Path | str | None, room: int | None
    ) -> _Work | None:
        """All that reads this rank's tensors; None where another rank fails of that."""
        with Gathering(self._exchange, arranged.plan.gathers, source, arranged.mine, arranged.all) as gathering:
            held, turn, (step, created_at) = self._baseline.held, arranged.turn, arranged.turn.label
            version = Version(0 if held is None else held.version + 1)
            label = Label(run=self._run, version=version, step=step, created_at=created_at, canary=turn.canary)
            uploads = Uploads(self._bucket, threads=self._threads, check=_go_on)
            with uploads.or_stop():
                if held is None or arranged.plan.kind == "anchor":
                    others = read_model_files(self._bucket, source, folder_files, held) if self._rank == 0 else {}
                    read = take_rank_image(source, arranged.mine.names, gathering, self._rank, others)
                else:
                    read = self._compare(source, label, held, uploads, room)
        if gathering.is_short:
            return None
        return _Work(
            label=label,
            held=held,
            is_forced=turn.anchor,
            read=read,
            offer=arranged.mine,
            kept=gathering.kept,
            uploads=uploads,
        )

    def _compare(
        self, source: TensorSource, label: Label, held: Restored, uploads: Uploads, room: int | None
    ) -> DeltaDraft:
        effort = Effort(level=self._level, threads=self._threads, room=room)
        draft = DeltaDraft(
            label, source, held.table, held.bits, effort=effort, put=uploads.put, progress=self._progress
        )  # fmt: skip
        return draft.read()

    def _complete(self, work: _Work) -> Draft:
        """Upload this rank's part."""
        with work.uploads.or_stop():
            if isinstance(work.read, FolderImage):
                draft = send_anchor(
                    self._bucket, work.label, work.read, work.held, work.uploads,
                    is_forced=work.is_forced, threads=self._threads,
                )  # fmt: skip
            else:
                draft = work.read.finish()
            work.uploads.finish(self._progress)
        return draft

    def _settle(self, part: Part, work: _Work | None) -> Outcome:
        """Learn what became of the version; nobody commits unless all ranks have told that they are ready."""
        with self._baseline.committing():
            outcome = agree(self._exchange, part, Outcome, lambda parts: self._commit(parts, work))
            if outcome.failure is not None and outcome.failure.is_unsure:
                raise outcome.failure.error()
        return outcome

    def _commit(self, parts: Sequence[Part], work: _Work | None) -> Outcome:
        check_none_failed(parts)
        manifests = [part.manifest for part in parts if part.manifest is not None]
        if work is None or len(manifests) != len(parts):
            raise STOPPED.error()
        held, image = work.held, work.read
        if isinstance(image, FolderImage):
            manifest = self._merge_anchors(manifests, image)
        elif held is None:
            raise InternalError("a delta on nothing")
        else:
            manifest = merge_deltas(held.table, manifests)
        body = encode_checked(manifest)
        try:
            self._committer.commit(manifest, body, after=tip_before(held, is_forced=work.is_forced))
        except SlackwaterError as error:
            unsure = not isinstance(error, LostRaceError)
            return Outcome(failure=msgspec.structs.replace(Failure.of(error), is_unsure=unsure))
        self._hint.wrote(manifest.version)
        return Outcome(manifest=msgspec.Raw(body))

    def _merge_anchors(self, manifests: list[Manifest], image: FolderImage) -> Manifest:
        specs = {tensor.name: tensor.spec for manifest in manifests for tensor in manifest.tensors}
        check_config(image.files[CONFIG], specs)
        index = index_of(manifests)
        digest = object_digest(index)
        key = anchor_key(self._run, manifests[0].version, hashlib.sha256(digest.encode()).hexdigest()[:16], INDEX_FILE)
        ref = ObjectRef(key=key, size=len(index), sha256=digest)
        self._bucket.put(key, index)
        return merge_anchors(manifests, {INDEX_FILE: ref})

    def _move(self, work: _Work, draft: Draft, body: bytes, source: TensorSource | None) -> tuple[Manifest, StateTable]:
        manifest, image = decode_manifest(body), work.read
        if isinstance(image, FolderImage):
            table = StateTable.of_anchor(manifest)
            bits = {**{name: image.bits(name) for name in work.offer.names}, **work.kept}
            self._baseline.replace(manifest, table, bits, work.offer.held)
        else:
            table = self._advance(work, draft, manifest, source)
        if isinstance(source, Follows):
            source.committed(manifest.version)
        return manifest, table

    def _advance(self, work: _Work, draft: Draft, manifest: Manifest, source: TensorSource | None) -> StateTable:
        if work.held is None:
            raise InternalError(f"version {manifest.version} is a delta on nothing")
        if isinstance(source, Follows):
            with self._baseline.moving():
                check_unwritten(draft.manifest, work.held.table.outline, source)
        table = work.held.table.after(manifest)
        self._baseline.advance(work.held, draft, table, manifest.num_bytes)
        return table


def _go_on() -> None:
    """Nobody takes a version back that all ranks are at."""
