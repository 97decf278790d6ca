"""What a snapshot holds, from its manifest and its outline alone: pure, and ready to be printed as JSON."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Literal

import msgspec

from slackwater.checkpoint.canary import Canary
from slackwater.checkpoint.columns import from_column
from slackwater.checkpoint.groups import groups
from slackwater.checkpoint.manifest import ENCODINGS, Manifest, ObjectRef, Parent, Tiles
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import TensorSpec, tile_count
from slackwater.errors import CorruptError
from slackwater.weights.delta_folder import RUN as DIFF_RUN

Kind = Literal["anchor", "delta", "fold", "folder"]
"""What there is to inspect; a folder has no manifest."""


class DtypeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of one dtype."""

    tensors: int
    elements: int
    bytes: int


class EncodingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All bodies of one encoding."""

    bodies: int
    bytes: int


class TensorSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor: of a delta, one that changes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int
    tiles: int
    """In a delta, those that change."""
    changed: int | None = None
    """Elements that a delta changes."""
    distance: int | None = None
    """How far they move together, in places on the line of the numbers; where the base was read."""
    sum: str | None = None
    """Element sum after, in hex."""

    @property
    def density(self) -> float:
        """The share of its elements that changes."""
        return (self.changed or 0) / self.elements if self.elements else 0.0


class ChangeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a delta changes."""

    elements: int
    density: float
    """Share of all elements."""
    tensors: int
    groups: int
    """Groups of tensors that load together: `slackwater.checkpoint.groups`."""
    tiles: int
    bodies: int
    bundles: int
    """Bodies that make several tiles."""
    body_bytes: int
    bits_per_element: float
    """Bits of the bodies for each changed element; 0 where nothing changes."""
    encodings: dict[str, EncodingSummary]


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot, or a model folder."""

    name: str
    kind: Kind
    tensors: int
    elements: int
    bytes: int
    dtypes: dict[str, DtypeSummary]
    state: str | None = None
    parent: Parent | None = None
    step: int | None = None
    """The trainer's; a delta folder has none."""
    created_at: str | None = None
    quantizers: tuple[str, ...] = ()
    nans: tuple[str, ...] = ()
    canary: Canary | None = None
    manifest_bytes: int | None = None
    object_bytes: int | None = None
    objects: tuple[ObjectRef, ...] = ()
    change: ChangeSummary | None = None
    files: dict[str, int] = {}
    """Bytes of an anchor's or a folder's files."""
    is_new: bool | None = None
    """Of a fold in a bucket: whether this call made it."""
    other_files: tuple[str, ...] = ()
    """Files beside the tensors that two compared states don't share: a delta doesn't carry them."""
    listed: tuple[TensorSummary, ...] = ()
    """Each tensor, or in a delta each that changes: most changed elements first."""


def summarize_outline(name: str, outline: Outline, files: Mapping[str, int]) -> Summary:
    """A model folder."""
    return Summary(
        name=name,
        kind="folder",
        tensors=len(outline.specs),
        elements=outline.num_elements,
        bytes=outline.num_bytes,
        dtypes=_dtypes(outline),
        files=dict(files),
        listed=tuple(_tensor(spec, num_tiles=tile_count(spec)) for spec in outline.specs),
    )


def summarize(
    name: str,
    kind: Kind,
    manifest: Manifest,
    outline: Outline,
    *,
    manifest_bytes: int,
    distances: Mapping[int, int] | None = None,
) -> Summary:
    """An anchor, a delta or a fold.

    Args:
        name: What to call it.
        kind: What it is.
        manifest: Its manifest.
        outline: Of its run.
        manifest_bytes: Bytes of the manifest.
        distances: By index of the tensor, how far its elements move.

    Raises:
        CorruptError: It names tiles that the outline doesn't have.
    """
    tiles = manifest.tiles
    return Summary(
        name=name,
        kind=kind,
        tensors=len(outline.specs),
        elements=outline.num_elements,
        bytes=outline.num_bytes,
        dtypes=_dtypes(outline),
        state=manifest.state,
        parent=manifest.parent,
        step=None if manifest.run == DIFF_RUN else manifest.step,
        created_at=manifest.created_at,
        quantizers=manifest.quantizers,
        nans=manifest.nans,
        canary=manifest.canary,
        manifest_bytes=manifest_bytes,
        object_bytes=manifest.num_bytes,
        objects=manifest.objects,
        change=None if tiles is None else _change(manifest, outline, tiles),
        files={file: manifest.objects[index].size for file, index in manifest.files.items()},
        listed=tuple(_anchored(manifest, outline) if tiles is None else _changed(outline, tiles, distances or {})),
    )


