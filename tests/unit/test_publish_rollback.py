from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bucket_rig import copied
from states_rig import RUN, altered, bits, publish_states, tell_nobody, write_states

from slackwater.checkpoint.keys import manifest_key
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import CorruptError, InvalidInputError, LostRaceError, NotFoundError, WrongBaseError
from slackwater.ids import RunId, Version
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.published import Published
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.publish.rollback import rollback
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.weights.source import FolderSource

Back = Callable[..., Published]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_states(tmp_path_factory.mktemp("states"), 5)


@pytest.fixture(scope="module")
def published(states: list[Path]) -> MemoryBucket:
    """Five versions, anchors at 0 and 3."""
    bucket = MemoryBucket()
    publish_states(bucket, states, anchor_every=3)
    return bucket


@pytest.fixture
def bucket(published: MemoryBucket) -> MemoryBucket:
    """A copy, to be written."""
    return copied(published)


@pytest.fixture
def back(tmp_path: Path) -> Back:
    """Goes back, each time in a folder of its own."""

    def go(bucket: MemoryBucket, to: int, *, anchor: bool = False, run: RunId = RUN) -> Published:
        scratch = tmp_path / f"scratch-{len(list(tmp_path.iterdir()))}"
        scratch.mkdir()
        return rollback(
            bucket, run, Version(to),
            scratch=scratch, level="fast", threads=1, progress=tell_nobody, anchor=anchor, clock=ManualClock(),
        )  # fmt: skip

    return go


def restored(bucket: MemoryBucket, number: int) -> dict[str, bytes]:
    return {name: found.tobytes() for name, found in restore(bucket, RUN, Version(number)).bits.items()}


def contents(bucket: MemoryBucket) -> dict[str, bytes]:
    return {item.key: bucket.get(item.key, max_bytes=2**30) for item in bucket.list("")}


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("to", range(4))
def test_the_next_version_has_the_old_ones_state_and_step(
    bucket: MemoryBucket, states: list[Path], back: Back, to: int, anchor: bool
) -> None:
    before = contents(bucket)
    published = back(bucket, to, anchor=anchor)
    old, new = read_manifest(bucket, RUN, Version(to)), read_manifest(bucket, RUN, Version(5))
    assert (published.version, published.kind) == (5, "anchor" if anchor else "delta")
    assert (new.state, new.step) == (old.state, old.step)
    assert restored(bucket, 5) == bits(states[to])
    assert new.parent is None if anchor else new.parent is not None and new.parent.version == 4
    after = contents(bucket)
    assert find_head(bucket, RUN) == 5
    assert {key: after[key] for key in before if not key.endswith("head.json")} == {
        key: body for key, body in before.items() if not key.endswith("head.json")
    }


def test_an_anchor_of_an_old_version_has_its_config_and_tokenizer(bucket: MemoryBucket, back: Back) -> None:
    back(bucket, 1, anchor=True)
    assert read_manifest(bucket, RUN, Version(5)).side_files == read_manifest(bucket, RUN, Version(0)).side_files


def test_replicas_and_publishers_go_on_from_there(
    bucket: MemoryBucket, states: list[Path], tmp_path: Path, back: Back
) -> None:
    assert Fetcher(bucket, RUN, tmp_path / "cache").head(Version(4)) == 4
    back(bucket, 1)
    assert Fetcher(bucket, RUN, tmp_path / "cache").head(Version(4)) == 5
    publisher = Publisher.open(bucket, RUN, threads=1, clock=ManualClock())
    assert publisher.publish(FolderSource(states[2]), step=20).version == 6
    assert restored(bucket, 6) == bits(states[2])


def test_a_publisher_that_did_not_know_loses_the_race(
    bucket: MemoryBucket, states: list[Path], tmp_path: Path, back: Back
) -> None:
    publisher = Publisher.open(bucket, RUN, threads=1, clock=ManualClock())
    back(bucket, 2)
    newer = altered(
        states[4], tmp_path / "newer", lambda tensors: tensors.update({"model.steps": torch.tensor(9).int()})
    )
    with pytest.raises((LostRaceError, WrongBaseError)):
        publisher.publish(FolderSource(newer), step=50)
    assert restored(bucket, 5) == bits(states[2])


class Overtaken(MemoryBucket):
    """A bucket where another publisher commits each version first."""

    rival = b""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        if self.rival:
            super().put_if_absent(key, self.rival)
        return super().put_if_absent(key, body)


def test_a_publisher_that_is_faster_wins(states: list[Path], back: Back) -> None:
    """Its manifest is there when ours is to be created: ours must not replace it."""
    bucket, other = Overtaken(), MemoryBucket()
    publish_states(bucket, states[:3])
    publish_states(other, states[:4])
    bucket.rival = other.get(manifest_key(RUN, Version(3)), max_bytes=2**20)
    with pytest.raises(LostRaceError):
        back(bucket, 0)
    assert bucket.get(manifest_key(RUN, Version(3)), max_bytes=2**20) == bucket.rival


@pytest.mark.parametrize("to", [4, 1])
def test_going_back_to_what_is_there_already_is_refused(bucket: MemoryBucket, back: Back, to: int) -> None:
    if to != 4:
        back(bucket, to)
    before = contents(bucket)
    with pytest.raises(InvalidInputError, match=f"the newest, has the state of version {to} already"):
        back(bucket, to)
    assert contents(bucket) == before


@pytest.mark.parametrize(("run", "to"), [("run", 5), ("run", 99_999_999), ("other", 0)])
def test_what_is_not_there_is_told(bucket: MemoryBucket, back: Back, run: str, to: int) -> None:
    before = contents(bucket)
    with pytest.raises(NotFoundError):
        back(bucket, to, run=RunId(run))
    assert contents(bucket) == before


def spoil(bucket: MemoryBucket, number: int) -> None:
    key = read_manifest(bucket, RUN, Version(number)).objects[0].key
    body = bytearray(bucket.get(key, max_bytes=2**30))
    body[-1] ^= 1
    bucket.put(key, bytes(body))


def test_a_damaged_old_version_is_not_published(bucket: MemoryBucket, back: Back) -> None:
    spoil(bucket, 1)
    for anchor in (False, True):
        with pytest.raises(CorruptError):
            back(bucket, 2, anchor=anchor)
    assert find_head(bucket, RUN) == 4
    assert back(bucket, 0).version == 5


def test_an_anchor_goes_back_from_a_head_that_is_broken(bucket: MemoryBucket, states: list[Path], back: Back) -> None:
    spoil(bucket, 4)
    with pytest.raises(CorruptError):
        back(bucket, 2)
    assert find_head(bucket, RUN) == 4
    assert (back(bucket, 2, anchor=True).version, restored(bucket, 5)) == (5, bits(states[2]))
