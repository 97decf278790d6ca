"""Folds made in the background, while the run goes on: which ones, and the thread that makes them.

A fold is a convenience. Where one is late, fails or is killed, nothing of it is visible, and readers take the deltas.
"""

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Final, NamedTuple, Self

from slackwater.checkpoint.codec import Level
from slackwater.errors import InvalidInputError, SlackwaterError, UnavailableError
from slackwater.ids import RunId, Version
from slackwater.publish.commit import Signs
from slackwater.publish.delta import Progress, tell_nobody
from slackwater.publish.fold import FoldBucket, Folded, fold
from slackwater.publish.lineage import read_manifest

_LOG: Final = logging.getLogger(__name__)
_MODELS: Final = 2
"""What `fold` takes of the disk."""


class Span(NamedTuple):
    """What a fold leads over."""

    start: Version
    end: Version


class _Due(NamedTuple):
    anchor: Version
    """What all of them are rebuilt from."""
    spans: tuple[Span, ...]


def due_folds(version: Version, anchor: Version, every: int) -> tuple[Span, ...]:
    """The folds by which a reader goes from an anchor to ``version``: the rungs of a binary ladder.

    Versions after the anchor are counted in blocks of ``every``. Block *k* ends a fold over as many blocks as the
    lowest set bit of *k* says: 1, 2, 1, 4, 1, 2, 1, 8, …, as in a Fenwick tree. So with *K* blocks a reader of any
    version reads at most 1 + log2(*K*) folds, one for each bit of its block's number, and then fewer than ``every``
    deltas. With ``every`` = 8, version 47 is the anchor, the folds 0..32 and 32..40, and 7 deltas: 9 steps for 47.

    A delta lies under at most 1 + log2(*K*) folds, and under half as many on average: even if no element changed
    twice, all folds together were at most 1 + log2(*K*) / 2 times the bytes of the deltas. Elements do change twice,
    so that bytes grow slower than versions. Folds that all begin at the anchor would spare a reader some more, and cost
    up to (*K* + 1) / 2 times the deltas, which has no bound.

    Args:
        version: Committed just now.
        anchor: The newest anchor at or below it.
        every: Versions in a block; 1 or more.

    Returns:
        Rising, each beginning where the one before ends; where nobody failed or lagged, all but the last are made
        already. None where ``version`` doesn't end a block. Folds over a single version are left out: a delta does it.
    """
    blocks, rest = divmod(version - anchor, every)
    if rest:
        return ()
    spans: list[Span] = []
    while blocks > 0:
        below = blocks & (blocks - 1)
        spans.append(Span(start=Version(anchor + below * every), end=Version(anchor + blocks * every)))
        blocks = below
    return tuple(span for span in reversed(spans) if span.end - span.start > 1)


class Folding:
    """Makes folds in a thread of its own, one at a time. Told of a version it returns at once, and it never raises.

    A fold rebuilds both of its versions: the anchor and what leads on from it are read from the bucket, two models lie
    on the disk meanwhile, and memory holds a few tiles for each thread and one pack. Where the disk lacks that room, or
    anything fails, the log says so and the fold is left out: this process doesn't try it again, the next one does where
    its ladder needs it. Where versions come faster than folds, the newest ladder replaces the one before.

    Args:
        bucket: Where the run lies.
        run: The run.
        every: See `due_folds`.
        level: How much time to spend for how many bytes.
        threads: Bodies decoded and encoded at once.
        signer: Signs each fold.
        scratch: A folder on a disk with room for two models; None takes the system's temporary one (``TMPDIR``).
        progress: Told how far a fold is.
        made: Told of each fold that is there, from the thread that made it.

    Raises:
        InvalidInputError: ``every`` or ``threads`` is below 1.
    """

    def __init__(
        self,
        bucket: FoldBucket,
        run: RunId,
        *,
        every: int,
        level: Level = "fast",
        threads: int = 1,
        signer: Signs | None = None,
        scratch: Path | None = None,
        progress: Progress = tell_nobody,
        made: Callable[[Folded], object] | None = None,
    ) -> None:
        if min(every, threads) < 1:
            raise InvalidInputError(f"a fold every {every} versions with {threads} threads: both are 1 or more")
        self._bucket = bucket
        self._run = run
        self._every = every
        self._level: Level = level
        self._threads = threads
        self._signer = signer
        self._scratch = scratch
        self._progress = progress
        self._made = made
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._due: _Due | None = None
        self._tried: set[Span] = set()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Close it at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    def committed(self, version: Version, anchor: Version) -> None:
        """Learn of a version that was committed, and of the anchor that it rests on; make what is due by then."""
        spans = due_folds(version, anchor, self._every)
        with self._lock:
            if not spans or self._closed.is_set():
                return
            self._due = _Due(anchor, spans)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="fold", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until what is due has been made, or left out."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Make no more: what is being made is left at its next body, and nothing of it is visible. Idempotent."""
        self._closed.set()
        self.wait()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            anchor, span = found
            try:
                folded = self._fold(anchor, span)
            except CancelledError:
                continue
            except (SlackwaterError, OSError) as error:
                _LOG.warning("the fold %s/%d..%d is left out: %s", self._run, *span, error)
                continue
            if self._made is not None:
                self._made(folded)

    def _next(self) -> tuple[Version, Span] | None:
        """The next fold of the newest ladder; None ends the thread, before it is told of another."""
        with self._lock:
            if self._due is not None and not self._closed.is_set():
                for span in self._due.spans:
                    if span not in self._tried:
                        self._tried.add(span)
                        return self._due.anchor, span
            self._thread = None
            return None

    def _fold(self, anchor: Version, span: Span) -> Folded:
        with tempfile.TemporaryDirectory(prefix=".slackwater-", dir=self._scratch) as folder:
            self._check_room(Path(folder), anchor)
            return fold(
                self._bucket,
                self._run,
                span.start,
                span.end,
                scratch=Path(folder),
                level=self._level,
                threads=self._threads,
                progress=self._go_on,
                signer=self._signer,
            )

    def _check_room(self, folder: Path, anchor: Version) -> None:
        """A full disk would cost its other users more than a fold is worth."""
        needed, free = (
            _MODELS * read_manifest(self._bucket, self._run, anchor).num_bytes,
            shutil.disk_usage(folder).free,
        )
        if free < needed:
            raise UnavailableError(
                f"{folder.parent} has {free} bytes free, and two models take {needed}", hint="free some, or set TMPDIR"
            )

    def _go_on(self, stage: str, done: int, total: int) -> None:
        self._progress(stage, done, total)
        if self._closed.is_set():
            raise CancelledError