def _dtypes(outline: Outline) -> dict[str, DtypeSummary]:
    tensors, elements, num_bytes = Counter[str](), Counter[str](), Counter[str]()
    for spec in outline.specs:
        tensors[spec.dtype] += 1
        elements[spec.dtype] += spec.num_elements
        num_bytes[spec.dtype] += spec.num_bytes
    return {
        dtype: DtypeSummary(tensors=count, elements=elements[dtype], bytes=num_bytes[dtype])
        for dtype, count in sorted(tensors.items())
    }


def _change(manifest: Manifest, outline: Outline, tiles: Tiles) -> ChangeSummary:
    bodies = list(manifest.listed())
    encodings: dict[str, EncodingSummary] = {}
    for encoding in ENCODINGS.values():
        lengths = [body.length for body in bodies if body.encoding == encoding]
        encodings[encoding] = EncodingSummary(bodies=len(lengths), bytes=sum(lengths))
    names = [outline.specs[tensor].name for tensor in _tensors_of(outline, tiles)]
    body_bytes = sum(body.length for body in bodies)
    return ChangeSummary(
        elements=manifest.num_changed,
        density=manifest.num_changed / outline.num_elements if outline.num_elements else 0.0,
        tensors=len(names),
        groups=len(groups(names)),
        tiles=len(tiles.number),
        bodies=len(bodies),
        bundles=sum(len(body.tiles) > 1 for body in bodies),
        body_bytes=body_bytes,
        bits_per_element=8 * body_bytes / manifest.num_changed if manifest.num_changed else 0.0,
        encodings=encodings,
    )


def _tensors_of(outline: Outline, tiles: Tiles) -> Mapping[int, list[int]]:
    """By tensor that changes, by rising name, the indexes of its tiles in the columns."""
    if tiles.number and max(tiles.number) >= outline.num_tiles:
        raise CorruptError(f"the delta names tile {max(tiles.number)}, and its run has {outline.num_tiles}")
    found: defaultdict[int, list[int]] = defaultdict(list)
    for index, number in enumerate(tiles.number):
        found[outline.tensor_of(number)].append(index)
    return dict(sorted(found.items()))


def _changed(outline: Outline, tiles: Tiles, distances: Mapping[int, int]) -> list[TensorSummary]:
    by_tensor = _tensors_of(outline, tiles)
    sums = from_column(tiles.sums, len(by_tensor), "tiles.sums").tolist()
    listed = [
        _tensor(
            outline.specs[tensor],
            num_tiles=len(indexes),
            changed=sum(tiles.changed[index] for index in indexes),
            distance=distances.get(tensor),
            element_sum=element_sum,
        )
        for (tensor, indexes), element_sum in zip(by_tensor.items(), sums, strict=True)
    ]
    return sorted(listed, key=lambda item: (-(item.changed or 0), item.name))


def _anchored(manifest: Manifest, outline: Outline) -> list[TensorSummary]:
    sums = StateTable.of_anchor(manifest).sums.tolist()
    return [
        _tensor(spec, num_tiles=tile_count(spec), element_sum=element_sum)
        for spec, element_sum in zip(outline.specs, sums, strict=True)
    ]


def _tensor(
    spec: TensorSpec,
    *,
    num_tiles: int,
    changed: int | None = None,
    distance: int | None = None,
    element_sum: int | None = None,
) -> TensorSummary:
    return TensorSummary(
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        elements=spec.num_elements,
        bytes=spec.num_bytes,
        tiles=num_tiles,
        changed=changed,
        distance=distance,
        sum=None if element_sum is None else f"{element_sum:016x}",
    )
