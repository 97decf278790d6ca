"""Tiny random Kimi K3 and DeepSeek V4.1, written as Hugging Face folders under their releases' names, unquantised.

They need nemo-automodel. Of vision towers and of DeepSeek's draft model they have a few tensors; Engram is left out.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file

from slackwater.engine.torch import nemo
from slackwater.engine.torch.nemo_layout import canonical
from slackwater.testing.tiny_model import END_OF_TEXT, IM_END, TINY_VOCAB, TINY_WINDOW, Dtype, write_tiny_tokenizer

NEMO_TOYS: Final = ("KimiK3ForConditionalGeneration", "DeepseekV41ForCausalLM")
"""Architectures that `write_nemo_toy` writes."""

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_STD: Final = 0.08
_HEADS: Final = 4
_NARROW: Final = re.compile(r"^head\.weight$|\.compressor\.w(kv|gate)\.")
"""What the release has in BF16, and the code that runs it in single precision."""
_SPECIAL: Final = {"bos_token_id": END_OF_TEXT, "eos_token_id": IM_END, "pad_token_id": END_OF_TEXT}
_SIZES: Final = {
    "vocab_size": TINY_VOCAB,
    "max_position_embeddings": TINY_WINDOW,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": _HEADS,
    "q_lora_rank": 32,
}
_K3: Final = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 5,
        "intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "routed_expert_hidden_size": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "attn_res_block_size": 2,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4, 5],
            "head_dim": 16,
            "num_heads": _HEADS,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    },
}
_V41: Final = {
    "model_type": "deepseek_v41",
    "image_token_id": TINY_VOCAB - 1,
    "text_config": {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "o_lora_rank": 32,
        "o_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "compress_ratios": [0, 2, 2, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3],
        "index_n_heads": 4,
        "index_head_dim": 32,
        # As many as the window has: with keys of four bits scores tie, and which of equals is kept depends on shapes.
        "index_topk": TINY_WINDOW,
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [],
        "num_nextn_predict_layers": 0,
        "dspark_block_size": 0,
        "dspark_noise_token_id": END_OF_TEXT,
        "dspark_target_layer_ids": [],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": TINY_WINDOW // 4,
        },
    },
}
_SEEING: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = MappingProxyType(
    {
        NEMO_TOYS[0]: {"vision_tower.encoder.blocks.0.wo.weight": (32, 32), "mm_projector.proj.0.weight": (64, 32)},
        NEMO_TOYS[1]: {"vision.blocks.0.attn.wo.weight": (32, 32), "image_start": (64,), "mtp.0.norm.weight": (64,)},
    }
)
"""A few of the tensors that serving text has no use for."""
_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(dict(zip(NEMO_TOYS, (_K3, _V41), strict=True)))


def write_nemo_toy(
    folder: Path, architecture: str, *, seed: int = 0, tokenizer: bool = True, dtype: Dtype = "bfloat16"
) -> Path:
    """Write a random model of one of `NEMO_TOYS`; equal arguments write equal bits.

    Args:
        folder: Made if absent; files of the same names are replaced.
        architecture: One of `NEMO_TOYS`: 0.4 and 0.5 million parameters.
        seed: Of the weights.
        tokenizer: Whether the files of `write_tiny_tokenizer` go along.
        dtype: Of every tensor but those that the release keeps in single precision.

    Returns:
        ``folder``.

    Raises:
        UnsupportedError: nemo-automodel isn't installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = toy_config(architecture, dtype=dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = canonical(nemo.make(architecture, config))
    tensors |= {name: torch.empty(shape, dtype=_DTYPES[dtype]) for name, shape in _SEEING[architecture].items()}
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        _fill(name, tensors[name], generator)
    # safetensors refuses tensors that share memory, as parts of one area do.
    own = {
        name: tensor.to(_DTYPES[dtype] if _NARROW.search(name) else tensor.dtype, copy=True)
        for name, tensor in tensors.items()
    }
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tiny_tokenizer(folder)
    return folder


def toy_config(architecture: str, *, dtype: Dtype = "bfloat16") -> dict[str, Any]:
    """The toy's ``config.json``."""
    part = _CONFIGS[architecture]
    text = {**_SIZES, **_SPECIAL, **part["text_config"]}
    return {**part, "architectures": [architecture], "dtype": dtype, **_SPECIAL, "text_config": text}


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith("A_log"):
        tensor.zero_()[:_HEADS].uniform_(1, 16, generator=generator).log_()
    elif "conv1d" in name:
        tensor.uniform_(-0.5, 0.5, generator=generator)
    elif "norm" in name or name.endswith("scale"):
        tensor.fill_(1.0)
    else:
        tensor.normal_(std=_STD, generator=generator)
