"""Stores that ignore create-if-absent, answers that are lost, and the head hint."""

from itertools import pairwise
from pathlib import Path

import pytest
from history_rig import AWAY, CAP, Careless, Shelf, Trainer, Turned, states, ten_versions
from hypothesis import given
from hypothesis import strategies as st
from publish_rig import RUN, keys, model_folder, trained, weights

from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.errors import LostRaceError, UnavailableError, UnsupportedError
from slackwater.ids import Version
from slackwater.publish.commit import LOOK_AGAIN_S
from slackwater.publish.hint import HINT_EVERY_S, HintWriter
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.weights.state_dict import StateDictSource


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def memory(model: Path) -> MemoryBucket:
    return ten_versions(model)


@pytest.fixture
def bucket(memory: MemoryBucket) -> Shelf:
    return Shelf(memory)


def test_a6_01_a_publisher_hints_a_burst_once_and_its_last_version_when_it_is_closed(model: Path) -> None:
    memory, clock = MemoryBucket(), Turned()
    with Publisher(memory, RUN, threads=1, clock=clock) as publisher:
        for step, tensors in enumerate(states(5)):
            publisher.publish(StateDictSource(tensors), step=step, folder_files=model)
            assert hinted(memory) == b'{"version":0}'
    assert hinted(memory) == b'{"version":4}'


# A store that ignores create-if-absent


def test_a_store_that_creates_twice_is_refused_at_the_first_commit(model: Path) -> None:
    memory = MemoryBucket("careless")
    trainer = Trainer(Careless(memory), model)
    with pytest.raises(
        UnsupportedError, match=r"version 0 of demo is committed and whole: memory://careless ignores"
    ) as told:
        trainer.publish(0)
    assert "slackwater doctor memory://careless" in told.value.hint
    assert read_manifest(memory, RUN, Version(0)).step == 0
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"version 1 of demo isn't committed"):
            trainer.publish(1)
    assert find_head(memory, RUN) == 0


def test_a_store_is_asked_once_by_each_publisher(bucket: Shelf, model: Path) -> None:
    trainer = Trainer(bucket, model)
    for step in range(10, 13):
        trainer.publish(step)
    assert bucket.count("put_if_absent") == 4


def test_a_store_that_does_not_answer_the_second_time_is_asked_at_the_next_commit(model: Path) -> None:
    bucket = Silent(MemoryBucket())
    trainer = Trainer(bucket, model)
    assert [trainer.publish(step) for step in range(3)] == [0, 1, 2]
    assert bucket.count("put_if_absent") == 5


