"""Readers with keys: every one of them refuses what no trusted key signed, and none knows how."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from states_rig import RUN, bits, tell_nobody, write_states

from slackwater.bucket.base import Bucket
from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import fold_key, manifest_key, signature_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.checkpoint.signature import Signer, TrustedKeys
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import AuthError, CorruptError, InvalidInputError, NotFoundError, UnavailableError
from slackwater.hotload.snapshots import BucketSnapshots
from slackwater.ids import RunId, Version
from slackwater.publish.audit import Auditor
from slackwater.publish.fold import Folded, fold
from slackwater.publish.history import read_history
from slackwater.publish.key_files import read_signer, read_trusted
from slackwater.publish.lineage import find_head, read_manifest
from slackwater.publish.path import along, read_fold, read_path
from slackwater.publish.publisher import Publisher
from slackwater.publish.rebuild import rebuild
from slackwater.publish.restore import restore
from slackwater.publish.rollback import rollback
from slackwater.publish.signed import MAX_SIGNATURE_BYTES, SignedBucket
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.weights.source import FolderSource

SIGNER: Final = Signer(bytes(range(32)))
STRANGER: Final = Signer(bytes(32))
TRUSTED: Final = TrustedKeys([SIGNER.public_key])
LAST: Final = Version(3)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_states(tmp_path_factory.mktemp("states"), 4)


@pytest.fixture(scope="module")
def published(states: list[Path]) -> MemoryBucket:
    bucket = MemoryBucket()
    publish(bucket, states, SIGNER)
    return bucket


@pytest.fixture
def bucket(published: MemoryBucket) -> MemoryBucket:
    """A copy, to be written."""
    copy = MemoryBucket()
    for item in published.list(""):
        copy.put(item.key, published.get(item.key, max_bytes=item.size))
    return copy


def publish(bucket: Bucket, states: list[Path], signer: Signer | None, run: RunId = RUN) -> None:
    with Publisher(bucket, run, threads=1, signer=signer, clock=ManualClock()) as publisher:
        for step, folder in enumerate(states):
            publisher.publish(FolderSource(folder), step=step)


def folded(bucket: Bucket, scratch: Path, signer: Signer | None, start: int = 0, end: int = 2) -> Folded:
    scratch.mkdir()
    return fold(
        bucket, RUN, Version(start), Version(end),
        scratch=scratch, level="fast", threads=1, progress=tell_nobody, signer=signer,
    )  # fmt: skip


def body_of(bucket: Bucket, key: str) -> bytes:
    return bucket.get(key, max_bytes=2**24)


def signature_of(bucket: Bucket, version: Version = LAST) -> str:
    return signature_key(RUN, object_digest(body_of(bucket, manifest_key(RUN, version))))


def steps_to(bucket: Bucket, version: Version) -> list[tuple[int | None, int]]:
    return along(
        bucket, RUN, version,
        lambda path: [(None if item.parent is None else item.parent.version, item.version) for item in path],
    )  # fmt: skip


# Every reader


def by_restoring(bucket: Bucket, _scratch: Path) -> dict[str, bytes]:
    return {name: found.tobytes() for name, found in restore(bucket, RUN, LAST).bits.items()}


def by_rebuilding(bucket: Bucket, scratch: Path) -> dict[str, bytes]:
    folder = scratch / "model"
    folder.mkdir(exist_ok=True)
    return bits(rebuild(bucket, RUN, LAST, folder, threads=1, progress=tell_nobody).folder)


def by_publishing(bucket: Bucket, _scratch: Path) -> dict[str, bytes]:
    with Publisher.open(bucket, RUN, threads=1) as publisher:
        return {name: publisher.held_bits(name).tobytes() for name in publisher.held_specs()}


READERS: Final[list[Callable[[Bucket, Path], dict[str, bytes]]]] = [by_restoring, by_rebuilding, by_publishing]


def by_path(bucket: Bucket, _scratch: Path) -> object:
    return read_path(bucket, RUN, LAST)


def by_fetching(bucket: Bucket, scratch: Path) -> object:
    return Fetcher(bucket, RUN, scratch / "cache", threads=1).manifest(LAST)


def by_lookup(bucket: Bucket, _scratch: Path) -> object:
    return BucketSnapshots(bucket, RUN).find(LAST)


LOOKERS: Final[list[Callable[[Bucket, Path], object]]] = [by_path, by_fetching, by_lookup]


@pytest.mark.parametrize("read", READERS)
def test_a_reader_with_keys_makes_of_a_signed_run_what_others_make(
    published: MemoryBucket, states: list[Path], tmp_path: Path, read: Callable[[Bucket, Path], dict[str, bytes]]
) -> None:
    assert read(SignedBucket(published, TRUSTED), tmp_path) == bits(states[LAST])


def forge(bucket: MemoryBucket) -> None:
    forged = msgspec.structs.replace(read_manifest(bucket, RUN, LAST), step=77)
    bucket.put(manifest_key(RUN, LAST), encode_manifest(forged))


def sign_as_another(bucket: MemoryBucket) -> None:
    bucket.put(signature_of(bucket), STRANGER.sign(body_of(bucket, manifest_key(RUN, LAST))))


def sign_another(bucket: MemoryBucket) -> None:
    bucket.put(signature_of(bucket), body_of(bucket, signature_of(bucket, Version(2))))


def lose(bucket: MemoryBucket) -> None:
    bucket.delete(signature_of(bucket))


def spoil(bucket: MemoryBucket) -> None:
    bucket.put(signature_of(bucket), b'{"algorithm":"ed25519"')


def empty(bucket: MemoryBucket) -> None:
    bucket.put(signature_of(bucket), b"")


def inflate(bucket: MemoryBucket) -> None:
    bucket.put(signature_of(bucket), body_of(bucket, signature_of(bucket)) + b" " * MAX_SIGNATURE_BYTES)


SPOILT: Final = [
    (forge, "it isn't signed"),
    (sign_as_another, f"it is signed with key {STRANGER.public_key[:16]}, which isn't trusted"),
    (sign_another, "isn't that of these bytes"),
    (lose, "it isn't signed"),
    (spoil, "can't be read"),
    (empty, "can't be read"),
    (inflate, str(MAX_SIGNATURE_BYTES)),
]


@pytest.mark.parametrize("read", [*READERS, *LOOKERS])
@pytest.mark.parametrize(("wrong", "told"), SPOILT)
def test_a_reader_with_keys_refuses_by_name_what_is_not_signed_as_it_should_be(
    bucket: MemoryBucket,
    tmp_path: Path,
    read: Callable[[Bucket, Path], object],
    wrong: Callable[[MemoryBucket], None],
    told: str,
) -> None:
    wrong(bucket)
    with pytest.raises(CorruptError, match=rf"run/manifests/00000003\.json: .*{told}"):
        read(SignedBucket(bucket, TRUSTED), tmp_path)
    assert read_path(bucket, RUN, LAST)  # without keys it is taken


@pytest.mark.parametrize("read", [*READERS, *LOOKERS])
def test_another_runs_signed_manifest_is_refused_under_this_runs_name(
    bucket: MemoryBucket, states: list[Path], tmp_path: Path, read: Callable[[Bucket, Path], object]
) -> None:
    publish(bucket, states, SIGNER, RunId("other"))
    body = body_of(bucket, manifest_key(RunId("other"), LAST))
    bucket.put(manifest_key(RUN, LAST), body)
    with pytest.raises(CorruptError, match="isn't signed"):  # its signature lies with the other run
        read(SignedBucket(bucket, TRUSTED), tmp_path)
    bucket.put(signature_key(RUN, object_digest(body)), SIGNER.sign(body))
    with pytest.raises(CorruptError, match="other"):
        read(SignedBucket(bucket, TRUSTED), tmp_path)


def test_an_older_signed_version_is_refused_under_a_newer_number(bucket: MemoryBucket) -> None:
    bucket.put(manifest_key(RUN, LAST), body_of(bucket, manifest_key(RUN, Version(2))))
    with pytest.raises(CorruptError, match="is the manifest of version 2 of run"):
        read_manifest(SignedBucket(bucket, TRUSTED), RUN, LAST)


def test_a_history_and_an_audit_tell_which_version_is_not_signed(bucket: MemoryBucket, tmp_path: Path) -> None:
    lose(bucket)
    trusting = SignedBucket(bucket, TRUSTED)
    entries = read_history(trusting, RUN)
    assert [entry.kind for entry in entries] == ["anchor", "delta", "delta", "damaged"]
    assert entries[-1].damage == "run/manifests/00000003.json: it isn't signed"
    auditor = Auditor(depth="manifest", scratch=tmp_path, threads=1, progress=tell_nobody)
    assert dict(auditor.version(trusting, RUN, LAST).counts) == {"manifest": 1}
    assert not auditor.version(trusting, RUN, Version(2)).counts


@pytest.mark.parametrize("trusted", [TRUSTED, TrustedKeys([STRANGER.public_key])])
def test_an_audit_calls_no_anchor_missing_whose_manifest_it_does_not_take(
    states: list[Path], tmp_path: Path, trusted: TrustedKeys
) -> None:
    bucket = MemoryBucket()
    publish(bucket, states[:3], None if trusted is TRUSTED else SIGNER)
    auditor = Auditor(depth="objects", scratch=tmp_path, threads=1, progress=tell_nobody)
    report = auditor.version(SignedBucket(bucket, trusted), RUN, Version(2))
    assert (dict(report.counts), report.num_manifests, report.state) == ({"manifest": 3}, 0, None)


def test_what_is_not_signed_tells_the_way_out_which_leads_out(states: list[Path]) -> None:
    bucket = MemoryBucket()
    publish(bucket, states[:1], None)
    with pytest.raises(CorruptError) as raised:
        Publisher.open(SignedBucket(bucket, TRUSTED), RUN, threads=1, signer=SIGNER)
    assert "--sign-with KEY --anchor" in raised.value.hint
    assert "leave --trust out" in raised.value.hint
    with Publisher(bucket, RUN, threads=1, signer=SIGNER) as publisher:
        publisher.publish(FolderSource(states[1]), step=1, anchor=True)
    with Publisher(SignedBucket(bucket, TRUSTED), RUN, threads=1, signer=SIGNER) as publisher:
        assert publisher.publish(FolderSource(states[2]), step=2).version == Version(2)


def test_a_run_that_begins_to_be_signed_is_taken_from_its_first_signed_anchor_on(
    states: list[Path],
) -> None:
    bucket = MemoryBucket()
    publish(bucket, states[:2], None)
    with Publisher(bucket, RUN, threads=1, signer=SIGNER) as publisher:
        publisher.publish(FolderSource(states[2]), step=2, anchor=True)
        publisher.publish(FolderSource(states[3]), step=3)
    trusting = SignedBucket(bucket, TRUSTED)
    assert steps_to(trusting, LAST) == [(None, 2), (2, 3)]
    with pytest.raises(CorruptError, match="isn't signed"):
        restore(trusting, RUN, Version(1))


# Folds


def test_a_signed_fold_is_used_and_an_unsigned_one_left_aside(
    bucket: MemoryBucket, states: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trusting = SignedBucket(bucket, TRUSTED)
    body = encode_manifest(folded(bucket, tmp_path / "fold", None).manifest)
    assert steps_to(bucket, LAST) == [(None, 0), (0, 2), (2, 3)]
    assert steps_to(trusting, LAST) == [(None, 0), (0, 1), (1, 2), (2, 3)]
    assert "going without folds to version 3 of run: run/folds/00000000-00000002.json: it isn't signed" in caplog.text
    assert by_restoring(trusting, tmp_path) == bits(states[LAST])
    bucket.put(signature_key(RUN, object_digest(body)), SIGNER.sign(body))
    assert steps_to(trusting, LAST) == [(None, 0), (0, 2), (2, 3)]


@pytest.mark.parametrize("signer", [None, STRANGER])
def test_whoever_makes_a_fold_with_keys_is_told_of_one_that_no_trusted_key_signed(
    bucket: MemoryBucket, tmp_path: Path, signer: Signer | None
) -> None:
    folded(bucket, tmp_path / "first", signer)
    with pytest.raises(CorruptError, match=r"run/folds/00000000-00000002\.json: it is"):
        folded(SignedBucket(bucket, TRUSTED), tmp_path / "second", SIGNER)
    auditor = Auditor(depth="manifest", scratch=tmp_path, threads=1, progress=tell_nobody)
    report = auditor.fold(SignedBucket(bucket, TRUSTED), RUN, Version(0), Version(2))
    assert dict(report.counts) == {"manifest": 1}


def test_a_fold_is_there_after_its_signature(bucket: MemoryBucket, tmp_path: Path) -> None:
    failing = FaultyBucket(bucket, Fault(verb="put", key="/signatures/", before=UnavailableError("away")))
    with pytest.raises(UnavailableError):
        folded(failing, tmp_path / "first", SIGNER)
    with pytest.raises(NotFoundError):
        read_fold(bucket, RUN, Version(0), Version(2))
    made = folded(failing, tmp_path / "second", SIGNER)
    assert made.is_new
    body = body_of(bucket, fold_key(RUN, Version(0), Version(2)))
    TRUSTED.check(body, body_of(bucket, signature_key(RUN, object_digest(body))))


def test_a_fold_over_forged_versions_is_not_made(bucket: MemoryBucket, tmp_path: Path) -> None:
    forge(bucket)
    with pytest.raises(CorruptError, match=r"00000003\.json: it isn't signed"):
        folded(SignedBucket(bucket, TRUSTED), tmp_path / "fold", SIGNER, end=3)


# Going back


def test_going_back_signs_the_new_version_and_trusts_what_it_reads(bucket: MemoryBucket, tmp_path: Path) -> None:
    trusting = SignedBucket(bucket, TRUSTED)

    def back(to: int) -> Version:
        scratch = tmp_path / str(to)
        scratch.mkdir()
        return rollback(
            trusting, RUN, Version(to),
            scratch=scratch, level="fast", threads=1, progress=tell_nobody, signer=SIGNER, clock=ManualClock(),
        ).version  # fmt: skip

    assert back(1) == LAST + 1
    assert read_manifest(trusting, RUN, Version(4)).state == read_manifest(bucket, RUN, Version(1)).state
    forge(bucket)
    with pytest.raises(CorruptError, match=r"00000003\.json: it isn't signed"):
        back(LAST)


# The bucket itself


def test_all_else_passes(bucket: MemoryBucket) -> None:
    trusting = SignedBucket(bucket, TRUSTED)
    assert trusting.url == bucket.url
    assert find_head(trusting, RUN) == LAST
    assert {item.key for item in trusting.list("")} == {item.key for item in bucket.list("")}
    trusting.put("run/head.json", b"{}")
    assert trusting.get("run/head.json", max_bytes=9) == b"{}"
    assert trusting.put_if_absent("run/blobs/x", b"abc")
    assert not trusting.put_if_absent("run/blobs/x", b"abc")
    assert trusting.get_range("run/blobs/x", 1, 2) == b"bc"
    with pytest.raises(NotFoundError):
        trusting.get(manifest_key(RUN, Version(9)), max_bytes=9**9)
    with pytest.raises(CorruptError, match="at most 1"):
        trusting.get(manifest_key(RUN, LAST), max_bytes=1)


def test_a_range_of_a_manifest_is_cut_from_what_was_checked(bucket: MemoryBucket) -> None:
    trusting, key = SignedBucket(bucket, TRUSTED), manifest_key(RUN, LAST)
    body = body_of(bucket, key)
    assert trusting.get_range(key, 3, 20) == body[3:23]
    assert trusting.get_range(key, 3, 0) == b""
    for start, length in ((0, len(body) + 1), (len(body), 2), (len(body), 1)):
        with pytest.raises(CorruptError, match="too few"):
            trusting.get_range(key, start, length)
    forge(bucket)
    assert trusting.get_range(key, 0, 1) == b"{"
    with pytest.raises(CorruptError, match="isn't signed"):
        trusting.get_range(key, 3, 20)


@pytest.mark.parametrize("key", ["run/manifests/100000000.json", "run/manifests/x/y", "run/folds/a"])
def test_whatever_lies_where_manifests_and_folds_do_must_be_signed(bucket: MemoryBucket, key: str) -> None:
    bucket.put(key, b"{}")
    with pytest.raises(CorruptError, match=f"{key}: it isn't signed"):
        SignedBucket(bucket, TRUSTED).get(key, max_bytes=9)


def test_a_store_that_does_not_answer_is_not_taken_for_a_missing_signature(bucket: MemoryBucket) -> None:
    away = FaultyBucket(bucket, Fault(verb="get", key="/signatures/", before=UnavailableError("away")))
    with pytest.raises(UnavailableError):
        read_manifest(SignedBucket(away, TRUSTED), RUN, LAST)
    assert read_manifest(SignedBucket(away, TRUSTED), RUN, LAST).version == LAST


# Key files

KEY: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def private(key: Ed25519PrivateKey | rsa.RSAPrivateKey, password: bytes | None = None) -> bytes:
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def public(key: Ed25519PrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def written(path: Path, body: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(body)
    path.chmod(mode)
    return path


def test_a_private_key_is_read_and_one_that_others_may_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert read_signer(written(tmp_path / "key.pem", private(KEY))).public_key == SIGNER.public_key
    assert caplog.text == ""
    open_to_all = written(tmp_path / "open.pem", private(KEY), 0o644)
    assert read_signer(open_to_all).public_key == SIGNER.public_key
    assert f"{open_to_all} can be read by others" in caplog.text


def test_public_keys_are_read_as_pem_and_as_hex(tmp_path: Path) -> None:
    pem = written(tmp_path / "a.pem", public(KEY))
    digits = written(tmp_path / "b", f"{STRANGER.public_key}\n".encode())
    trusted = read_trusted([pem, digits])
    assert [trusted.check(b"x", signer.sign(b"x")) for signer in (SIGNER, STRANGER)] == [
        SIGNER.public_key,
        STRANGER.public_key,
    ]


def test_key_files_are_named_as_text_as_well(tmp_path: Path) -> None:
    pem, digits = written(tmp_path / "a.pem", private(KEY)), written(tmp_path / "b", SIGNER.public_key.encode())
    assert read_signer(str(pem)).public_key == SIGNER.public_key
    for trusted in (read_trusted([str(digits)]), read_trusted(str(digits)), read_trusted(digits)):
        assert SIGNER.public_key in trusted
        assert STRANGER.public_key not in trusted


def test_a_key_file_of_another_kind_is_told_for_what_it_is(tmp_path: Path) -> None:
    def told(read: Callable[[Path], object], body: bytes) -> str:
        with pytest.raises(InvalidInputError) as raised:
            read(written(tmp_path / "key", body))
        return str(raised.value)

    old = KEY.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    assert "a private key with a password" in told(read_signer, private(KEY, b"secret"))
    assert "holds a public key, and a private one signs" in told(read_signer, public(KEY))
    assert "holds a public key, and a private one signs" in told(read_signer, f"{SIGNER.public_key}\n".encode())
    for body in (private(KEY), private(KEY, b"secret"), old):
        assert "holds a private key, and what is trusted is its public half" in told(read_trusted, body)


@pytest.mark.parametrize("read", [read_signer, lambda path: read_trusted([path])])
def test_a_key_file_that_can_not_be_used_is_named_and_never_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, read: Callable[[Path], object]
) -> None:
    caplog.set_level(logging.DEBUG)
    other = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
    files = [
        tmp_path / "missing.pem",
        tmp_path,
        Path("/dev/zero"),
        written(tmp_path / "empty.pem", b""),
        written(tmp_path / "noise.pem", bytes(range(256))),
        written(tmp_path / "rsa.pem", private(other) if read is read_signer else public(other)),
        written(tmp_path / "locked.pem", private(KEY, b"secret")),
        written(tmp_path / "mistaken.pem", public(KEY) if read is read_signer else private(KEY)),
    ]
    for path in files:
        with pytest.raises(InvalidInputError) as raised:
            read(path)
        assert str(path) in raised.value.message
        assert raised.value.hint
        secret = b"".join((private(KEY), private(other), public(KEY))).decode().splitlines()
        assert not [line for line in secret if not line.startswith("-----") and line in str(raised.value)]
    assert caplog.text == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("read", [read_signer, lambda path: read_trusted([path])])
def test_a_key_file_that_may_not_be_read_is_a_matter_of_rights(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = written(tmp_path / "key.pem", private(KEY), 0o000)
    with pytest.raises(AuthError, match=r"key\.pem may not be read"):
        read(path)


def test_no_key_file_is_no_trust() -> None:
    with pytest.raises(InvalidInputError, match="no key is trusted"):
        read_trusted([])
