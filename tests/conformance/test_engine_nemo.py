"""Kimi K3 and DeepSeek V4.1: release names over live memory, and nemo-automodel's own forward pass."""

import re
from collections.abc import Mapping
from importlib import import_module, util
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from release_layouts import release
from safetensors.torch import load_file, save_file
from torch import nn

from slackwater.engine.torch import fla, nemo
from slackwater.engine.torch.built import Built
from slackwater.engine.torch.folder import fill, read_specs
from slackwater.engine.torch.nemo_layout import canonical
from slackwater.engine.torch.tap import Ids, RouterTap
from slackwater.errors import UnsupportedError
from slackwater.testing.nemo_toys import NEMO_TOYS, toy_config, write_nemo_toy

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(util.find_spec("nemo_automodel") is None, reason="nemo-automodel isn't installed"),
]

K3, V41 = NEMO_TOYS
IDS = torch.arange(3, 40)[None]
RELEASES = {K3: "kimi-k3", V41: "deepseek-v4.1-flash"}
IDLE = ("vision", "mm_projector", "aligner", "image_", "mtp.")
EXPERT = {
    K3: "language_model.model.layers.2.block_sparse_moe.experts.{}.w{}.weight",
    V41: "layers.2.ffn.experts.{}.w{}.weight",
}
GATE = {K3: "language_model.model.layers.{}.block_sparse_moe.gate.", V41: "layers.{}.ffn.gate."}


@pytest.fixture(scope="module", params=NEMO_TOYS)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, architecture: str) -> Path:
    made = tmp_path_factory.mktemp(architecture)
    return write_nemo_toy(made, architecture, tokenizer=False, dtype="float32")


def served(folder: Path, architecture: str) -> Built:
    return nemo.build(folder, architecture, read_specs(folder))


def logits(model: Built | nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    module = model.module if isinstance(model, Built) else model
    with torch.inference_mode():
        return module(input_ids=ids).logits


def test_a_model_holds_the_tensors_of_the_file(folder: Path, architecture: str) -> None:
    tensors = served(folder, architecture).tensors
    stored = load_file(folder / "model.safetensors")
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in stored.items())


def test_names_and_dtypes_are_the_releases(tmp_path: Path, architecture: str) -> None:
    folder, known = write_nemo_toy(tmp_path, architecture, tokenizer=False), release(RELEASES[architecture])
    expected = {name: known.serving[name].dtype if name not in known.quantizers else "BF16" for name in known.export}
    found = {name: spec.dtype for name, spec in read_specs(folder).items()}
    assert patterns(found) == patterns(expected)


def patterns(dtypes: Mapping[str, str]) -> dict[str, str]:
    """Dtypes of the text model's tensors, by name without numbers."""
    return {re.sub(r"\.\d+(?=\.)", ".N", name): dtypes[name] for name in dtypes if not name.startswith(IDLE)}


def test_every_tensor_has_memory_of_its_own_in_which_it_is_contiguous(folder: Path, architecture: str) -> None:
    tensors = served(folder, architecture).tensors
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_forward_pass_is_that_of_nemos_own_loading(tmp_path: Path, architecture: str, dtype: Any) -> None:
    folder = write_nemo_toy(tmp_path, architecture, tokenizer=False, dtype=dtype)
    model = served(folder, architecture)
    module: Any = model.module
    # Built once more, as nemo lays it out, and filled by its own adapter.
    other = type(module)(module.config, backend=module.backend).eval()
    loaded = other.state_dict_adapter.from_hf(load_file(folder / "model.safetensors"))
    assert not other.load_state_dict(loaded, strict=False).missing_keys
    ours, theirs = logits(module), logits(other)
    assert ours.dtype == theirs.dtype
    assert (ours - theirs).abs().max() < 1e-5
    assert {str(tensor.dtype) for tensor in model.tensors.values()} == {"torch.float32", f"torch.{dtype}"}


def test_what_comes_later_changes_nothing(folder: Path, architecture: str) -> None:
    module = served(folder, architecture).module
    whole = logits(module)
    other = IDS.clone()
    other[:, 30:] = 7
    assert (logits(module, other)[:, :30] - whole[:, :30]).abs().max() < 1e-5
    for count in (1, 2, 16, 17):
        assert (logits(module, IDS[:, :count]) - whole[:, :count]).abs().max() < 1e-5


@pytest.mark.parametrize("part", [1, 2, 3])
def test_writing_an_experts_tensor_changes_what_a_reload_would(
    folder: Path, tmp_path: Path, architecture: str, part: int
) -> None:
    model, other = served(folder, architecture), served(folder, architecture)
    before = logits(model)
    assert model.routing is not None
    expert = int(ids_of(model)[0, model.routing.layers.index(2), 0])
    name = EXPERT[architecture].format(expert, part)
    edited = load_file(folder / "model.safetensors")
    edited[name] += 1
    save_file(edited, tmp_path / "model.safetensors")
    fill(tmp_path, other.tensors)
    model.tensors[name].add_(1)
    assert torch.equal(logits(model), logits(other))
    assert not torch.equal(logits(model), before)


