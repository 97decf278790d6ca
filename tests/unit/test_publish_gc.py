"""Garbage collection: what goes, what stays, and whatever happens meanwhile."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest
from gc_rig import DAY_S, NEWEST, AgingBucket, aged, collected, keys, publish, restored, state, surveyed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from publish_rig import RUN, all_bits, model_folder
from states_rig import tell_nobody

from depth import examples
from slackwater.checkpoint.chain import plan_path
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import blob_key, fold_key, head_key, manifest_key
from slackwater.cli.gc import LEAST_AGE_S, parse_age
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import (
    AuthError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
)
from slackwater.ids import Version
from slackwater.publish.fold import fold
from slackwater.publish.gc import collect, point_at_head, survey
from slackwater.publish.lineage import HeadHint, find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.retention import GcPlan, Policy, plan_gc
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.weights.state_dict import StateDictSource


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "folder")


@pytest.fixture
def bucket(folder: Path) -> AgingBucket:
    """Ten days ago: anchors at 0, 3 and 6, eight versions."""
    bucket = AgingBucket()
    publish(bucket, folder, "addaddad")
    return aged(bucket)


def test_what_is_needed_no_more_goes_and_the_run_goes_on(bucket: AgingBucket, folder: Path) -> None:
    plan = collected(bucket)
    assert {item.key for item in bucket.list("demo/manifests")} == {manifest_key(RUN, Version(n)) for n in (6, 7)}
    named = {ref.key for n in (6, 7) for ref in read_manifest(bucket, RUN, Version(n)).objects}
    assert keys(bucket) == named | {manifest_key(RUN, Version(n)) for n in (6, 7)} | {head_key(RUN)}
    assert {item.key for item in plan.keep} == keys(bucket)
    assert find_head(bucket, RUN) == 7
    publisher = Publisher.open(bucket, RUN, threads=1, clock=ManualClock())
    published = publisher.publish(StateDictSource(state(1.0, 99.0, 2.0)), step=8, folder_files=folder)
    assert (published.version, published.kind) == (8, "delta")
    assert restored(bucket, 8) == all_bits(StateDictSource(state(1.0, 99.0, 2.0)))


def test_a_second_collection_finds_nothing(bucket: AgingBucket) -> None:
    collected(bucket)
    before = keys(bucket)
    assert collected(bucket).delete == ()
    assert keys(bucket) == before


@pytest.mark.parametrize("hint", [None, 0, 1, 7])
@pytest.mark.parametrize("known", [None, 0, 2, 6])
def test_readers_find_the_head_whatever_the_hint_was_before(
    bucket: AgingBucket, tmp_path: Path, hint: int | None, known: int | None
) -> None:
    MemoryBucket.delete(bucket, head_key(RUN))
    if hint is not None:
        bucket.put(head_key(RUN), msgspec.json.encode(HeadHint(version=Version(hint))))
    collected(bucket, Policy(keep_last=1, keep_anchors=1, pinned=[Version(1)]))
    assert find_head(bucket, RUN) == 7
    view = Fetcher(bucket, RUN, tmp_path).look(None if known is None else Version(known))
    assert (view.version, view.receded) == (7, False)


def test_a_dry_survey_writes_nothing(bucket: AgingBucket) -> None:
    before = {key: bucket.get(key, max_bytes=2**20) for key in keys(bucket)}
    bucket.deletions_left = 0
    assert plan_gc(surveyed(bucket), NEWEST).delete
    assert {key: bucket.get(key, max_bytes=2**20) for key in keys(bucket)} == before


def test_ages_are_measured_by_the_clock_that_dates_the_hint(bucket: AgingBucket) -> None:
    """Not by this machine's, which may be days ahead."""
    point_at_head(bucket, RUN)
    assert survey(bucket, RUN, now_s=None, progress=tell_nobody).now_s == bucket.now_s
    MemoryBucket.delete(bucket, head_key(RUN))
    lost = survey(bucket, RUN, now_s=None, progress=tell_nobody)
    assert (lost.now_s, plan_gc(lost, NEWEST).delete) == (0.0, ())


def test_a_run_without_versions_gets_no_hint() -> None:
    empty = AgingBucket()
    with pytest.raises(NotFoundError):
        point_at_head(empty, RUN)
    assert keys(empty) == set()


def test_credentials_that_may_not_delete_are_told_and_nothing_is_lost(bucket: AgingBucket) -> None:
    point_at_head(bucket, RUN)
    plan, before = plan_gc(surveyed(bucket), NEWEST), keys(bucket)
    bucket.deletions_left = 0
    with pytest.raises(AuthError):
        collect(bucket, RUN, plan, threads=1, progress=tell_nobody)
    assert keys(bucket) == before


