"""What is damaged of a snapshot: its manifests, its objects, its tensors. It is only read, and all of it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from slackwater.bucket.base import Get
from slackwater.checkpoint.keys import fold_key, manifest_key
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.errors import CorruptError, InvalidInputError, NotFoundError, SlackwaterError, WrongBaseError
from slackwater.ids import RunId, Version
from slackwater.publish.damage import Depth, Report
from slackwater.publish.delta import Progress
from slackwater.publish.history import check_not_collected
from slackwater.publish.lineage import read_manifest
from slackwater.publish.objects import fetch_object
from slackwater.publish.path import Reads, read_fold
from slackwater.publish.proof import Rebuilding, Step, prove_objects
from slackwater.weights.delta_folder import MANIFEST_FILE, OUTLINE_FILE, DeltaFolder
from slackwater.weights.diff import hash_source
from slackwater.weights.patch import Delta, copy_folder, folder_bytes
from slackwater.weights.source import INDEX_FILE, FolderSource
from slackwater.weights.watched import Watched


@dataclass(frozen=True, kw_only=True, slots=True)
class Auditor:
    """How audits are made."""

    depth: Depth
    scratch: Path
    """An empty folder: at the depth ``tensors`` the snapshot is rebuilt in it."""
    threads: int
    progress: Progress
    """Told the stages ``manifests``, ``copy`` and ``objects`` in bytes, ``tensors`` in tiles."""

    def version(self, bucket: Reads, run: RunId, version: Version) -> Report:
        """Check a version, down to its anchor.

        Raises:
            NotFoundError: It was collected, and is no damage.
        """
        report = Report(depth=self.depth)
        with report.until_unavailable(manifest_key(run, version)):
            check_not_collected(bucket, run, version)
            steps, is_whole = self._walk(report, bucket, run, version)
            self._check(report, bucket, steps, is_whole=is_whole)
        return report

    def fold(self, bucket: Get, run: RunId, start: Version, end: Version) -> Report:
        """Check a fold, and the version that it is made on down to its anchor."""
        report = Report(depth=self.depth)
        key = fold_key(run, start, end)
        with report.until_unavailable(key):
            steps, is_whole = self._walk(report, bucket, run, start)
            fold = report.attempt("manifest", key, lambda: read_fold(bucket, run, start, end))
            last = report.attempt("manifest", manifest_key(run, end), lambda: read_manifest(bucket, run, end))
            if fold is not None:
                steps.append(_step(bucket, key, fold))
            fits = fold is None or last is None or fold.state == last.state
            if fold is not None and last is not None and not fits:
                report.note("lineage", key, f"it makes state {fold.state[:12]}, and version {end} is {last.state[:12]}")
            self._check(report, bucket, steps, is_whole=is_whole and fold is not None, fits=fits)
        return report

    def delta(self, path: Path, base: FolderSource | None) -> Report:
        """Check a delta folder.

        Args:
            path: The folder.
            base: The model that it was made on; the depth ``tensors`` needs it.

        Raises:
            InvalidInputError: It is needed and missing.
        """
        if self.depth == "tensors" and base is None:
            raise InvalidInputError(f"without its base no tensor of {path} can be made", hint="name it with --base")
        report = Report(depth=self.depth)
        if not (path / OUTLINE_FILE).is_file():
            report.note("missing", OUTLINE_FILE, "it isn't there: copy the whole delta folder")
            return report
        with report.noting("manifest", MANIFEST_FILE):
            folder = DeltaFolder(path)
            steps = [Step(key=MANIFEST_FILE, delta=Delta(manifest=folder.manifest, pack=folder.pack))]
            if base is None or self.depth != "tensors":
                self._check(report, None, steps, is_whole=False)
            else:
                self._copy(base)
                self._check(report, None, steps, is_whole=True, table=self._read(base))
        return report

    def folder(self, path: Path) -> Report:
        """Check a model folder: its files' headers, and with more depth all its tensors, which gives its state.

        Raises:
            InvalidInputError: There is no such folder.
        """
        if not path.is_dir():
            raise InvalidInputError(f"{path} is no folder", hint="name a model folder or a delta folder")
        report = Report(depth=self.depth)
        with report.noting("object", str(path)):
            source = _open(path)
            report.num_objects = len(source.shards)
            report.num_bytes = Outline(source.specs().values()).num_bytes
            if self.depth != "manifest":
                table = self._read(source)
                report.num_tiles, report.state = table.outline.num_tiles, table.digest
        return report

    def _walk(self, report: Report, bucket: Get, run: RunId, version: Version) -> tuple[list[Step], bool]:
        """Read manifests downwards to an anchor; returns those that can be read, and whether these are all.

        The lowest one that is there may be one that can't be taken, and an anchor: then nothing below it is missed.
        """
        steps: list[Step] = []
        gaps = _Gaps(report)
        for number in map(Version, range(version, -1, -1)):
            key = manifest_key(run, number)
            manifest = gaps.read(key, partial(read_manifest, bucket, run, number))
            if manifest is not None:
                steps.append(_step(bucket, key, manifest))
            self.progress("manifests", version - number + 1, version + 1)
            if manifest is not None and manifest.kind == "anchor":
                return steps[::-1], not report.counts
            if number == version and gaps.held:
                gaps.tell()
                return [], False  # no such version: those below it are not its own
        if not gaps.may_hide_anchor:
            gaps.tell()
            report.note("missing", manifest_key(run, Version(0)), f"no anchor leads to version {version} of {run}")
        return steps[::-1], False

    def _check(
        self,
        report: Report,
        bucket: Get | None,
        steps: Sequence[Step],
        *,
        is_whole: bool,
        fits: bool = True,
        table: StateTable | None = None,
    ) -> None:
        """Follow the manifests, and go as deep as is asked; the last one may have been told of: it doesn't ``fit``."""
        table = _follow(report, steps, table)
        report.num_manifests -= not fits
        is_known = fits and (table is not None or (bucket is None and not report.counts))
        report.state = steps[-1].manifest.state if steps and is_known else None
        if self.depth == "manifest":
            return
        rebuilding = None
        if self.depth == "tensors" and is_whole and table is not None:
            rebuilding = Rebuilding(report, self.scratch, table.outline, self.threads)
            if bucket is None:
                rebuilding.open()
        prove_objects(report, bucket, steps, rebuilding, self.progress)
        if rebuilding is not None and table is not None and report.is_rebuildable:
            rebuilding.compare(table, self.progress)
        if rebuilding is not None:
            rebuilding.tell_miscounted()

    def _read(self, source: FolderSource) -> StateTable:
        return hash_source(Watched(source, partial(self.progress, "read")), threads=self.threads)

    def _copy(self, base: FolderSource) -> None:
        total = folder_bytes(base)
        for done in copy_folder(base, self.scratch):
            self.progress("copy", done, total)


