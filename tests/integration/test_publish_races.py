"""F07: two publishers that stand at the commit of the same version at the same time. One wins, every time."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pytest
from publish_rig import RUN, Tensors, all_bits, keys, model_folder, restored, trained, weights

from slackwater.bucket.base import Bucket
from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.keys import manifest_key
from slackwater.errors import LostRaceError
from slackwater.ids import Version
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.publisher import Published, Publisher
from slackwater.testing.bucket import Fault, FaultyBucket, Gate, MemoryBucket
from slackwater.weights.state_dict import StateDictSource

RACES: Final = 1000
PARTS: Final = 4
LOCAL_RACES: Final = 60

Kind = Literal["first anchor", "delta", "later anchor"]
KINDS: Final[tuple[Kind, ...]] = ("first anchor", "delta", "later anchor")


class Start(Gate):
    """Lets two through, once both are here."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)

    def hold(self, seconds: float = 30.0) -> None:
        """Wait for the other one."""
        self._both.wait(seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Racer:
    """A publisher that has a state to publish."""

    publisher: Publisher
    tensors: Tensors
    kind: Kind
    step: int
    model: Path

    def publish(self) -> Published | LostRaceError:
        """The version, or how the race was lost."""
        try:
            return self.publisher.publish(
                StateDictSource(self.tensors),
                step=self.step,
                folder_files=self.model,
                anchor=self.kind == "later anchor",
            )
        except LostRaceError as error:
            return error


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def race_once(bucket: Bucket, base: Tensors, seed: int, kind: Kind, model: Path) -> None:
    """Two publishers meet at the commit; what became of it is checked from outside."""
    head = find_head(bucket, RUN)
    version = Version(0 if head is None else head + 1)
    start = Start()
    racers = [
        Racer(
            publisher=Publisher(
                FaultyBucket(bucket, Fault(verb="put_if_absent", key="/manifests/", gate=start)), RUN, threads=1
            ),
            tensors=trained(base, 2 * seed + number),
            kind=kind,
            step=number,
            model=model,
        )
        for number in (0, 1)
    ]
    with ThreadPoolExecutor(2) as pool:
        endings = list(pool.map(Racer.publish, racers))
    (winner,) = (number for number in (0, 1) if isinstance(endings[number], Published))
    lost = endings[1 - winner]
    assert isinstance(lost, LostRaceError)
    manifest = read_manifest(bucket, RUN, version)
    assert (find_head(bucket, RUN), manifest.step) == (version, winner)
    assert f"state {manifest.state[:12]}, step {winner}" in lost.message
    assert restored(bucket, version) == all_bits(StateDictSource(racers[winner].tensors))
    before = bucket.get(manifest_key(RUN, version), max_bytes=1 << 20)
    assert isinstance(racers[1 - winner].publish(), LostRaceError)
    assert bucket.get(manifest_key(RUN, version), max_bytes=1 << 20) == before


def prepared(bucket: Bucket, base: Tensors, kind: Kind, model: Path) -> None:
    if kind != "first anchor":
        Publisher(bucket, RUN, threads=1).publish(StateDictSource(base), step=9, folder_files=model)


def run_races(seeds: Iterable[int], make: Callable[[int], Bucket], model: Path) -> None:
    base = weights()
    for seed in seeds:
        kind = KINDS[seed % len(KINDS)]
        bucket = make(seed)
        prepared(bucket, base, kind, model)
        race_once(bucket, base, seed, kind, model)


@pytest.mark.parametrize("part", range(PARTS))
def test_f07_of_two_publishers_at_the_commit_one_wins_a_thousand_times(model: Path, part: int) -> None:
    run_races(range(part, RACES, PARTS), lambda _: MemoryBucket(), model)


def test_f07_of_two_publishers_at_the_commit_of_a_directory_one_wins(model: Path, tmp_path: Path) -> None:
    run_races(range(LOCAL_RACES), lambda seed: LocalBucket(tmp_path / str(seed), create=True), model)


def test_f07_equal_states_that_race_are_one_version_whoever_made_it(model: Path) -> None:
    """Both send the same objects; the manifests differ in their step, so that one of them is told that it lost."""
    bucket, base = MemoryBucket(), weights()
    prepared(bucket, base, "delta", model)
    start = Start()
    sources = StateDictSource(trained(base, 1))

    def publish(step: int) -> str:
        faulty = FaultyBucket(bucket, Fault(verb="put_if_absent", key="/manifests/", gate=start))
        try:
            return Publisher(faulty, RUN, threads=1).publish(sources, step=step).state
        except LostRaceError:
            return "lost"

    with ThreadPoolExecutor(2) as pool:
        endings = sorted(pool.map(publish, (1, 2)))
    assert endings == [read_manifest(bucket, RUN, Version(1)).state, "lost"]
    assert len(keys(bucket, "/blobs/")) == 1


def test_f07_who_lost_opens_anew_and_goes_on_from_the_winner(model: Path) -> None:
    bucket, base = MemoryBucket(), weights()
    prepared(bucket, base, "delta", model)
    for seed in range(5):
        race_once(bucket, base, seed, "delta", model)
    assert find_head(bucket, RUN) == 5
    last = trained(base, 99)
    assert Publisher.open(bucket, RUN, threads=1).publish(StateDictSource(last), step=6).version == 6
    assert restored(bucket, 6) == all_bits(StateDictSource(last))