def test_a_collection_that_ended_in_the_middle_is_finished_by_the_next(bucket: AgingBucket) -> None:
    whole = AgingBucket()
    whole.now_s = bucket.now_s
    for item in list(bucket.list("")):
        whole.put(item.key, bucket.get(item.key, max_bytes=item.size))
    aged(whole)
    aged(bucket)
    collected(whole)
    for left in (1, 4, 6, 8, 10**6):
        bucket.deletions_left = left
        try:
            collected(bucket)
        except AuthError:
            assert left < 10**6
    assert keys(bucket) == keys(whole)


def commit_naming(bucket: AgingBucket, key: str, body: bytes) -> None:
    """Commit version 8 as an anchor that names an object which its publisher found there, and so didn't upload."""
    newest = read_manifest(bucket, RUN, Version(7))
    ref = msgspec.structs.replace(newest.objects[0], key=key, size=len(body), sha256=object_digest(body))
    made = msgspec.structs.replace(
        newest, version=Version(8), objects=(ref,), parent=None, kind="anchor", tiles=None, bodies=None
    )
    bucket.put_if_absent(manifest_key(RUN, Version(8)), msgspec.json.encode(made))


def planned(bucket: AgingBucket) -> tuple[GcPlan, str, bytes]:
    """A plan, and an object that is to go by it."""
    point_at_head(bucket, RUN)
    plan = plan_gc(surveyed(bucket), NEWEST)
    doomed = next(item for item in plan.delete if item.why == "object" and "/blobs/" in item.key)
    return plan, doomed.key, bucket.get(doomed.key, max_bytes=doomed.size)


def test_what_a_version_published_meanwhile_names_is_spared(bucket: AgingBucket) -> None:
    plan, key, body = planned(bucket)
    commit_naming(bucket, key, body)
    done = collect(bucket, RUN, plan, threads=1, progress=tell_nobody)
    assert (done.spared, key in keys(bucket)) == ((key,), True)
    assert done.num_deleted == len(plan.delete) - 1
    assert done.num_bytes == plan.num_bytes - len(body)


def test_what_could_not_be_spared_is_told(bucket: AgingBucket) -> None:
    """Its publisher commits between the last look and the deletion."""
    plan, key, body = planned(bucket)

    def commit_last(_stage: str, done: int, total: int) -> None:
        if done == total:
            commit_naming(bucket, key, body)

    with pytest.raises(CorruptError, match=r"was deleted in the moment .*publish an anchor"):
        collect(bucket, RUN, plan, threads=1, progress=commit_last)


def apply_from(bucket: AgingBucket, fetcher: Fetcher, held: int, head: int) -> list[str]:
    """What a replica that holds a version loads on its way to another one."""

    def kind_of(version: Version) -> Literal["anchor", "delta"] | None:
        try:
            return fetcher.manifest(version).kind
        except NotFoundError:
            return None

    path = plan_path(Version(held), Version(head), kind_of)
    if path.anchor is not None:
        fetcher.anchor(fetcher.manifest(path.anchor))
    for version in path.deltas:
        fetcher.bodies(fetcher.manifest(version))
    assert keys(bucket)
    return [*([] if path.anchor is None else [f"anchor {path.anchor}"]), *(f"delta {v}" for v in path.deltas)]


def test_f15_a_slow_replica_replays_old_deltas_while_these_are_young_and_then_takes_the_anchor(
    folder: Path, tmp_path: Path
) -> None:
    bucket = AgingBucket()
    publish(bucket, folder, "addddddad")
    fetcher = Fetcher(bucket, RUN, tmp_path)
    assert fetcher.manifest(Version(2)).kind == "delta"
    plan = collected(bucket)
    assert plan.delete == ()
    assert apply_from(bucket, fetcher, 1, 5) == ["delta 2", "delta 3", "delta 4", "delta 5"]
    manifest = fetcher.manifest(Version(6))  # and before it has the packs:
    assert collected(aged(bucket)).delete
    with pytest.raises(NotFoundError):
        fetcher.bodies(manifest)
    assert apply_from(bucket, fetcher, 5, 8) == ["anchor 7", "delta 8"]


def test_f15_what_a_lease_names_stays_with_its_chain(bucket: AgingBucket, tmp_path: Path) -> None:
    collected(bucket, Policy(keep_last=1, keep_anchors=1, leases=[Version(2)]))
    assert apply_from(bucket, Fetcher(bucket, RUN, tmp_path), 0, 2) == ["delta 1", "delta 2"]


def test_packs_of_dead_publishers_go_when_they_are_old_and_other_runs_are_left_alone(bucket: AgingBucket) -> None:
    old, new = (blob_key(RUN, object_digest(body)) for body in (b"old", b"new"))
    foreign = ("other/manifests/00000000.json", f"demo2/blobs/{'0' * 64}", "demo/README.txt")
    for key in (old, *foreign):
        bucket.put(key, b"old")
    aged(bucket, 2)
    bucket.put(new, b"new")
    collected(bucket)
    assert (old in keys(bucket), new in keys(bucket), keys(bucket) >= {*foreign}) == (False, True, True)


