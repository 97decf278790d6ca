"""Signatures over manifests: read as the page says, refused where a bit differs, and needed by readers with keys."""

import hashlib
import json
from pathlib import Path
from typing import Final

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from publish_rig import RUN, all_bits, model_folder, trained, weights

from slackwater.checkpoint.digest import object_digest
from slackwater.checkpoint.keys import manifest_key, signature_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.checkpoint.signature import Signer, TrustedKeys
from slackwater.delivery.fetcher import Fetcher
from slackwater.errors import CorruptError, InvalidInputError
from slackwater.ids import Version
from slackwater.publish.lineage import read_manifest
from slackwater.publish.publisher import Publisher
from slackwater.publish.signed import SignedBucket
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket
from slackwater.weights.source import FolderSource
from slackwater.weights.state_dict import StateDictSource

SEED: Final = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC: Final = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
"""The first test vector of RFC 8032, 7.1."""
SIGNER: Final = Signer(SEED)
TRUSTED: Final = TrustedKeys([PUBLIC])
MANIFEST: Final = b'{"format":2,"run":"demo"}'


def pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def public_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


# The format


def test_a_key_is_that_of_the_rfc() -> None:
    assert SIGNER.public_key == PUBLIC


def test_a_signature_is_read_by_who_knows_the_page_alone() -> None:
    read = json.loads(SIGNER.sign(MANIFEST))
    assert sorted(read) == ["algorithm", "key", "signature"]
    signed = b"slackwater manifest 1\n" + hashlib.sha256(MANIFEST).digest()
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(read["key"]))
    key.verify(bytes.fromhex(read["signature"]), signed)


def test_a_manifest_has_one_signature_of_a_key() -> None:
    assert SIGNER.sign(MANIFEST) == Signer(SEED).sign(MANIFEST)
    assert SIGNER.sign(MANIFEST) != SIGNER.sign(MANIFEST + b" ")


@given(st.binary())
def test_what_was_signed_is_taken(manifest: bytes) -> None:
    assert TRUSTED.check(manifest, SIGNER.sign(manifest)) == SIGNER.public_key


def test_one_of_several_keys_is_enough_and_is_told() -> None:
    other = Signer(bytes(32))
    trusted = TrustedKeys([other.public_key, SIGNER.public_key])
    assert [trusted.check(MANIFEST, signer.sign(MANIFEST)) for signer in (SIGNER, other)] == [
        SIGNER.public_key,
        other.public_key,
    ]


def test_a_signer_is_one_of_the_trusted_by_its_public_key() -> None:
    assert SIGNER.public_key in TRUSTED
    assert Signer(bytes(32)).public_key not in TRUSTED
    assert SIGNER.public_key in TrustedKeys([public_pem(Ed25519PrivateKey.from_private_bytes(SEED))])


# What is refused


@given(st.integers(0, 8 * len(MANIFEST) - 1))
def test_any_other_bit_of_the_manifest_is_refused(bit: int) -> None:
    spoilt = bytearray(MANIFEST)
    spoilt[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError, match="isn't that of these bytes"):
        TRUSTED.check(bytes(spoilt), SIGNER.sign(MANIFEST))


@given(st.integers(0, 8 * len(SIGNER.sign(MANIFEST)) - 1))
def test_any_other_bit_of_the_signature_is_refused(bit: int) -> None:
    spoilt = bytearray(SIGNER.sign(MANIFEST))
    spoilt[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError):
        TRUSTED.check(MANIFEST, bytes(spoilt))


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "none"},
        {"algorithm": "ed448"},
        {"key": ""},
        {"key": SIGNER.public_key.upper()},
        {"key": SIGNER.public_key[:-1]},
        {"signature": ""},
        {"signature": "00" * 64},
        {"signature": "0" * 127},
        {"signature": "\u0661" * 128},
        {"signature": None},
    ],
)
def test_a_signature_that_is_none_is_refused(change: dict[str, object]) -> None:
    body = json.dumps({**json.loads(SIGNER.sign(MANIFEST)), **change}).encode()
    with pytest.raises(CorruptError):
        TRUSTED.check(MANIFEST, body)


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b"\xff", b"[" * 4096, b'{"algorithm":' * 300])
def test_what_is_no_json_of_a_signature_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptError):
        TRUSTED.check(MANIFEST, body)


def test_a_signature_of_the_bare_bytes_or_their_digest_is_not_one_of_a_manifest() -> None:
    """What a key signs for another purpose can't be shown as a manifest's."""
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    for signed in (MANIFEST, hashlib.sha256(MANIFEST).digest()):
        body = json.dumps({**json.loads(SIGNER.sign(MANIFEST)), "signature": key.sign(signed).hex()}).encode()
        with pytest.raises(CorruptError, match="isn't that of these bytes"):
            TRUSTED.check(MANIFEST, body)


def test_a_key_that_is_not_trusted_is_named() -> None:
    stranger = Signer(bytes(32))
    with pytest.raises(CorruptError, match=stranger.public_key[:16]):
        TRUSTED.check(MANIFEST, stranger.sign(MANIFEST))


