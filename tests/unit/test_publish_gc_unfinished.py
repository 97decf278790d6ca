"""What broken writers left, in a collection."""

import json
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

import pytest
from gc_rig import DAY_S, NEWEST, AgingBucket, aged, collected, keys, publish, restored, state, surveyed
from publish_rig import RUN, model_folder
from states_rig import tell_nobody

from slackwater.bucket.base import Unfinished
from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key, blob_key, fold_key, head_key, manifest_key, signature_key
from slackwater.cli.attended import Attended
from slackwater.cli.gc import Garbage, collect_garbage, show_garbage
from slackwater.cli.scratch import Scratch
from slackwater.errors import (
    AuthError,
    NotFoundError,
    SlackwaterError,
    UnavailableError,
    UnsupportedError,
)
from slackwater.ids import Version
from slackwater.publish.gc import survey
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.retention import Policy, plan_gc
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


BLOB = blob_key(RUN, object_digest(b"half"))


def begun(bucket: AgingBucket) -> set[str]:
    return {upload.key for upload in MemoryBucket.unfinished(bucket, "")}


def test_f02_old_unfinished_writes_are_aborted_and_the_objects_of_their_names_stay(bucket: AgingBucket) -> None:
    kept = read_manifest(bucket, RUN, Version(7)).objects[0].key
    old = [bucket.begin(key, started_s=bucket.now_s - 3 * DAY_S) for key in (BLOB, kept, manifest_key(RUN, Version(8)))]
    plan = collected(bucket)
    assert plan.abort == tuple(sorted(old, key=lambda upload: upload.key))
    assert plan.underway == ()
    assert begun(bucket) == set()
    assert kept in keys(bucket)
    assert restored(bucket, 7)


def test_what_a_publisher_may_be_at_is_not_aborted(bucket: AgingBucket) -> None:
    """Only its age tells a live writer's upload from a dead one's."""
    live = bucket.begin(BLOB, started_s=bucket.now_s - DAY_S + 1)
    unknown = bucket.begin(blob_key(RUN, object_digest(b"?")))
    ahead = bucket.begin(anchor_key(RUN, Version(8), "0" * 16, "model.safetensors"), started_s=bucket.now_s + 60)
    plan = collected(bucket)
    assert (plan.abort, {*plan.underway}) == ((), {live, unknown, ahead})
    assert len(begun(bucket)) == 3
    bucket.now_s += 1
    assert collected(bucket).abort == (live,)
    assert begun(bucket) == {unknown.key, ahead.key}


def test_without_the_stores_time_nothing_is_aborted(bucket: AgingBucket) -> None:
    bucket.begin(BLOB, started_s=bucket.now_s - 300 * DAY_S)
    MemoryBucket.delete(bucket, head_key(RUN))
    assert plan_gc(survey(bucket, RUN, now_s=None, progress=tell_nobody), NEWEST).abort == ()


def test_in_the_middle_of_a_first_anchor_nothing_is_touched() -> None:
    """However old: without a version there is no telling whose it is."""
    bucket = AgingBucket()
    bucket.put(anchor_key(RUN, Version(0), "0" * 16, "config.json"), b"{}")
    bucket.begin(anchor_key(RUN, Version(0), "0" * 16, "model.safetensors"), started_s=bucket.now_s)
    before = keys(aged(bucket))
    for collection in (collected, surveyed):
        with pytest.raises(NotFoundError):
            collection(bucket)
    assert (keys(bucket), len(begun(bucket))) == (before, 1)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        (BLOB, True),
        (manifest_key(RUN, Version(8)), True),
        (fold_key(RUN, Version(0), Version(2)), True),
        (anchor_key(RUN, Version(8), "0" * 16, "model.safetensors"), True),
        (head_key(RUN), True),
        (signature_key(RUN, object_digest(b"manifest")), True),
        ("demo/notes.txt", False),
        ("demo/signatures/0.json", False),
        ("demo/head.json.bak", False),
        (BLOB.replace("demo/", "demo2/"), False),
        (BLOB.replace("demo/", "other/"), False),
        ("head.json", False),
        ("demo", False),
    ],
)
def test_only_keys_of_the_runs_grammar_are_aborted(bucket: AgingBucket, key: str, *, ours: bool) -> None:
    bucket.begin(key, started_s=bucket.now_s - 300 * DAY_S)
    plan = collected(bucket)
    assert ([upload.key for upload in plan.abort], plan.underway) == ([key] if ours else [], ())
    assert begun(bucket) == (set() if ours else {key})


