"""Tiny checkpoints in the on-disk layout of the five releases: names, dtypes, packing and scales, made by hand.

Names and dtypes follow the releases; widths are chosen so that every kind of block meets an edge.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from slackwater.checkpoint.shards import build_index, build_shard, cut_shards
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.weights.quantize.formats import FP8_E8M0, FP8_F32, MXFP4, MXFP4_I8
from slackwater.weights.quantize.quantizer import Quantizer
from slackwater.weights.quantized import QuantizedSource
from slackwater.weights.source import INDEX_FILE
from slackwater.weights.state_dict import StateDictSource

_KINDS: Final[Mapping[str, Quantizer]] = {"fp8": FP8_F32, "fp8-e8m0": FP8_E8M0, "fp4": MXFP4_I8, "mxfp4": MXFP4}
"""What stands in the column of dtypes for a weight that is quantised."""

_QWEN = """
    lm_head.weight                                                                  BF16 96 160
    model.language_model.embed_tokens.weight                                        BF16 96 160
    model.language_model.norm.weight                                                BF16 160
    model.language_model.layers.{0,1}.{input,post_attention}_layernorm.weight       BF16 160
    model.language_model.layers.{0,1}.mlp.{gate,up}_proj.weight                     BF16 224 160
    model.language_model.layers.{0,1}.mlp.down_proj.weight                          BF16 160 224
    model.language_model.layers.0.linear_attn.{A_log,dt_bias}                       F32  4
    model.language_model.layers.0.linear_attn.conv1d.weight                         BF16 128 1 4
    model.language_model.layers.0.linear_attn.in_proj_{a,b}.weight                  BF16 4 160
    model.language_model.layers.0.linear_attn.in_proj_qkv.weight                    BF16 128 160
    model.language_model.layers.0.linear_attn.in_proj_z.weight                      BF16 64 160
    model.language_model.layers.0.linear_attn.norm.weight                           BF16 16
    model.language_model.layers.0.linear_attn.out_proj.weight                       BF16 160 64
    model.language_model.layers.1.self_attn.{q,k}_norm.weight                       BF16 16
    model.language_model.layers.1.self_attn.q_proj.weight                           BF16 128 160
    model.language_model.layers.1.self_attn.{k,v}_proj.weight                       BF16 32 160
    model.language_model.layers.1.self_attn.o_proj.weight                           BF16 160 64
    model.visual.blocks.0.attn.qkv.weight                                           BF16 96 32
    model.visual.blocks.0.attn.qkv.bias                                             BF16 96
    model.visual.patch_embed.proj.weight                                            BF16 32 3 2 4 4
    mtp.fc.weight                                                                   BF16 160 320
    mtp.{norm,pre_fc_norm_embedding,pre_fc_norm_hidden}.weight                      BF16 160
"""

_GLM_MLA = """
    {L}.self_attn.{q,kv}_a_layernorm.weight                                         BF16 32
    {L}.self_attn.q_a_proj.weight                                                   fp8  32 160
    {L}.self_attn.q_b_proj.weight                                                   fp8  192 32
    {L}.self_attn.kv_a_proj_with_mqa.weight                                         fp8  48 160
    {L}.self_attn.kv_b_proj.weight                                                  fp8  128 32
    {L}.self_attn.o_proj.weight                                                     fp8  160 64
    {L}.self_attn.indexer.k_norm.{weight,bias}                                      BF16 32
    {L}.self_attn.indexer.weights_proj.weight                                       BF16 2 160
    {L}.self_attn.indexer.wk.weight                                                 fp8  32 160
    {L}.self_attn.indexer.wq_b.weight                                               fp8  64 32
"""
_GLM_DENSE = """
    {L}.mlp.{gate,up}_proj.weight                                                   fp8  288 160
    {L}.mlp.down_proj.weight                                                        fp8  160 288
"""
_GLM_MOE = """
    {L}.mlp.gate.weight                                                             BF16 2 160
    {L}.mlp.gate.e_score_correction_bias                                            F32  2
    {L}.mlp.{experts.0,experts.1,shared_experts}.{gate,up}_proj.weight              fp8  136 160
    {L}.mlp.{experts.0,experts.1,shared_experts}.down_proj.weight                   fp8  160 136
