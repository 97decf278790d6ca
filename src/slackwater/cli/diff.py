"""``slackwater diff``: what leads from one state to another, measured, and kept as a delta folder on request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.manifest import FORMAT, Manifest, ObjectRef, Parent, encode_manifest
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.rules import decode_manifest
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.cli.attended import Attended
from slackwater.cli.snapshot import Shelf
from slackwater.cli.summary import Summary, summarize
from slackwater.clock import SystemClock
from slackwater.errors import InvalidInputError
from slackwater.publish.delta import bits_of, encode_delta
from slackwater.weights.delta_folder import END, RUN, START, write_delta, write_object
from slackwater.weights.diff import hash_source
from slackwater.weights.source import FolderSource
from slackwater.weights.watched import Watched

_NAMED: Final = 5
"""Tensors that a refusal names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffSettings:
    """How deltas are made."""

    out: Path | None
    """The delta folder to make; None: nothing is kept."""
    level: Level
    threads: int
    partial: bool = False
    """Tensors that the second state lacks stay as they are."""
    sign_with: Path | None = None
    """File of the private key that signs a fold in a bucket; delta folders aren't signed."""
    trust: Sequence[Path] = ()
    """Files of the public keys, one of which must sign such a fold; none asks nothing."""


def diff_states(old: str, new: str, settings: DiffSettings, shelf: Shelf, work: Attended) -> Summary:
    """Compare two states.

    Raises:
        InvalidInputError: They don't have the same tensors.
        NotFoundError: There is no such version.
        CorruptError: A state is damaged.
    """
    before, after = shelf.state(old), shelf.state(new)
    check_alike(before.specs(), after.specs(), partial=settings.partial)
    made = make_delta(before, after, settings, work)
    outline = Outline(before.specs().values())
    summary = summarize(f"{old} to {new}", "delta", made, outline, manifest_bytes=len(encode_manifest(made)))
    return msgspec.structs.replace(summary, other_files=_other_files(before, after))


def make_delta(before: FolderSource, after: FolderSource, settings: DiffSettings, work: Attended) -> Manifest:
    """Encode what leads from one folder to another, and keep it where `DiffSettings.out` says; returns its manifest.

    Raises:
        InvalidInputError: The delta folder is there already.
    """
    folder = None if settings.out is None else work.scratch.beside(settings.out)

    def put(ref: ObjectRef, body: bytes) -> None:
        if folder is not None:
            write_object(folder, ref, body)

    held = hash_source(Watched(before, partial(work.tell, "read")), threads=settings.threads)
    encoded = encode_delta(
        RUN, after, held, bits_of(before), level=settings.level, threads=settings.threads, put=put, progress=work.tell
    )
    manifest = Manifest(
        format=FORMAT,
        run=RUN,
        version=END,
        kind="delta",
        parent=Parent(version=START, state=held.digest),
        state=encoded.table.digest,
        step=0,
        created_at=datetime.fromtimestamp(SystemClock().wall(), UTC).isoformat(),
        objects=encoded.objects,
        bodies=encoded.bodies,
        tiles=encoded.tiles,
        nans=encoded.nans,
    )
    decode_manifest(encode_manifest(manifest))  # what readers will do
    if folder is not None and settings.out is not None:
        write_delta(folder, manifest, held.outline)
        work.scratch.appear(folder, settings.out)
    return manifest


def check_alike(before: Mapping[str, TensorSpec], after: Mapping[str, TensorSpec], *, partial: bool) -> None:
    """Check that a delta can lead from some tensors to others: it changes bits, and nothing else.

    Args:
        before: The tensors of the state before, by name.
        after: Those of the state after.
        partial: Whether it may lack some, which stay as they are.

    Raises:
        InvalidInputError: A tensor is in one of them alone, or has another dtype or shape; some are named.
    """
    missing, extra = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    if extra:
        raise InvalidInputError(
            f"only the second state has {_some(extra)}",
            hint="a delta adds no tensors: publish an anchor of another run",
        )
    if missing and not partial:
        raise InvalidInputError(
            f"only the first state has {_some(missing)}", hint="with --partial they stay as they are"
        )
    for name, spec in after.items():
        if spec != before[name]:
            raise InvalidInputError(
                f"{name} goes from {before[name].dtype} {list(before[name].shape)} to {spec.dtype} {list(spec.shape)}",
                hint="a delta changes neither dtypes nor shapes",
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _other_files(before: FolderSource, after: FolderSource) -> tuple[str, ...]:
    names = sorted(before.files.keys() | after.files.keys())
    return tuple(name for name in names if _read(before, name) != _read(after, name))


def _read(source: FolderSource, name: str) -> bytes | None:
    return source.files[name].read_bytes() if name in source.files else None
