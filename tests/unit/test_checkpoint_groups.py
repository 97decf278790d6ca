"""Groups: what engines read together is never split, and nothing else is tied together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from release_layouts import TABLES, release

from slackwater.checkpoint.groups import Group, group_key, groups

TOGETHER = [
    "a.b.weight a.b.weight_scale_inv",
    "a.b.weight a.b.scale",
    "a.b.weight_packed a.b.weight_scale a.b.weight_global_scale a.b.input_global_scale",
    "a.b.weight a.b.weight_scale a.b.weight_scale_2 a.b.input_scale",
    "l.self_attn.q_proj.weight l.self_attn.k_proj.weight l.self_attn.v_proj.weight_scale_inv",
    "l.self_attn.q_proj.bias l.self_attn.k_proj.bias l.self_attn.v_proj.bias",
    "l.self_attn.q_a_proj.weight l.self_attn.kv_a_proj_with_mqa.weight_scale_inv l.self_attn.g_proj.weight",
    "l.self_attn.q_proj.weight l.self_attn.g_proj.weight l.self_attn.f_a_proj.weight l.self_attn.b_proj.weight",
    "l.self_attn.v_proj.weight_scale_inv l.self_attn.g_a_proj.weight l.self_attn.b_proj.weight",
    "l.self_attn.q_conv1d.weight l.self_attn.k_conv1d.weight l.self_attn.v_conv1d.weight",
    "l.linear_attn.in_proj_qkv.weight l.linear_attn.in_proj_z.weight",
    "l.linear_attn.in_proj_b.weight l.linear_attn.in_proj_a.weight",
    "l.indexer.wk.weight l.indexer.wk.weight_scale_inv l.indexer.weights_proj.weight",
    "l.attn.wq_a.scale l.attn.wkv.weight",
    "l.attn.compressor.wkv.weight l.attn.compressor.wgate.weight",
    "l.mlp.gate_proj.weight l.mlp.up_proj.weight_scale_inv",
    "l.ffn.shared_experts.w1.weight l.ffn.shared_experts.w3.scale",
    "l.ffn.experts.7.w1.weight l.ffn.experts.7.w2.scale l.ffn.experts.7.w3.weight",
    "experts.7.w1.weight experts.7.w2.scale",
]

APART = [
    "l.attn.wkv.weight l.attn.compressor.wkv.weight l.attn.wq_b.weight l.attn.indexer.wq_b.weight",
    "l.ffn.experts.7.w1.weight l.ffn.experts.70.w1.weight m.ffn.experts.7.w1.weight l.ffn.shared_experts.w1.weight",
    "l.ffn.gate.weight l.ffn.gate.bias l.ffn.gate.bias_vl",
    "l.self_attn.A_log l.self_attn.dt_bias l.self_attn.q_proj.weight l.self_attn.o_proj.weight",
    "l.self_attn.q_proj.weight l.self_attn.q_proj.bias l.self_attn.q_conv1d.weight",
    "l.hc_attn_scale l.hc_attn_fn l.hc_ffn_scale",
    "l.self_attn.f_a_proj.weight l.self_attn.f_b_proj.weight l.self_attn.kv_b_proj.weight l.self_attn.q_b_proj.weight",
    "l.mlp.gate_proj.weight l.mlp.down_proj.weight l.mlp.gate.weight",
    "l.my_experts.7.w1.weight l.my_experts.7.w2.weight experts.w1.weight experts.x.w1.weight experts.7",
    "embed.weight head.weight norm.weight image_start weight",
]


@pytest.mark.parametrize("together", TOGETHER)
def test_what_loads_together_is_one_group(together: str) -> None:
    names = tuple(together.split())
    assert groups(names) == (Group(key=group_key(names[0]), names=names),)


@pytest.mark.parametrize("names", APART)
def test_what_loads_alone_is_a_group_of_its_own(names: str) -> None:
    assert [group.names for group in groups(names.split())] == [(name,) for name in names.split()]


@given(st.lists(st.lists(st.sampled_from(["a", "experts", "7", "wk", "q_proj", "weight", "scale", "bias", ""]))))
def test_every_name_is_in_one_group_and_order_is_that_of_first_names(parts: list[list[str]]) -> None:
    names = list(dict.fromkeys(".".join(part) for part in parts))
    found = groups(names * 2)
    assert sorted(name for group in found for name in group.names) == sorted(names)
    assert all({group_key(name) for name in group.names} == {group.key} for group in found)
    firsts = [names.index(group.names[0]) for group in found]
    assert firsts == sorted(firsts)
    assert all(sorted(group.names, key=names.index) == list(group.names) for group in found)
    assert len({group.key for group in found}) == len(found)


@pytest.mark.parametrize("name", TABLES)
def test_in_every_release_the_group_of_a_scale_holds_its_weight(name: str) -> None:
    tiny = release(name)
    group_of = {member: group for group in groups(tiny.serving) for member in group.names}
    assert group_of.keys() == tiny.serving.keys()
    for weight, quantizer in tiny.quantizers.items():
        rows, cols = tiny.export[weight].shape
        first, *others = quantizer.parts(weight, (rows, cols))
        assert set(others) <= set(group_of[first].names), weight
