from pathlib import Path

import msgspec
import pytest
from bucket_rig import copied
from states_rig import RUN, publish_states, write_states

from slackwater.bucket.base import ObjectInfo
from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.cli.history import age_of, spell_age
from slackwater.errors import NotFoundError
from slackwater.ids import RunId, Version
from slackwater.publish.history import Entry, read_history, read_numbers
from slackwater.publish.lineage import HeadHint, read_manifest
from slackwater.testing.bucket import FaultyBucket, MemoryBucket


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


class Stale(MemoryBucket):
    """A bucket whose listing lacks the newest manifests."""

    def __init__(self, bucket: MemoryBucket, shown: int) -> None:
        super().__init__()
        for item in bucket.list(""):
            self.put(item.key, bucket.get(item.key, max_bytes=item.size))
        self._shown = {manifest_key(RUN, Version(number)) for number in range(shown)}

    def list(self, prefix: str):  # noqa: ANN201  # as in the class it stands for
        return (item for item in super().list(prefix) if item.key in self._shown)


def numbers(entries: list[Entry]) -> list[int]:
    return [entry.version for entry in entries]


def test_a_history_tells_what_each_version_is_and_cost(bucket: MemoryBucket) -> None:
    entries = read_history(bucket, RUN)
    assert numbers(entries) == [0, 1, 2, 3, 4]
    assert [entry.kind for entry in entries] == ["anchor", "delta", "delta", "anchor", "delta"]
    assert [entry.parent for entry in entries] == [None, 0, 1, None, 3]
    assert [entry.step for entry in entries] == [0, 10, 20, 30, 40]
    total = read_manifest(bucket, RUN, Version(0)).outline.num_elements
    for entry in entries:
        manifest = read_manifest(bucket, RUN, entry.version)
        assert (entry.state, entry.num_bytes) == (manifest.state, manifest.num_bytes)
        assert entry.density == manifest.num_changed / total
        bodies = 0 if manifest.bodies is None else len(manifest.bodies.encoding)
        assert sum(entry.encodings.values()) == bodies
    assert (entries[0].density, entries[0].encodings) == (1.0, {})


def test_a_history_reads_manifests_and_no_object(bucket: MemoryBucket) -> None:
    watched = FaultyBucket(bucket)
    read_history(watched, RUN)
    assert watched.count("get", "/blobs/") + watched.count("get_range", "/blobs/") == 0
    assert watched.count("get", "/anchors/") + watched.count("get_range", "/anchors/") == 0
    assert watched.count("get", "/manifests/") == 5


@pytest.mark.parametrize(("limit", "expected"), [(1, [4]), (2, [3, 4]), (5, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4])])
def test_a_limit_counts_from_the_newest(bucket: MemoryBucket, limit: int, expected: list[int]) -> None:
    assert numbers(read_history(bucket, RUN, limit=limit)) == expected


def test_density_needs_an_anchor_from_below_where_none_is_shown(bucket: MemoryBucket) -> None:
    assert [entry.density for entry in read_history(bucket, RUN, limit=1)] == [read_history(bucket, RUN)[-1].density]
    for number in (0, 3):
        bucket.delete(manifest_key(RUN, Version(number)))
    assert [entry.density for entry in read_history(bucket, RUN)] == [None, None, None]


def test_versions_that_retention_took_are_left_out(bucket: MemoryBucket) -> None:
    for number in (0, 2):
        bucket.delete(manifest_key(RUN, Version(number)))
    assert numbers(read_history(bucket, RUN)) == [1, 3, 4]


@pytest.mark.parametrize("hint", [None, 0, 2, 4, 99])
@pytest.mark.parametrize("shown", [0, 2, 5])
def test_neither_a_late_listing_nor_a_wrong_hint_hides_a_version(
    bucket: MemoryBucket, hint: int | None, shown: int
) -> None:
    stale = Stale(bucket, shown)
    stale.delete(head_key(RUN))
    if hint is not None:
        stale.put(head_key(RUN), msgspec.json.encode(HeadHint(version=Version(hint))))
    found = read_numbers(stale, RUN)
    assert (list(found.written_s), found.head) == ([0, 1, 2, 3, 4], 4)


def test_a_manifest_that_cannot_be_read_is_a_line_of_its_own(bucket: MemoryBucket) -> None:
    bucket.put(manifest_key(RUN, Version(1)), b"{")
    bucket.put(manifest_key(RUN, Version(2)), b"")
    entries = read_history(bucket, RUN)
    assert [entry.kind for entry in entries] == ["anchor", "damaged", "damaged", "anchor", "delta"]
    assert "the manifest can't be read" in (entries[1].damage or "")


def test_keys_that_are_no_manifests_are_left_aside(bucket: MemoryBucket) -> None:
    for key in ("run/manifests/9.json", "run/manifests/00000009.json.bak", "run/manifests/deep/00000009.json"):
        bucket.put(key, b"{}")
    bucket.put("run2/manifests/00000009.json", b"{}")
    assert read_numbers(bucket, RUN).head == 4


def test_a_run_without_versions_is_told() -> None:
    with pytest.raises(NotFoundError, match=r"other has no version .*--run"):
        read_history(MemoryBucket(), RunId("other"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3_725, "1 h 2 min"), (200_000, "2 d 7 h")],
)
def test_ages_are_spelt_in_two_units(seconds: float | None, text: str) -> None:
    assert spell_age(seconds) == text


def test_the_store_tells_an_age_before_the_publisher_does(bucket: MemoryBucket) -> None:
    entry = read_history(bucket, RUN)[0]
    assert entry.created_at is not None
    assert entry.written_s is None
    assert age_of(entry, 100.0) is not None
    dated = read_numbers(Dated(bucket), RUN)
    assert set(dated.written_s.values()) == {50.0}
    assert age_of(read_history(Dated(bucket), RUN)[0], 60.0) == 10.0
    assert age_of(read_history(Dated(bucket), RUN)[0], 40.0) == 0.0


class Dated(Stale):
    """A bucket that tells when an object was written."""

    def __init__(self, bucket: MemoryBucket) -> None:
        super().__init__(bucket, 5)

    def list(self, prefix: str):  # noqa: ANN201  # as above
        return (ObjectInfo(key=item.key, size=item.size, modified_s=50.0) for item in super().list(prefix))
