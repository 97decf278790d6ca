"""Runs of some days ago, to be collected."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import torch
from publish_rig import RUN, all_bits
from states_rig import tell_nobody

from slackwater.bucket.base import Bucket, ObjectInfo, Unfinished
from slackwater.checkpoint.signature import Signer
from slackwater.errors import (
    AuthError,
    SlackwaterError,
)
from slackwater.ids import Version
from slackwater.publish.gc import collect, point_at_head, survey
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.publish.retention import Contents, GcPlan, Policy, plan_gc
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.weights.state_dict import StateDictSource

DAY_S = 86_400.0
NEWEST = Policy(keep_last=1, keep_anchors=1)

Bits = dict[str, bytes]


class AgingBucket(MemoryBucket):
    """A bucket that dates its objects by a clock of the test; it can lose its rights, and hide keys."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000 * DAY_S
        self.deletions_left = 10**6
        self.hidden: set[str] = set()
        self.listing_fails: SlackwaterError | None = None
        self.may_abort = True
        self._written_s: dict[str, float] = {}

    def put(self, key: str, body: bytes | memoryview) -> None:
        super().put(key, body)
        self._written_s[key] = self.now_s

    def put_if_absent(self, key: str, body: bytes) -> bool:
        made = super().put_if_absent(key, body)
        if made:
            self._written_s[key] = self.now_s
        return made

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = (item for item in super().list(prefix) if item.key not in self.hidden)
        return (replace(item, modified_s=self._written_s[item.key]) for item in found)

    def delete(self, key: str) -> None:
        if not self.deletions_left:
            raise AuthError(f"may not delete {key}")
        self.deletions_left -= 1
        super().delete(key)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        if self.listing_fails is not None:
            raise self.listing_fails
        return super().unfinished(prefix)

    def abort(self, upload: Unfinished) -> None:
        if not self.may_abort:
            raise AuthError(f"may not abort {upload.key}")
        super().abort(upload)


def state(*values: float) -> dict[str, torch.Tensor]:
    """A model of a few elements: the same values are the same state, and the same step from it the same pack."""
    return {"model.w.weight": torch.tensor(values).to(torch.bfloat16), "model.b": torch.tensor([values[0]])}


def publish(
    bucket: Bucket, folder: Path, kinds: str, values: list[int] | None = None, signer: Signer | None = None
) -> list[Bits]:
    """Publish a version for each letter, ``a`` an anchor; returns their bits. Between two an hour passes."""
    publisher = Publisher.open(
        bucket, RUN, anchor_every=1000, anchor_share=inf, threads=1, clock=ManualClock(), signer=signer
    )
    made: list[Bits] = []
    for number, kind in enumerate(kinds):
        source = StateDictSource(state(1.0, values[number] if values else number, 2.0))
        publisher.publish(source, step=number, folder_files=folder, anchor=kind == "a")
        made.append(all_bits(source))
        if isinstance(bucket, AgingBucket):
            bucket.now_s += 3600
    return made


def aged(bucket: AgingBucket, days: float = 10) -> AgingBucket:
    bucket.now_s += days * DAY_S
    return bucket


def surveyed(bucket: AgingBucket) -> Contents:
    return survey(bucket, RUN, now_s=bucket.now_s, progress=tell_nobody)


def collected(bucket: AgingBucket, policy: Policy = NEWEST) -> GcPlan:
    point_at_head(bucket, RUN)
    plan = plan_gc(survey(bucket, RUN, now_s=None, progress=tell_nobody), policy)
    collect(bucket, RUN, plan, threads=2, progress=tell_nobody)
    return plan


def restored(bucket: MemoryBucket, version: int) -> Bits:
    return {name: bits.tobytes() for name, bits in restore(bucket, RUN, Version(version)).bits.items()}


def keys(bucket: MemoryBucket) -> set[str]:
    return {item.key for item in MemoryBucket.list(bucket, "")}