# Keys


def test_keys_are_read_as_pem_with_and_without_a_password() -> None:
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    for signer in (Signer.from_pem(pem(key)), Signer.from_pem(pem(key, b"secret"), b"secret")):
        assert signer.public_key == SIGNER.public_key
        TrustedKeys([public_pem(key)]).check(MANIFEST, signer.sign(MANIFEST))


def test_a_key_that_can_not_be_used_is_refused_and_never_shown() -> None:
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    other = ec.generate_private_key(ec.SECP256R1())
    unreadable = ((b"", None), (b"no pem", None), (pem(key, b"secret"), None), (pem(key, b"secret"), b"wrong"))
    for body, password in (*unreadable, (pem(key), b"needless"), (pem(other), None)):
        with pytest.raises(InvalidInputError) as raised:
            Signer.from_pem(body, password)
        assert SEED.hex() not in str(raised.value)
    for seed in (b"", SEED[:-1], SEED + b"\0"):
        with pytest.raises(InvalidInputError, match="32 bytes"):
            Signer(seed)
    for text in ("", "xyz", SIGNER.public_key[:-2], public_pem(other), "-----BEGIN PUBLIC KEY-----"):
        with pytest.raises(InvalidInputError):
            TrustedKeys([text])
    with pytest.raises(InvalidInputError, match="no key is trusted"):
        TrustedKeys([])


# Readers


@pytest.fixture
def memory(tmp_path: Path) -> MemoryBucket:
    """Two signed versions."""
    bucket = MemoryBucket()
    publisher = Publisher(bucket, RUN, threads=1)
    tensors = weights()
    for step in range(2):
        publisher.publish(StateDictSource(tensors), step=step, folder_files=_folder(tmp_path))
        tensors = trained(tensors, step)
        sign(bucket, Version(step), SIGNER)
    return bucket


def _folder(root: Path) -> Path:
    return root / "model" if (root / "model").exists() else model_folder(root / "model")


def sign(bucket: MemoryBucket, version: Version, signer: Signer) -> None:
    body = bucket.get(manifest_key(RUN, version), max_bytes=1 << 20)
    bucket.put(signature_key(RUN, object_digest(body)), signer.sign(body))


def reader(bucket: MemoryBucket | FaultyBucket, root: Path) -> Fetcher:
    return Fetcher(SignedBucket(bucket, TRUSTED), RUN, root / "cache", threads=1)


def test_a_reader_with_keys_takes_signed_versions(memory: MemoryBucket, tmp_path: Path) -> None:
    fetcher = reader(memory, tmp_path)
    assert fetcher.head(None) == 1
    assert all_bits(FolderSource(fetcher.anchor(fetcher.manifest(Version(0))))) == all_bits(StateDictSource(weights()))
    assert fetcher.bodies(fetcher.manifest(Version(1))).num_bytes > 0


def test_a_reader_with_keys_refuses_what_is_not_signed_or_by_another(memory: MemoryBucket, tmp_path: Path) -> None:
    last = read_manifest(memory, RUN, Version(1))
    forged = encode_manifest(msgspec.structs.replace(last, step=77))
    memory.put(manifest_key(RUN, Version(1)), forged)
    with pytest.raises(CorruptError, match=r"00000001\.json: it isn't signed"):
        reader(memory, tmp_path).manifest(Version(1))
    sign(memory, Version(1), Signer(bytes(32)))
    with pytest.raises(CorruptError, match=r"00000001\.json: it is signed with key"):
        reader(memory, tmp_path).manifest(Version(1))
    assert Fetcher(memory, RUN, tmp_path / "plain").manifest(Version(1)).step == 77


def test_a_signed_manifest_under_another_number_is_still_refused(memory: MemoryBucket, tmp_path: Path) -> None:
    memory.put(manifest_key(RUN, Version(2)), memory.get(manifest_key(RUN, Version(1)), max_bytes=1 << 20))
    with pytest.raises(CorruptError, match="is the manifest of demo/1"):
        reader(memory, tmp_path).manifest(Version(2))


@pytest.mark.parametrize("place", [0.0, 0.3, 0.5, 0.7, 1.0])
def test_f10_with_keys_any_spoilt_bit_of_a_manifest_is_found_and_fetched_once_more(
    memory: MemoryBucket, tmp_path: Path, place: float
) -> None:
    key = manifest_key(RUN, Version(1))
    at = round(place * (len(memory.get(key, max_bytes=1 << 20)) - 1))
    once = FaultyBucket(memory, Fault(verb="get", key=key, flip=at))
    assert reader(once, tmp_path).manifest(Version(1)) == read_manifest(memory, RUN, Version(1))
    assert once.count("get", key) == 2
    ever = FaultyBucket(memory, Fault(verb="get", key=key, flip=at, times=2))
    with pytest.raises(CorruptError, match=r"00000001\.json"):
        reader(ever, tmp_path).manifest(Version(1))
