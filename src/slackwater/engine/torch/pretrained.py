"""Models that transformers has the code of, with weights in memory of ours."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.engine.placement import place
from slackwater.engine.torch.arena import gather
from slackwater.engine.torch.built import Built, layer_of
from slackwater.engine.torch.folder import DTYPE_OF, differing, empty, fill, spec_of
from slackwater.engine.torch.misfit import fitting
from slackwater.errors import UnsupportedError
from slackwater.rollout.routes import Routing
from slackwater.weights.views import Source, live_tensors, sources

_AS_STORED: Final = (
    "A_log",
    "dt_bias",
    "e_score_correction_bias",
    "conv1d.weight",
    "_hc.base",
    "_hc.fn",
    "_hc.scale",
)
"""Small tensors that modules compute with whatever their dtype is. The loader may give them another than the file does;
here they have the file's, as a trainer sees them.
"""


def build(folder: Path, architecture: str, stored: Mapping[str, TensorSpec], *, attention: str) -> Built:
    """Load a folder in the dtype that its config names.

    Stored tensors that the class says it has no use for, such as those of a draft model, are held but not read.

    Args:
        folder: Its files.
        architecture: The class.
        stored: What the files hold.
        attention: What transformers calls the one to use.

    Raises:
        UnsupportedError: The config makes no model, the tensors don't fit it, or transformers changed their bits.
    """
    module = _from_pretrained(folder, architecture, attention)
    made = sources(module, stored)
    recast = _as_stored(module, made)
    idle = {name: empty(stored[name]) for name in _idle(module, stored.keys() - _names(made.values()))}
    # Weights are patched in place: they must lie in plain memory of ours, not in a mapping of the file.
    gather([*_apart(live_tensors(module)), *idle.values()])
    live = live_tensors(module)
    held = {name: view for target, source in made.items() for name, view in source.views(live[target].data)} | idle
    aliases = _aliases(module)
    ties = {_only(made[alias]): _only(made[first]) for alias, first in aliases.items() if {alias, first} <= made.keys()}
    lacking = {name: tensor for name, tensor in live.items() if name not in made and name not in aliases}
    specs = {name: spec_of(name, tensor) for name, tensor in {**held, **lacking}.items() if name not in ties}
    place(stored, specs, ties=ties)
    fill(folder, {name: held[name] for name in (*recast, *idle)})
    wrong = differing(folder, held)
    if wrong is not None:
        raise UnsupportedError(
            f"transformers loads {wrong} with other bits than {folder} holds", hint="report the architecture"
        )
    tensors = {name: held[name] for name in specs}
    routers = _routers(module)
    text = module.config.get_text_config()
    code = f"transformers {transformers.__version__}"
    return Built(module=module, code=code, tensors=tensors, text=text, routers=routers, routing=_routing(routers))


def _from_pretrained(folder: Path, architecture: str, attention: str) -> Any:
    transformers.utils.logging.disable_progress_bar()
    near = {"local_files_only": True, "trust_remote_code": False}
    with fitting(folder, "transformers"):
        config: Any = transformers.AutoConfig.from_pretrained(folder, **near)
        kind: Any = getattr(transformers, architecture)
        if not isinstance(config, kind.config_class):
            raise TypeError(f"{architecture} takes no {type(config).__name__}")
        module: Any = kind.from_pretrained(
            folder, config=config, dtype="auto", attn_implementation=attention, use_safetensors=True, **near
        )
    return module.eval().requires_grad_(requires_grad=False)


def _as_stored(module: nn.Module, made: Mapping[str, Source]) -> frozenset[str]:
    """Give the tensors of `_AS_STORED` the dtype that they are stored in; stored names of those whose bits are lost."""
    live = live_tensors(module)
    changed: list[Source] = []
    for target, source in made.items():
        dtypes = {DTYPE_OF.get(spec.dtype) for spec in source.stored}
        dtype = dtypes.pop()
        if target.endswith(_AS_STORED) and dtype and not dtypes and dtype != live[target].dtype:
            live[target].data = live[target].data.to(dtype)
            changed.append(source)
    return _names(changed)


def _names(made: Iterable[Source]) -> frozenset[str]:
    return frozenset(spec.name for source in made for spec in source.stored)


def _idle(module: Any, names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's names that the class says it has no use for."""
    ignored: list[str] = module._keys_to_ignore_on_load_unexpected or []  # noqa: SLF001 - transformers tells it nowhere else
    return sorted(name for name in names if any(re.search(pattern, name) for pattern in ignored))


def _apart(live: Mapping[str, torch.Tensor]) -> Iterable[torch.Tensor]:
    """Tied tensors once."""
    return {id(tensor): tensor for tensor in live.values()}.values()


def _aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, and their first, in the module."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _only(source: Source) -> str:
    (spec,) = source.stored
    return spec.name


def _routers(module: nn.Module) -> dict[int, nn.Module]:
    """By number of layer: modules that have a row of weights for each of ``num_experts``, and choose ``top_k``."""
    found: dict[int, nn.Module] = {}
    for name, part in module.named_modules():
        layer, weight = layer_of(name), getattr(part, "weight", None)
        sizes: tuple[Any, Any] = (getattr(part, "num_experts", None), getattr(part, "top_k", None))
        chooses = isinstance(weight, torch.Tensor) and None not in sizes and weight.shape[0] == sizes[0]
        if layer is not None and chooses:
            found[layer] = part
    return dict(sorted(found.items()))


def _routing(routers: Mapping[int, Any]) -> Routing | None:
    sizes = {(int(router.num_experts), int(router.top_k)) for router in routers.values()}
    if len(sizes) > 1:
        raise UnsupportedError(f"routers that choose differently, {sorted(sizes)}, can't be served")
    return next((Routing(layers=tuple(routers), experts=all_, per_token=chosen) for all_, chosen in sizes), None)
