"""Bundles and batches: every tile once, in bodies that a rank can fetch alone, and no group parted."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from release_layouts import TABLES, release

from slackwater.checkpoint.bundles import batches
from slackwater.checkpoint.groups import groups
from slackwater.checkpoint.outline import Outline
from slackwater.checkpoint.tensor import TILE_BYTES, TensorSpec

LEAVES = ["q_proj.weight", "k_proj.weight", "k_proj.weight_scale_inv", "experts.0.w1.weight", "experts.1.w1.weight",
          "experts.1.w1.scale", "down_proj.weight", "norm.weight", "bias"]  # fmt: skip
SHAPES = [(), (0,), (5,), (64, 64), (2**20,), (2**21, 2), (2**22,), (2**12, 2**11), (16, 2**19)]


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def num_bytes(outline: Outline, number: int) -> int:
    tensor, tile = outline.place(number)
    return tile.count * tensor.bits_dtype.itemsize


def check(outline: Outline, names: list[str]) -> None:
    planned = list(batches(outline, names))
    batch_of: dict[str, set[int]] = {}
    seen: list[int] = []
    for index, batch in enumerate(planned):
        for bundle in batch:
            seen += bundle
            assert len({outline.place(number)[0].dtype for number in bundle}) == 1
            assert len(bundle) == 1 or sum(num_bytes(outline, number) for number in bundle) <= TILE_BYTES
            for number in bundle:
                batch_of.setdefault(outline.place(number)[0].name, set()).add(index)
    firsts = [(outline.by_name[name], name) for name in names]
    wanted = [number for tensor, _ in firsts for number in range(*outline.first_tiles[tensor : tensor + 2])]
    assert sorted(seen) == sorted(wanted)
    for group in groups(names):
        assert len(set().union(*(batch_of.get(name, set()) for name in group.names))) <= 1


@given(st.dictionaries(st.tuples(st.integers(0, 2), st.sampled_from(LEAVES)), st.sampled_from(SHAPES), max_size=12))
def test_every_tile_is_in_one_bundle_and_no_group_is_parted(tensors: dict[tuple[int, str], tuple[int, ...]]) -> None:
    specs = [
        spec(f"l.{layer}.{leaf}", *shape, dtype="F32" if "scale" in leaf else "BF16")
        for (layer, leaf), shape in tensors.items()
    ]
    outline = Outline(specs)
    check(outline, [tensor.name for tensor in outline.specs])


@pytest.mark.parametrize("model", sorted(TABLES))
def test_the_releases_are_cut_without_parting_a_group(model: str) -> None:
    outline = Outline(release(model).source().specs().values())
    check(outline, [tensor.name for tensor in outline.specs])


def test_small_tensors_of_a_dtype_share_a_body() -> None:
    outline = Outline([spec(f"l.{index}.norm.weight", 64) for index in range(20)] + [spec("z", 3, dtype="F32")])
    (batch,) = batches(outline, [tensor.name for tensor in outline.specs])
    assert sorted(map(len, batch)) == [1, 20]


def test_a_rank_can_fetch_its_tiles_of_a_large_tensor_alone() -> None:
    outline = Outline([spec("a.norm.weight", 64), spec("b.up_proj.weight", 64, 2**17), spec("c.norm.weight", 64)])
    bundles = [bundle for batch in batches(outline, [tensor.name for tensor in outline.specs]) for bundle in batch]
    alone = [bundle for bundle in bundles if outline.place(bundle[0])[0].name == "b.up_proj.weight"]
    assert [len(bundle) for bundle in alone] == [1] * 16


def test_each_expert_has_bodies_of_its_own() -> None:
    """Kimi K3's: codes and scales of each of the three matrices together."""
    outline = Outline(
        spec(f"l.experts.{expert}.w{matrix}.{part}", *shape, dtype="U8")
        for expert in range(3)
        for matrix in (1, 2, 3)
        for part, shape in (("weight_packed", (3072, 1792)), ("weight_scale", (3072, 112)))
    )
    planned = list(batches(outline, [tensor.name for tensor in outline.specs]))
    assert [[len(bundle) for bundle in batch] for batch in planned] == [[2, 2, 2]] * 3


def test_small_experts_have_bodies_of_their_own_too() -> None:
    outline = Outline(
        [spec(f"l.experts.{expert}.w{matrix}.weight", 8, 8) for expert in range(3) for matrix in (1, 2, 3)]
        + [spec("l.norm.weight", 8), spec("a.norm.weight", 8)]
    )
    planned = list(batches(outline, [tensor.name for tensor in outline.specs]))
    owners = [{outline.place(number)[0].name[:11] for bundle in batch for number in bundle} for batch in planned]
    assert owners == [{"a.norm.weig"}, *({f"l.experts.{expert}"} for expert in range(3)), {"l.norm.weig"}]


def test_nothing_to_send_has_no_batch() -> None:
    assert list(batches(Outline([spec("a", 3)]), [])) == []
    assert [bundle for batch in batches(Outline([spec("a", 0)]), ["a"]) for bundle in batch] == []


def test_batches_come_in_the_order_of_first_names() -> None:
    outline = Outline([spec(f"t{index:02d}.norm.weight", 2**20 * 3) for index in range(9)])
    numbers = [n for batch in batches(outline, [t.name for t in outline.specs]) for bundle in batch for n in bundle]
    assert all(before < after for before, after in pairwise(numbers))