"""
_GLM_NORMS = """
    {L}.{input,post_attention}_layernorm.weight                                     BF16 160
"""
_GLM_MTP = """
    {L}.{enorm,hnorm,shared_head.norm}.weight                                       BF16 160
    {L}.eh_proj.weight                                                              BF16 160 320
"""
_GLM_KDA = """
    {L}.self_attn.A_log                                                             F32  4
    {L}.self_attn.dt_bias                                                           F32  64
    {L}.self_attn.b_proj.weight                                                     BF16 4 160
    {L}.self_attn.{f,g}_a_proj.weight                                               BF16 16 160
    {L}.self_attn.{f,g}_b_proj.weight                                               BF16 64 16
    {L}.self_attn.{q,k,v}_conv1d.weight                                             BF16 64 1 4
    {L}.self_attn.{q,k,v}_proj.weight                                               fp8  64 160
    {L}.self_attn.o_norm.weight                                                     BF16 16
    {L}.self_attn.o_proj.weight                                                     fp8  160 64
"""
_GLM_MHC = """
    {L}.hc_{attn,ffn}_base                                                          F32  8
    {L}.hc_{attn,ffn}_fn                                                            F32  8 320
    {L}.hc_{attn,ffn}_scale                                                         F32  3
"""
_GLM_ENDS = """
    lm_head.weight                                                                  BF16 96 160
    {L}embed_tokens.weight                                                          BF16 96 160
    {L}norm.weight                                                                  BF16 160
"""
_GLM_KPOOL = """
    {L}.self_attn.indexer.index_kpool_compress_ape                                  BF16 4 32
    {L}.self_attn.indexer.index_kpool_compress_gate                                 BF16 32 160
"""
_GLM_VISION = """
    model.visual.blocks.0.mlp.{gate,up}_proj.weight                                 BF16 64 32
    model.visual.blocks.0.mlp.{gate,up}_proj.bias                                   BF16 64
    model.visual.downsample.weight                                                  BF16 160 32 2 2
"""

_K3_LAYER = """
    {L}.{input_layernorm,post_attention_layernorm}.weight                           BF16 160
    {L}.{self_attention,mlp}_res_norm.weight                                        BF16 160
    {L}.{self_attention,mlp}_res_proj.weight                                        BF16 1 160
"""
_K3_KDA = """
    {L}.self_attn.A_log                                                             F32  128
    {L}.self_attn.dt_bias                                                           F32  64
    {L}.self_attn.{q,k,v,g}_proj.weight                                             BF16 64 160
    {L}.self_attn.{q,k,v}_conv1d.weight                                             F32  64 1 4
    {L}.self_attn.f_a_proj.weight                                                   BF16 16 160
    {L}.self_attn.f_b_proj.weight                                                   BF16 64 16
    {L}.self_attn.b_proj.weight                                                     BF16 4 160
    {L}.self_attn.o_norm.weight                                                     F32  16
    {L}.self_attn.o_proj.weight                                                     BF16 160 64
    {L}.mlp.{gate,up}_proj.weight                                                   BF16 96 160
    {L}.mlp.down_proj.weight                                                        BF16 160 96
"""
_K3_MLA_MOE = """
    {L}.self_attn.{q,kv}_a_layernorm.weight                                         BF16 32
    {L}.self_attn.q_a_proj.weight                                                   BF16 32 160
    {L}.self_attn.q_b_proj.weight                                                   BF16 128 32
    {L}.self_attn.kv_a_proj_with_mqa.weight                                         BF16 48 160
    {L}.self_attn.kv_b_proj.weight                                                  BF16 128 32
    {L}.self_attn.g_proj.weight                                                     BF16 64 160
    {L}.self_attn.o_proj.weight                                                     BF16 160 64
    {L}.block_sparse_moe.gate.weight                                                BF16 3 160
    {L}.block_sparse_moe.gate.e_score_correction_bias                               F32  3
    {L}.block_sparse_moe.experts.{0,1,2}.{w1,w3}.weight                             mxfp4 128 96
    {L}.block_sparse_moe.experts.{0,1,2}.w2.weight                                  mxfp4 96 128
    {L}.block_sparse_moe.shared_experts.{gate,up}_proj.weight                       BF16 64 160
    {L}.block_sparse_moe.shared_experts.down_proj.weight                            BF16 160 64
    {L}.block_sparse_moe.routed_expert_down_proj.weight                             BF16 96 160
    {L}.block_sparse_moe.routed_expert_up_proj.weight                               BF16 160 96
    {L}.block_sparse_moe.routed_expert_norm.weight                                  BF16 96
