"""Apply deltas to a mapped checkpoint and watch this process's anonymous memory: the child of `mapped`.

Anonymous memory (``RssAnon`` of ``/proc/self/status``) is what only swapping gives back. Pages of the mapped file don't
count: the kernel writes them out and drops them as it likes.

    python benchmarks/applying.py FOLDER     one JSON array, an `Applied` for each delta
"""

import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from slackwater.checkpoint.codec import Place, apply_body
from slackwater.checkpoint.manifest import BodyEntry
from slackwater.checkpoint.outline import Outline
from slackwater.weights.source import ShardSource

FILE: Final = "model.safetensors"
STEPS: Final = "steps.json"
STATUS: Final = Path("/proc/self/status")
THREADS: Final = 2

_SAMPLE_SECONDS: Final = 0.001


class Step(msgspec.Struct, frozen=True):
    """One delta, whose body makes each tile of the checkpoint: all tiles have the same bits."""

    name: str
    entry: BodyEntry
    body: bytes


class Applied(msgspec.Struct, frozen=True):
    """What applying one delta took."""

    name: str
    extra: int
    """Bytes of anonymous memory at the peak, less those before the first delta."""
    num_bytes: int
    """Dense bytes."""
    seconds: float


class Peak:
    """The most anonymous memory seen, in bytes."""

    def __init__(self) -> None:
        self.most = anonymous()

    def look(self) -> None:
        """Take a sample."""
        self.most = max(self.most, anonymous())


def anonymous() -> int:
    """Bytes of anonymous memory that this process has now."""
    lines = STATUS.read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def watched() -> Generator[Peak]:
    """Sample the memory every millisecond, from a thread."""
    peak, done = Peak(), threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            peak.look()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def apply(step: Step, outline: Outline, source: ShardSource, before: int) -> Applied:
    """Apply a delta to every tile, in place, on `THREADS` threads.

    Args:
        step: The delta.
        outline: Of the checkpoint.
        source: The checkpoint.
        before: Anonymous memory that doesn't count, in bytes.
    """
    entry, body = step.entry, memoryview(step.body)

    def one(number: int) -> None:
        spec, tile = outline.place(number)
        bits = source.bits(spec.name)
        held = tile.take(bits)
        apply_body([Place(spec=spec, tile=tile)], entry, body, [held])
        if tile.rows > 1:  # taken as a copy
            tile.put(bits, held)

    begun = time.perf_counter()
    with watched() as peak:
        _in_threads(one, range(outline.num_tiles))
    seconds = time.perf_counter() - begun
    return Applied(name=step.name, extra=peak.most - before, num_bytes=outline.num_bytes, seconds=seconds)


def _in_threads(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(work, numbers):
            pass


def main() -> None:
    """Apply all deltas of a folder, one after the other."""
    folder = Path(sys.argv[1])
    steps = msgspec.json.decode((folder / STEPS).read_bytes(), type=list[Step])
    source = ShardSource({FILE: np.memmap(folder / FILE, dtype=np.uint8, mode="r+")})
    outline = Outline(source.specs().values())
    before = anonymous()
    print(msgspec.json.encode([apply(step, outline, source, before) for step in steps]).decode())


if __name__ == "__main__":
    main()
