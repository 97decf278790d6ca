"""Sources of pieces: a rank's own tensors with the lines that they are, and those that torch places over ranks."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pieces_rig import DOWN, NORM, UP, big_model, small_tiles
from publish_rig import model_folder
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from slackwater.checkpoint.pieces import Piece, cut_out, num_lines
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import InvalidInputError, NotFoundError
from slackwater.publish.merge import check_shares
from slackwater.weights.dtensor import read_dtensors
from slackwater.weights.parted import PartedSource
from slackwater.weights.quantized import QuantizedSource
from slackwater.weights.source import Parted, Shows, pieces_of
from slackwater.weights.state_dict import StateDictSource


@pytest.fixture(autouse=True)
def tiles_are_small() -> Generator[None]:
    with small_tiles():
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def test_a_source_names_whole_tensors_and_gives_its_pieces() -> None:
    state = big_model()
    held = {UP: Piece(begin=24, end=48), DOWN: Piece(begin=0, end=48)}
    tensors = {UP: state[UP][24:48], DOWN: state[DOWN][:, :48], NORM: state[NORM]}
    source = PartedSource(tensors, held, {UP: (96, 32), DOWN: [32, 96]})
    assert source.specs() == {name: StateDictSource(state).specs()[name] for name in sorted(tensors)}
    assert source.pieces() == pieces_of(source) == held
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(source.bits(name), StateDictSource({name: tensor}).bits(name))
    assert isinstance(source, Parted)
    assert isinstance(source, Shows)
    assert [source.shows(name) for name in (UP, DOWN, "other")] == [True, False, False]  # columns are copied
    with pytest.raises(NotFoundError):
        source.bits("other")


def test_a_piece_that_is_the_whole_tensor_is_none() -> None:
    state = big_model()
    source = PartedSource({UP: state[UP]}, {UP: Piece(begin=0, end=96)}, {UP: (96, 32)})
    assert pieces_of(source) == pieces_of(StateDictSource(state)) == {}


def test_a_piece_of_a_tied_output_head_is_left_out() -> None:
    half = big_model()[UP][:48]
    tensors = {"lm_head.weight": half, "model.embed_tokens.weight": half}
    source = PartedSource(tensors, dict.fromkeys(tensors, Piece(begin=0, end=48)), dict.fromkeys(tensors, (96, 32)))
    assert list(source.specs()) == list(source.pieces()) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("pieces", "shapes", "words"),
    [
        ({UP: Piece(begin=0, end=48)}, {}, f"{UP} needs all of a tensor, a piece and the whole one's shape"),
        ({}, {UP: (96, 32)}, f"{UP} needs all of"),
        ({DOWN: Piece(begin=0, end=48)}, {DOWN: (32, 96)}, f"{DOWN} needs all of"),
        ({UP: Piece(begin=0, end=48)}, {UP: (96, 64)}, f"{UP} is [48, 32] on this rank, and lines 0 to 48"),
        ({UP: Piece(begin=0, end=54)}, {UP: (96, 32)}, "are [54, 32]"),
        ({UP: Piece(begin=1, end=49)}, {UP: (96, 32)}, "inside a tile"),
        ({UP: Piece(begin=0, end=48)}, {UP: ()}, "are no piece of it: it has 1"),
    ],
)  # fmt: skip
def test_a_source_of_pieces_checks_their_shapes(
    pieces: dict[str, Piece], shapes: dict[str, tuple[int, ...]], words: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        PartedSource({UP: big_model()[UP][:48]}, pieces, shapes)
    assert words in str(caught.value)


# From torch's own tensors


@contextmanager
def mesh_of(rank: int, *sizes: int) -> Generator[DeviceMesh]:
    """A mesh as one of its ranks sees it; nobody is there but this one."""
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        dist.destroy_process_group()


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """What a rank has of a tensor, by torch's own arithmetic."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor
    for axis, (length, offset) in enumerate(zip(shape, offsets, strict=True)):
        local = local.narrow(axis, offset if length else 0, length)
    return DTensor.from_local(
        local, mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )  # fmt: skip


