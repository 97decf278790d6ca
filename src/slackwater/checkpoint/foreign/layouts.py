"""The foreign layouts by name: one way in, one way out."""

from collections.abc import Iterable
from typing import Final

from slackwater.checkpoint.foreign.arc import read_arc, write_arc
from slackwater.checkpoint.foreign.delta import Change, Files, ForeignDelta
from slackwater.checkpoint.foreign.pickles import arc_v3_refused
from slackwater.checkpoint.foreign.slime import read_slime, write_slime
from slackwater.checkpoint.foreign.sparse import read_sparse, write_sparse
from slackwater.errors import UnsupportedError

LAYOUTS: Final = ("slime", "coreweave", "arc_v1", "arc_v2", "trl")
"""Every name that `read_delta` and `write_delta` take. CoreWeave's layout is slime's, of XOR and adler32."""


def read_delta(layout: str, files: Files) -> ForeignDelta:
    """Read a delta of another program. Bodies are checked as they are decoded, all else here.

    Args:
        layout: A name of `LAYOUTS`.
        files: Its files by their name below the delta's folder, whole; the bodies stay views of them.

    Raises:
        UnsupportedError: No such layout, something in it that isn't read, or a pickle.
        InvalidInputError: The files are a full snapshot.
        CorruptError: The files break the layout, or one of them is missing.
    """
    match layout:
        case "slime" | "coreweave":
            return read_slime(files)
        case "arc_v1":
            return read_arc(files, "zlib")
        case "arc_v2":
            return read_arc(files, "zstd")
        case "trl":
            return read_sparse(files)
        case _:
            raise _unknown(layout)


def write_delta(layout: str, changes: Iterable[Change], *, version: str, base_version: str) -> Files:
    """Write a delta as another program would, with that layout's usual encoding and checksum.

    Args:
        layout: A name of `LAYOUTS`.
        changes: Each tensor once; consumed one by one. Those without change are left out, but in ``arc_v1`` and
            ``arc_v2``, whose readers want all of them.
        version: What the delta makes; a whole number for ``trl``. The arc layouts don't write it.
        base_version: What it was made on; only ``slime`` and ``coreweave`` write it.

    Returns:
        The files by name, in the order in which to upload them: an index comes last.

    Raises:
        UnsupportedError: No such layout, or a tensor is too large for it.
        InvalidInputError: A tensor comes twice, or the layout can't name such a version.
    """
    match layout:
        case "slime":
            return write_slime(changes, version=version, base_version=base_version)
        case "coreweave":
            return write_slime(changes, version=version, base_version=base_version, checksum="adler32")
        case "arc_v1":
            return write_arc(changes, compression="zlib")
        case "arc_v2":
            return write_arc(changes, compression="zstd")
        case "trl":
            return write_sparse(changes, version=version)
        case _:
            raise _unknown(layout)


def _unknown(layout: str) -> UnsupportedError:
    if layout == "arc_v3":
        return arc_v3_refused("the delta")
    return UnsupportedError(f"the delta layout {layout[:40]!r} is unknown", hint=f"one of {', '.join(LAYOUTS)}")
