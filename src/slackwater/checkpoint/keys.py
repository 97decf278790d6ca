"""The grammar of bucket keys, relative to the bucket's prefix.

::

    <run>/manifests/00000007.json              the commit of version 7, created if absent, never changed
    <run>/anchors/00000000-<digest>/<file>     an ordinary Hugging Face folder
    <run>/blobs/<sha256>                       packs of delta tiles, named by their content
    <run>/folds/00000003-00000007.json         a fold: what leads from version 3 to version 7 in one step
    <run>/signatures/<sha256>.json             the signature of the manifest with this SHA-256, put before it
    <run>/head.json                            a hint: the newest version that its writer knew
"""

import re
from typing import Final

from slackwater.ids import ObjectDigest, RunId, Version

_FOLD: Final = re.compile(r"/([0-9]{8})-([0-9]{8})\.json")


def manifest_key(run: RunId, version: Version) -> str:
    """The key whose creation commits ``version``."""
    return f"{run}/manifests/{version:08d}.json"


def anchor_key(run: RunId, version: Version, digest: str, file: str) -> str:
    """A file of an anchor. ``digest`` (16 hex characters of the content) keeps racing publishers apart."""
    return f"{run}/anchors/{version:08d}-{digest}/{file}"


def blob_key(run: RunId, digest: ObjectDigest) -> str:
    """A pack of tile bodies."""
    return f"{run}/blobs/{digest}"


def folds_prefix(run: RunId) -> str:
    """Below which a run's folds lie."""
    return f"{run}/folds"


def fold_key(run: RunId, start: Version, end: Version) -> str:
    """The key whose creation commits the fold from ``start`` to ``end``."""
    return f"{folds_prefix(run)}/{start:08d}-{end:08d}.json"


def parse_fold_key(run: RunId, key: str) -> tuple[Version, Version] | None:
    """What a key under `folds_prefix` leads from and to; None where it is no fold's."""
    found = _FOLD.fullmatch(key.removeprefix(folds_prefix(run)))
    return None if found is None else (Version(int(found[1])), Version(int(found[2])))


def signature_key(run: RunId, manifest: ObjectDigest) -> str:
    """A manifest's signature, by the manifest's SHA-256. See `slackwater.checkpoint.signature`."""
    return f"{run}/signatures/{manifest}.json"


def head_key(run: RunId) -> str:
    """The head hint. Readers that find it stale probe the next manifests by number."""
    return f"{run}/head.json"
