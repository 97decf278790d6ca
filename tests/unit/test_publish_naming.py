"""A source that names tensors otherwise is told what the lineage calls them; another model is not."""

import random
import re
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from release_layouts import TABLES, release

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import InvalidInputError
from slackwater.publish.naming import find_renamed
from slackwater.publish.plan import check_fits

RENAMED = [
    # A text model's class, without the prefix of the whole.
    ("model.layers.3.mlp.up_proj.weight", "model.language_model.layers.3.mlp.up_proj.weight"),
    ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    ("lm_head.weight", "language_model.lm_head.weight"),
    # What transformers writes of Kimi-Linear, Kimi K2, DeepSeek V4.
    ("model.layers.0.block_sparse_moe.gate_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
    (
        "language_model.model.blocks.7.self_attn.q_a_proj.weight",
        "language_model.model.layers.7.self_attn.q_a_proj.weight",
    ),
    ("model.layers.2.ffn.experts.11.w1.weight", "layers.2.ffn.experts.11.w1.weight"),
    ("model.layers.2.hc_attn_fn", "layers.2.hc_attn_fn"),
    ("model.norm.weight", "norm.weight"),
    # Modules of transformers that its files don't have; wrappers.
    ("model.layers.1.self_attn.forget_gate.A_log", "model.layers.1.self_attn.A_log"),
    ("module.model.layers.1.self_attn.q_proj.bias", "model.layers.1.self_attn.q_proj.bias"),
    ("base_model.model.model.norm.weight", "model.norm.weight"),
]


@pytest.mark.parametrize(("theirs", "ours"), RENAMED)
def test_a_renamed_tensor_is_found_among_its_siblings(theirs: str, ours: str) -> None:
    others = [ours.replace("proj", "projection"), f"{ours}_inv", *(ours.replace(str(n), str(n + 1)) for n in range(12))]
    siblings = [name for name in others if name != ours]
    assert find_renamed([theirs], [ours, *siblings]) == (theirs, ours)
    assert find_renamed([theirs], siblings) is None


@pytest.mark.parametrize(
    ("unknown", "missing"),
    [
        ([], []),
        (["a"], []),
        ([], ["a"]),
        (["model.extra.weight"], ["model.norm.weight"]),
        (["model.layers.4.mlp.up_proj.weight"], ["model.layers.3.mlp.up_proj.weight"]),
        (["layers.1.experts.2.w1.weight"], ["layers.2.experts.1.w1.weight"]),
        (["l.mlp.up_proj.weight"], ["l.mlp.up_proj.weight_scale_inv"]),
        (["x.0.norm.weight"], ["y.0.norm.weight", "z.0.norm.weight"]),
        (["y.0.norm.weight", "z.0.norm.weight"], ["x.0.norm.weight"]),
        (["", ".", "..", "weight"], ["bias", "a..", "0"]),
    ],
)
def test_where_no_name_or_two_are_close_none_is_taken(unknown: list[str], missing: list[str]) -> None:
    assert find_renamed(unknown, missing) is None


def test_a_name_that_stands_closer_to_another_is_not_taken() -> None:
    unknown = ["model.layers.2.attn.compressor.norm.weight", "model.layers.2.attn.norm.weight"]
    missing = ["layers.2.attn.compressor.norm.weight", "layers.2.attn.kv_norm.weight"]
    assert find_renamed(unknown[1:], missing[1:]) is None
    assert find_renamed(unknown, missing) == (unknown[0], missing[0])


@pytest.mark.parametrize("layout", sorted(TABLES))
def test_in_every_release_a_prefix_is_seen_through(layout: str) -> None:
    names = sorted(release(layout).serving)
    for name in names:
        assert find_renamed([f"module.{name}"], names) == (f"module.{name}", name)
    assert find_renamed([f"module.{name}" for name in names], names) == (f"module.{names[0]}", names[0])


SEGMENTS = st.lists(st.sampled_from(["a", "b", "0", "1", "w1", "weight", "bias", ""]), max_size=5).map(".".join)


@given(st.sets(SEGMENTS), st.sets(SEGMENTS))
def test_what_is_found_is_a_pair_of_the_two_and_its_order_makes_no_difference(one: set[str], other: set[str]) -> None:
    found = find_renamed(one, other)
    assert found == find_renamed(sorted(one, reverse=True), sorted(other, reverse=True))
    if found is not None:
        assert found[0] in one
        assert found[1] in other
        assert [s for s in found[0].split(".") if s.isdecimal()] == [s for s in found[1].split(".") if s.isdecimal()]


def test_names_without_number_are_searched_within_bounds() -> None:
    drawn = random.Random(0)
    names = ["".join(drawn.choices(string.ascii_lowercase, k=8)) for _ in range(20_000)]
    begin = time.process_time()
    assert find_renamed([f"{name}.weight" for name in names], [f"{name}x.weight" for name in names]) is None
    assert time.process_time() - begin < 2


def spec(name: str, dtype: str, *shape: int) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name=name, dtype=dtype, shape=shape)}


@pytest.mark.parametrize(
    ("held", "new", "hint"),
    [
        (spec("language_model.norm.weight", "BF16", 2), spec("norm.weight", "BF16", 2), "language_model.norm.weight"),
        (spec("norm.weight", "BF16", 2), spec("extra", "BF16", 2), "^publish another model"),
        (spec("a.weight", "F8_E4M3", 2, 2), spec("a.weight", "BF16", 2, 2), "QuantizedSource"),
        (spec("a.weight", "I8", 2, 1), spec("a.weight", "BF16", 2, 2), "QuantizedSource"),
        (spec("a.weight_packed", "U8", 2, 1), spec("a.weight", "BF16", 2, 2), "QuantizedSource"),
        (spec("a.weight", "BF16", 2), spec("a.weight", "F32", 2), "^cast to the serving dtype"),
        (spec("a.weight", "BF16", 4), spec("a.weight", "BF16", 2), "^give whole tensors"),
    ],
)
def test_a_source_that_does_not_fit_is_told_what_to_do(
    held: dict[str, TensorSpec], new: dict[str, TensorSpec], hint: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_fits("delta", held, new)
    assert next(iter(new)) in caught.value.message
    assert re.search(hint, caught.value.hint)
