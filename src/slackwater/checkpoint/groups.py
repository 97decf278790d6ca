"""Which tensors must load together: what a delta may not split.

An engine that gets codes without their scale, or one half of a fused parameter, serves wrong numbers or drops what
it got. So a group holds a weight with its scales, and all that an engine joins to one parameter. Engines join
matrices that are applied to the same input; the table below names them by the releases' module names, wider than any
one engine's. A routed expert is one group: engines stack and repack it as a whole.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from slackwater.checkpoint.tensor import expert_of

_WEIGHT_LEAVES: Final = frozenset({
    "weight", "weight_packed",
    "scale", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
    "input_scale", "input_global_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
})  # fmt: skip
"""Last names of one weight and of what it can't be read without."""

_FUSIONS: Final = (
    # All that reads an attention layer's input: qkv_proj; MLA's q_a + kv_a, with K3's gate; KDA's input projections.
    ("qkv_proj", ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_a_proj", "g_a_proj")),
    ("qkv_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    # The short convolutions of KDA.
    ("conv1d", ("q_conv1d", "k_conv1d", "v_conv1d")),
    # The gated delta net of Qwen 3.5.
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
    # The indexer of sparse attention.
    ("wk_weights_proj", ("wk", "weights_proj")),
    # DeepSeek V4.1: attention, and its compressor of keys and values.
    ("wqa_wkv", ("wq_a", "wkv", "wgate")),
    # Gated MLPs.
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("w13", ("w1", "w3")),
)
"""The name of a joined parameter, and the modules, beside each other, that are joined in it."""

_JOINED: Final = {module: joined for joined, modules in _FUSIONS for module in modules}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tensors that must load together."""

    key: str
    """`group_key` of each."""
    names: tuple[str, ...]


def group_key(name: str) -> str:
    """What a tensor's group is called: names of equal keys must load together.

    Examples:
        >>> group_key("layers.0.attn.wkv.scale"), group_key("layers.0.attn.wq_a.weight")
        ('layers.0.attn.wqa_wkv', 'layers.0.attn.wqa_wkv')
        >>> group_key("layers.0.ffn.experts.7.w2.scale")
        'layers.0.ffn.experts.7'
        >>> group_key("layers.0.ffn.gate.bias")
        'layers.0.ffn.gate.bias'
    """
    expert = expert_of(name)
    if expert is not None:
        return expert
    module, _, leaf = name.rpartition(".")
    parent, dot, last = module.rpartition(".")
    joined = f"{parent}{dot}{_JOINED.get(last, last)}"
    return joined if leaf in _WEIGHT_LEAVES and module else f"{joined}.{leaf}".removeprefix(".")


def groups(names: Iterable[str]) -> tuple[Group, ...]:
    """Share tensors out over groups, each in one: in the order of first names, inside as they come."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        found.setdefault(group_key(name), []).append(name)
    return tuple(Group(key=key, names=tuple(members)) for key, members in found.items())
