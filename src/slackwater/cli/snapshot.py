"""How commands are told of states and deltas: as folders, or by name in the bucket of ``--bucket``.

::

    ./model           a model folder, or a delta folder
    run/12            with --bucket: version 12 of the run, as a state or as the delta that it is
    run/3..7          with --bucket: the fold from version 3 to version 7

With ``--bucket`` what reads like a name is one; a folder of that name is written ``./run/12``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slackwater.bucket.base import Bucket
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.outline import Outline
from slackwater.cli.absent import absent_fold, absent_version, no_snapshot
from slackwater.cli.attended import Attended
from slackwater.cli.trust import open_trusted
from slackwater.errors import InvalidInputError, NotFoundError, WrongBaseError
from slackwater.ids import RunId, Version, parse_snapshot, run_id, snapshot_name
from slackwater.publish.lineage import read_manifest
from slackwater.publish.objects import fetch_object
from slackwater.publish.path import read_fold, read_path
from slackwater.publish.rebuild import rebuild
from slackwater.weights.delta_folder import DeltaFolder, is_delta_folder
from slackwater.weights.patch import Delta, made_on
from slackwater.weights.source import FolderSource

_FOLD: Final = re.compile(r"([A-Za-z0-9][^/]*)/([0-9]{1,8})\.\.([0-9]{1,8})")
_VERSION: Final = re.compile(r"[A-Za-z0-9][^/]*/[0-9]{1,8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionName:
    """A version in a bucket."""

    run: RunId
    version: Version

    def __str__(self) -> str:
        return snapshot_name(self.run, self.version)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldName:
    """A fold in a bucket."""

    run: RunId
    start: Version
    end: Version

    def __str__(self) -> str:
        return f"{self.run}/{self.start}..{self.end}"


Name = Path | VersionName | FoldName


def parse_name(text: str, *, in_bucket: bool) -> Name:
    """Read what a command was told.

    Args:
        text: See the module.
        in_bucket: Whether there is a bucket.

    Raises:
        InvalidInputError: It has the form of a name and a run that none can have.
    """
    fold = _FOLD.fullmatch(text)
    if in_bucket and fold is not None:
        return FoldName(run=run_id(fold[1]), start=Version(int(fold[2])), end=Version(int(fold[3])))
    if in_bucket and _VERSION.fullmatch(text):
        run, version = parse_snapshot(text)
        return VersionName(run=run, version=version)
    if not in_bucket and (fold is not None or _VERSION.fullmatch(text)) and not Path(text).exists():
        raise InvalidInputError(f"{text} is no folder", hint="name the bucket with --bucket")
    return Path(text)


class Shelf:
    """Where a command finds what it was told of.

    Args:
        bucket: A URL; None where there is none.
        work: The command's folders and bars.
        threads: Bodies decoded at once.
        trust: Files of the public keys whose versions and folds are taken; none takes all. Folders are taken as they
            are.

    Raises:
        InvalidInputError: The URL or a key file is wrong, or there are keys and no bucket.
    """

    def __init__(self, bucket: str | None, work: Attended, threads: int, trust: Sequence[Path] = ()) -> None:
        if bucket is None and trust:
            raise InvalidInputError("folders have no signatures to check", hint="leave --trust out, or add --bucket")
        self._bucket = None if bucket is None else open_trusted(bucket, trust)
        self._work = work
        self._threads = threads

    @property
    def bucket(self) -> Bucket:
        """The bucket.

        Raises:
            InvalidInputError: There is none.
        """
        if self._bucket is None:
            raise InvalidInputError("no bucket is named", hint="name it with --bucket")
        return self._bucket

    def name(self, text: str) -> Name:
        """See `parse_name`.

        Raises:
            InvalidInputError: It has the form of a name and a run that none can have; or it is a run's alone.
            NotFoundError: It is no folder and has not the form of a snapshot's name.
        """
        name = parse_name(text, in_bucket=self._bucket is not None)
        if self._bucket is not None and isinstance(name, Path) and not name.exists():
            raise no_snapshot(self._bucket, text)
        return name

    def state(self, text: str) -> FolderSource:
        """A state: a model folder, or a version of the bucket, rebuilt in a temporary folder.

        Raises:
            InvalidInputError: It is neither.
            NotFoundError: There is no such version.
            CorruptError: It is damaged.
        """
        name = self.name(text)
        if isinstance(name, Path):
            return FolderSource(name)
        if isinstance(name, FoldName):
            raise InvalidInputError(f"{name} is a fold, not a state", hint=f"name {name.run}/{name.end}")
        self.manifest(name)  # tells why it isn't there
        folder = self._work.scratch.folder()
        rebuild(self.bucket, name.run, name.version, folder, threads=self._threads, progress=self._work.tell)
        return FolderSource(folder)

    def delta(self, text: str) -> Delta:
        """A delta: a delta folder, a delta of the bucket, or a fold.

        Raises:
            InvalidInputError: It is none.
            NotFoundError: It isn't there.
            CorruptError: Its manifest is damaged.
        """
        name = self.name(text)
        if isinstance(name, Path):
            if not is_delta_folder(name):
                raise NotFoundError(f"{name} is no delta folder", hint="make one with `slackwater diff --out`")
            folder = DeltaFolder(name)
            return Delta(manifest=folder.manifest, pack=folder.pack)
        manifest = self.manifest(name)
        if manifest.kind == "anchor":
            before = manifest.version - 1
            fold = "" if before < 0 else f", or a fold that leads to it: {name.run}/{before}..{manifest.version}"
            raise InvalidInputError(f"{name} is an anchor, not a delta", hint=f"name a delta{fold}")
        return Delta(manifest=manifest, pack=lambda ref: memoryview(fetch_object(self.bucket, ref)))

    def manifest(self, name: VersionName | FoldName) -> Manifest:
        """A manifest of the bucket.

        Raises:
            InvalidInputError: It is a fold that leads backwards.
            NotFoundError: It isn't there; the message says what is.
            CorruptError: It is damaged.
        """
        try:
            if isinstance(name, FoldName):
                return read_fold(self.bucket, name.run, name.start, name.end)
            return read_manifest(self.bucket, name.run, name.version)
        except NotFoundError as error:
            if isinstance(name, FoldName):
                raise absent_fold(self.bucket, name.run, name.start, name.end) from error
            raise absent_version(self.bucket, name.run, name.version) from error

    def check_base(self, base: str, text: str, *, may_be_after: bool) -> None:
        """Check by manifests alone that a version is what a delta was made on. Folders have none: they pass.

        Args:
            base: The state.
            text: The delta.
            may_be_after: Whether it may also be what the delta makes.

        Raises:
            WrongBaseError: It is another version; the hint names the right one.
            NotFoundError: One of them isn't there.
            CorruptError: Its manifest is damaged.
        """
        held, name = self.name(base), self.name(text)
        if not isinstance(held, VersionName):
            return
        state, manifest = self.manifest(held).state, self.delta(text).manifest
        if manifest.parent is None or state == manifest.parent.state or (may_be_after and state == manifest.state):
            return
        raise WrongBaseError(
            f"{text} is made on {made_on(manifest)}; {held} is state {state[:12]}", hint=_way(held, name, manifest)
        )

    def outline(self, run: RunId, version: Version) -> Outline:
        """The tensors of a run, which all its versions have: two manifests are read at most, unless the first is gone.

        Raises:
            NotFoundError: No anchor leads to the version.
            CorruptError: A manifest is damaged.
        """
        try:
            anchor = read_manifest(self.bucket, run, Version(0))
        except NotFoundError:
            anchor, *_ = read_path(self.bucket, run, version)
        return anchor.outline


def _way(held: VersionName, name: Name, manifest: Manifest) -> str:
    """What to do where a delta isn't made on the version that is held."""
    if isinstance(name, Path) or manifest.parent is None:
        return "name the state that the delta was made on"
    right = f"name {name.run}/{manifest.parent.version}"
    if held.run != name.run or held.version >= manifest.version:
        return right
    return f"{right}, or make a fold: `slackwater fold {held.run}/{held.version}..{manifest.version} --bucket …`"