def test_a_store_that_lists_too_much_aborts_nothing_of_others(bucket: AgingBucket) -> None:
    history = surveyed(bucket)
    theirs = Unfinished(key=f"other/blobs/{'0' * 64}", upload="1", started_s=0.0)
    assert plan_gc(replace(history, unfinished=[theirs]), NEWEST).abort == ()


@pytest.mark.parametrize("error", [UnsupportedError("no listing", hint="a rule"), AuthError("not you")])
def test_where_unfinished_writes_can_not_be_listed_that_is_told_and_the_rest_goes(
    bucket: AgingBucket, error: SlackwaterError
) -> None:
    bucket.begin(BLOB, started_s=bucket.now_s - 300 * DAY_S)
    bucket.listing_fails = error
    assert surveyed(bucket).blind == str(error)
    assert collected(bucket).delete
    assert begun(bucket) == {BLOB}
    bucket.listing_fails = None
    assert surveyed(bucket).blind is None


def test_a_store_that_does_not_answer_ends_the_collection_before_it_begins(bucket: AgingBucket) -> None:
    before, bucket.listing_fails = keys(bucket), UnavailableError("away")
    with pytest.raises(UnavailableError):
        collected(bucket)
    assert keys(bucket) == before


def test_credentials_that_may_not_abort_are_told_when_all_else_is_done(bucket: AgingBucket) -> None:
    bucket.begin(BLOB, started_s=bucket.now_s - 300 * DAY_S)
    bucket.may_abort = False
    with pytest.raises(AuthError, match="may not abort"):
        collected(bucket)
    assert {item.key for item in bucket.list("demo/manifests")} == {manifest_key(RUN, Version(n)) for n in (6, 7)}
    bucket.may_abort = True
    plan = collected(bucket)
    assert (plan.delete, len(plan.abort), begun(bucket)) == ((), 1, set())


def half(root: Path, key: str, age_s: float) -> Path:
    """What a writer leaves that is killed: a hidden file beside its target."""
    path = root / key
    left = path.with_name(f".put-{secrets.token_hex(8)}-{path.name}")
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"half")
    then = time.time() - age_s
    os.utime(left, (then, then))
    return left


def test_the_command_lists_unfinished_uploads_first_and_aborts_the_old_ones_when_told_to(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "bucket"
    publisher = Publisher(LocalBucket(root, create=True), RUN, threads=1, clock=ManualClock())
    publisher.publish(StateDictSource(state(1.0, 2.0)), step=0, folder_files=folder)
    old, young = half(root, BLOB, 2 * DAY_S + 60), half(root, head_key(RUN), 3 * 3600 + 60)
    foreign = half(root, f"other/blobs/{'0' * 64}", 9 * DAY_S)
    with Scratch() as scratch:
        work = Attended(scratch=scratch, tell=tell_nobody)
        show_garbage(collect_garbage(str(root), RUN, Policy(), delete=False, work=work), as_json=False)
        told = capsys.readouterr().out.splitlines()
        assert told[:2] == [
            f"unfinished upload {BLOB} started 2 d 0 h ago",
            "unfinished upload demo/head.json started 3 h 1 min ago: stays",
        ]
        assert told[-2:] == ["would go  1 unfinished upload", "nothing was deleted: --delete does it"]
        assert (old.exists(), young.exists(), foreign.exists()) == (True, True, True)
        show_garbage(collect_garbage(str(root), RUN, Policy(), delete=True, work=work), as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert [upload["key"] for upload in said["abort"]] == [BLOB]
    assert [upload["key"] for upload in said["underway"]] == ["demo/head.json"]
    assert (said["blind"], said["collected"]["num_aborted"], said["collected"]["num_deleted"]) == (None, 1, 0)
    assert (old.exists(), young.exists(), foreign.exists()) == (False, True, True)


def test_many_unfinished_uploads_are_counted_and_what_was_not_looked_for_is_named(
    capsys: pytest.CaptureFixture[str], bucket: AgingBucket
) -> None:
    for number in range(25):
        bucket.begin(blob_key(RUN, object_digest(b"%d" % number)), started_s=None if number % 2 else 0.0)
    history = surveyed(bucket)
    garbage = Garbage(run=RUN, plan=plan_gc(history, NEWEST), now_s=0.0, blind="none: a rule\n", collected=None)
    show_garbage(
        replace(garbage, plan=replace(garbage.plan, delete=(), underway=garbage.plan.underway * 2)), as_json=False
    )
    told = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("started 0 s ago") for line in told) == 13
    assert sum(line.endswith("started who knows when: stays") for line in told) == 20
    assert "… and 4 more unfinished uploads: --json lists all" in told
    assert r"not looked for: none: a rule\n" in told
    assert "would go  13 unfinished uploads" in told
