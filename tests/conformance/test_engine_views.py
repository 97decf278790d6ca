"""Models that transformers fuses as it loads them: names are the files', and writes reach the forward pass."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slackwater.checkpoint.tensor import Tile, TileWrite
from slackwater.engine.torch import pretrained
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.weights import WeightBits
from slackwater.errors import UnsupportedError
from slackwater.testing.tiny_model import Dtype
from slackwater.testing.toys import TOYS, write_toy
from slackwater.weights.views import Source

IDS = torch.arange(3, 40)[None]
PATCHED = {
    "LlamaForCausalLM": "model.layers.1.mlp.up_proj.weight",
    "Qwen3MoeForCausalLM": "model.layers.1.mlp.experts.5.up_proj.weight",
    "MixtralForCausalLM": "model.layers.1.block_sparse_moe.experts.5.w3.weight",
    "DeepseekV3ForCausalLM": "model.layers.1.mlp.gate.e_score_correction_bias",
    "Qwen3_5ForCausalLM": "model.layers.0.linear_attn.A_log",
    "Qwen3_5ForConditionalGeneration": "model.language_model.layers.0.linear_attn.dt_bias",
    "Qwen3_5MoeForCausalLM": "model.layers.0.mlp.experts.5.down_proj.weight",
    "Qwen3_5MoeForConditionalGeneration": "model.language_model.layers.0.mlp.experts.5.gate_proj.weight",
    "GlmMoeDsaForCausalLM": "model.layers.1.mlp.experts.5.gate_proj.weight",
    "Glm5NextForConditionalGeneration": "model.language_model.layers.0.self_attn.k_conv1d.weight",
    "KimiLinearForCausalLM": "model.layers.0.self_attn.v_conv1d.weight",
}
"""Of each toy a tensor that is an expert's, part of a joined one, a buffer, or in single precision."""


def written(folder: Path, architecture: str, dtype: Dtype = "bfloat16") -> Path:
    return write_toy(folder / f"{architecture}-{dtype}", architecture, dtype=dtype)


def logits(model: LoadedModel) -> torch.Tensor:
    module: Any = model.module
    module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        return module(input_ids=IDS).logits


def write_over(model: LoadedModel, name: str) -> None:
    """Make a tensor's numbers others by writing their bits."""
    weights = WeightBits(model.parameters, model.specs)
    tile = Tile(index=0, start=0, cols=model.parameters[name].numel())
    values = np.roll(weights.read(name, tile), 1)
    weights.commit(weights.stage([TileWrite(name=name, tile=tile, positions=None, values=values)]))


def edit(folder: Path, name: str) -> None:
    """The same in the file."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].flatten().roll(1).reshape(tensors[name].shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("architecture", TOYS)
def test_names_dtypes_and_shapes_are_the_files_and_every_tensor_is_where_the_pass_reads_it(
    tmp_path: Path, architecture: str
) -> None:
    folder = written(tmp_path, architecture)
    stored, model = load_file(folder / "model.safetensors"), load(folder)
    assert model.parameters.keys() == model.specs.keys() == stored.keys()
    for name, tensor in stored.items():
        assert (model.parameters[name].dtype, model.parameters[name].shape) == (tensor.dtype, tensor.shape)
        assert model.parameters[name].is_contiguous()
        assert torch.equal(model.parameters[name], tensor)
    live = {tensor.untyped_storage().data_ptr() for tensor in model.module.state_dict(keep_vars=True).values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in model.parameters.values()} == live


@pytest.mark.parametrize("architecture", TOYS)
def test_a_write_does_what_a_reload_of_the_edited_folder_does(tmp_path: Path, architecture: str) -> None:
    folder, name = written(tmp_path, architecture), PATCHED[architecture]
    model = load(folder)
    before = logits(model)
    write_over(model, name)
    edit(folder, name)
    assert torch.equal(logits(model), logits(load(folder)))
    assert not torch.equal(logits(model), before)


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "DeepseekV3ForCausalLM", "KimiLinearForCausalLM"])
def test_numbers_that_are_stored_in_single_precision_keep_it(tmp_path: Path, architecture: str) -> None:
    folder = written(tmp_path, architecture)
    single = {name for name, tensor in load_file(folder / "model.safetensors").items() if tensor.dtype == torch.float32}
    model = load(folder)
    assert single
    assert {name for name, spec in model.specs.items() if spec.dtype == "F32"} == single
    assert any((model.parameters[name] != model.parameters[name].bfloat16().float()).any() for name in single)
    assert logits(model).isfinite().all()


def test_a_model_without_one_experts_tensor_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "Qwen3MoeForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match="makes no model"):
        load(folder)


def test_a_router_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path, "MixtralForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.gate.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"lacks model\.layers\.1\.mlp\.gate\.weight"):
        load(folder)


def test_a_tensor_that_the_loader_would_round_is_refused(tmp_path: Path) -> None:
    folder, name = written(tmp_path, "MixtralForCausalLM"), "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"another shape or dtype in model\.layers\.1.*experts\.3\.w1"):
        load(folder)


def test_a_mapping_that_is_wrong_is_never_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Source.views

    def swapped(self: Source, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        parts = list(honest(self, whole))
        views = [view for _, view in parts]
        return [(name, view) for (name, _), view in zip(parts, [*views[1:], views[0]], strict=True)]

    monkeypatch.setattr(Source, "views", swapped)
    with pytest.raises(UnsupportedError, match=r"loads .*down_proj.* with other bits"):
        load(written(tmp_path, "Qwen3MoeForCausalLM"))


def test_a_draft_models_tensors_are_held_though_nothing_reads_them(tmp_path: Path) -> None:
    folder, name = written(tmp_path, "Qwen3_5ForCausalLM"), "mtp.fc.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.randn(64, 128).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    assert torch.equal(model.parameters[name], tensors[name])
    before = logits(model)
    write_over(model, name)
    assert torch.equal(logits(model), before)


def test_a_class_that_takes_another_config_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "LlamaForCausalLM")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "architectures": ["MixtralForCausalLM"]}))
    with pytest.raises(UnsupportedError, match="MixtralForCausalLM takes no LlamaConfig"):
        load(folder)


def test_routers_that_choose_differently_are_refused() -> None:
    routers = {layer: SimpleNamespace(num_experts=8, top_k=layer) for layer in (1, 2)}
    with pytest.raises(UnsupportedError, match=r"\(8, 1\), \(8, 2\)"):
        pretrained._routing(routers)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "KimiLinearForCausalLM"])
def test_equal_seeds_write_equal_bits(tmp_path: Path, architecture: str) -> None:
    folders = [write_toy(tmp_path / name, architecture, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    one, other, third = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], third["lm_head.weight"])
