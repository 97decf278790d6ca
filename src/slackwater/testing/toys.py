"""Tiny random models of every architecture that transformers has the code of, as Hugging Face folders under their
releases' names.

Each has a vocabulary of `TINY_VOCAB` tokens, a window of `TINY_WINDOW`, 8 experts of which a token gets 2 where there
are any, and weights large enough for its answers to differ. Sparse attention keeps as many keys as the window has:
with random weights the scores of its indexer tie, and which of equal ones is kept depends on shapes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from safetensors.torch import load_file, save_file

from slackwater.testing.tiny_model import END_OF_TEXT, IM_END, TINY_VOCAB, TINY_WINDOW, Dtype, write_tiny_tokenizer

_SINGLE: Final = ("A_log", "dt_bias", "e_score_correction_bias", "_base", "_fn", "_scale")
"""Releases store these in single precision."""
_SPECIAL: Final = {"bos_token_id": END_OF_TEXT, "eos_token_id": IM_END, "pad_token_id": END_OF_TEXT}
_BASE: Final = {
    "vocab_size": TINY_VOCAB,
    "max_position_embeddings": TINY_WINDOW,
    "initializer_range": 0.3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    **_SPECIAL,
}
_GROUPED: Final = {"num_key_value_heads": 2, "head_dim": 16}
_LATENT: Final = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: Final = {"n_routed_experts": 8, "n_shared_experts": 1, **_EXPERTS}
_INDEXER: Final = {"index_topk": TINY_WINDOW, "index_head_dim": 32, "index_n_heads": 2}
_DELTA_NET: Final = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    **_GROUPED,
}
_MIXED: Final = {"num_experts": 8, "shared_expert_intermediate_size": 32, **_EXPERTS}
_QWEN_EYE: Final = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
_GLM_EYE: Final = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "projection_intermediate_size": 64,
}
_TEXTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "LlamaForCausalLM": {"num_hidden_layers": 2, **_GROUPED},
    "Qwen3MoeForCausalLM": {"num_hidden_layers": 3, "num_experts": 8, "norm_topk_prob": True, **_GROUPED, **_EXPERTS},
    "MixtralForCausalLM": {
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **_GROUPED,
        "intermediate_size": 32,
    },
    "DeepseekV3ForCausalLM": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        **_LATENT,
        **_ROUTED,
    },
    "Qwen3_5ForCausalLM": _DELTA_NET,
    "Qwen3_5ForConditionalGeneration": _DELTA_NET,
    "Qwen3_5MoeForCausalLM": {**_DELTA_NET, **_MIXED},
    "Qwen3_5MoeForConditionalGeneration": {**_DELTA_NET, **_MIXED},
    "GlmMoeDsaForCausalLM": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "index_topk_freq": 2,
        **_LATENT,
        **_ROUTED,
        **_INDEXER,
    },
    "Glm5NextForConditionalGeneration": {
        "num_hidden_layers": 5,
        "mlp_layer_types": ["dense", *["sparse"] * 4],
        "index_kpool": 4,
        "hc_mult": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        **_LATENT,
        "qk_rope_head_dim": 0,
        **_ROUTED,
        **_INDEXER,
    },
    "KimiLinearForCausalLM": {
        "num_hidden_layers": 5,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_local_experts": 8,
        "n_shared_experts": 1,
        **_LATENT,
        "q_lora_rank": None,
        **_EXPERTS,
    },
}
_SEEING: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen3_5ForConditionalGeneration": _QWEN_EYE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_EYE,
    "Glm5NextForConditionalGeneration": _GLM_EYE,
}
"""Those with a vision tower, which never runs here."""
_DENSE: Final = ("KimiLinearForCausalLM", ".layers.0.block_sparse_moe.", ".layers.0.mlp.")
"""Where transformers writes a name that the release hasn't."""

TOYS: Final = tuple(_TEXTS)
"""Architectures that `write_toy` writes."""


def write_toy(folder: Path, architecture: str, *, seed: int = 0, dtype: Dtype = "bfloat16") -> Path:
    """Write a model with a tokenizer; equal arguments write equal bits.

    Args:
        folder: Made if absent; files of the same names are replaced.
        architecture: One of `TOYS`.
        seed: Of the weights.
        dtype: Of all tensors but those that releases store in float32.

    Returns:
        ``folder``.
    """
    kind: Any = getattr(transformers, architecture)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = kind(_config(kind, architecture))
        _spread(module)
    module.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = {_released(architecture, name): _stored(name, tensor, dtype) for name, tensor in load_file(path).items()}
    save_file(stored, path, metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _write_json(folder / "config.json", _in_dtype(said, dtype))
    _write_json(folder / "generation_config.json", {"bos_token_id": END_OF_TEXT, "eos_token_id": IM_END})
    return write_tiny_tokenizer(folder)


def _config(kind: Any, architecture: str) -> Any:
    text = {**_BASE, **_TEXTS[architecture]}
    eye = _SEEING.get(architecture)
    sizes = text if eye is None else {"text_config": text, "vision_config": dict(eye), "tie_word_embeddings": False}
    return kind.config_class(**sizes)


def _spread(module: Any) -> None:
    """Move what is made of equal numbers: norms, and biases of gates and of routers, which steer what they choose."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if name.endswith(("norm.weight", "e_score_correction_bias", "dt_bias")):
                tensor.add_(torch.randn(tensor.shape) * 0.05)


def _released(architecture: str, name: str) -> str:
    wrong, right = _DENSE[1:] if architecture == _DENSE[0] else ("", "")
    return name.replace(wrong, right) if wrong else name


def _stored(name: str, tensor: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    return tensor.float() if name.endswith(_SINGLE) else tensor.to(getattr(torch, dtype))


def _in_dtype(config: Any, dtype: Dtype) -> Any:
    """What transformers wrote names the dtype of the module, which was made in single precision."""
    if not isinstance(config, dict):
        return config
    entries = cast("dict[str, Any]", config).items()
    return {key: dtype if key == "dtype" else _in_dtype(value, dtype) for key, value in entries}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