def tap_of(model: Built) -> RouterTap:
    assert model.routing is not None
    return RouterTap(model.routers, model.routing)


def ids_of(model: Built) -> Ids:
    with tap_of(model).watching() as seen:
        logits(model)
    return seen.chosen(IDS.shape[1])


def scores_of(model: Built, architecture: str, layer: int, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's scores of all experts, ``[tokens, experts]``, and the bias by which it chooses."""
    gate = GATE[architecture].format(layer)
    found = inputs.float() @ model.tensors[gate + "weight"].float().T
    scores = found.sigmoid() if architecture == K3 else nn.functional.softplus(found).sqrt()
    return scores, model.tensors[gate + ("e_score_correction_bias" if architecture == K3 else "bias")]


def test_routers_tell_what_their_scores_say(folder: Path, architecture: str) -> None:
    model, inputs = served(folder, architecture), list[torch.Tensor]()
    routing = model.routing
    assert routing is not None
    assert (routing.experts, routing.per_token) == (8, 2)
    assert routing.layers == ((1, 2, 3, 4) if architecture == K3 else (0, 1, 2, 3))
    hooks = [
        router.register_forward_pre_hook(lambda _module, given: inputs.append(given[0]))
        for router in model.routers.values()
    ]
    chosen = ids_of(model)
    assert len(inputs) == len(hooks) == 4
    for at, (layer, given) in enumerate(zip(routing.layers, inputs, strict=True)):
        scores, bias = scores_of(model, architecture, layer, given)
        expected = (scores + bias).topk(2).indices.sort().values
        assert torch.equal(torch.from_numpy(chosen[:, at]).sort().values, expected)


def test_forcing_what_routers_choose_anyway_changes_no_bit(folder: Path, architecture: str) -> None:
    model = served(folder, architecture)
    chosen = ids_of(model)
    with tap_of(model).watching(chosen):
        forced = logits(model)
    assert torch.equal(forced, logits(model))


def test_forced_experts_get_the_weights_of_their_scores(folder: Path, architecture: str) -> None:
    model, other = served(folder, architecture), served(folder, architecture)
    told = (ids_of(model) + 3) % 8
    told[5:] = -1
    with tap_of(model).watching(told) as seen:
        forced = logits(model)
    assert (seen.chosen(5) == told[:5]).all()
    scale = 1.0 if architecture == K3 else 1.5

    def patched(at: int, layer: int, router: Any) -> Any:
        natural = router.forward

        def forward(inputs: torch.Tensor, *others: Any) -> Any:
            weights, ids, loss = natural(inputs, *others)
            scores, _ = scores_of(other, architecture, layer, inputs)
            ids[:5] = torch.from_numpy(told[:5, at])
            mine = scores.gather(1, ids)
            weights[:5] = (scale * mine / mine.sum(1, keepdim=True))[:5]
            return weights, ids, loss

        return forward

    for at, (layer, router) in enumerate(other.routers.items()):
        router.forward = patched(at, layer, router)
    assert (forced - logits(other)).abs().max() < 1e-5
    assert (forced - logits(model)).abs().max() > 1e-3


def test_what_the_file_has_narrower_than_the_code_is_held_as_in_the_file(tmp_path: Path) -> None:
    folder = write_nemo_toy(tmp_path, V41, tokenizer=False)
    model, stored = served(folder, V41), load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.tensors.items())
    assert {name: tensor.dtype for name, tensor in model.tensors.items()} == {
        name: tensor.dtype for name, tensor in stored.items()
    }
    before = logits(model)
    model.tensors["head.weight"].zero_()
    assert before.abs().max() > 1
    assert logits(model).abs().max() == 0


def test_a_layout_that_makes_copies_is_refused() -> None:
    module = nemo.make(K3, toy_config(K3))
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    with pytest.raises(UnsupportedError, match=r"no view of .*experts"):
        canonical(module)


def test_engram_is_refused_by_name() -> None:
    config = toy_config(V41)
    config["text_config"] |= {"engram_layer_ids": [1], "engram_num_embeddings": [64]}
    with pytest.raises(UnsupportedError, match="Engram"):
        nemo.make(V41, config)


def test_without_nemo_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo, "_DISTRIBUTION", "nemo-that-is-absent")
    with pytest.raises(UnsupportedError, match=r"needs nemo-that-is-absent.*--no-deps"):
        nemo.make(K3, toy_config(K3))


def test_the_stand_in_lasts_no_longer_than_the_import() -> None:
    with fla.standing_in():
        assert import_module("fla.ops.kda").chunk_kda is fla.delta_rule
    assert util.find_spec("fla") is None
