"""Signatures, and the versions that nobody trusted signed, in a collection."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gc_rig import DAY_S, NEWEST, AgingBucket, aged, collected, keys, publish, state, surveyed
from publish_rig import RUN, model_folder
from states_rig import tell_nobody

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import fold_key, manifest_key, signature_key
from slackwater.checkpoint.signature import Signer, TrustedKeys
from slackwater.cli.attended import Attended
from slackwater.cli.gc import collect_garbage
from slackwater.cli.scratch import Scratch
from slackwater.errors import (
    AuthError,
    CorruptError,
)
from slackwater.ids import Version
from slackwater.publish.fold import fold
from slackwater.publish.gc import collect, point_at_head
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.restore import restore
from slackwater.publish.retention import Policy, plan_gc
from slackwater.publish.signed import SignedBucket
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