class Silent(FaultyBucket):
    """Answers no second create of the first version."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        made = super().put_if_absent(key, body)
        if not made and key.endswith("0.json"):
            raise AWAY
        return made


class Lossy(FaultyBucket):
    """Loses the first answer, tries again by itself, and tells what it finds, as a bucket over a network does."""

    def put_if_absent(self, key: str, body: bytes) -> bool:
        made = super().put_if_absent(key, body)
        return made and not key.endswith("0.json")


def test_f05_an_answer_that_was_lost_shows_that_the_store_keeps_the_first(model: Path) -> None:
    bucket = Lossy(MemoryBucket())
    trainer = Trainer(bucket, model)
    assert [trainer.publish(step) for step in range(3)] == [0, 1, 2]
    assert bucket.count("put_if_absent") == 3


# A publisher that slept


def collect_but(memory: MemoryBucket, *kept: int) -> None:
    """What retention may leave: some anchors, and the newest."""
    for version in range(10):
        if version not in kept:
            memory.delete(manifest_key(RUN, Version(version)))


@pytest.mark.parametrize("kept", [(2, 8, 9), (2, 9)])
def test_a_number_that_was_collected_meanwhile_is_not_used_again(model: Path, kept: tuple[int, ...]) -> None:
    memory, clock = MemoryBucket(), Turned()
    sleeper = Publisher(memory, RUN, clock=clock, threads=1)
    for step, tensors in enumerate(states(3)):
        sleeper.publish(StateDictSource(tensors), step=step, folder_files=model)
    with Publisher(memory, RUN, threads=1) as other:
        for step, tensors in enumerate(states(10)[3:], 3):
            other.publish(StateDictSource(tensors), step=step, folder_files=model)
    collect_but(memory, *kept)
    clock.now += LOOK_AGAIN_S
    with pytest.raises(LostRaceError, match=r"others have gone on with demo to version 9, .* stood at version 2"):
        sleeper.publish(StateDictSource(trained(states(3)[2], 77)), step=3)
    assert keys(memory, "/manifests/") == [manifest_key(RUN, Version(version)) for version in kept]
    sleeper.close()
    assert hinted(memory) == b'{"version":9}'


def test_a_first_number_that_was_collected_meanwhile_is_not_used_again(memory: MemoryBucket, model: Path) -> None:
    empty = MemoryBucket()
    sleeper = Publisher.open(empty, RUN)
    for item in memory.list(""):
        empty.put(item.key, memory.get(item.key, max_bytes=CAP))
    collect_but(empty, 6, 7, 8, 9)
    with pytest.raises(LostRaceError, match="to version 9, and this publisher stood at its beginning"):
        sleeper.publish(StateDictSource(weights()), step=0, folder_files=model)


def test_a_publisher_that_goes_on_looks_for_the_head_once(bucket: Shelf, model: Path) -> None:
    clock = Turned()
    publisher = Publisher(bucket, RUN, clock=clock, threads=1)
    listings = list[int]()
    for step in range(4):
        publisher.publish(StateDictSource(trained(weights(), step)), step=step, folder_files=model)
        listings.append(bucket.count("list", "manifests"))
        clock.now += LOOK_AGAIN_S - 1
    assert listings[0] == listings[-1]
    clock.now += 1
    publisher.publish(StateDictSource(weights()), step=4)
    assert bucket.count("list", "manifests") == listings[-1] + 1


# The head hint


def hinted(bucket: MemoryBucket) -> bytes:
    return bucket.get(head_key(RUN), max_bytes=CAP)


def test_a6_01_of_a_burst_the_first_hint_is_written_and_the_last_at_the_end() -> None:
    bucket, clock = FaultyBucket(memory := MemoryBucket()), Turned()
    hints = HintWriter(bucket, RUN, clock)
    for version in range(5):
        hints.wrote(Version(version))
        clock.now += HINT_EVERY_S / 5
        assert hinted(memory) == b'{"version":0}'
    assert bucket.count("put") == 1
    for _ in range(2):
        hints.flush()
        assert (hinted(memory), bucket.count("put")) == (b'{"version":4}', 2)


def test_a6_01_versions_further_apart_are_all_hinted_and_nothing_is_left_for_the_end() -> None:
    bucket, clock = FaultyBucket(memory := MemoryBucket()), Turned()
    hints = HintWriter(bucket, RUN, clock)
    for version in range(5):
        hints.wrote(Version(version))
        assert hinted(memory) == b'{"version":%d}' % version
        clock.now += HINT_EVERY_S
    hints.flush()
    assert bucket.count("put") == 5


def test_a6_01_a_hint_that_fails_harms_nobody_and_is_written_later() -> None:
    memory, clock = MemoryBucket(), Turned()
    bucket = FaultyBucket(memory, Fault(verb="put", times=2, before=UnavailableError("429")))
    hints = HintWriter(bucket, RUN, clock)
    hints.wrote(Version(0))
    hints.wrote(Version(1))
    assert bucket.count("put") == 1
    clock.now += HINT_EVERY_S
    hints.wrote(Version(2))
    assert (keys(memory), bucket.count("put")) == ([], 2)
    hints.flush()
    assert hinted(memory) == b'{"version":2}'
    HintWriter(bucket, RUN, clock).flush()
    assert bucket.count("put") == 3


@given(st.lists(st.floats(0, 3), max_size=20))
def test_a6_01_no_two_hints_are_written_within_a_second_before_the_end(pauses: list[float]) -> None:
    clock, written = Turned(), list[float]()

    class Noting(FaultyBucket):
        def put(self, key: str, body: bytes | memoryview) -> None:
            written.append(clock.now)
            super().put(key, body)

    hints = HintWriter(Noting(memory := MemoryBucket()), RUN, clock)
    for version, pause in enumerate(pauses):
        hints.wrote(Version(version))
        clock.now += pause
    assert all(late - early >= HINT_EVERY_S for early, late in pairwise(written))
    hints.flush()
    assert not pauses or hinted(memory) == b'{"version":%d}' % (len(pauses) - 1)
