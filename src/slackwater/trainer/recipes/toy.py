"""A tiny random mixture of experts and a task that it learns within a minute: the demo without a download.

A prompt's last token names one of four classes; an answer earns the share of its tokens that are of this class, which
is a token's number modulo four. Chance earns a quarter.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from slackwater.trainer.samples import Sample

ANSWER_TOKENS: Final = 4
WINDOW: Final = 64
"""Of the model."""
_SIGNS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz+-"
"""The text of each token: one sign, so that answers can be read."""
_CLASSES: Final = 4
_PROMPT_TOKENS: Final = 4
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": len(_SIGNS),
    "max_position_embeddings": WINDOW,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def write_model(folder: Path, seed: int) -> Path:
    """Write a random Qwen3-MoE in bf16, and a tokenizer of 64 signs; equal arguments write equal bits.

    Args:
        folder: Made if absent.
        seed: Of the weights.

    Returns:
        ``folder``.
    """
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES))
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def draw(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """``count`` prompts, as token ids."""
    return [
        (*(rng.randrange(len(_SIGNS)) for _ in range(_PROMPT_TOKENS - 1)), rng.randrange(_CLASSES))
        for _ in range(count)
    ]


def reward(sample: Sample) -> float:
    """Share of the answer's tokens that are of the class that the prompt names, 0 to 1; 0 without a token."""
    wanted = sample.prompt_ids[-1]
    return sum(token % _CLASSES == wanted for token in sample.token_ids) / max(len(sample.token_ids), 1)


def _write_tokenizer(folder: Path) -> None:
    made = Tokenizer(BPE(vocab={sign: number for number, sign in enumerate(_SIGNS)}, merges=[]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevelDecoder()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": WINDOW}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
