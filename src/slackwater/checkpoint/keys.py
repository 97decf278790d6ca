"""The grammar of bucket keys, relative to the bucket's prefix.

::

    <run>/manifests/00000007.json              the commit of version 7, created if absent, never changed
    <run>/anchors/00000000-<digest>/<file>     an ordinary Hugging Face folder
    <run>/blobs/<sha256>                       packs of delta tiles, named by their content
    <run>/head.json                            a hint: the newest version that its writer knew
"""

from slackwater.ids import ObjectDigest, RunId, Version


def manifest_key(run: RunId, version: Version) -> str:
    """The key whose creation commits ``version``."""
    return f"{run}/manifests/{version:08d}.json"


def anchor_key(run: RunId, version: Version, digest: str, file: str) -> str:
    """A file of an anchor. ``digest`` (16 hex characters of the content) keeps racing publishers apart."""
    return f"{run}/anchors/{version:08d}-{digest}/{file}"


def blob_key(run: RunId, digest: ObjectDigest) -> str:
    """A pack of tile bodies."""
    return f"{run}/blobs/{digest}"


def head_key(run: RunId) -> str:
    """The head hint. Readers that find it stale probe the next manifests by number."""
    return f"{run}/head.json"
