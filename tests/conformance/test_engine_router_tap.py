"""The tap on the routers of models: it sees what they choose, forces what it is told, and changes nothing else."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.tap import Ids, RouterTap
from slackwater.testing.toys import write_toy

TOKENS = 12
IDS = torch.arange(3, 3 + TOKENS)[None]
FAMILIES = (
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Glm5NextForConditionalGeneration",
    "KimiLinearForCausalLM",
)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    loaded = load(write_toy(tmp_path_factory.mktemp("toy"), request.param, dtype="float32"))
    module: Any = loaded.module
    module.set_attn_implementation("sdpa")
    return loaded


def tap_of(model: LoadedModel) -> RouterTap:
    assert model.routing is not None
    return RouterTap(model.routers, model.routing)


def logits(model: LoadedModel) -> Tensor:
    with torch.inference_mode():
        return model.module(input_ids=IDS).logits


def natural(model: LoadedModel) -> Ids:
    with tap_of(model).watching() as seen:
        logits(model)
    return seen.chosen(TOKENS)


def other(ids: Ids) -> Ids:
    """Other experts for every token: the next two."""
    return (ids[..., ::-1] + 3) % 8


@contextmanager
def patched(model: LoadedModel, ids: Ids) -> Generator[None]:
    """Routers whose last choice is ``ids``, by another way: their module's own ``torch.topk`` is replaced."""
    module = __import__(type(model.module).__module__, fromlist=["torch"])
    real, layers = module.torch, iter(range(ids.shape[1]))

    def topk(scores: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        values, chosen = real.topk(scores, *args, **kwargs)
        if tuple(scores.shape) != (TOKENS, 8) or chosen.shape[-1] != 2:
            return values, chosen
        told = real.from_numpy(ids[:, next(layers)].copy())
        return scores.gather(1, told), told

    class Torch:
        """``torch``, but for one function."""

        def __getattr__(self, name: str) -> Any:
            return topk if name == "topk" else getattr(real, name)

    module.torch = Torch()
    try:
        yield
    finally:
        module.torch = real


def test_it_sees_what_a_hook_sees(model: LoadedModel) -> None:
    hooked: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda *parts: hooked.append(parts[-1][-1])) for router in
             model.routers.values()]  # fmt: skip
    plain = logits(model)
    for hook in hooks:
        hook.remove()
    with tap_of(model).watching() as seen:
        watched = logits(model)
    assert torch.equal(plain, watched)
    assert np.array_equal(seen.chosen(TOKENS), torch.stack(hooked, dim=1).numpy())
    assert np.array_equal(seen.chosen(5), seen.chosen(TOKENS)[:5])
    assert seen.chosen(5).dtype == np.int64


def test_afterwards_routers_are_as_they_were(model: LoadedModel) -> None:
    with pytest.raises(ZeroDivisionError), tap_of(model).watching():
        raise ZeroDivisionError
    assert not any("forward" in vars(router) for router in model.routers.values())


def test_forcing_what_would_be_chosen_changes_no_bit(model: LoadedModel) -> None:
    with tap_of(model).watching(natural(model)):
        forced = logits(model)
    assert torch.equal(forced, logits(model))


def test_forced_experts_are_weighed_as_the_router_weighs_them(model: LoadedModel) -> None:
    told = other(natural(model))
    with tap_of(model).watching(told) as seen:
        forced = logits(model)
    with patched(model, told):
        expected = logits(model)
    assert torch.equal(forced, expected)
    assert not torch.equal(forced, logits(model))
    assert np.array_equal(seen.chosen(TOKENS), told)


def test_tokens_that_are_told_nothing_choose_for_themselves(model: LoadedModel) -> None:
    told = other(natural(model))[:9]
    told[:4] = -1
    with tap_of(model).watching(told) as seen:
        forced = logits(model)
    chosen = seen.chosen(TOKENS)
    assert np.array_equal(chosen[4:9], told[4:])
    assert np.array_equal(chosen[:4], natural(model)[:4])
    # Tokens attend to others before them only: the first are as they always are.
    assert torch.allclose(forced[:, :4], logits(model)[:, :4], atol=1e-4)
    assert ((chosen >= 0) & (chosen < 8)).all()
