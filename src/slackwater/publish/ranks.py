"""A version published by all ranks of a trainer: each one compares, encodes and uploads its own tensors.

No weight moves between ranks, only manifests. Rank 0 merges them and commits; each rank moves its own baseline once it
has been told so. Where any rank fails nobody commits, and all of them raise.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from slackwater.bucket.base import Bucket
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key
from slackwater.checkpoint.manifest import Manifest, ObjectRef
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.shards import Shard, build_index, build_shard, cut_shards
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.clock import Clock, SystemClock
from slackwater.errors import InvalidInputError, LostRaceError, SlackwaterError
from slackwater.ids import RunId, Version, run_id
from slackwater.publish.baseline import Baseline, check_unwritten
from slackwater.publish.commit import commit, encode_checked, write_hint
from slackwater.publish.delta import Progress, tell_nobody
from slackwater.publish.draft import Draft, Label, draft_anchor, draft_delta
from slackwater.publish.exchange import Exchange
from slackwater.publish.mapped import MappedStore
from slackwater.publish.merge import check_shares, merge_anchors, merge_deltas
from slackwater.publish.part import PartStore
from slackwater.publish.plan import check_config, check_fits, check_side_files, decide
from slackwater.publish.published import Published, report
from slackwater.publish.restore import Restored
from slackwater.publish.upload import Uploads
from slackwater.weights.image import CONFIG, FolderImage
from slackwater.weights.source import INDEX_FILE, FolderSource, Follows, TensorSource, side_files


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to other ranks."""

    kind: str
    message: str
    hint: str = ""
    is_unsure: bool = False
    """Whether the commit may have happened all the same."""

    def error(self) -> SlackwaterError:
        """The error as it is raised there."""
        return _kinds().get(self.kind, SlackwaterError)(self.message, hint=self.hint)


class _Turn(msgspec.Struct, frozen=True):
    """What rank 0 decides for all."""

    head: Version | None = None
    label: tuple[int, str] = (0, "")
    """Step and time."""
    anchor: bool = False
    anchor_every: int = 1
    failure: Failure | None = None


class _Part(msgspec.Struct, frozen=True):
    """What a rank has ready."""

    manifest: Manifest | None = None
    names: tuple[str, ...] = ()
    failure: Failure | None = None


class _Outcome(msgspec.Struct, frozen=True):
    """What became of it."""

    manifest: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None


_STOPPED: Final = Failure(kind=SlackwaterError.kind, message="it stopped without telling why; see its log")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A rank's part, uploaded."""

    held: Restored | None
    draft: Draft
    image: Mapping[str, Bits] | None
    """An anchor's bits."""


