"""Publish a model's anchor and deltas, and watch seconds, bytes and this process's memory: the child of `publishing`.

python benchmarks/publish_cost.py TASK     one JSON object, a `Cost`
"""

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

import applying
import measure
from slackwater.bucket.base import Bucket, ObjectInfo
from slackwater.bucket.open import open_bucket
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.warm import warm_kernels
from slackwater.ids import Version, run_id
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.weights.source import FolderSource

THREADS: Final = 2
"""Of the publisher, and of writing the full checkpoint."""

_ENOUGH_BYTES: Final = 1_000_000_000
"""Of a full checkpoint's files that are written; what the others take is reckoned from these."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is published where."""

    name: str
    before: str
    """A model folder."""
    after: str
    """The folder of its next step."""
    url: str
    """The bucket; its settings come from the environment."""
    runs: int
    """Deltas that are timed."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What publishing took. Sizes and memory in bytes, times in seconds; of deltas the median."""

    name: str
    num_bytes: int
    """Of all tensors."""
    share: float
    """Changed elements over all."""
    encoded: int
    """The bodies of a delta."""
    uploaded: int
    """All that was sent for that delta: objects, manifest and hint."""
    anchor_uploaded: int
    anchor_s: float
    full_s: float
    """Writing the same files to the same bucket, and nothing else; reckoned from a part where they are large."""
    delta_s: float
    """From the call to the commit."""
    blocked_s: float
    """Until `publish_async` returns."""
    copy_s: float
    """A copy of the same bytes into memory that is there, on one thread."""
    copy_threads_s: float
    """The same on `THREADS` threads."""
    anchor_extra: int
    """Anonymous memory at the anchor's peak, without what was there before."""
    delta_extra: int
    most: int
    """The most memory that was resident, mapped files included."""

    @property
    def extra(self) -> int:
        """Anonymous memory at the peak, without the baseline, which is as large as the model."""
        return max(self.anchor_extra, self.delta_extra) - self.num_bytes


class Counted:
    """A bucket that counts what is sent to it."""

    def __init__(self, inner: Bucket) -> None:
        self._inner: Final = inner
        self._lock: Final = threading.Lock()
        self.sent = 0
        """Bytes."""

    @property
    def url(self) -> str:
        """The inner bucket's."""
        return self._inner.url

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `slackwater.bucket.base.Get.get`."""
        return self._inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `slackwater.bucket.base.Get.get_range`."""
        return self._inner.get_range(key, start, length)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `slackwater.bucket.base.List.list`."""
        return self._inner.list(prefix)

    def put(self, key: str, body: bytes | memoryview) -> None:
        """See `slackwater.bucket.base.Put.put`."""
        self._count(body)
        self._inner.put(key, body)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """See `slackwater.bucket.base.PutIfAbsent.put_if_absent`."""
        self._count(body)
        return self._inner.put_if_absent(key, body)

    def _count(self, body: bytes | memoryview) -> None:
        with self._lock:
            self.sent += len(body)


class Lineage:
    """A run whose versions turn between two states of a model."""

    def __init__(self, task: Task, bucket: Counted, publisher: Publisher) -> None:
        self._bucket: Final = bucket
        self._publisher: Final = publisher
        self._folders: Final = (Path(task.before), Path(task.after))
        self._sources: Final = tuple(map(FolderSource, self._folders))
        self._step = 0

    def anchor(self) -> float:
        """Publish the state before; returns its seconds."""
        begun = time.perf_counter()
        self._publisher.publish(self._sources[0], step=0)
        return time.perf_counter() - begun

    def delta(self) -> tuple[float, float, float]:
        """Publish the other state in the background; returns blocked seconds, all seconds, and the changed share."""
        self._step += 1
        begun = time.perf_counter()
        handle = self._publisher.publish_async(self._sources[self._step % 2], step=self._step)
        blocked = time.perf_counter() - begun
        published = handle.result()
        return blocked, time.perf_counter() - begun, published.changed / published.total


def measured(task: Task) -> Cost:
    """Publish, write and copy the model; everything is warm but the anchor's pages."""
    warm_kernels(("BF16",))
    bucket = open_bucket(task.url, create=True)
    counted = Counted(bucket)
    run = run_id(f"bench-{task.name}")
    before = applying.anonymous()
    with Publisher(counted, run, anchor_every=task.runs + 2, threads=THREADS) as publisher:
        lineage = Lineage(task, counted, publisher)
        with applying.watched() as anchor_peak:
            anchor_s = lineage.anchor()
        anchor_uploaded = counted.sent
        with applying.watched() as delta_peak:
            _, _, share = lineage.delta()
        uploaded = counted.sent - anchor_uploaded
        timed = [lineage.delta() for _ in range(task.runs)]
    del publisher, lineage  # and the baseline, before a copy takes as much
    bodies = read_manifest(bucket, run, Version(1)).listed()
    source = FolderSource(Path(task.after))
    copy_s, copy_threads_s = copy_seconds(source, task.runs)
    return Cost(
        name=task.name,
        num_bytes=Outline(source.specs().values()).num_bytes,
        share=share,
        encoded=sum(body.length for body in bodies),
        uploaded=uploaded,
        anchor_uploaded=anchor_uploaded,
        anchor_s=anchor_s,
        full_s=full_seconds(bucket, source),
        delta_s=statistics.median(total for _, total, _ in timed),
        blocked_s=statistics.median(blocked for blocked, _, _ in timed),
        copy_s=copy_s,
        copy_threads_s=copy_threads_s,
        anchor_extra=anchor_peak.most - before,
        delta_extra=delta_peak.most - before,
        most=_most_resident(),
    )


def full_seconds(bucket: Bucket, source: FolderSource, enough: int = _ENOUGH_BYTES) -> float:
    """Seconds that it takes to write a folder's weights, `THREADS` files at a time, without digests or a commit.

    Args:
        bucket: Where to.
        source: The folder.
        enough: Bytes after which the rest is reckoned instead of written.
    """
    files = {file: np.memmap(path, dtype=np.uint8, mode="r") for file, path in source.shards.items()}
    some: list[str] = []
    while len(some) < len(files) and sum(files[file].size for file in some) < enough:
        some.append(list(files)[len(some)])
    begun = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda file: bucket.put(f"full/{file}", files[file].data), some):
            pass
    seconds = time.perf_counter() - begun
    return seconds * sum(file.size for file in files.values()) / sum(files[file].size for file in some)


def copy_seconds(source: FolderSource, runs: int) -> tuple[float, float]:
    """Seconds of the median copy of all tensors, on one thread and on `THREADS`."""
    into = {name: np.ones_like(source.bits(name)) for name in source.specs()}

    def one(name: str) -> None:
        np.copyto(into[name], source.bits(name))

    def in_order() -> None:
        for name in into:
            one(name)

    def in_threads() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(one, into):
                pass

    in_order()  # maps the file's pages
    speeds = [measure.timed(1, runs, copy)[0] for copy in (in_order, in_threads)]
    alone, together = (statistics.median(speed.seconds) for speed in speeds)
    return alone, together


def _most_resident() -> int:
    lines = applying.STATUS.read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Carry out the task of the command line."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    print(msgspec.json.encode(measured(task)).decode())


if __name__ == "__main__":
    main()
