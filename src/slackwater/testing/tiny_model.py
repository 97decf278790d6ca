"""A tiny random Llama and a byte-level tokenizer, written as a Hugging Face folder without any network.

Token ids 0 to 255 are the bytes themselves, so a character outside ASCII spans tokens; then follow pairs of
common letters, and the three special tokens at the end. Every id of the vocabulary has a text.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Final, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

TINY_VOCAB: Final = 512
"""Vocabulary of model and tokenizer."""
TINY_WINDOW: Final = 1024
"""Context window of the model."""
END_OF_TEXT: Final = 509
"""``<|endoftext|>``: the beginning-of-sequence and padding token."""
IM_START: Final = 510
"""``<|im_start|>``."""
IM_END: Final = 511
"""``<|im_end|>``: the end-of-sequence token. The model hardly ever samples it below a temperature of 1."""
TINY_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML."""

Dtype = Literal["bfloat16", "float32"]
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_HEAD_DIM: Final = 16
_LETTERS: Final = "Ġetaoinshrdlucm"
"""The most frequent letters; the first is how byte-level tokenizers write a space."""
_SECOND: Final = "etaoinshrdlucmfwyp"
_PLAIN_BYTES: Final = frozenset((*range(33, 127), *range(161, 173), *range(174, 256)))
"""Bytes that byte-level tokenizers write as themselves, being printable in Latin-1."""


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tokenizer: bool = True,
    hidden: int = 64,
    layers: int = 2,
    dtype: Dtype = "bfloat16",
) -> Path:
    """Write a random `LlamaForCausalLM` with tied embeddings; equal arguments write equal bits.

    Args:
        folder: Made if absent; files of the same names are replaced.
        seed: Of the weights. Models of other seeds answer differently.
        tokenizer: Whether the tokenizer's files go along.
        hidden: Width; a multiple of 32.
        layers: Number of decoder layers.
        dtype: Of every tensor.

    Returns:
        ``folder``, loadable by ``AutoModelForCausalLM.from_pretrained``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(seed, hidden, layers, _DTYPES[dtype]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(hidden, layers, dtype))
    _write_json(folder / "generation_config.json", {"bos_token_id": END_OF_TEXT, "eos_token_id": IM_END})
    if tokenizer:
        write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with `TINY_CHAT_TEMPLATE` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = list(_pairs())
    vocab = [*_byte_symbols(), *("".join(pair) for pair in pairs)]
    made = Tokenizer(BPE(vocab={text: index for index, text in enumerate(vocab)}, merges=pairs))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevelDecoder()
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": TINY_WINDOW,
        "chat_template": TINY_CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)
    return folder


def _tensors(seed: int, hidden: int, layers: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)

    embedding = draw(TINY_VOCAB, hidden, 0.3)
    # Nearly zero rows have nearly zero logits: such tokens lose against the best of the others.
    embedding[END_OF_TEXT:] *= 0.01
    yield "model.embed_tokens.weight", embedding
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for part, (rows, columns) in _projections(hidden).items():
            yield f"{name}.{part}.weight", draw(rows, columns, columns**-0.5)
        yield f"{name}.input_layernorm.weight", torch.ones(hidden, dtype=dtype)
        yield f"{name}.post_attention_layernorm.weight", torch.ones(hidden, dtype=dtype)
    yield "model.norm.weight", torch.ones(hidden, dtype=dtype)


def _projections(hidden: int) -> dict[str, tuple[int, int]]:
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (2 * hidden, hidden),
        "mlp.up_proj": (2 * hidden, hidden),
        "mlp.down_proj": (hidden, 2 * hidden),
    }


def _config(hidden: int, layers: int, dtype: Dtype) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // _HEAD_DIM,
        "num_key_value_heads": hidden // _HEAD_DIM // 2,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": TINY_WINDOW,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "vocab_size": TINY_VOCAB,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
    }


def _byte_symbols() -> Iterator[str]:
    """The character that byte-level tokenizers write for each byte, by rising byte."""
    shifted = iter(range(256, 512))
    for byte in range(256):
        yield chr(byte if byte in _PLAIN_BYTES else next(shifted))


def _pairs() -> Iterator[tuple[str, str]]:
    return islice(product(_LETTERS, _SECOND), END_OF_TEXT - 256)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
