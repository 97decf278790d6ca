"""Finding the newest version: by its number, whatever the hint says."""

import json
from pathlib import Path

import pytest

from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import CorruptError, UnavailableError
from slackwater.ids import RunId, Version
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket

RUN = RunId("demo")


@pytest.fixture
def memory() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def bucket(memory: MemoryBucket) -> FaultyBucket:
    return FaultyBucket(memory)


@pytest.fixture
def fetcher(bucket: FaultyBucket, tmp_path: Path) -> Fetcher:
    return Fetcher(bucket, RUN, tmp_path)


def put_hint(bucket: MemoryBucket, version: int) -> None:
    bucket.put(head_key(RUN), json.dumps({"version": version}).encode())


def commit_numbers(bucket: MemoryBucket, *versions: int) -> None:
    for version in versions:
        bucket.put(manifest_key(RUN, Version(version)), b"{}")


def test_an_empty_run_has_no_head(fetcher: Fetcher) -> None:
    assert fetcher.head(None) is None


@pytest.mark.parametrize("known", [None, 0, 3])
def test_f06_the_head_is_found_by_number_without_a_hint(
    fetcher: Fetcher, memory: MemoryBucket, known: int | None
) -> None:
    commit_numbers(memory, 0, 1, 2, 3, 4, 5)
    assert fetcher.head(None if known is None else Version(known)) == 5


@pytest.mark.parametrize("hint", [0, 3, 5, 6, 99_999_999])
def test_a_hint_is_only_a_place_to_start(fetcher: Fetcher, memory: MemoryBucket, hint: int) -> None:
    commit_numbers(memory, 0, 1, 2, 3, 4, 5)
    put_hint(memory, hint)
    assert fetcher.head(None) == 5
    assert fetcher.head(Version(2)) == 5


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": -1}',
        b'{"version": "5"}',
        b'{"version": 1e99}',
        b"\xff\xfe",
        b"[" * 4000,
        b" " * 5000,
    ],
)
def test_f10_a_broken_hint_is_no_hint(fetcher: Fetcher, memory: MemoryBucket, body: bytes) -> None:
    commit_numbers(memory, 0, 1, 2)
    memory.put(head_key(RUN), body)
    assert fetcher.head(None) == 2


def test_a_far_hint_saves_asking_for_every_number(fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket) -> None:
    commit_numbers(memory, *range(100))
    put_hint(memory, 98)
    assert fetcher.head(Version(3)) == 99
    assert bucket.count("get_range") == 3


def test_a_run_whose_first_versions_were_retired_is_found_without_a_hint(
    fetcher: Fetcher, memory: MemoryBucket
) -> None:
    commit_numbers(memory, 40, 41, 42)
    memory.put(f"{RUN}/manifests/notes.txt", b"not ours")
    assert fetcher.head(None) == 42


def test_f16_a_bucket_that_was_set_back_never_lowers_the_head(fetcher: Fetcher, memory: MemoryBucket) -> None:
    commit_numbers(memory, *range(6))
    put_hint(memory, 5)
    assert fetcher.head(Version(9)) == 9
    assert fetcher.look(Version(9)).receded is True
    assert fetcher.look(Version(5)).receded is False


def test_a_hint_that_lags_is_not_a_bucket_that_was_set_back(fetcher: Fetcher, memory: MemoryBucket) -> None:
    commit_numbers(memory, *range(6))
    put_hint(memory, 2)
    view = fetcher.look(Version(5))
    assert (view.version, view.receded) == (5, False)


def test_an_empty_manifest_counts_as_committed_and_reads_as_corrupt(fetcher: Fetcher, memory: MemoryBucket) -> None:
    memory.put(manifest_key(RUN, Version(0)), b"")
    assert fetcher.head(None) == 0
    with pytest.raises(CorruptError):
        fetcher.manifest(Version(0))


def test_a_store_that_is_away_is_not_an_empty_one(fetcher: Fetcher, memory: MemoryBucket, bucket: FaultyBucket) -> None:
    commit_numbers(memory, 0)
    for verb in ("get", "get_range"):
        bucket.add(Fault(verb=verb, before=UnavailableError("away")))
        with pytest.raises(UnavailableError):
            fetcher.head(Version(0))
