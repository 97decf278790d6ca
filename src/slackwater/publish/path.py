"""The manifests that lead to a version, read from a bucket: an anchor or what is held, then deltas and folds."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, Protocol, TypeVar

from slackwater.bucket.base import Get, List
from slackwater.checkpoint.chain import plan_listed, plan_path
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
_ANCHOR: Final = re.compile(r"/([0-9]{8})-[0-9a-f]{16}/.+", re.DOTALL)


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
    return _Path(bucket, run, version, held).read()


def along(
    bucket: Reads, run: RunId, version: Version, use: Callable[[list[Manifest]], _Used], *, held: Version | None = None
) -> _Used:
    """Use the path of `read_path`, shortened by folds; where a fold on it is damaged, the path of deltas.

    Where folds are listed, anchors are listed too, and the fewest steps are planned by both listings. Read are then the
    version's own manifest and those of the path: its anchor's, its deltas', its folds'. Each has to be made on the
    state of the one before, and the last has to make the version's; whatever doesn't fit, as after a listing that lags,
    costs the folds: all manifests of the path of deltas are read.

    A fold may cross an anchor on the way from ``held``. Else the path begins with the newest anchor at or below the
    version, as that of deltas does: no fold leads past it from an older one. Only an anchor without listed files of its
    own, as where it links all of them, may be passed by a fold, from the one that it links.

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
    folds = _find_folds(bucket, run) if path.may_have_folds() else {}
    if folds:
        try:
            short = path.shorten(folds, _find_anchors(bucket, run))
            if short is not None:
                return use(short)
        except (NotFoundError, CorruptError, WrongBaseError) as error:
            _LOG.warning("going without folds to version %d of %s: %s", version, run, error)
    return use(path.read())


class _Path:
    """Reads each manifest once."""

    def __init__(self, bucket: Get, run: RunId, version: Version, held: Version | None) -> None:
        self._bucket = bucket
        self._run = run
        self._version = version
        self._held = held
        self._manifests: dict[Version, Manifest] = {}

    def may_have_folds(self) -> bool:
        """Whether steps lead to the version: not where it is at hand, or an anchor that the path begins with.

        Raises:
            CorruptError: Its manifest breaks the format.
        """
        if self._version == self._held:
            return False
        is_onwards = self._held is not None and self._held < self._version
        kind = self._kind_of(self._version)
        return kind == "delta" or (kind == "anchor" and is_onwards)

    def read(self) -> list[Manifest]:
        """The manifests from what is held, or from the newest anchor, deltas alone."""
        path = plan_path(self._held, self._version, self._kind_of)
        anchor = [] if path.anchor is None else [path.anchor]
        return [self._manifest(version) for version in (*anchor, *path.deltas)]

    def shorten(self, folds: _Folds, anchors: set[Version]) -> list[Manifest] | None:
        """The manifests of the fewest steps by what is listed; None where no fold is among them."""
        path = plan_listed(
            self._held,
            self._version,
            lambda version: self._manifest(version).kind,
            lambda end: folds.get(end, ()),
            anchors | {self._version},
        )
        start = self._held if path is None or path.anchor is None else path.anchor
        if path is None or start is None:
            return None
        steps = list(pairwise((start, *path.deltas)))
        if all(self._is_delta(*step) for step in steps):
            return None
        first = [] if path.anchor is None else [self._manifest(path.anchor)]
        found = first + [self._step(*step) for step in steps]
        self._check(found)
        return found

    def _is_delta(self, before: Version, end: Version) -> bool:
        return end == before + 1 and self._manifest(end).kind == "delta"

    def _step(self, before: Version, end: Version) -> Manifest:
        return self._manifest(end) if self._is_delta(before, end) else read_fold(self._bucket, self._run, before, end)

    def _check(self, found: list[Manifest]) -> None:
        for before, after in pairwise(found):
            if after.parent is None or after.parent.state != before.state:
                raise CorruptError(
                    f"what leads to version {before.version} of {self._run} doesn't make the state that version "
                    f"{after.version} is made on"
                )
        if found[-1].state != self._manifest(self._version).state:
            raise CorruptError(f"the fold to version {self._version} of {self._run} doesn't make its state")

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
    """The folds that a listing shows."""
    found: defaultdict[Version, list[Version]] = defaultdict(list)
    for key in _list(bucket, folds_prefix(run)):
        fold = parse_fold_key(run, key)
        if fold is not None:
            found[fold[1]].append(fold[0])
    return found


def _find_anchors(bucket: List, run: RunId) -> set[Version]:
    """The versions of which a listing shows an anchor's files. Where their publisher lost a race, one is a delta."""
    prefix = f"{run}/anchors"
    files = (_ANCHOR.fullmatch(key.removeprefix(prefix)) for key in _list(bucket, prefix))
    return {Version(int(file[1])) for file in files if file is not None}


def _list(bucket: List, prefix: str) -> list[str]:
    """Keys, none where the store refuses: nothing rests on a listing, and it may lag."""
    try:
        return [item.key for item in bucket.list(prefix)]
    except SlackwaterError as error:
        _LOG.info("%s can't be listed, so folds aren't used: %s", prefix, error)
        return []
