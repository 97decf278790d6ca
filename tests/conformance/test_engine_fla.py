"""The stand-in for flash-linear-attention against transformers' own code of Kimi's earlier linear model."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear as kimi

from slackwater.engine.torch import fla

BATCH, COUNT, HEADS, SIZE = 2, 37, 3, 8


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (BATCH, COUNT, HEADS, SIZE)
    q, k, v, g = (draw(*shape, seed=seed) for seed in range(4))
    return q, k, v, -functional.softplus(g), draw(*shape[:-1], seed=4).sigmoid()


@pytest.mark.parametrize("reference", ["recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"])
def test_the_delta_rule_is_transformers(reference: str) -> None:
    q, k, v, g, beta = inputs()
    expected, _ = getattr(kimi, reference)(
        q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
    )
    found, _ = fla.delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    assert (found - expected).abs().max() < 1e-5


def test_a_positions_bits_dont_depend_on_later_ones() -> None:
    q, k, v, g, beta = inputs()
    whole, _ = fla.delta_rule(q, k, v, g, beta)
    part, _ = fla.delta_rule(*(x[:, :11] for x in (q, k, v, g, beta)))
    assert torch.equal(part, whole[:, :11])


def test_the_convolution_sees_its_own_position_and_those_before() -> None:
    x, weight = draw(BATCH, COUNT, SIZE, seed=0), draw(SIZE, 1, 4, seed=1)
    made = fla.ShortConvolution(SIZE, 4, activation="silu")
    made.weight.data = weight
    found, _ = made(x=x, cache=None, output_final_state=False, cu_seqlens=None)
    padded = functional.pad(x, (0, 0, 3, 0))
    expected = sum(padded[:, tap : tap + COUNT] * weight[:, 0, tap] for tap in range(4))
    assert (found - functional.silu(torch.as_tensor(expected))).abs().max() < 1e-5


def test_the_gated_norm_is_transformers() -> None:
    x, g = draw(BATCH, COUNT, SIZE, seed=0), draw(BATCH, COUNT, SIZE, seed=1)
    made, reference = fla.FusedRMSNormGated(SIZE, eps=1e-6, activation="sigmoid"), kimi.KimiLinearRMSNormGated(SIZE)
    made.weight.data = reference.weight.data = draw(SIZE, seed=2)
    assert (made(x, g) - reference(x, g)).abs().max() < 1e-6


def test_the_decay_is_transformers() -> None:
    config = SimpleNamespace(hidden_size=SIZE, linear_head_dim=SIZE, linear_num_heads=HEADS)
    reference: Any = kimi.KimiLinearForgetGate(cast("Any", config))
    reference.dt_bias.data, reference.A_log.data = draw(HEADS * SIZE, seed=0), draw(1, 1, HEADS, 1, seed=1)
    x = draw(BATCH, COUNT, SIZE, seed=2)
    raw = reference.f_b_proj(reference.f_a_proj(x)).view(BATCH, COUNT, HEADS, SIZE)
    found = fla.gate(raw, reference.A_log.flatten(), dt_bias=reference.dt_bias)
    assert (found - reference(x)).abs().max() < 1e-5


def test_what_the_stand_in_lacks_is_refused_not_ignored() -> None:
    with pytest.raises(NotImplementedError, match="cu_seqlens"):
        fla.delta_rule(*inputs(), cu_seqlens=torch.tensor([0, 37]))
