"""Folds in the background: which ones are due and who makes them."""

import logging
from itertools import pairwise
from math import log2
from pathlib import Path

import pytest
from bucket_rig import copied
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from folding_rig import EVERY, LAST, folding, publish
from hypothesis import given
from hypothesis import strategies as st
from publish_rig import RUN, keys, model_folder
from publish_rig import restored as bits_at

from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import fold_key, signature_key
from slackwater.checkpoint.signature import Signer, TrustedKeys
from slackwater.errors import InvalidInputError, UnavailableError
from slackwater.ids import Version
from slackwater.publish.fold import Folded
from slackwater.publish.folding import Folding, Span, due_folds
from slackwater.publish.lineage import read_manifest
from slackwater.publish.path import read_fold, read_path
from slackwater.publish.signed import SignedBucket
from slackwater.testing.bucket import Fault, FaultyBucket, Gate, MemoryBucket


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> MemoryBucket:
    """Versions 0 to 49 of one anchor."""
    bucket = MemoryBucket()
    publish(bucket, LAST + 3, model_folder(tmp_path_factory.mktemp("run") / "model"))
    return bucket


@pytest.fixture
def bucket(published: MemoryBucket) -> MemoryBucket:
    """A copy, to be written."""
    return copied(published)


def folds(bucket: MemoryBucket) -> list[str]:
    return [key.rpartition("/")[2].removesuffix(".json") for key in keys(bucket, "/folds/")]


def steps(version: int, anchor: int, every: int) -> list[Span]:
    """What a reader goes along where every fold that was ever due is there."""
    ended = version - (version - anchor) % every
    ladder = due_folds(Version(ended), Version(anchor), every)
    reached = {span.end for span in ladder}
    start, found = Version(anchor), list[Span]()
    while start < version:
        span = next((item for item in ladder if item.start == start), Span(start, Version(start + 1)))
        assert span.end in reached or span.end == start + 1
        found.append(span)
        start = span.end
    return found


# Which


