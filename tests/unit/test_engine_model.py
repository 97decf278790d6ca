"""Loading: what is refused, and that nothing but the folder decides."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slackwater.engine.torch.model import load
from slackwater.errors import CorruptError, NotFoundError, UnsupportedError
from slackwater.testing.tiny_model import write_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", tokenizer=False)


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_a_tied_tensor_appears_once(folder: Path) -> None:
    model = load(folder)
    assert "lm_head.weight" not in model.specs
    assert model.specs.keys() == load_file(folder / "model.safetensors").keys()
    assert not any(parameter.requires_grad for parameter in model.module.parameters())


def test_a_tied_alias_in_the_file_is_accepted(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" not in load(folder).specs


def test_a_foreign_architecture_is_refused_before_anything_is_loaded(folder: Path) -> None:
    change(folder / "config.json", architectures=["EvilForCausalLM"], auto_map={"AutoModelForCausalLM": "evil.E"})
    with pytest.raises(UnsupportedError, match=r"EvilForCausalLM is not supported.*LlamaForCausalLM"):
        load(folder)


def test_a_missing_tensor_is_named_instead_of_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"lacks model\.norm\.weight"):
        load(folder)


def test_files_that_are_absent_or_broken_are_named(folder: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        load(folder / "nowhere")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        load(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(NotFoundError, match="pickled"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptError, match="no JSON"):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("num_attention_heads", 0, "ZeroDivisionError"),
        ("num_attention_heads", [4], "num_attention_heads"),
        ("num_key_value_heads", 0, "ZeroDivisionError"),
        ("num_key_value_heads", 3, "RuntimeError"),
        ("hidden_size", "64", r"hidden_size.*expected int, got str"),
        ("hidden_size", None, "hidden_size"),
        ("hidden_size", -64, "negative dimension"),
        ("hidden_size", 63, "not a multiple"),
        ("hidden_size", 2**70, "Overflow"),
        ("head_dim", 0, "ZeroDivisionError"),
        ("vocab_size", 0, "Padding_idx"),
        ("max_position_embeddings", "1024", "max_position_embeddings"),
        ("max_position_embeddings", 0, "leaves a window of 0"),
        ("max_position_embeddings", 1, "leaves a window of 1"),
        ("dtype", "nonsense", "nonsense"),
        ("dtype", "manual_seed", "IndexError"),
        ("hidden_act", "nope", "nope"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}, "TypeError"),
        ("model_type", "nope", "nope"),
        ("quantization_config", 5, "AttributeError"),
    ],
)
def test_a_config_that_makes_no_model_is_named_with_the_cause(
    folder: Path, field: str, value: object, cause: str
) -> None:
    change(folder / "config.json", **{field: value})
    with pytest.raises(UnsupportedError, match=cause) as caught:
        load(folder)
    assert str(folder / "config.json") in caught.value.message
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"eos_token_id": "x"}', '{"eos_token_id": [null]}', "[1]", "[" * 100_000])
def test_a_generation_config_that_says_nothing_sound_is_named(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(CorruptError, match=r"generation_config\.json"):
        load(folder)


@pytest.mark.parametrize(("named", "wanted"), [(5, (5,)), ([5, 6], (5, 6)), (None, (511,))])
def test_end_tokens_come_from_the_generation_config(folder: Path, named: object, wanted: tuple[int, ...]) -> None:
    change(folder / "generation_config.json", eos_token_id=named)
    assert load(folder).eos_token_ids == wanted


def test_a_sliding_window_cuts_the_window(folder: Path) -> None:
    change(folder / "config.json", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=128)
    assert load(folder).window == 128
