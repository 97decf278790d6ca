"""Ed25519 signatures over manifests and folds: who can write to a bucket still can't make what readers with keys take.

A manifest names its run, its number, its parent's state and every object by SHA-256, so a signature over its bytes
covers the whole version. It lies in an object of its own, named by the manifest's SHA-256 and put before the
manifest: a version that is visible is signed. Folds are manifests too. The object is JSON::

    {"algorithm": "ed25519", "key": "<64 hex digits>", "signature": "<128 hex digits>"}

Signed are the bytes ``slackwater manifest 1`` and a newline, followed by the manifest's SHA-256 (32 bytes). The
algorithm is that of RFC 8032; private and public keys are read as PEM (RFC 8410), as ``openssl genpkey -algorithm
ed25519`` writes them.
"""

import hashlib
from collections.abc import Iterable
from typing import Annotated, Final, Literal, Self

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from slackwater.errors import CorruptError, InvalidInputError

_CONTEXT: Final = b"slackwater manifest 1\n"
_HINT: Final = "make a key with: openssl genpkey -algorithm ed25519"

_Hex32 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Hex64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{128}$")]


class _Signature(msgspec.Struct, frozen=True, kw_only=True):
    algorithm: Literal["ed25519"]
    key: _Hex32
    signature: _Hex64


class Signer:
    """Signs manifests with a private key in memory.

    Args:
        seed: The private key: 32 bytes.

    Raises:
        InvalidInputError: It has another length.
    """

    def __init__(self, seed: bytes) -> None:
        if len(seed) != 32:  # noqa: PLR2004 : RFC 8032, 5.1.5
            raise InvalidInputError(f"an Ed25519 private key has 32 bytes, not {len(seed)}", hint=_HINT)
        self._key = Ed25519PrivateKey.from_private_bytes(seed)

    @classmethod
    def from_pem(cls, pem: bytes, password: bytes | None = None) -> Self:
        """Read a private key.

        Raises:
            InvalidInputError: It is no Ed25519 private key, or the password is wrong or missing.
        """
        try:
            key = load_pem_private_key(pem, password)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidInputError("the signing key can't be read as PEM", hint=_HINT) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidInputError("the signing key isn't an Ed25519 key", hint=_HINT)
        return cls(key.private_bytes_raw())

    @property
    def public_key(self) -> str:
        """What readers trust: 64 hex digits."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, manifest: bytes) -> bytes:
        """The bytes of the signature object for a manifest's bytes. The same manifest gives the same bytes."""
        signature = self._key.sign(_signed(manifest)).hex()
        return msgspec.json.encode(_Signature(algorithm="ed25519", key=self.public_key, signature=signature))


class TrustedKeys:
    """The public keys of those whose versions a reader takes.

    Args:
        keys: Each as 64 hex digits, or as PEM.

    Raises:
        InvalidInputError: There is none, or one can't be read.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = {key.public_bytes_raw().hex(): key for key in map(_public_key, keys)}
        if not self._keys:
            raise InvalidInputError("no key is trusted, so that no version would be", hint="name one, or don't check")

    def __contains__(self, key: str) -> bool:
        """Whether a public key, as 64 hex digits, is one of them: `Signer.public_key` tells a signer's."""
        return key in self._keys

    def check(self, manifest: bytes, signature: bytes) -> str:
        """Check that one of the keys signed a manifest; returns that key.

        Args:
            manifest: The manifest's bytes, as they were read.
            signature: The bytes of its signature object.

        Raises:
            CorruptError: The signature can't be read, is another key's, or is that of other bytes.
        """
        try:
            read = msgspec.json.decode(signature, type=_Signature)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise CorruptError(f"the signature can't be read: {error}") from error
        key = self._keys.get(read.key)
        if key is None:
            raise CorruptError(
                f"it is signed with key {read.key[:16]}, which isn't trusted",
                hint="add the trainer's new public key to the trusted ones, if it has one",
            )
        try:
            key.verify(bytes.fromhex(read.signature), _signed(manifest))
        except InvalidSignature as error:
            raise CorruptError(f"the signature of key {read.key[:16]} isn't that of these bytes") from error
        return read.key


def _signed(manifest: bytes) -> bytes:
    return _CONTEXT + hashlib.sha256(manifest).digest()


def _public_key(text: str) -> Ed25519PublicKey:
    try:
        if "-----BEGIN" not in text:
            return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
        key = load_pem_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidInputError(
            "a trusted key is 64 hex digits, or PEM", hint="openssl pkey -pubout writes it"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInputError("a trusted key isn't an Ed25519 key", hint=_HINT)
    return key