"""
_K3_ENDS = """
    {L}.lm_head.weight                                                              BF16 96 160
    {L}.model.embed_tokens.weight                                                   BF16 96 160
    {L}.model.{norm,output_attn_res_norm}.weight                                    BF16 160
    {L}.model.output_attn_res_proj.weight                                           BF16 1 160
"""

_V41 = """
    {embed,head}.weight                                                             BF16 96 160
    norm.weight                                                                     BF16 160
    image_{start,end,newline}                                                       BF16 160
    layers.{0,1}.{attn,ffn}_norm.weight                                             BF16 160
    layers.{0,1}.hc_{attn,ffn}_base                                                 F32  8
    layers.{0,1}.hc_{attn,ffn}_fn                                                   F32  8 320
    layers.{0,1}.hc_{attn,ffn}_scale                                                F32  3
    layers.{0,1}.attn.attn_sink                                                     F32  4
    layers.{0,1}.attn.q_norm.weight                                                 BF16 48
    layers.{0,1}.attn.kv_norm.weight                                                BF16 64
    layers.{0,1}.attn.wq_a.weight                                                   fp8-e8m0 48 160
    layers.{0,1}.attn.wq_b.weight                                                   fp8-e8m0 256 48
    layers.{0,1}.attn.wkv.weight                                                    fp8-e8m0 64 160
    layers.{0,1}.attn.wo_a.weight                                                   fp8-e8m0 64 128
    layers.{0,1}.attn.wo_b.weight                                                   fp8-e8m0 160 64
    layers.1.attn.compressor.{wkv,wgate}.weight                                     BF16 64 160
    layers.1.attn.compressor.norm.weight                                            BF16 64
    layers.1.attn.indexer.wq_b.weight                                               fp8-e8m0 128 48
    layers.1.attn.indexer.wk.weight                                                 BF16 32 160
    layers.1.attn.indexer.weights_proj.weight                                       BF16 4 160
    layers.1.attn.indexer.k_norm.weight                                             BF16 32
    layers.{0,1}.ffn.gate.weight                                                    BF16 3 160
    layers.{0,1}.ffn.gate.{bias,bias_vl}                                            F32  3
    layers.{0,1}.ffn.experts.{0,1,2}.{w1,w3}.weight                                 fp4  64 160
    layers.{0,1}.ffn.experts.{0,1,2}.w2.weight                                      fp4  160 64
    layers.{0,1}.ffn.shared_experts.{w1,w3}.weight                                  fp8-e8m0 72 160
    layers.{0,1}.ffn.shared_experts.w2.weight                                       fp8-e8m0 160 72
    vision.blocks.0.attn.wqkv.weight                                                BF16 96 32
    vision.blocks.0.mlp.{w1,w2}.weight                                              BF16 64 32
    aligner.{w1,w2}.weight                                                          BF16 64 32
    aligner.{w1,w2}.bias                                                            BF16 64
