import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from publish_rig import RUN, all_bits, model_folder
from states_rig import tell_nobody

from slackwater.bucket.base import Bucket, ObjectInfo, Unfinished
from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.chain import plan_path
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import anchor_key, blob_key, fold_key, head_key, manifest_key, signature_key
from slackwater.checkpoint.signature import Signer, TrustedKeys
from slackwater.cli.attended import Attended
from slackwater.cli.gc import LEAST_AGE_S, Garbage, collect_garbage, parse_age, show_garbage
from slackwater.cli.scratch import Scratch
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import (
    AuthError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SlackwaterError,
    UnavailableError,
    UnsupportedError,
)
from slackwater.ids import Version
from slackwater.publish.fold import fold
from slackwater.publish.gc import collect, point_at_head, survey
from slackwater.publish.lineage import HeadHint, find_head, read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.publish.retention import Contents, GcPlan, Policy, plan_gc
from slackwater.publish.signed import SignedBucket
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "folder")


def publish(
    bucket: Bucket, folder: Path, kinds: str, values: list[int] | None = None, signer: Signer | None = None
) -> list[Bits]:
    """Publish a version for each letter, ``a`` an anchor; returns their bits. Between two an hour passes."""
    publisher = Publisher.open(bucket, RUN, anchor_every=1000, threads=1, clock=ManualClock(), signer=signer)
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


# Signatures

SIGNER = Signer(Ed25519PrivateKey.generate().private_bytes_raw())


@pytest.fixture
def signed(folder: Path) -> AgingBucket:
    """As ``bucket``, signed."""
    bucket = AgingBucket()
    publish(bucket, folder, "addaddad", signer=SIGNER)
    return aged(bucket)


def signatures(bucket: AgingBucket) -> set[str]:
    return {key for key in keys(bucket) if "/signatures/" in key}


def signatures_of(bucket: AgingBucket, manifests: Iterable[str]) -> set[str]:
    return {signature_key(RUN, object_digest(bucket.get(key, max_bytes=2**20))) for key in manifests}


def trusted(bucket: AgingBucket) -> SignedBucket:
    return SignedBucket(bucket, TrustedKeys([SIGNER.public_key]))


def test_signatures_go_with_what_they_sign(signed: AgingBucket, tmp_path: Path) -> None:
    for start, end in ((0, 2), (6, 7)):
        scratch = tmp_path / f"{start}"
        scratch.mkdir()
        fold(
            signed, RUN, Version(start), Version(end),
            scratch=scratch, level="fast", threads=1, progress=tell_nobody, signer=SIGNER,
        )  # fmt: skip
    before = signatures(aged(signed))
    assert len(before) == 8 + 1  # the fold over one version is its delta, byte for byte
    of_none = signature_key(RUN, object_digest(b"never committed"))
    signed.put(of_none, b"{}")
    collected(signed)
    assert of_none in keys(signed)  # young
    kept = [manifest_key(RUN, Version(6)), manifest_key(RUN, Version(7)), fold_key(RUN, Version(6), Version(7))]
    assert signatures(signed) - {of_none} == signatures_of(signed, kept) < before
    assert restore(trusted(signed), RUN, Version(7)).version == 7
    collected(aged(signed))
    assert signatures(signed) == signatures_of(signed, kept)


def test_a_signed_manifest_that_is_left_has_its_signature_wherever_a_collection_ends(signed: AgingBucket) -> None:
    signed.deletions_left = 0
    while True:
        signed.deletions_left += 1
        try:
            collected(signed)
        except AuthError:
            left = [key for key in keys(signed) if "/manifests/" in key]
            assert signatures_of(signed, left) <= signatures(signed)
        else:
            break
    assert len(signatures(signed)) == 2


def test_the_signature_of_a_version_that_is_committed_meanwhile_is_spared(signed: AgingBucket, folder: Path) -> None:
    """Its publisher was killed between both, days ago, and goes on from there."""
    ahead = AgingBucket()
    for item in list(signed.list("")):
        ahead.put(item.key, signed.get(item.key, max_bytes=item.size))
    with Publisher.open(ahead, RUN, threads=1, clock=ManualClock(), signer=SIGNER) as publisher:
        publisher.publish(StateDictSource(state(1.0, 9.0, 2.0)), step=8, folder_files=folder)
    for key in keys(ahead) - keys(signed) - {manifest_key(RUN, Version(8))}:
        signed.put(key, ahead.get(key, max_bytes=2**20))
    point_at_head(aged(signed), RUN)
    plan = plan_gc(surveyed(signed), NEWEST)
    manifest = ahead.get(manifest_key(RUN, Version(8)), max_bytes=2**20)
    signature = signature_key(RUN, object_digest(manifest))
    assert signature in {item.key for item in plan.delete}
    signed.put_if_absent(manifest_key(RUN, Version(8)), manifest)
    assert signature in collect(signed, RUN, plan, threads=1, progress=tell_nobody).spared
    assert read_manifest(trusted(signed), RUN, Version(8)).version == 8


@pytest.mark.parametrize("forger", [None, Signer(Ed25519PrivateKey.generate().private_bytes_raw())])
def test_a_forged_newer_anchor_makes_a_collection_with_keys_refuse_and_delete_nothing(
    folder: Path, tmp_path: Path, forger: Signer | None
) -> None:
    root, key = tmp_path / "bucket", tmp_path / "key.pub"
    key.write_text(SIGNER.public_key)
    bucket = LocalBucket(root, create=True)
    publish(bucket, folder, "adada", signer=SIGNER)
    publish(bucket, folder, "aaa", signer=forger)
    then = time.time() - 9 * DAY_S
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))
    before = {item.key for item in bucket.list("")}
    policy = Policy(keep_last=1, keep_anchors=1)
    with Scratch() as scratch:
        work = Attended(scratch=scratch, tell=tell_nobody)
        for delete in (False, True):
            with pytest.raises(CorruptError, match=r"00000005\.json can't be read, .* signed"):
                collect_garbage(str(root), RUN, policy, delete=delete, work=work, trust=[key])
            assert {item.key for item in bucket.list("")} == before
        words = ("gc", "--bucket", root, "--run", RUN, "--keep", "1", "--delete", "--trust", key)
        command = [sys.executable, "-m", "slackwater.cli.main", *map(str, words)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
        assert (done.returncode, "00000005.json can't be read" in done.stderr) == (1, True)
        assert {item.key for item in bucket.list("")} == before
        for number in (5, 6, 7):
            (root / manifest_key(RUN, Version(number))).unlink()
        assert collect_garbage(str(root), RUN, policy, delete=True, work=work, trust=[key]).plan.versions == {4: "head"}
    assert {item.key for item in bucket.list("demo/manifests")} == {manifest_key(RUN, Version(4))}


# What broken writers left

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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
