"""The page's reader and the package agree, beyond the frozen bucket: where tensors are cut, digests, any body."""

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import reader_v2
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_v2 import CLASSES, WIDTHS, Tensor, Tile

from depth import examples
from slackwater.checkpoint import contexts
from slackwater.checkpoint import tensor as package
from slackwater.checkpoint.codec import Level, Place, encode_body
from slackwater.checkpoint.element_sum import element_sum, seed_of
from slackwater.checkpoint.tensor import Bits, TensorSpec, tile_at

MI = 1024 * 1024
LAYER = "model.layers.0"


def cuts(tensor: Tensor) -> list[tuple[int, int, int, int]]:
    return [(tile.start, tile.rows, tile.cols, tile.stride) for tile in tensor.tiles()]


def package_cuts(tensor: Tensor) -> list[tuple[int, int, int, int]]:
    spec = TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
    return [(tile.start, tile.rows, tile.cols, tile.stride) for tile in package.tiles(spec)]


def whole(count: int) -> list[tuple[int, int, int, int]]:
    return [(0, 1, count, 0)]


def runs(lengths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Contiguous tiles, end to end."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [(start, 1, length, 0) for start, length in zip(starts, lengths, strict=False)]


def columns(rows: int, stride: int, lengths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Rectangles beside each other."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [(start, rows, length, stride) for start, length in zip(starts, lengths, strict=False)]


FROZEN: list[tuple[str, str, tuple[int, ...], list[tuple[int, int, int, int]]]] = [
    ("a scalar", "F32", (), whole(1)),
    ("nothing", "BF16", (0, 8), []),
    ("nothing of much", "BF16", (2**40, 0, 2**40), []),
    ("exactly 8 MiB", "BF16", (2048, 2048), whole(4 * MI)),
    ("16 equal sections", "BF16", (4096, 2048), runs([512 * 1024] * 16)),
    ("a vector that 16 divides", "U8", (8 * MI + 16,), runs([512 * 1024 + 1] * 16)),
    ("a vector that 16 doesn't divide", "U8", (8 * MI + 1,), runs([4 * MI + 1, 4 * MI])),
    ("lines that 16 doesn't divide", "BF16", (4095, 2048), runs([2048 * 2048, 2047 * 2048])),
    ("several tiles in a section, evenly", "F32", (16 * 5, 1024 * 1024), runs([2 * MI, 2 * MI, MI] * 16)),
    ("a line above 8 MiB", "U8", (3, 9 * MI), runs([9 * MI] * 3)),
    ("three axes", "BF16", (32, 512, 1024), runs([MI] * 16)),
    (f"{LAYER}.mlp.experts.7.up_proj.weight", "BF16", (4096, 2048), runs([4 * MI] * 2)),
    (f"{LAYER}.mlp.experts.7.down_proj.weight", "BF16", (2048, 4096), runs([4 * MI] * 2)),
    (f"{LAYER}.mlp.experts.down_proj", "BF16", (32, 512, 1024), runs([MI] * 16)),
    (f"{LAYER}.self_attn.o_proj.weight", "BF16", (2048, 4096), columns(2048, 4096, [256] * 16)),
    (f"{LAYER}.mlp.down_proj.weight_packed", "U8", (8192, 1040), columns(8192, 1040, [65] * 16)),
    (f"{LAYER}.mlp.down_proj.weight", "BF16", (4096, 2050), columns(4096, 2050, [684, 684, 682])),
    (f"{LAYER}.mlp.down_proj.weight_scale_inv", "BF16", (2048, 4096), runs([512 * 1024] * 16)),
    (f"{LAYER}.mlp.down_proj.weight", "U8", (8 * MI + 16,), runs([512 * 1024 + 1] * 16)),
    (f"{LAYER}.mlp.shared_down_proj.weight", "BF16", (4096, 2048), runs([512 * 1024] * 16)),
    ("w2.weight", "F32", (16, 32, 8192), columns(16, 32 * 8192, [2 * 8192] * 16)),
]


@pytest.mark.parametrize(("name", "dtype", "shape", "expected"), FROZEN, ids=lambda part: str(part)[:40])
def test_tensors_are_cut_as_they_were(
    name: str, dtype: str, shape: tuple[int, ...], expected: list[tuple[int, int, int, int]]
) -> None:
    tensor = Tensor(name, dtype, shape)
    assert cuts(tensor) == expected
    assert package_cuts(tensor) == expected


def test_a_tensor_of_more_than_four_gi_elements_is_cut_by_arithmetic_alone() -> None:
    tensor = Tensor("embedding", "BF16", (262_144, 20_480))
    assert tensor.count > 2**32
    tiles = tensor.tiles()
    assert (len(tiles), tiles[0].count, tiles[-1].start + tiles[-1].count) == (1296, 203 * 20_480, tensor.count)
    assert package_cuts(tensor) == cuts(tensor)


AXES = st.sampled_from([1, 2, 3, 15, 16, 17, 48, 160, 1000, 1024, 4096, 7168, 18432, 129_280])
NAMES = st.sampled_from([
    "lm_head.weight", "model.layers.3.self_attn.o_proj.weight", "a.down_proj.weight_packed", "o_proj.weight",
    "m.experts.12.down_proj.weight", "m.experts.12.gate_proj.weight", "xo_proj.weight", "m.w2.weight.scale",
    "layers.1.ffn.experts.0.w2.weight", "experts.0.w2.weight", "m.experts.x.w2.weight", "fc2.weight", "wo_b.weight",
])  # fmt: skip


@given(NAMES, st.sampled_from(sorted(WIDTHS)), st.lists(AXES, max_size=3))
def test_page_and_package_cut_alike_and_leave_nothing_out(name: str, dtype: str, shape: list[int]) -> None:
    tensor = Tensor(name, dtype, tuple(shape))
    spec = TensorSpec(name=name, dtype=dtype, shape=tensor.shape)
    assert package.tile_count(spec) == len(tensor.tiles())
    assert package_cuts(tensor) == cuts(tensor)
    assert sum(tile.count for tile in tensor.tiles()) == tensor.count
    for before, after in pairwise(tensor.tiles()):
        assert after.start == before.start + before.cols
        assert after.rows == before.rows


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["q_proj.weight", "o_proj.weight"])
def test_a_rank_needs_no_other_ranks_tiles(name: str, ranks: int) -> None:
    tensor = Tensor(name, "BF16", (4096, 4096))
    axis = 4096 if name == "o_proj.weight" else tensor.count
    edges = {tile.start for tile in tensor.tiles()}
    assert edges >= {rank * axis // ranks for rank in range(ranks)}


def test_page_and_package_know_the_same_dtypes_and_exponents() -> None:
    assert WIDTHS == package.WIDTHS
    assert {dtype: contexts.field(dtype) for dtype in WIDTHS} == {dtype: CLASSES.get(dtype, (0, 0)) for dtype in WIDTHS}


@given(st.text(min_size=1, max_size=8), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**64 - 1), st.data())
def test_element_sums_are_those_of_the_page_and_add_up(name: str, width: int, seed: int, data: st.DataObject) -> None:
    rows, cols, before, after = (data.draw(st.integers(low, 5)) for low in (2, 1, 0, 0))
    stride = before + cols + after
    bits = noise(str(seed), rows * stride, width)
    tile = package.Tile(index=0, start=before, rows=rows, cols=cols, stride=stride)
    part = {index: int(bits[index]) for index in Tile(before, rows, cols, stride).indexes()}
    rest = {index: int(bits[index]) for index in range(rows * stride) if index not in part}
    assert element_sum(seed_of(name), tile, tile.take(bits)) == reader_v2.element_sum(name, part)
    everything = package.Tile(index=0, start=0, cols=bits.size)
    total = reader_v2.element_sum(name, part) + reader_v2.element_sum(name, rest)
    assert element_sum(seed_of(name), everything, bits) == total % 2**64


def noise(label: str, count: int, width: int) -> Bits:
    return np.frombuffer(hashlib.shake_128(label.encode()).digest(count * width), dtype=f"<u{width}")


@settings(max_examples=examples(60))
@given(
    dtype=st.sampled_from(sorted(WIDTHS)),
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=3),
    share=st.sampled_from([1, 8, 40, 128, 255]),
    far=st.sampled_from([0, 16, 255]),
    level=st.sampled_from(["fast", "wan"]),
    label=st.text(max_size=4),
)
def test_the_pages_reader_decodes_whatever_the_package_encodes(
    dtype: str, sizes: list[int], share: int, far: int, level: Level, label: str
) -> None:
    olds, news = zip(*(step(f"{label} {at}", dtype, size, share, far) for at, size in enumerate(sizes)), strict=True)
    specs = [TensorSpec(name=f"t{at}", dtype=dtype, shape=(size,)) for at, size in enumerate(sizes)]
    encoded = encode_body([Place(spec=spec, tile=tile_at(spec, 0)) for spec in specs], olds, news, level)
    if encoded is None:
        assert all(np.array_equal(old, new) for old, new in zip(olds, news, strict=True))
        return
    kept = [specs.index(tile.place.spec) for tile in encoded.tiles]
    read = {"sparse": reader_v2.sparse, "dense": reader_v2.dense, "full": reader_v2.full}[encoded.encoding]
    assert read(encoded.body, [olds[at].tolist() for at in kept], dtype) == [news[at].tolist() for at in kept]
    for at, tile in zip(kept, encoded.tiles, strict=True):
        assert tile.post == reader_v2.tile_digest(news[at].tolist(), WIDTHS[dtype])
        assert tile.changed == int((olds[at] != news[at]).sum())


def step(label: str, dtype: str, size: int, share: int, far: int) -> tuple[Bits, Bits]:
    """Random bits whose exponents are near each other, and the next ones: ``share`` and ``far`` of 256 change."""
    width = WIDTHS[dtype]
    old = noise(label, size, width)
    shift, mask = CLASSES.get(dtype, (0, 0))
    near = noise(f"{label} near", size, 1) % 4
    old = old & ~np.array(mask << shift, dtype=old.dtype) | near.astype(old.dtype) << np.array(shift, old.dtype)
    chance, sign = noise(f"{label} chance", size, 1), noise(f"{label} sign", size, 1)
    new = np.where(sign & 1, old + 1, old - 1).astype(old.dtype)
    new = np.where(noise(f"{label} far", size, 1) < far, noise(f"{label} fresh", size, width), new)
    return old, np.where(chance < share, new, old)
