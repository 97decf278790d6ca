"""The ranks' parts of a version become one manifest. Each part is a manifest of its own, of that rank's tensors."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from slackwater.checkpoint.columns import from_column, to_column
from slackwater.checkpoint.groups import group_key, groups
from slackwater.checkpoint.manifest import MAX_NANS, AnchorTensor, Bodies, Manifest, ObjectRef, Tiles
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.pieces import Piece, num_lines
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import CorruptError, InvalidInputError


def share_out(specs: Iterable[TensorSpec], world: int) -> list[list[str]]:
    """Names for each rank, of about equally many bytes: groups that load together stay together.

    Args:
        specs: All tensors.
        world: How many ranks.
    """
    sizes = {spec.name: spec.num_bytes for spec in specs}
    shares: list[list[str]] = [[] for _ in range(world)]
    loads = [0] * world
    weighed = sorted(groups(sorted(sizes)), key=lambda group: -sum(map(sizes.__getitem__, group.names)))
    for group in weighed:
        rank = loads.index(min(loads))
        shares[rank] += group.names
        loads[rank] += sum(map(sizes.__getitem__, group.names))
    return [sorted(share) for share in shares]


def check_shares(
    shares: Sequence[Iterable[str]],
    wanted: Iterable[str] | None,
    pieces: Sequence[Iterable[tuple[TensorSpec, Piece]]] = (),
) -> None:
    """Check that ranks own each tensor once, whole or in pieces, and together all.

    The tensors of a group that are whole have one owner; its pieces lie where the trainer has them.

    Args:
        shares: The names of the tensors that each rank has whole.
        wanted: The lineage's tensors; None before its first anchor.
        pieces: What each rank has of others, with edges that are those of tiles.

    Raises:
        InvalidInputError: A tensor, or a line of one, has two owners or none, or a group is parted; the message names
            it.
    """
    owners: dict[str, int] = {}
    keys: dict[str, int] = {}
    for rank, name in ((rank, name) for rank, share in enumerate(shares) for name in share):
        if name in owners:
            raise InvalidInputError(
                f"{name} is published by rank {owners[name]} and by rank {rank}", hint="give each tensor one owner"
            )
        owners[name] = rank
        if keys.setdefault(group_key(name), rank) != rank:
            raise InvalidInputError(
                f"{name} of rank {rank} loads together with tensors of rank {keys[group_key(name)]}",
                hint="share tensors out by groups: slackwater.publish.merge.share_out does",
            )
    parted = _check_pieces(pieces, owners)
    missing = sorted(set(wanted or ()) - owners.keys() - parted)
    if missing:
        raise InvalidInputError(f"no rank publishes {missing[0]}", hint="the ranks' tensors are together the model")


def _check_pieces(pieces: Sequence[Iterable[tuple[TensorSpec, Piece]]], owners: Mapping[str, int]) -> frozenset[str]:
    """The tensors that are in pieces: of one kind at all ranks, each line once."""
    specs: dict[str, TensorSpec] = {}
    found: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, (spec, piece) in ((rank, held) for rank, share in enumerate(pieces) for held in share):
        if spec.name in owners:
            raise InvalidInputError(
                f"{spec.name} is published whole by rank {owners[spec.name]}, and in pieces by rank {rank}",
                hint="give it whole to one rank, or in pieces to several",
            )
        other = specs.setdefault(spec.name, spec)
        if other != spec:
            raise InvalidInputError(
                f"{spec.name} is {spec.dtype} {list(spec.shape)} on rank {rank}, and {other.dtype} "
                f"{list(other.shape)} on another",
                hint="a piece's spec is that of the whole tensor, the same on all ranks",
            )
        found[spec.name].append((piece.begin, piece.end, rank))
    for name, lines in found.items():
        _check_lines(name, sorted(lines), num_lines(specs[name]))
    return frozenset(found)


def _check_lines(name: str, lines: Sequence[tuple[int, int, int]], count: int) -> None:
    """Check that lines, each with its rank, follow on one another from the first to the last."""
    done, owner = 0, 0
    for begin, end, rank in [*lines, (count, count, 0)]:
        if begin > done:
            raise InvalidInputError(
                f"no rank publishes lines {done} to {begin} of {name}", hint="the ranks' pieces are together the tensor"
            )
        if begin < done:
            raise InvalidInputError(
                f"line {begin} of {name} is published by rank {owner} and by rank {rank}",
                hint="of ranks that hold the same lines one publishes them, and the others leave the tensor out",
            )
        done, owner = end, rank


def merge_deltas(held: StateTable, parts: Sequence[Manifest]) -> Manifest:
    """One delta of what each rank's changes.

    Args:
        held: The state that all were made on.
        parts: By rank; their tiles are disjoint. Where several change a tensor, its sum moves by what each adds to it.

    Raises:
        CorruptError: One was made on another state, or two change the same tile.
    """
    tiles, sums = held.tiles.copy(), held.sums.copy()
    numbers: list[int] = []
    for part in parts:
        listed = part.tiles
        if listed is None or part.parent is None or part.parent.state != held.digest:
            raise CorruptError(f"a rank's part of version {part.version} is no delta on {held.digest[:12]}")
        numbers += listed.number
        tensors = sorted({held.outline.tensor_of(number) for number in listed.number})
        tiles[list(listed.number)] = listed.post
        sums[tensors] += from_column(listed.sums, len(tensors), "tiles.sums") - held.sums[tensors]  # modulo 2**64
    if len(set(numbers)) != len(numbers):
        raise CorruptError("two ranks changed the same tile")
    changed = sorted({held.outline.tensor_of(number) for number in numbers})
    return msgspec.structs.replace(
        parts[0],
        state=StateTable(outline=held.outline, tiles=tiles, sums=sums).digest,
        objects=_objects(parts),
        bodies=_bodies(parts),
        tiles=_tiles(parts, to_column(held.sums[:0] if not changed else sums[changed])),
        quantizers=tuple(sorted({name for part in parts for name in part.quantizers})),
        nans=_nans(parts),
    )


def merge_anchors(parts: Sequence[Manifest], extra: Mapping[str, ObjectRef]) -> Manifest:
    """One anchor of each rank's files.

    Args:
        parts: By rank; their tensors and files are disjoint.
        extra: Files besides, such as the index, by name.
    """
    objects = (*_objects(parts), *extra.values())
    files: dict[str, int] = {}
    tensors: list[AnchorTensor] = []
    for part, first in zip(parts, _firsts(parts), strict=True):
        files |= {file: first + index for file, index in part.files.items()}
        tensors += [msgspec.structs.replace(tensor, object=first + tensor.object) for tensor in part.tensors]
    files |= {file: len(objects) - len(extra) + index for index, file in enumerate(extra)}
    tensors.sort(key=lambda tensor: tensor.name)
    return msgspec.structs.replace(
        parts[0],
        state=_state(tensors),
        objects=objects,
        tensors=tuple(tensors),
        files=dict(sorted(files.items())),
        nans=_nans(parts),
    )


def _state(tensors: Sequence[AnchorTensor]) -> str:
    outline = Outline(tensor.spec for tensor in tensors)
    columns = [
        from_column(tensor.digests, outline.first_tiles[index + 1] - outline.first_tiles[index] + 1, tensor.name)
        for index, tensor in enumerate(tensors)
    ]
    tiles = np.concatenate([np.empty(0, dtype=np.uint64), *(column[:-1] for column in columns)])
    return StateTable(outline=outline, tiles=tiles, sums=np.array([c[-1] for c in columns], dtype=np.uint64)).digest


def _firsts(parts: Sequence[Manifest]) -> list[int]:
    """The index of each part's first object among all."""
    return list(accumulate((len(part.objects) for part in parts), initial=0))[:-1]


