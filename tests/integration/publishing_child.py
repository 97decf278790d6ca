"""Publishers as processes of their own, which die, stop or meet a full disk at a chosen call of their bucket.

A nursery imports everything once and forks a publisher for each task: two hundred deaths take seconds. It and its
publishers run no thread while they fork.
"""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

import msgspec

from slackwater.bucket.base import ObjectInfo
from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.warm import warm_kernels
from slackwater.errors import SlackwaterError
from slackwater.publish.publisher import Publisher
from slackwater.weights.source import FolderSource

RUN: Final = "run"
SOURCE: Final = Path(__file__).parents[2] / "src"

Moment = Literal["before", "during", "after", "soon", "stop", "full"]
"""``before``: killed before the call is carried out. ``during``: killed by the kernel when half of the bytes are
written. ``after``: killed when it is carried out, before its answer is read. ``soon``: killed by an alarm some time
later. ``stop``: stopped before it, as by a debugger, until someone lets it go on. ``full``: the disk takes half of the
bytes and no more, until the next call.
"""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a publisher does: it resumes the lineage and publishes the states that the bucket lacks, in order."""

    bucket: str
    states: tuple[str, ...]
    """A model folder for each version from 0 on."""
    report: str
    """The file that its `Report` goes to."""
    baseline: str | None = None
    """The folder that keeps what was committed over a restart; None keeps it in memory."""
    anchor_every: int = 50
    call: int = -1
    """The call that writes, counted from 0, that something happens at; below 0: nothing does."""
    moment: Moment = "before"
    soon_s: float = 0.001
    """When the alarm of ``soon`` rings, in seconds after the call."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a publisher that came to its end did."""

    puts: tuple[tuple[str, int], ...]
    """Each call that writes: its key, and its bytes."""
    kinds: tuple[str, ...]
    """The kind of each version that it published."""
    errors: tuple[str, ...]
    """The kinds of the errors that it met; each failed publish is tried once more."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a publisher ended, or that it is stopped."""

    pid: int
    signal: int = 0
    """What killed or stopped it; 0 where it came to its end."""
    status: int = 0


class FatefulBucket:
    """A directory whose user dies, stops or meets a full disk at one of the calls that write."""

    def __init__(self, task: Task) -> None:
        self._inner = LocalBucket(task.bucket, create=True)
        self._call = task.call
        self._moment = task.moment
        self._soon_s = task.soon_s
        self._lock = threading.Lock()
        self.puts: list[tuple[str, int]] = []

    @property
    def url(self) -> str:
        """The directory's."""
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
        with self._lock:
            is_fateful = self._meet(key, body)
            self._inner.put(key, body)
            self._outlive(is_fateful=is_fateful)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """See `slackwater.bucket.base.PutIfAbsent.put_if_absent`."""
        with self._lock:
            is_fateful = self._meet(key, body)
            created = self._inner.put_if_absent(key, body)
            self._outlive(is_fateful=is_fateful)
            return created

    def _meet(self, key: str, body: bytes | memoryview) -> bool:
        limit_files(None)
        is_fateful = len(self.puts) == self._call
        self.puts.append((key, len(body)))
        if is_fateful and self._moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_fateful and self._moment == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_fateful and self._moment in ("during", "full"):
            limit_files(len(body) // 2)
        return is_fateful

    def _outlive(self, *, is_fateful: bool) -> None:
        if is_fateful and self._moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_fateful and self._moment == "soon":
            signal.setitimer(signal.ITIMER_REAL, self._soon_s)


def limit_files(num_bytes: int | None) -> None:
    """Let no file of this process grow past so many bytes; a write beyond raises SIGXFSZ, or EFBIG where ignored."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))


def carry_out(task: Task) -> Report:
    """Publish what the bucket lacks."""
    bucket = FatefulBucket(task)
    publisher = Publisher.open(bucket, RUN, anchor_every=task.anchor_every, threads=2, baseline_dir=task.baseline)
    first = 0 if publisher.version is None else publisher.version + 1
    kinds: list[str] = []
    errors: list[str] = []
    for step, folder in enumerate(task.states[first:], first):
        source = FolderSource(Path(folder))
        try:
            published = publisher.publish(source, step=step)
        except SlackwaterError as error:
            errors.append(error.kind)
            limit_files(None)
            try:
                published = publisher.publish(source, step=step)
            except SlackwaterError as again:
                errors.append(again.kind)
                break
        kinds.append(published.kind)
    publisher.close()
    return Report(puts=tuple(bucket.puts), kinds=tuple(kinds), errors=tuple(errors))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A publisher's end as its parent sees it."""

    ending: Ending
    report: Report | None
    """None where it was killed or is stopped."""


class Nursery:
    """Starts publishers, one at a time, and waits for the end of each."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
        )
        self._reports: dict[int, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)

    def carry_out(self, task: Task) -> Outcome:
        """Fork a publisher, and wait until it ends, dies or stops."""
        return self._ask(msgspec.json.encode(task), Path(task.report))

    def go_on(self, pid: int) -> Outcome:
        """Let a publisher that is stopped go on, and wait for its end."""
        return self._ask(msgspec.json.encode(pid), self._reports[pid])

    def _ask(self, line: bytes, report: Path) -> Outcome:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise BrokenPipeError
        stdin.write(line + b"\n")
        stdin.flush()
        ending = msgspec.json.decode(stdout.readline(), type=Ending)
        self._reports[ending.pid] = report
        ended = not ending.signal and not ending.status
        return Outcome(ending=ending, report=msgspec.json.decode(report.read_bytes(), type=Report) if ended else None)


def serve(lines: Iterator[bytes]) -> None:
    """Fork a publisher for each task that comes; a number instead wakes the publisher with this pid."""
    for line in lines:
        asked = msgspec.json.decode(line, type=Task | int)
        if isinstance(asked, int):
            os.kill(asked, signal.SIGCONT)
        pid = asked if isinstance(asked, int) else fork(asked)
        _, status = os.waitpid(pid, os.WUNTRACED)
        ending = _ending(pid, status)
        sys.stdout.buffer.write(msgspec.json.encode(ending) + b"\n")
        sys.stdout.buffer.flush()


def fork(task: Task) -> int:
    """A publisher in a process of its own; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN if task.moment == "full" else signal.SIG_DFL)
        report = carry_out(task)
        limit_files(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        Path(task.report).write_bytes(msgspec.json.encode(report))
        status = 0
    finally:
        os._exit(status)


def _ending(pid: int, status: int) -> Ending:
    if os.WIFSTOPPED(status):
        return Ending(pid=pid, signal=os.WSTOPSIG(status))
    if os.WIFSIGNALED(status):
        return Ending(pid=pid, signal=os.WTERMSIG(status))
    return Ending(pid=pid, status=os.WEXITSTATUS(status))


if __name__ == "__main__":
    warm_kernels(("F16", "F32"))
    serve(iter(sys.stdin.buffer.readline, b""))
