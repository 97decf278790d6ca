"""Seconds of repeated runs on one thread, the speeds that they make, and the machine that they ran on."""

import importlib.metadata
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

_GIGA: Final = 1e9
_FEW: Final = 3
_LIBRARIES: Final = ("numpy", "numba", "xxhash", "zstandard", "torch")

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Dense bytes per second over some runs: the bytes of whole tensors, whatever a body has of them."""

    num_bytes: int
    """Dense bytes of one run."""
    seconds: tuple[float, ...]
    """Of each run; at least one."""

    @property
    def gbps(self) -> float:
        """GB/s (10**9 bytes) of the median run."""
        return self.num_bytes / statistics.median(self.seconds) / _GIGA

    @property
    def slowest(self) -> float:
        """GB/s of the slowest run."""
        return self.num_bytes / max(self.seconds) / _GIGA

    @property
    def fastest(self) -> float:
        """GB/s of the fastest run."""
        return self.num_bytes / min(self.seconds) / _GIGA

    def __str__(self) -> str:
        return f"{self.gbps:6.2f}  ({self.slowest:.2f} to {self.fastest:.2f})"


def nothing() -> None:
    """What is to be prepared before a run that needs nothing."""


def timed(
    num_bytes: int,
    runs: int,
    work: Callable[[], _Result],
    *,
    before: Callable[[], object] = nothing,
    patience: float = math.inf,
) -> tuple[Speed, _Result]:
    """Run ``work`` several times.

    Args:
        num_bytes: Dense bytes of a run.
        runs: How many at most; at least 1.
        work: What is timed.
        before: Called before each run, outside its time.
        patience: Seconds of all runs together after which three runs are enough.

    Returns:
        The speed, and what the last run returned.
    """
    seconds: list[float] = []
    while True:
        before()
        begun = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begun)
        if len(seconds) >= (runs if sum(seconds) < patience else min(runs, _FEW)):
            return Speed(num_bytes=num_bytes, seconds=tuple(seconds)), result


@contextmanager
def one_core() -> Generator[None]:
    """Keep this thread, and threads that it starts meanwhile, to one core: some peers start threads unasked."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def load() -> float:
    """Processes that want a core, averaged over the last minute; this one counts as about 1."""
    return os.getloadavg()[0]


def machine() -> str:
    """One line of what decides a speed: processor, cores, interpreter, libraries."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores; Python {platform.python_version()}, {versions}"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