class _Gaps:
    """Manifests read downwards: one that isn't there is missed only once a lower one turns out to be there.

    Args:
        report: Takes what is found.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.held: list[tuple[str, str]] = []
        """What isn't there: keys, and what the bucket says."""
        self.may_hide_anchor = False
        """Whether the last one that was there can't be taken."""

    def read(self, key: str, work: Callable[[], Manifest]) -> Manifest | None:
        """Read one; None where it isn't there, or what is wrong with it was noted."""
        with self._report.noting("manifest", key):
            try:
                manifest = work()
            except NotFoundError as error:
                self.held.append((key, error.message))
                return None
            except SlackwaterError:
                self.tell()
                self.may_hide_anchor = True
                raise
            self.tell()
            self.may_hide_anchor = False
            return manifest
        return None

    def tell(self) -> None:
        """Note what isn't there."""
        for key, what in self.held:
            self._report.note("missing", key, what)
        self.held.clear()


def _open(path: Path) -> FolderSource:
    """A model folder, whose files the audit blames where they don't fit together.

    Raises:
        NotFoundError: It has no safetensors, or lacks one that its index names.
        CorruptError: A file breaks safetensors' rules, or the index names other tensors.
    """
    try:
        return FolderSource(path)
    except InvalidInputError as error:
        lacks = NotFoundError if _lacks_files(path) else CorruptError
        raise lacks(error.message, hint=error.hint) from error


def _lacks_files(path: Path) -> bool:
    """Of a folder that can't be opened, whose index can be read where there is one."""
    index = path / INDEX_FILE
    if not index.is_file():
        return True
    named: set[str] = set(msgspec.json.decode(index.read_bytes())["weight_map"].values())
    return not named or not all((path / name).is_file() for name in named)


def _step(bucket: Get, key: str, manifest: Manifest) -> Step:
    return Step(key=key, delta=Delta(manifest=manifest, pack=lambda ref: memoryview(fetch_object(bucket, ref))))


def _follow(report: Report, steps: Sequence[Step], table: StateTable | None) -> StateTable | None:
    """Follow the manifests with a table, and where that is broken, at least compare each with the one before."""
    before: Manifest | None = None
    for step in steps:
        after: StateTable | None = None
        with report.noting("manifest", step.key):
            after = _after(table, before, step.manifest)
            report.num_manifests += 1
        table, before = after, step.manifest
    return table


def _after(table: StateTable | None, before: Manifest | None, manifest: Manifest) -> StateTable | None:
    parent = manifest.parent
    if parent is None:
        return StateTable.of_anchor(manifest)
    if before is not None and parent.version != before.version:
        return None  # one between them can't be read
    if table is not None:
        return table.after(manifest)
    if before is not None and parent.state != before.state:
        raise WrongBaseError(f"it was made on {parent.state[:12]}, and version {before.version} is {before.state[:12]}")
    return None