def test_folds_are_collected_with_their_ends(bucket: AgingBucket, tmp_path: Path) -> None:
    for start, end in ((0, 2), (6, 7)):
        scratch = tmp_path / f"{start}"
        scratch.mkdir()
        fold(bucket, RUN, Version(start), Version(end), scratch=scratch, level="fast", threads=1, progress=tell_nobody)
    collected(aged(bucket))
    left = {item.key for item in bucket.list("demo/folds")}
    assert left == {fold_key(RUN, Version(6), Version(7))}
    assert restored(bucket, 7)


# What can't be right


@pytest.mark.parametrize("hidden", [[0], [3], [6], range(8)])
def test_a_listing_that_lags_is_refused(bucket: AgingBucket, hidden: list[int]) -> None:
    bucket.hidden = {manifest_key(RUN, Version(number)) for number in hidden}
    with pytest.raises(ConflictError, match="the listing of demo lacks version"):
        plan_gc(surveyed(bucket), NEWEST)


def test_a_listing_without_anything_is_refused_where_a_head_is_there(bucket: AgingBucket) -> None:
    bucket.hidden = keys(bucket)
    with pytest.raises(ConflictError, match="lags"):
        plan_gc(surveyed(bucket), NEWEST)


@pytest.mark.parametrize("body", [b"", b"{", b'{"format":"other/1"}'])
@pytest.mark.parametrize("number", [0, 4, 7])
def test_a_manifest_that_can_not_be_read_is_refused(bucket: AgingBucket, number: int, body: bytes) -> None:
    bucket.put(manifest_key(RUN, Version(number)), body)
    with pytest.raises(CorruptError, match=rf"{number:08d}\.json can't be read"):
        plan_gc(surveyed(bucket), NEWEST)


def test_a_fold_that_can_not_be_read_is_refused(bucket: AgingBucket) -> None:
    bucket.put(fold_key(RUN, Version(0), Version(2)), b"{")
    with pytest.raises(CorruptError, match=r"00000000-00000002\.json can't be read.*a fold may be deleted"):
        surveyed(bucket)


def test_a_run_that_is_not_there_is_refused() -> None:
    with pytest.raises(NotFoundError):
        surveyed(AgingBucket())


@pytest.mark.parametrize(("text", "seconds"), [("24h", DAY_S), ("90min", 5400), ("90m", 5400), ("1.5d", 1.5 * DAY_S)])
def test_ages_are_read(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "24", "24 h", "-24h", "0h", "59min", "3599s", "nanh", "1e9h", "٢٤h"])
def test_what_is_no_age_or_too_short_a_one_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is no minimum age"):
        parse_age(text)
    assert parse_age("1h") == LEAST_AGE_S


# Random histories


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.text("addd", min_size=0, max_size=7).map(lambda text: "a" + text),
    values=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    keep=st.integers(1, 4),
    anchors=st.integers(1, 3),
    min_age_h=st.integers(0, 9),
    data=st.data(),
)
def test_after_any_prefix_of_any_plan_every_kept_version_restores_bit_exactly(
    folder: Path, kinds: str, values: list[int], keep: int, anchors: int, min_age_h: int, data: st.DataObject
) -> None:
    """States come back, so that versions share packs; ages and policies are anything."""
    bucket = AgingBucket()
    states = publish(bucket, folder, kinds, values)
    numbers = st.sets(st.integers(0, len(kinds) - 1).map(Version), max_size=2)
    policy = Policy(
        keep_last=keep, keep_anchors=anchors, min_age_s=3600.0 * min_age_h,
        pinned=data.draw(numbers), leases=data.draw(numbers),
    )  # fmt: skip
    point_at_head(bucket, RUN)
    plan = plan_gc(surveyed(bucket), policy)
    bucket.deletions_left = data.draw(st.integers(0, len(plan.delete)))
    whole = bucket.deletions_left == len(plan.delete)
    try:
        collect(bucket, RUN, plan, threads=1, progress=tell_nobody)
        assert whole
    except AuthError:
        assert not whole
    assert find_head(bucket, RUN) == len(kinds) - 1
    assert plan.versions.keys() >= {*policy.pinned, *policy.leases, Version(len(kinds) - 1)}
    for version in plan.versions:
        assert restored(bucket, version) == states[version]
    left = keys(bucket)
    for number in range(len(kinds)):
        if manifest_key(RUN, Version(number)) in left:
            assert {ref.key for ref in read_manifest(bucket, RUN, Version(number)).objects} <= left