"""


def _at(place: str, *tables: str) -> str:
    return "".join(tables).replace("{L}", place)


_GLM_52 = (
    _at("model.", _GLM_ENDS)
    + _at("model.layers.0", _GLM_NORMS, _GLM_MLA, _GLM_DENSE)
    + _at("model.layers.1", _GLM_NORMS, _GLM_MLA, _GLM_MOE)
    + _at("model.layers.2", _GLM_NORMS, _GLM_MLA, _GLM_MOE, _GLM_MTP)
)
_GLM_53 = (
    _at("model.language_model.", _GLM_ENDS)
    + _at("model.language_model.layers.0", _GLM_NORMS, _GLM_MHC, _GLM_KDA, _GLM_DENSE)
    + _at("model.language_model.layers.1", _GLM_NORMS, _GLM_MHC, _GLM_MLA, _GLM_KPOOL, _GLM_MOE)
    + _at("model.language_model.layers.2", _GLM_NORMS, _GLM_MHC, _GLM_MLA, _GLM_KPOOL, _GLM_MOE, _GLM_MTP)
    + _GLM_VISION
)
_K3 = (
    _at("language_model", _K3_ENDS)
    + _at("language_model.model.layers.0", _K3_LAYER, _K3_KDA)
    + _at("language_model.model.layers.1", _K3_LAYER, _K3_MLA_MOE)
)

TABLES: Final[Mapping[str, str]] = {
    "qwen3.5-9b": _QWEN,
    "glm-5.2": _GLM_52,
    "glm-5.3-flash": _GLM_53,
    "kimi-k3": _K3,
    "deepseek-v4.1-flash": _V41,
}
"""Each release: a line gives names (braces are alternatives), a dtype or kind, and the shape before quantising."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A tiny checkpoint: what its anchor holds, and what a trainer of it exports."""

    name: str
    serving: Mapping[str, TensorSpec]
    quantizers: Mapping[str, Quantizer]
    """By the weight's name in the export."""
    export: Mapping[str, torch.Tensor]
    """Everything in BF16, as trainers save it."""

    def source(self) -> QuantizedSource:
        """The anchor's tensors, quantised for the first time."""
        return QuantizedSource(StateDictSource(self.export), self.serving)

    def after_step(self, *, lr: float, seed: int = 1) -> "Release":
        """The release after an Adam-sized step: each value of the upper half of every tensor's rows by ``lr``."""
        drawn = torch.Generator().manual_seed(seed)
        return replace(self, export={name: _step(values, lr, drawn) for name, values in self.export.items()})

    def write(self, folder: Path) -> None:
        """A Hugging Face folder of several safetensors files, with an index and a config."""
        source = self.source()
        plan = cut_shards(list(source.specs().values()), 256 * 1024)
        for shard in plan:
            (folder / shard.file).write_bytes(build_shard(shard, source))
        (folder / INDEX_FILE).write_bytes(build_index(plan))
        (folder / "config.json").write_text(json.dumps({"model_type": self.name}), encoding="utf-8")


def release(name: str, *, seed: int = 0) -> Release:
    """One of `TABLES`, with random weights."""
    drawn = torch.Generator().manual_seed(seed)
    serving: dict[str, TensorSpec] = {}
    quantizers: dict[str, Quantizer] = {}
    export: dict[str, torch.Tensor] = {}
    for tensor, kind, shape in _read(TABLES[name]):
        assert tensor not in export, tensor
        export[tensor] = (torch.randn(shape, generator=drawn) * 0.02).to(torch.bfloat16)
        if kind in _KINDS:
            quantizers[tensor] = _KINDS[kind]
            serving.update(_KINDS[kind].parts(tensor, (shape[0], shape[1])))
        else:
            serving[tensor] = TensorSpec(name=tensor, dtype=kind, shape=shape)
    return Release(name=name, serving=serving, quantizers=quantizers, export=export)


def _read(table: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for line in table.strip().splitlines():
        if line.strip():
            pattern, kind, *shape = line.split()
            for name in _expand(pattern):
                yield name, kind, tuple(int(size) for size in shape)


def _expand(pattern: str) -> Iterator[str]:
    head, brace, rest = pattern.partition("{")
    if not brace:
        yield pattern
        return
    choices, _, tail = rest.partition("}")
    for choice in choices.split(","):
        yield from _expand(head + choice + tail)


def _step(values: torch.Tensor, lr: float, drawn: torch.Generator) -> torch.Tensor:
    moved = values.float()
    upper = moved[: (len(moved) + 1) // 2]
    upper += lr * torch.sign(torch.randn(upper.shape, generator=drawn))
    return moved.to(torch.bfloat16)
