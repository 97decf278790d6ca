"""What retention took is told from what was lost."""

from pathlib import Path

import pytest
from history_rig import Shelf, hint_at, lose, ten_versions
from publish_rig import RUN, model_folder

from slackwater.checkpoint.keys import manifest_key
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import (
    NotFoundError,
)
from slackwater.ids import Version
from slackwater.publish.audit import Auditor
from slackwater.publish.damage import Report
from slackwater.publish.delta import tell_nobody
from slackwater.publish.history import read_history
from slackwater.testing.bucket import FaultyBucket, MemoryBucket


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def memory(model: Path) -> MemoryBucket:
    return ten_versions(model)


@pytest.fixture
def bucket(memory: MemoryBucket) -> Shelf:
    return Shelf(memory)


def audited(bucket: MemoryBucket | FaultyBucket, version: int, scratch: Path) -> Report:
    auditor = Auditor(depth="manifest", scratch=scratch, threads=1, progress=tell_nobody)
    return auditor.version(bucket, RUN, Version(version))


def test_a_version_that_was_collected_is_told_and_is_no_damage(memory: MemoryBucket, tmp_path: Path) -> None:
    lose(memory, *range(6))
    for version in range(6):
        with pytest.raises(NotFoundError, match=f"version {version} of demo was collected: .* is anchor 6"):
            audited(memory, version, tmp_path)
    assert [audited(memory, version, tmp_path).counts for version in range(6, 10)] == [{}] * 4
    assert audited(memory, 10, tmp_path).counts == {"missing": 1}
    assert [entry.version for entry in read_history(memory, RUN)] == [6, 7, 8, 9]


@pytest.mark.parametrize("gone", [(7,), (0, 1, 2), (0, 1, 2, 3, 4, 5, 6), tuple(range(10))], ids=str)
def test_a_version_that_something_needs_is_damage(memory: MemoryBucket, tmp_path: Path, gone: tuple[int, ...]) -> None:
    lose(memory, *gone)
    for version in gone:
        assert audited(memory, version, tmp_path).counts == {"missing": 1}


def test_between_versions_that_are_there_a_lost_one_is_damage(memory: MemoryBucket, tmp_path: Path) -> None:
    lose(memory, 5)
    assert audited(memory, 5, tmp_path).counts == {"missing": 1}


@pytest.mark.parametrize("body", [b"", b"{"])
def test_below_an_anchor_that_can_not_be_read_nothing_is_called_collected(
    memory: MemoryBucket, tmp_path: Path, body: bytes
) -> None:
    lose(memory, *range(6))
    memory.put(manifest_key(RUN, Version(6)), body)
    assert audited(memory, 5, tmp_path).counts == {"missing": 1}


def test_a6_10_an_audit_rests_on_no_listing(memory: MemoryBucket, bucket: Shelf, tmp_path: Path) -> None:
    bucket.shown = list(memory.list(f"{RUN}/manifests"))
    lose(memory, *range(6))
    with pytest.raises(NotFoundError, match="was collected"):
        audited(bucket, 3, tmp_path)
    bucket.shown = []
    assert audited(bucket, 3, tmp_path).counts == {"missing": 1}
    bucket.may_list = False
    assert audited(bucket, 3, tmp_path).counts == {"missing": 1}
    assert audited(bucket, 9, tmp_path).counts == {}


@pytest.mark.parametrize("hint", [None, 0, 1])
@pytest.mark.parametrize("known", [2, 5])
def test_a_reader_whose_version_was_collected_goes_on_though_the_hint_is_lost(
    memory: MemoryBucket, bucket: Shelf, tmp_path: Path, hint: int | None, known: int
) -> None:
    fetcher = Fetcher(bucket, RUN, tmp_path / "cache")
    lose(memory, *range(6))
    hint_at(memory, hint)
    view = fetcher.look(Version(known))
    assert (view.version, view.receded) == (9, False)


def test_f16_a_reader_still_tells_a_bucket_that_was_set_back(
    memory: MemoryBucket, bucket: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher = Fetcher(bucket, RUN, tmp_path / "cache")
    lose(memory, *range(6, 10))
    for hint in (None, 0, 5):
        hint_at(memory, hint)
        view = fetcher.look(Version(9))
        assert (view.version, view.receded) == (9, True)
    bucket.may_list = False
    assert fetcher.look(Version(9)).receded
    assert "may not list" in caplog.text
    view = fetcher.look(Version(5))
    assert (view.version, view.receded) == (5, False)


def test_a_new_reader_passes_a_gap_that_an_old_hint_lies_below(
    memory: MemoryBucket, bucket: Shelf, tmp_path: Path
) -> None:
    lose(memory, 1, 2, 3)
    hint_at(memory, 0)
    fetcher = Fetcher(bucket, RUN, tmp_path / "cache")
    assert fetcher.head(None) == 9
    bucket.may_list = False
    assert fetcher.head(None) == 0
    assert fetcher.head(Version(5)) == 9
