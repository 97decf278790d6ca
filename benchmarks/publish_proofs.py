"""Crashes and races of publishers, counted: those of the tests, more of them."""

from collections.abc import Callable, Iterable
from pathlib import Path

from publish_rig import model_folder
from publishing_child import Nursery
from test_publish_crashes import die_and_resume
from test_publish_races import run_races

from slackwater.errors import SlackwaterError
from slackwater.testing.bucket import MemoryBucket


def torn_reads(root: Path, seeds: int) -> int:
    """Kill a publisher at each call that writes, again and again; the number of deaths that left a part of a version.

    A death also counts where the next publisher failed, or sent more than was missing.
    """
    with Nursery() as nursery:
        return _failures(lambda seed: die_and_resume(nursery, root / str(seed), seed), range(seeds))


def lost_races(root: Path, seeds: int) -> int:
    """Let two publishers meet at the commit; the number of races without one whole winner and one told loser."""
    model = model_folder(root / "model")
    return _failures(lambda seed: run_races([seed], lambda _: MemoryBucket(), model), range(seeds))


def _failures(prove: Callable[[int], None], seeds: Iterable[int]) -> int:
    return sum(_fails(prove, seed) for seed in seeds)


def _fails(prove: Callable[[int], None], seed: int) -> bool:
    try:
        prove(seed)
    except (AssertionError, ValueError, SlackwaterError):
        return True
    return False