def test_blocks_end_folds_as_in_a_fenwick_tree() -> None:
    last = [due_folds(Version(10 + 8 * block), Version(10), 8)[-1] for block in range(1, 9)]
    assert [(span.end - span.start) // 8 for span in last] == [1, 2, 1, 4, 1, 2, 1, 8]
    assert due_folds(Version(40), Version(0), 8) == (Span(Version(0), Version(32)), Span(Version(32), Version(40)))


def test_nothing_is_due_at_an_anchor_within_a_block_or_over_one_version() -> None:
    assert due_folds(Version(50), Version(50), 8) == ()
    assert due_folds(Version(57), Version(50), 8) == ()
    assert due_folds(Version(48), Version(50), 8) == ()
    assert due_folds(Version(42), Version(50), 8) == ()
    assert due_folds(Version(1), Version(0), 1) == ()
    assert due_folds(Version(3), Version(0), 1) == (Span(Version(0), Version(2)),)


@given(st.integers(0, 10**6), st.integers(1, 500), st.integers(1, 64))
def test_any_version_is_reached_by_few_folds_and_fewer_deltas_than_a_block(anchor: int, count: int, every: int) -> None:
    found = steps(anchor + count, anchor, every)
    assert found[0].start == anchor
    assert found[-1].end == anchor + count
    assert all(left.end == right.start for left, right in pairwise(found))
    num_folds = sum(span.end - span.start > 1 for span in found)
    assert num_folds <= 1 + log2(max(1, count // every))
    assert len(found) - num_folds < every + (every == 1)


@given(st.integers(1, 500), st.integers(1, 64))
def test_a_ladder_is_made_of_folds_that_were_due_before(count: int, every: int) -> None:
    before = {span for version in range(count * every) for span in due_folds(Version(version), Version(0), every)}
    assert before >= set(due_folds(Version(count * every), Version(0), every)[:-1])


@given(st.integers(1, 500), st.integers(1, 64))
def test_all_folds_together_are_a_bounded_multiple_of_the_deltas(blocks: int, every: int) -> None:
    made = {span for block in range(1, blocks + 1) for span in due_folds(Version(block * every), Version(0), every)}
    assert sum(span.end - span.start for span in made) <= (1 + log2(blocks) / 2) * blocks * every


@pytest.mark.parametrize(("every", "threads"), [(0, 1), (-8, 1), (8, 0)])
def test_numbers_below_one_are_refused(every: int, threads: int) -> None:
    with pytest.raises(InvalidInputError, match="both are 1 or more"):
        Folding(MemoryBucket(), RUN, every=every, threads=threads)


# A late joiner


def test_a_joiner_at_version_47_reads_an_anchor_and_few_folds(bucket: MemoryBucket, tmp_path: Path) -> None:
    plain = FaultyBucket(bucket)
    state = bits_at(plain, LAST)
    made: list[Folded] = []
    with folding(bucket, tmp_path, 8, made.append) as maker:
        for number in range(LAST + 1):
            maker.committed(Version(number), Version(0))
            maker.wait()
    assert folds(bucket) == sorted(
        ["00000000-00000008", "00000000-00000016", "00000016-00000024", "00000000-00000032", "00000032-00000040"]
    )
    assert [folded.is_new for folded in made] == [True] * 5
    watched = FaultyBucket(bucket)
    assert bits_at(watched, LAST) == state
    assert watched.count("get", "/folds/") == 2
    assert watched.count("get", "/manifests/") == 1 + LAST - 40  # of the anchor, and of each delta
    assert watched.count("list") == 2
    anchor = len(read_manifest(bucket, RUN, Version(0)).objects)
    read = [*(read_fold(bucket, RUN, Version(start), Version(end)) for start, end in ((0, 32), (32, 40)))]
    read += [read_manifest(bucket, RUN, Version(number)) for number in range(41, LAST + 1)]
    assert watched.count("get", "/blobs/") == sum(len(item.objects) for item in read) == 9
    assert plain.count("get", "/blobs/") == LAST
    assert watched.count("get", "/anchors/") <= anchor
    short, long = (sum(item.num_bytes for item in path) for path in (read, read_path(bucket, RUN, Version(LAST))[1:]))
    all_folds = sum(folded.manifest.num_bytes for folded in made)
    assert short < 0.75 * long
    assert all_folds < 1.5 * long


# Who


def test_folds_are_made_while_versions_are_published(tmp_path: Path) -> None:
    bucket, states = MemoryBucket(), list[dict[str, bytes]]()
    with folding(bucket, tmp_path) as maker:

        def each(version: Version) -> None:
            states.append(bits_at(bucket, version))
            maker.committed(version, Version(0))

        publish(bucket, 9, model_folder(tmp_path / "model"), each)
        maker.wait()
    assert "00000000-00000008" in folds(bucket)
    assert [bits_at(bucket, number) for number in range(9)] == states
    assert not list(tmp_path.glob(".slackwater-*"))


def test_being_told_of_a_version_waits_for_nothing_and_the_newest_ladder_wins(
    bucket: MemoryBucket, tmp_path: Path
) -> None:
    gate, made = Gate(), list[Span]()
    slow = FaultyBucket(bucket, Fault(verb="put_if_absent", key="/folds/", gate=gate))

    def tell(folded: Folded) -> None:
        assert folded.manifest.parent is not None
        made.append(Span(folded.manifest.parent.version, folded.manifest.version))

    with folding(slow, tmp_path, made=tell) as maker:
        maker.committed(Version(4), Version(0))
        assert gate.reached.wait(30)
        for number in range(5, 29):
            maker.committed(Version(number), Version(0))
        gate.open()
        maker.wait()
    assert made == [(0, 4), (0, 16), (16, 24), (24, 28)]


def test_what_was_left_out_is_made_by_the_next_process_where_its_ladder_needs_it(
    bucket: MemoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FaultyBucket(bucket, Fault(verb="put", key="/blobs/", before=UnavailableError("away")))
    with folding(failing, tmp_path) as maker:
        maker.committed(Version(8), Version(0))
        maker.wait()
        assert "the fold demo/0..8 is left out: away" in caplog.text
        maker.committed(Version(12), Version(0))
        maker.wait()
    assert folds(bucket) == ["00000008-00000012"]
    with folding(bucket, tmp_path) as maker:
        maker.committed(Version(12), Version(0))
        maker.wait()
    assert folds(bucket) == ["00000000-00000008", "00000008-00000012"]


def test_a_disk_without_room_is_left_alone(
    bucket: MemoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slackwater.publish.folding._MODELS", 2**60)
    with folding(bucket, tmp_path) as maker:
        maker.committed(Version(8), Version(0))
        maker.wait()
    assert (folds(bucket), list(tmp_path.iterdir())) == ([], [])
    assert f"is left out: {tmp_path} has" in caplog.text


def test_a_scratch_folder_that_is_not_there_costs_the_fold_alone(
    bucket: MemoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with folding(bucket, tmp_path / "nowhere") as maker:
        maker.committed(Version(8), Version(0))
        maker.wait()
    assert folds(bucket) == []
    assert "the fold demo/0..8 is left out" in caplog.text


def test_a_closed_one_makes_nothing_and_closes_again(bucket: MemoryBucket, tmp_path: Path) -> None:
    maker = folding(bucket, tmp_path)
    maker.close()
    maker.committed(Version(8), Version(0))
    maker.wait()
    maker.close()
    assert folds(bucket) == []


@pytest.mark.parametrize("stage", ["fetch", "apply", "check", "encode"])
def test_closing_leaves_the_fold_at_its_next_body_and_nothing_of_it_is_visible(
    bucket: MemoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    gate, stages = Gate(), list[str]()

    def progress(name: str, _done: int, _total: int) -> None:
        stages.append(name)
        if name == stage:
            gate.hold()

    caplog.set_level(logging.WARNING)
    maker = Folding(bucket, RUN, every=EVERY, scratch=tmp_path, progress=progress)
    maker.committed(Version(8), Version(0))
    assert gate.reached.wait(30)
    maker._closed.set()  # what `close` does before it waits
    gate.open()
    maker.close()
    assert stages[-1] == stage
    assert (folds(bucket), list(tmp_path.iterdir()), caplog.text) == ([], [], "")


def test_folds_are_signed_before_they_are_there(bucket: MemoryBucket, tmp_path: Path) -> None:
    signer = Signer(Ed25519PrivateKey.generate().private_bytes_raw())
    with Folding(bucket, RUN, every=EVERY, scratch=tmp_path, signer=signer) as maker:
        maker.committed(Version(8), Version(0))
        maker.wait()
    body = bucket.get(fold_key(RUN, Version(0), Version(8)), max_bytes=2**20)
    assert keys(bucket, "/signatures/") == [signature_key(RUN, object_digest(body))]
    trusting = SignedBucket(bucket, TrustedKeys([signer.public_key]))
    assert read_fold(trusting, RUN, Version(0), Version(8)).version == 8