class RankPublisher:
    """One rank's publisher of a lineage. Every rank makes the same calls; each holds a copy of its own tensors.

    A rank owns whole tensors, and whole groups of them: `slackwater.publish.merge.share_out` deals them out. Tensors
    that a trainer keeps in pieces are put together by their owner first.

    Args:
        bucket: Where to; each rank opens it itself.
        run: The lineage.
        rank: This rank, from 0.
        world: How many there are.
        exchange: How they talk.
        anchor_every: Versions from one anchor to the next; rank 0's counts.
        level: As for `slackwater.publish.publisher.Publisher`.
        threads: As there, for each rank.
        baseline_dir: As there; each rank has a folder ``rank-<rank>`` in it.
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
        level: Level = "fast",
        threads: int = 2,
        baseline_dir: Path | str | None = None,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> None:
        if min(anchor_every, threads, world) < 1 or not 0 <= rank < world:
            raise InvalidInputError(
                f"rank={rank} of world={world} with anchor_every={anchor_every} and threads={threads}: a rank is below "
                "world, and the others are 1 or more"
            )
        self._bucket: Final = bucket
        self._run: Final[RunId] = run_id(run)
        self._rank: Final = rank
        self._exchange: Final = exchange
        self._anchor_every: Final = anchor_every
        self._level: Final[Level] = level
        self._threads: Final = threads
        self._clock: Final[Clock] = clock or SystemClock()
        self._progress: Final[Progress] = progress or tell_nobody
        memory = PartStore(bucket, self._run)
        folder = None if baseline_dir is None else Path(baseline_dir) / f"rank-{rank}"
        self._mapped: Final = None if folder is None else MappedStore(folder, bucket, self._run, memory)
        self._baseline: Final = Baseline(bucket, self._run, self._mapped or memory)

    @property
    def version(self) -> Version | None:
        """The newest version known to be committed; None before the first."""
        return self._baseline.version

    def held_bits(self, name: str) -> Bits:
        """One of this rank's tensors as it was last committed, flat. Not to be written.

        Raises:
            NotFoundError: Nothing is committed yet, or there is no such tensor here.
        """
        return self._baseline.bits(name)

    def held_specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of all ranks; empty before the first anchor."""
        return self._baseline.specs

    def close(self) -> None:
        """Let another publisher have the baseline's folder."""
        if self._mapped is not None:
            self._mapped.close()

    def publish(
        self, source: TensorSource, *, step: int, folder_files: Path | str | None = None, anchor: bool = False
    ) -> Published:
        """Publish the next version, with all other ranks; it is committed when this returns.

        Args:
            source: This rank's tensors, in the serving dtype: all that it owns, each time.
            step: The trainer's step; rank 0's counts.
            folder_files: Rank 0's model folder, which gives an anchor its config, tokenizer and chat template.
            anchor: Publish an anchor now; rank 0's counts.

        Raises:
            InvalidInputError: A source doesn't fit the lineage, or the ranks' tensors aren't together the model, or
                this source can be published by a single rank alone.
            LostRaceError: Another publisher committed this version.
            UnavailableError: The bucket doesn't answer, or a rank is gone.
            SlackwaterError: What another rank failed of.
        """
        began = self._clock.monotonic()
        turn = self._agree(step, anchor=anchor)
        part, work, failed = _Part(failure=_STOPPED), None, None
        try:
            work = self._begin(source, turn, folder_files)
            part = _Part(manifest=work.draft.manifest, names=tuple(source.specs()))
        except SlackwaterError as error:
            failed, part = error, _Part(failure=_failure(error))
        finally:  # whatever happened: the others wait
            encoded = self._clock.monotonic()
            outcome = self._settle(part, work)
        if failed is not None:
            raise failed
        if work is None or outcome.failure is not None:
            raise (outcome.failure or _STOPPED).error()
        done = self._clock.monotonic()
        manifest, table = self._move(work, body := bytes(outcome.manifest), source)
        return report(manifest, table, len(body), encode_s=encoded - began, upload_s=done - encoded)

    def _agree(self, step: int, *, anchor: bool) -> _Turn:
        """What rank 0 knows of the chain, and wants."""
        sent = None
        if self._rank == 0:
            turn = _Turn(failure=_STOPPED)
            try:
                turn = self._propose(step, anchor=anchor)
            except SlackwaterError as error:
                turn = _Turn(failure=_failure(error))
            finally:
                sent = self._exchange.broadcast(msgspec.json.encode(turn))
        turn = msgspec.json.decode(sent or self._exchange.broadcast(None), type=_Turn)
        if turn.failure is not None:
            raise turn.failure.error()
        return turn

    def _propose(self, step: int, *, anchor: bool) -> _Turn:
        if step < 0:
            raise InvalidInputError(f"step {step} is below 0")
        created_at = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat()
        head = self._baseline.find_head()
        return _Turn(head=head, label=(step, created_at), anchor=anchor, anchor_every=self._anchor_every)

    def _begin(self, source: TensorSource, turn: _Turn, folder_files: Path | str | None) -> _Work:
        """All that is this rank's own: compare, encode, upload."""
        self._baseline.sync_to(turn.head, frozenset(source.specs()), with_bits=not turn.anchor)
        held = self._baseline.held
        since = None if held is None else held.version - held.anchor
        kind = decide(anchor_every=turn.anchor_every, since_anchor=since, forced=turn.anchor)
        if held is not None:  # that all of them are there is seen once all ranks' are together
            check_fits("delta", self.held_specs(), source.specs())
        step, created_at = turn.label
        version = Version(0 if held is None else held.version + 1)
        label = Label(run=self._run, version=version, step=step, created_at=created_at)
        uploads = Uploads(self._bucket, threads=self._threads, check=_go_on)
        with uploads.or_stop():
            if held is None or kind == "anchor":
                image = self._image(source, folder_files)
                draft = draft_anchor(label, image, threads=self._threads)
                for ref in draft.manifest.objects:
                    uploads.put(ref, draft.bodies[ref.key])
                bits = {name: image.bits(name) for name in image.specs()}
            else:
                bits = None
                draft = self._draft_delta(label, source, held, uploads)
            uploads.finish(self._progress)
        return _Work(held=held, draft=draft, image=bits)

    def _draft_delta(self, label: Label, source: TensorSource, held: Restored, uploads: Uploads) -> Draft:
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

    def _image(self, source: TensorSource, folder_files: Path | str | None) -> FolderImage:
        """This rank's files: safetensors, and on rank 0 what belongs to the model besides."""
        specs = list(source.specs().values())
        shards = [
            Shard(file=f"model-rank{self._rank:05d}-{index:05d}.safetensors", specs=shard.specs)
            for index, shard in enumerate(cut_shards(specs) if specs else ())
        ]
        others = self._side_files(source, folder_files) if self._rank == 0 else {}
        return FolderImage(shards={shard.file: build_shard(shard, source) for shard in shards}, others=others)

    def _side_files(self, source: TensorSource, folder_files: Path | str | None) -> Mapping[str, bytes]:
        folder = source.folder if folder_files is None and isinstance(source, FolderSource) else folder_files
        if folder is None:
            raise InvalidInputError(
                "an anchor needs a config and a tokenizer, and the tensors come without a folder",
                hint="pass folder_files=<a folder with config.json and the tokenizer> on rank 0",
            )
        others = {file: path.read_bytes() for file, path in side_files(Path(folder)).items()}
        if CONFIG not in others:
            raise InvalidInputError(f"an anchor needs a {CONFIG}", hint="name a whole Hugging Face model folder")
        return others

    def _settle(self, part: _Part, work: _Work | None) -> _Outcome:
        """Learn what became of the version; nobody commits unless all ranks have told that they are ready."""
        with self._baseline.committing():
            gathered = self._exchange.gather(msgspec.json.encode(part))
            sent = None
            if gathered is not None:
                outcome = _Outcome(failure=_STOPPED)
                try:
                    outcome = self._commit([msgspec.json.decode(each, type=_Part) for each in gathered], work)
                except SlackwaterError as error:
                    outcome = _Outcome(failure=_failure(error))
                finally:
                    sent = self._exchange.broadcast(msgspec.json.encode(outcome))
            outcome = msgspec.json.decode(sent or self._exchange.broadcast(None), type=_Outcome)
            if outcome.failure is not None and outcome.failure.is_unsure:
                raise outcome.failure.error()
        return outcome

    def _commit(self, parts: list[_Part], work: _Work | None) -> _Outcome:
        for rank, part in enumerate(parts):
            if part.failure is not None:
                raise msgspec.structs.replace(
                    part.failure, message=f"rank {rank} failed: {part.failure.message}"
                ).error()
        manifests = [part.manifest for part in parts if part.manifest is not None]
        if work is None or len(manifests) != len(parts):
            raise _STOPPED.error()
        held = work.held
        check_shares([part.names for part in parts], None if held is None else held.table.outline.by_name)
        if held is None or work.image is not None:
            manifest = self._merge_anchors(manifests, work)
        else:
            manifest = merge_deltas(held.table, manifests)
        body = encode_checked(manifest)
        try:
            commit(self._bucket, manifest, body)
        except SlackwaterError as error:
            unsure = not isinstance(error, LostRaceError)
            return _Outcome(failure=msgspec.structs.replace(_failure(error), is_unsure=unsure))
        write_hint(self._bucket, self._run, manifest.version)
        return _Outcome(manifest=msgspec.Raw(body))

    def _merge_anchors(self, manifests: list[Manifest], work: _Work) -> Manifest:
        specs = {tensor.name: tensor.spec for manifest in manifests for tensor in manifest.tensors}
        config = manifests[0].objects[manifests[0].files[CONFIG]].key
        check_config(work.draft.bodies[config], specs)
        if work.held is not None:
            check_side_files(work.held.side_files, manifests[0].side_files)
        index = build_index([shard for manifest in manifests for shard in _shards(manifest)])
        digest = object_digest(index)
        key = anchor_key(self._run, manifests[0].version, hashlib.sha256(digest.encode()).hexdigest()[:16], INDEX_FILE)
        ref = ObjectRef(key=key, size=len(index), sha256=digest)
        self._bucket.put(key, index)
        return merge_anchors(manifests, {INDEX_FILE: ref})

    def _move(self, work: _Work, body: bytes, source: TensorSource) -> tuple[Manifest, StateTable]:
        manifest = decode_manifest(body)
        if work.held is None or work.image is not None:
            table = StateTable.of_anchor(manifest)
            self._baseline.replace(manifest, table, work.image or {})
        else:
            if isinstance(source, Follows):
                with self._baseline.moving():
                    check_unwritten(work.draft.manifest, work.held.table.outline, source)
            table = work.held.table.after(manifest)
            self._baseline.advance(work.held, work.draft, table)
        if isinstance(source, Follows):
            source.committed(manifest.version)
        return manifest, table


def _go_on() -> None:
    """Nobody takes a version back that all ranks are at."""


def _shards(anchor: Manifest) -> list[Shard]:
    """What a rank's files hold."""
    files = {index: file for file, index in anchor.files.items()}
    return [
        Shard(file=files[index], specs=tuple(t.spec for t in anchor.tensors if t.object == index))
        for index in sorted({tensor.object for tensor in anchor.tensors})
    ]


def _failure(error: SlackwaterError) -> Failure:
    return Failure(kind=error.kind, message=error.message, hint=error.hint)


def _kinds() -> Mapping[str, type[SlackwaterError]]:
    """The error tree by machine code."""
    found: dict[str, type[SlackwaterError]] = {}
    waiting: list[type[SlackwaterError]] = [SlackwaterError]
    while waiting:
        kind = waiting.pop()
        found.setdefault(kind.kind, kind)
        waiting += kind.__subclasses__()
    return found
