"""What publishing a version has come to."""

from dataclasses import dataclass
from typing import Literal

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.state import StateTable
from slackwater.ids import RunId, StateDigest, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A committed version and what it cost."""

    run: RunId
    version: Version
    kind: Literal["anchor", "delta"]
    state: StateDigest
    changed: int
    """Elements whose bits differ from the version before; in an anchor all."""
    total: int
    """Elements of the whole state."""
    uploaded_bytes: int
    """Bytes of this version's objects and manifest."""
    full_bytes: int
    """Bytes of all tensors."""
    encode_s: float
    """Seconds from the call to the finished draft: reading, comparing, encoding, hashing."""
    upload_s: float
    """Seconds from there to the commit."""

    @property
    def ratio(self) -> float:
        """``uploaded_bytes`` as a share of ``full_bytes``; 0 in a model without elements."""
        return self.uploaded_bytes / self.full_bytes if self.full_bytes else 0.0


def report(
    manifest: Manifest, table: StateTable, manifest_bytes: int, *, encode_s: float, upload_s: float
) -> Published:
    """What a committed version is and cost; ``table`` is the state after it."""
    return Published(
        run=manifest.run,
        version=manifest.version,
        kind=manifest.kind,
        state=manifest.state,
        changed=manifest.num_changed,
        total=table.outline.num_elements,
        uploaded_bytes=manifest.num_bytes + manifest_bytes,
        full_bytes=table.outline.num_bytes,
        encode_s=encode_s,
        upload_s=upload_s,
    )
