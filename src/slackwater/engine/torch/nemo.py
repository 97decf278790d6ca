"""Kimi K3 and DeepSeek V4.1, through nemo-automodel's modelling code: transformers has neither.

That code was made for training and keeps no cache: each pass runs an answer from its first token on.
"""

from collections.abc import Mapping
from importlib import import_module, metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.engine.placement import place
from slackwater.engine.torch.arena import gather
from slackwater.engine.torch.built import Built, layer_of
from slackwater.engine.torch.fla import in_use, standing_in
from slackwater.engine.torch.folder import empty, fill, read_config, spec_of
from slackwater.engine.torch.misfit import fitting
from slackwater.engine.torch.nemo_layout import canonical, lay_out, narrowed
from slackwater.errors import InternalError, UnsupportedError
from slackwater.rollout.routes import Routing

_MODELS: Final = "nemo_automodel.components.models"
_DISTRIBUTION: Final = "nemo-automodel"
_IDLE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "KimiK3ForConditionalGeneration": ("vision_tower.", "mm_projector."),
        "DeepseekV41ForCausalLM": ("vision.", "aligner.", "image_", "mtp."),
    }
)
"""How the names begin of what text alone, without a draft model, doesn't use."""


def build(folder: Path, architecture: str, stored: Mapping[str, TensorSpec]) -> Built:
    """Load a folder in the dtype that its config names.

    Tensors of vision towers and draft models are held but not read. What the code runs in single precision and the
    files have in less is held as in the files.

    Args:
        folder: Its files.
        architecture: The class.
        stored: What the files hold.

    Raises:
        UnsupportedError: nemo-automodel isn't installed, or the config or the tensors ask for what this engine hasn't.
    """
    _, config = read_config(folder, supported=_IDLE)
    with fitting(folder, _DISTRIBUTION):
        module: Any = make(architecture, config)
    idle = {name: empty(spec) for name, spec in stored.items() if name.startswith(_IDLE[architecture])}
    gather(list(idle.values()))
    tensors = narrowed(module, canonical(module), stored) | idle
    place(stored, {name: spec_of(name, tensor) for name, tensor in tensors.items()})
    fill(folder, tensors)
    routers = _routers(module)
    text = getattr(module.config, "text_config", module.config)
    code = f"{_DISTRIBUTION} {metadata.version(_DISTRIBUTION)}, {in_use()}"
    return Built(module=module, code=code, tensors=tensors, text=text, routers=routers, routing=_routing(routers))


def make(architecture: str, config: Mapping[str, Any]) -> nn.Module:
    """The module alone, laid out for `canonical`; its memory is not initialised.

    Args:
        architecture: The class.
        config: The checkpoint's ``config.json``.

    Raises:
        UnsupportedError: nemo-automodel isn't installed, or the config asks for what this engine hasn't.
    """
    _require()
    text: dict[str, Any] = dict(config.get("text_config") or {})
    # The whole names the dtype, unless the text model names one of its own.
    named = text.pop("torch_dtype", None) or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    text = {"dtype": named, **text}
    module = _k3(text) if architecture == "KimiK3ForConditionalGeneration" else _v41(config, text)
    module.eval().requires_grad_(requires_grad=False)
    lay_out(module)
    return module


def _require() -> None:
    try:
        metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise UnsupportedError(
            f"this architecture needs {_DISTRIBUTION}, which isn't installed",
            hint=f"pip install 'slackwater[nemo]', then pip install --no-deps {_DISTRIBUTION}==0.7.0",
        ) from error


def _k3(text: Mapping[str, Any]) -> nn.Module:
    settings = import_module(f"{_MODELS}.kimi_k3.config")
    with standing_in():
        models = import_module(f"{_MODELS}.kimi_k3.model")
    return models.KimiK3ForCausalLM(settings.KimiK3TextConfig(**text), backend=_backend("sdpa", "torch"))


def _v41(config: Mapping[str, Any], text: Mapping[str, Any]) -> nn.Module:
    settings = import_module(f"{_MODELS}.deepseek_v41.config")
    models = import_module(f"{_MODELS}.deepseek_v41.model")
    blind = {"num_hidden_layers": 0}
    made = settings.DeepseekV41Config(**{**config, "text_config": text, "vision_config": blind})
    if any(layer < made.text_config.num_hidden_layers for layer in made.text_config.engram_layer_ids):
        raise UnsupportedError(
            "DeepSeek V4.1's n-gram memory (Engram) is not served",
            hint="serve a checkpoint whose engram_layer_ids is empty",
        )
    return models.DeepseekV41ForCausalLM(made, backend=_backend("eager", "torch_fp32"))


def _backend(attention: str, norm: str) -> Any:
    plain = {"linear": "torch", "experts": "torch", "dispatcher": "torch", "enable_hf_state_dict_adapter": True}
    return import_module(f"{_MODELS}.common").BackendConfig(attn=attention, rms_norm=norm, **plain)


def _routers(module: nn.Module) -> dict[int, nn.Module]:
    """By number of layer: gates, which return weights, int64 ids ``[tokens, per_token]`` and None."""
    gates = import_module("nemo_automodel.components.moe.layers").Gate
    return {_layer(name): part for name, part in module.named_modules() if isinstance(part, gates)}


def _routing(routers: Mapping[int, Any]) -> Routing | None:
    for gate in routers.values():
        return Routing(layers=tuple(routers), experts=int(gate.n_experts), per_token=int(gate.topk))
    return None


def _layer(name: str) -> int:
    layer = layer_of(name)
    if layer is None:
        raise InternalError(f"{_DISTRIBUTION} has a router outside of its layers: {name}", hint="report it")
    return layer
