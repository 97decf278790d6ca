"""Runs whose manifests, hints and listings a test takes away."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from publish_rig import RUN, Tensors, trained, weights

from slackwater.bucket.base import ObjectInfo
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.clock import SystemClock
from slackwater.errors import (
    AuthError,
    UnavailableError,
)
from slackwater.ids import Version
from slackwater.publish.baseline import Baseline, MemoryStore
from slackwater.publish.commit import Committer, encode_checked
from slackwater.publish.draft import Draft, Label, draft_anchor
from slackwater.publish.hint import HintWriter
from slackwater.publish.lineage import Tip, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import FaultyBucket, MemoryBucket
from slackwater.weights.image import take_image
from slackwater.weights.source import side_files
from slackwater.weights.state_dict import StateDictSource

CAP: Final = 1 << 20
REFUSED: Final = AuthError("these credentials may not list")
AWAY: Final = UnavailableError("the store is away")


class Turned(SystemClock):
    """A clock that a test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Shelf(FaultyBucket):
    """A bucket whose listing is made by the test."""

    shown: list[ObjectInfo] | None = None
    """What a listing shows; None: all that is there."""
    may_list = True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = super().list(prefix)
        if not self.may_list:
            raise REFUSED
        return found if self.shown is None else iter([item for item in self.shown if item.key.startswith(prefix)])


class Careless(FaultyBucket):
    """A store that takes a conditional create for a plain one."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        super().put_if_absent(key, body)
        self.put(key, body)
        return True


class Trainer:
    """A publisher, reduced to what decides a run's history: each version is an anchor of one number."""

    def __init__(self, bucket: FaultyBucket, model: Path, *, clock: Turned | None = None) -> None:
        self.baseline = Baseline(bucket, RUN, MemoryStore(bucket, RUN))
        self._committer = Committer(bucket)
        self._hints = HintWriter(bucket, RUN, clock or Turned())
        self._model = model
        self.baseline.sync(with_bits=False)

    def publish(self, step: int) -> Version:
        self.baseline.sync(with_bits=False)
        held = self.baseline.held
        draft, body = drafted(self._model, 0 if held is None else held.version + 1, step)
        with self.baseline.committing():
            self._committer.commit(draft.manifest, body, after=None if held is None else held.tip)
        self.baseline.replace(draft.manifest, draft.table, {})
        self._hints.wrote(draft.manifest.version)
        return draft.manifest.version


def drafted(model: Path, version: int, step: int) -> tuple[Draft, bytes]:
    tensors = {"model.norm.bias": weights()["model.norm.bias"] + step}
    files = {name: path.read_bytes() for name, path in side_files(model).items()}
    label = Label(run=RUN, version=Version(version), step=step, created_at=f"step {step}")
    draft = draft_anchor(label, take_image(StateDictSource(tensors), files), threads=1)
    return draft, encode_checked(draft.manifest)


def states(count: int) -> list[Tensors]:
    found = [weights()]
    for step in range(1, count):
        found.append(trained(found[-1], step))
    return found


def lose(bucket: MemoryBucket, *versions: int) -> None:
    for version in versions:
        bucket.delete(manifest_key(RUN, Version(version)))


def hint_at(bucket: MemoryBucket, version: int | None) -> None:
    if version is None:
        bucket.delete(head_key(RUN))
    else:
        bucket.put(head_key(RUN), b'{"version":%d}' % version)


def tip(bucket: MemoryBucket, version: int) -> Tip:
    return Tip(version=Version(version), state=read_manifest(bucket, RUN, Version(version)).state)


def ten_versions(model: Path) -> MemoryBucket:
    """Anchors 0 and 6, ten versions."""
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, anchor_every=6, threads=1)
    for step, tensors in enumerate(states(10)):
        publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
    publisher.close()
    return bucket
