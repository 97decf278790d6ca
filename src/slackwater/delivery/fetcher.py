"""From a bucket to verified bytes: manifests, whole anchors on the local disk, a delta's packs in memory."""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from slackwater.bucket.base import Bucket
from slackwater.bucket.local import flush_folder
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.checkpoint.manifest import MAX_MANIFEST_BYTES, BodyEntry, Manifest, ObjectRef
from slackwater.checkpoint.rules import decode_manifest
from slackwater.delivery.cache import BlobCache
from slackwater.delivery.objects import disk_errors, is_intact, read_object, save_object, twice
from slackwater.errors import AuthError, CorruptError, InvalidInputError, NotFoundError, UnavailableError
from slackwater.ids import RunId, Version, snapshot_name

T = TypeVar("T")
U = TypeVar("U")

KEPT_ANCHORS: Final = 2
"""Anchor folders that stay on the disk."""
CACHE_BYTES: Final = 8 * 1024**3
"""What packs may take of the disk unless the caller says otherwise."""

_MAX_HINT_BYTES: Final = 4096
_log = logging.getLogger(__name__)


class _Hint(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=0, le=99_999_999)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bodies:
    """The packs of one delta, verified, in memory."""

    packs: tuple[bytes, ...]
    """By `BodyEntry.object`."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(map(len, self.packs))

    def of(self, entry: BodyEntry) -> memoryview:
        """One body, without a copy.

        Raises:
            CorruptError: The entry points outside its pack.
        """
        if not 0 <= entry.object < len(self.packs):
            raise CorruptError(f"a body points at object {entry.object} of {len(self.packs)}")
        pack = self.packs[entry.object]
        if not 0 <= entry.offset <= entry.offset + entry.length <= len(pack):
            raise CorruptError(f"a body points at {entry.length} bytes from {entry.offset} of {len(pack)}")
        return memoryview(pack)[entry.offset : entry.offset + entry.length]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadView:
    """What one look at the bucket found."""

    version: Version | None
    """The newest committed version, never below the one known; None: nothing is committed."""
    receded: bool
    """The version known is gone and none is newer: the bucket was set back. One that was collected has newer ones."""


class Fetcher:
    """Reads one run's versions out of a bucket. Calls block and may be made from any thread.

    One process owns ``cache_dir``. What is there after a crash is used again as far as it verifies.

    Args:
        bucket: Where the run lies.
        run: The run; a manifest of another one is refused.
        cache_dir: Where anchors and packs are kept.
        threads: Objects fetched at once.
        cache_bytes: Most bytes of packs on the disk. Anchors are not counted: the engine maps them.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: RunId,
        cache_dir: Path,
        *,
        threads: int = 4,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._bucket = bucket
        self._run = run
        self._threads = threads
        self._closed = threading.Event()
        self._source = _UntilClosed(bucket, self._closed)
        self._anchors = cache_dir / "anchors"
        self._anchor_lock = threading.Lock()
        self._cache = BlobCache(cache_dir / "blobs", max_bytes=cache_bytes)

    @property
    def run(self) -> RunId:
        """The run it reads."""
        return self._run

    def close(self) -> None:
        """End calls under way with UnavailableError before their next piece. Idempotent."""
        self._closed.set()

    def manifest(self, version: Version) -> Manifest:
        """Read a version's manifest.

        Raises:
            NotFoundError: The version isn't committed.
            CorruptError: The manifest is broken, is another version's or run's, or isn't signed as it should be.
            UnavailableError: The bucket doesn't answer.
        """
        return twice(lambda: self._manifest(version))

    def anchor(self, manifest: Manifest) -> Path:
        """Bring an anchor's files to the disk: an ordinary Hugging Face folder, every file verified at each call.

        A file that has changed since it came is fetched again. The folders of the `KEPT_ANCHORS` anchors that were
        asked for last are kept, older ones are deleted.

        Raises:
            InvalidInputError: The manifest is a delta's.
            NotFoundError: A file isn't in the bucket.
            CorruptError: A file is wrong, fetched twice.
            UnavailableError: The bucket doesn't answer, or the disk is full. What has come is kept.
        """
        if manifest.kind != "anchor":
            raise InvalidInputError(f"version {manifest.version} is a delta and has no folder")
        folder = self._anchors / f"{manifest.version:08d}-{manifest.state[:16]}"
        with self._anchor_lock, disk_errors(folder):
            if not self._is_whole(manifest, folder):
                self._fetch_folder(manifest, folder)
            os.utime(folder)
            self._drop_older_anchors()
        return folder

    def bodies(self, manifest: Manifest) -> Bodies:
        """Bring a delta's packs into memory, verified.

        Raises:
            InvalidInputError: The manifest is an anchor's, whose files belong on the disk.
            NotFoundError: A pack isn't in the bucket.
            CorruptError: A pack is wrong, fetched twice.
            UnavailableError: The bucket doesn't answer.
        """
        if manifest.kind == "anchor":
            raise InvalidInputError(f"version {manifest.version} is an anchor and has no packs")
        with self._cache.pinned(ref.sha256 for ref in manifest.objects):
            return Bodies(packs=tuple(self._parallel(self._pack, manifest.objects)))

    def head(self, known: Version | None) -> Version | None:
        """The newest committed version, never below ``known``. See `look`."""
        return self.look(known).version

    def look(self, known: Version | None) -> HeadView:
        """Find the newest committed version: start at the hint, then ask for the next numbers.

        The hint may be missing, stale or wrong; only a manifest that is there counts. At the first look a listing may
        raise what it leads to. Where the known one is gone and the hint leads to none above it, a listing tells whether
        it was collected or the bucket was set back.

        Raises:
            NotFoundError: No such bucket.
            AuthError: The store refused the credentials.
            UnavailableError: The bucket doesn't answer.
        """
        hint = self._hint()
        newest = known
        if hint is not None and (known is None or hint > known) and self._committed(hint):
            newest = hint
        if newest is None:
            newest = self._newest_listed()
        elif known is None:  # an old hint may lie below a gap that retention made
            with suppress(UnavailableError):  # nothing rests on a listing
                newest = self._newest_above(newest) or newest
        newest = self._climb(newest)
        if known is None or newest != known or (hint is not None and hint >= known) or self._committed(known):
            return HeadView(version=newest, receded=False)
        above = self._newest_above(known)
        return HeadView(version=known if above is None else self._climb(above), receded=above is None)

    def _manifest(self, version: Version) -> Manifest:
        key = manifest_key(self._run, version)
        try:
            body = self._source.get(key, max_bytes=MAX_MANIFEST_BYTES)
        except NotFoundError as error:
            raise NotFoundError(
                f"{snapshot_name(self._run, version)} isn't committed: {error.message}", hint=error.hint
            ) from error
        try:
            manifest = decode_manifest(body)
        except CorruptError as error:
            raise CorruptError(f"{key}: {error.message}", hint=error.hint) from error
        if (manifest.run, manifest.version) != (self._run, version):
            raise CorruptError(f"{key} is the manifest of {snapshot_name(manifest.run, manifest.version)}")
        return manifest

    def _is_whole(self, manifest: Manifest, folder: Path) -> bool:
        def intact(item: tuple[str, int]) -> bool:
            name, index = item
            return is_intact(folder / name, manifest.objects[index])

        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
        return names == manifest.files.keys() and all(self._parallel(intact, manifest.files.items()))

    def _drop_older_anchors(self) -> None:
        folders = [path for path in self._anchors.iterdir() if not path.name.startswith(".")]
        for old in sorted(folders, key=lambda path: path.stat().st_mtime_ns)[:-KEPT_ANCHORS]:
            shutil.rmtree(old)

    def _fetch_folder(self, manifest: Manifest, folder: Path) -> None:
        partial = folder.with_name(f".partial-{folder.name}")
        if folder.is_dir():  # damaged: what is still right in it need not come again
            shutil.rmtree(partial, ignore_errors=True)
            folder.replace(partial)
        partial.mkdir(parents=True, exist_ok=True)

        def save(item: tuple[str, int]) -> None:
            name, index = item
            twice(lambda: save_object(self._source, manifest.objects[index], partial / name))

        self._parallel(save, manifest.files.items())
        for stray in [path for path in partial.iterdir() if path.name not in manifest.files]:
            stray.unlink()
        flush_folder(partial)
        partial.replace(folder)
        flush_folder(folder.parent)

    def _pack(self, ref: ObjectRef) -> bytes:
        held = self._cache.read(ref)
        return twice(lambda: self._fetch_pack(ref)) if held is None else held

    def _fetch_pack(self, ref: ObjectRef) -> bytes:
        body = read_object(self._source, ref)
        try:
            self._cache.store(ref, body)
        except UnavailableError as error:
            # The bytes are verified and at hand: a full disk costs the next start a fetch, not this one.
            _log.warning("%s is used without being cached: %s", ref.key, error)
        return body

    def _hint(self) -> Version | None:
        try:
            body = self._source.get(head_key(self._run), max_bytes=_MAX_HINT_BYTES)
            return Version(msgspec.json.decode(body, type=_Hint).version)
        except (NotFoundError, CorruptError, msgspec.MsgspecError, UnicodeError, RecursionError):
            return None

    def _climb(self, newest: Version | None) -> Version | None:
        """The last of the numbers that are committed one after the other above this one."""
        following = Version(0 if newest is None else newest + 1)
        while self._committed(following):
            newest, following = following, Version(following + 1)
        return newest

    def _newest_above(self, known: Version) -> Version | None:
        """The newest committed version above one; None too where the credentials may not list."""
        try:
            return self._newest_listed(known + 1)
        except AuthError as error:
            _log.warning("whether versions above %d of %s are there isn't known: %s", known, self._run, error)
            return None

    def _newest_listed(self, lowest: int = 0) -> Version | None:
        """Where to start without a hint: retention may have taken the first numbers."""
        names = (info.key.rpartition("/")[2] for info in self._bucket.list(f"{self._run}/manifests"))
        numbers = (name.removesuffix(".json") for name in names)
        listed = [Version(int(number)) for number in numbers if number.isascii() and number.isdigit()]
        wanted = sorted((version for version in listed if version >= lowest), reverse=True)
        return next(filter(self._committed, wanted), None)

    def _committed(self, version: Version) -> bool:
        try:
            self._source.get_range(manifest_key(self._run, version), 0, 1)
        except NotFoundError:
            return False
        except CorruptError:
            # It is there and empty: reading it will say so.
            return True
        return True

    def _parallel(self, work: Callable[[T], U], items: Iterable[T]) -> list[U]:
        """Do ``work`` on all items; on the first error, begin no other."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="fetch") as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()


class _UntilClosed:
    """The bucket's reads until the fetcher is closed."""

    def __init__(self, bucket: Bucket, closed: threading.Event) -> None:
        self._bucket = bucket
        self._closed = closed

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self._check()
        return self._bucket.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._check()
        return self._bucket.get_range(key, start, length)

    def _check(self) -> None:
        if self._closed.is_set():
            raise UnavailableError("the fetcher was closed")