def _objects(parts: Sequence[Manifest]) -> tuple[ObjectRef, ...]:
    return tuple(ref for part in parts for ref in part.objects)


def _nans(parts: Sequence[Manifest]) -> tuple[str, ...]:
    return tuple(sorted({name for part in parts for name in part.nans})[:MAX_NANS])


def _bodies(parts: Sequence[Manifest]) -> Bodies:
    all_bodies = [(first, part.bodies) for first, part in zip(_firsts(parts), parts, strict=True) if part.bodies]
    return Bodies(
        object=tuple(first + index for first, bodies in all_bodies for index in bodies.object),
        length=tuple(length for _, bodies in all_bodies for length in bodies.length),
        encoding="".join(bodies.encoding for _, bodies in all_bodies),
        tiles=tuple(count for _, bodies in all_bodies for count in bodies.tiles),
    )


def _tiles(parts: Sequence[Manifest], sums: str) -> Tiles:
    listed = [part.tiles for part in parts if part.tiles]
    pairs = [np.stack((tiles.pre, tiles.post), axis=1).reshape(-1) for tiles in listed]
    return Tiles(
        number=tuple(number for tiles in listed for number in tiles.number),
        changed=tuple(changed for tiles in listed for changed in tiles.changed),
        digests=to_column(np.concatenate([np.empty(0, dtype=np.uint64), *pairs])),
        sums=sums,
    )
