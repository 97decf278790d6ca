"""The manifests that lead to a version, read from a bucket: an anchor or what is held, then deltas and folds."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, Protocol, TypeVar

from slackwater.bucket.base import Get, List
from slackwater.checkpoint.chain import Path, plan_path
from slackwater.checkpoint.keys import fold_key, folds_prefix, parse_fold_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from slackwater.checkpoint.rules import decode_manifest
from slackwater.errors import CorruptError, NotFoundError, SlackwaterError, WrongBaseError
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import read_manifest

_LOG: Final = logging.getLogger(__name__)
_Used = TypeVar("_Used")
_Folds = Mapping[Version, Sequence[Version]]
"""By the version that they lead to, those that they lead from."""
_NONE: Final[_Folds] = {}


class Reads(Get, List, Protocol):
    """A bucket to read from."""


def read_fold(bucket: Get, run: RunId, start: Version, end: Version) -> Manifest:
    """Read a fold.

    Raises:
        NotFoundError: There is none.
        CorruptError: It breaks the format, or is a fold of another run or of other versions.
    """
    key = fold_key(run, start, end)
    manifest = decode_manifest(bucket.get(key, max_bytes=MAX_MANIFEST_BYTES), fold=True)
    parent = manifest.parent
    if parent is None or (manifest.run, parent.version, manifest.version) != (run, start, end):
        raise CorruptError(f"{key} leads to version {manifest.version} of {manifest.run}")
    return manifest


def read_path(bucket: Get, run: RunId, version: Version, *, held: Version | None = None) -> list[Manifest]:
    """The manifests that make ``version``, deltas alone: on ``held`` where that leads there, else an anchor first.

    Raises:
        NotFoundError: The version isn't committed, or nothing leads to it.
        CorruptError: A manifest breaks the format.
    """
    return _Path(bucket, run, version, held).read(_NONE)


def along(
    bucket: Reads, run: RunId, version: Version, use: Callable[[list[Manifest]], _Used], *, held: Version | None = None
) -> _Used:
    """Use the path of `read_path`, shortened by folds; where a fold on it is damaged, the path of deltas.

    Args:
        bucket: Where the run lies.
        run: The run.
        version: Where to.
        use: Reads what the manifests name. It is called again where that was missing or damaged.
        held: A version at hand.

    Raises:
        NotFoundError: The version isn't committed, or nothing leads to it.
        CorruptError: A manifest breaks the format.
    """
    path = _Path(bucket, run, version, held)
    plain, folds = path.read(_NONE), _find_folds(bucket, run)
    if folds:
        try:
            short = path.read(folds)
            if short != plain:
                return use(short)
        except (NotFoundError, CorruptError, WrongBaseError) as error:
            _LOG.warning("going without folds to version %d of %s: %s", version, run, error)
    return use(plain)


class _Path:
    """Reads each manifest once."""

    def __init__(self, bucket: Get, run: RunId, version: Version, held: Version | None) -> None:
        self._bucket = bucket
        self._run = run
        self._version = version
        self._held = held
        self._manifests: dict[Version, Manifest] = {}

    def read(self, folds: _Folds) -> list[Manifest]:
        """The manifests from what is held, or from the newest anchor: a fold never leads back to an older one."""
        path = plan_path(self._held, self._version, self._kind_of)
        if folds:
            path = self._shortened(path.anchor, folds)
        anchor = [] if path.anchor is None else [self._manifest(path.anchor)]
        return anchor + self._steps(path)

    def _shortened(self, anchor: Version | None, folds: _Folds) -> Path:
        def folds_to(end: Version) -> Sequence[Version]:
            return folds.get(end, ())

        path = plan_path(self._held, self._version, self._kind_of, folds_to)
        if path.anchor is None or anchor is None:
            return path
        return replace(plan_path(anchor, self._version, self._kind_of, folds_to), anchor=anchor)

    def _steps(self, path: Path) -> list[Manifest]:
        found: list[Manifest] = []
        before = self._held if path.anchor is None else path.anchor
        for version in path.deltas:
            is_delta = before is None or (version == before + 1 and self._manifest(version).kind == "delta")
            found.append(self._manifest(version) if before is None or is_delta else self._fold(before, version))
            before = version
        return found

    def _fold(self, start: Version, end: Version) -> Manifest:
        fold = read_fold(self._bucket, self._run, start, end)
        if fold.state != self._manifest(end).state:
            raise CorruptError(f"{fold_key(self._run, start, end)} doesn't make the state of version {end}")
        return fold

    def _manifest(self, version: Version) -> Manifest:
        if version not in self._manifests:
            self._manifests[version] = read_manifest(self._bucket, self._run, version)
        return self._manifests[version]

    def _kind_of(self, version: Version) -> Literal["anchor", "delta"] | None:
        try:
            return self._manifest(version).kind
        except NotFoundError:
            return None


def _find_folds(bucket: List, run: RunId) -> _Folds:
    """The folds that a listing shows. It may lag or be refused: nothing rests on it."""
    found: defaultdict[Version, list[Version]] = defaultdict(list)
    try:
        keys = [item.key for item in bucket.list(folds_prefix(run))]
    except SlackwaterError as error:
        _LOG.info("the folds of %s can't be listed: %s", run, error)
        return _NONE
    for key in keys:
        fold = parse_fold_key(run, key)
        if fold is not None:
            found[fold[1]].append(fold[0])
    return found