EVERYWHERE = Replicate()


@pytest.mark.parametrize(
    ("sizes", "name", "placements"),
    [
        ((1,), UP, [Shard(0)]),
        ((4,), UP, [Shard(0)]),
        ((16,), DOWN, [Shard(1)]),
        ((4,), DOWN, [Shard(-1)]),
        ((2, 4), UP, [EVERYWHERE, Shard(0)]),
        ((4, 2), DOWN, [Shard(1), EVERYWHERE]),
        ((2, 4), UP, [Shard(0), Shard(0)]),
        ((2, 2, 2), DOWN, [Shard(1), EVERYWHERE, Shard(1)]),
        ((2, 1), NORM, [EVERYWHERE, Shard(0)]),
        ((3, 2), NORM, [EVERYWHERE, EVERYWHERE]),
        ((3,), DOWN, [EVERYWHERE]),
        ((40,), "odd.weight", [Shard(0)]),
    ],
)
def test_ranks_have_each_line_of_a_placed_tensor_once(
    sizes: tuple[int, ...], name: str, placements: list[Placement]
) -> None:
    state = {**big_model(), "odd.weight": torch.randn(33, 128).bfloat16()}  # a line is a tile; the last ranks have none
    whole = StateDictSource({name: state[name]}).bits(name)
    spec = StateDictSource({name: state[name]}).specs()[name]
    found = list[tuple[TensorSpec, Piece]]()
    for rank in range(math.prod(sizes)):
        with mesh_of(rank, *sizes) as mesh:
            source = read_dtensors({name: placed(state[name], mesh, placements)})
            for held in source.specs():
                assert source.specs()[held] == spec
                piece = source.pieces().get(held, Piece(begin=0, end=num_lines(spec)))
                found.append((spec, piece))
                np.testing.assert_array_equal(source.bits(held), cut_out(spec, piece, whole))
    check_shares([], [name], [[held] for held in found])


@pytest.mark.parametrize(
    ("name", "placements", "words"),
    [
        (DOWN, [EVERYWHERE, Shard(0)], "is sharded along axis 0, and its tiles are cut along axis 1"),
        (UP, [Shard(1), EVERYWHERE], "is sharded along axis 1, and its tiles are cut along axis 0"),
        (NORM, [EVERYWHERE, Shard(0)], "is too small to be cut: it has a single tile"),
        ("odd.weight", [EVERYWHERE, Shard(0)], "inside a tile"),
        (UP, [EVERYWHERE, Partial()], "is placed as"),
        (UP, [_StridedShard(0, split_factor=2), Shard(0)], "which isn't lines in a row"),
    ],
)
def test_a_placement_that_is_no_piece_is_refused_and_the_tensor_named(
    name: str, placements: list[Placement], words: str
) -> None:
    state = {**big_model(), "odd.weight": torch.ones(102, 32).bfloat16()}
    local = state[name]
    with mesh_of(0, 2, 2) as mesh:
        tensor = DTensor.from_local(
            local[:51] if name == "odd.weight" else local, mesh, placements,
            shape=local.shape, stride=local.stride(), run_check=False,
        )  # fmt: skip
        with pytest.raises(InvalidInputError) as caught:
            read_dtensors({name: tensor})
    assert name in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.hint


def test_plain_tensors_are_this_ranks_own() -> None:
    state = big_model()
    with mesh_of(1, 2) as mesh:
        placed_norm = placed(state[NORM], mesh, [EVERYWHERE])
        source = read_dtensors({NORM: placed_norm, "model.scale": state["model.scale"]})
    assert list(source.specs()) == ["model.scale"]
    assert source.pieces() == {}


def test_a_weight_in_pieces_is_not_quantised() -> None:
    source = PartedSource({UP: torch.zeros(48, 32)}, {UP: Piece(begin=0, end=48)}, {UP: (96, 32)})
    with pytest.raises(InvalidInputError, match="a weight is quantised whole"):
        QuantizedSource(source, source.specs())
