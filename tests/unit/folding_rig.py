"""A run of many small steps, and who makes its folds."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from publish_rig import RUN, stepped, weights

from slackwater.bucket.base import Bucket
from slackwater.ids import Version
from slackwater.publish.fold import Folded
from slackwater.publish.folding import Folding
from slackwater.publish.publisher import Publisher
from slackwater.testing.clock import ManualClock
from slackwater.weights.state_dict import StateDictSource

EVERY: Final = 4
LAST: Final = 47
RATE: Final = 2e-5


def publish(bucket: Bucket, count: int, folder: Path, each: Callable[[Version], object] | None = None) -> None:
    tensors = weights()
    with Publisher(bucket, RUN, anchor_every=100, threads=1, clock=ManualClock()) as publisher:
        for step in range(count):
            found = publisher.publish(StateDictSource(tensors), step=step, folder_files=folder)
            tensors = stepped(tensors, step, RATE)
            if each is not None:
                each(found.version)


def folding(
    bucket: Bucket, scratch: Path, every: int = EVERY, made: Callable[[Folded], object] | None = None
) -> Folding:
    return Folding(bucket, RUN, every=every, scratch=scratch, made=made)
