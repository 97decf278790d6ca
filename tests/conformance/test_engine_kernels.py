"""The kernels of the forward pass: what they compute, that company changes no bit, that every block is done once."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from slackwater.checkpoint.jit import array_at, entry
from slackwater.engine.torch.batch import Batch, Piece
from slackwater.engine.torch.kernels import tiles
from slackwater.engine.torch.kernels.bf16 import rounded
from slackwater.engine.torch.kernels.linear import Linear
from slackwater.engine.torch.kernels.small import install_gated, install_norm, is_gated, is_norm
from slackwater.engine.torch.kernels.team import Team, share
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.tile_rows import TileRows

pytestmark = pytest.mark.usefixtures("one_thread")
with_tiles = pytest.mark.skipif(not tiles.available(), reason="this processor has no AMX, or the system keeps it")

BF16 = 2.0**-8
"""Half of a step between neighbouring bf16, relative, and something for sums in another order."""


@pytest.fixture(params=[1, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    made = Team(request.param)
    yield made
    made.close()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def test_rounding_is_torchs() -> None:
    bits = np.concatenate(
        [np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32), np.arange(0x3F7F0000, 0x3F820000, 997)]
    ).astype(np.uint32)
    values = bits.view(np.float32)
    ours = np.array([rounded(value) for value in values[:4000]], dtype=np.uint16)
    theirs = torch.from_numpy(values[:4000].copy()).to(torch.bfloat16)
    finite = ~np.isnan(values[:4000])
    assert np.array_equal(ours[finite], theirs.view(torch.uint16).numpy()[finite])
    assert torch.from_numpy(ours).view(torch.bfloat16)[torch.from_numpy(~finite)].isnan().all()


def _count(job: int, number: int, _thread: int) -> None:
    array_at(job, number + 1, np.int64)[number] += 1


def test_every_block_of_every_job_is_done_once(team: Team) -> None:
    counts, function = np.zeros(97, dtype=np.int64), entry(_count)
    with team.awake():
        for _ in range(2000):
            share(team.words, int(counts.ctypes.data), function, len(counts))
    share(team.words, int(counts.ctypes.data), function, 5)  # asleep: the caller does it alone
    assert counts.tolist() == [2001] * 5 + [2000] * 92


def test_a_closed_teams_threads_end() -> None:
    before = threading.active_count()
    made = Team(4)
    with made.awake():
        pass
    made.close()
    for thread in threading.enumerate():
        if thread.name.startswith("team-") and thread is not threading.current_thread():
            thread.join(timeout=10)
    assert threading.active_count() <= before


@with_tiles
@pytest.mark.parametrize(("depth", "width"), [(64, 32), (576, 192), (96, 160)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_right_for_any_number_of_tokens(team: Team, depth: int, width: int, bias: bool) -> None:
    module = nn.Linear(depth, width, bias=bias).to(torch.bfloat16)
    assert Linear.fits(module.weight)
    linear = Linear(team)
    with torch.inference_mode(), team.awake():
        weight, added = module.weight.float(), module.bias.float() if bias else None
        linear.install(module)
        for tokens in (1, 15, 16, 17, 32, 33, 70):
            x = numbers(1, tokens, depth, seed=tokens)
            truth = functional.linear(x.float(), weight, added)
            assert module(x).shape == (1, tokens, width)
            assert (module(x).float() - truth).abs().max() <= truth.abs().max() * BF16


@with_tiles
def test_company_and_place_change_no_bit_of_a_product(team: Team) -> None:
    module = nn.Linear(576, 192, bias=False).to(torch.bfloat16)
    with torch.inference_mode(), team.awake():
        Linear(team).install(module)
        x = numbers(1, 70, 576)
        whole = module(x)
        for at in (0, 15, 16, 37, 69):
            assert torch.equal(module(x[:, at : at + 1])[0, 0], whole[0, at])


@with_tiles
def test_weights_patched_in_place_are_used(team: Team) -> None:
    module = nn.Linear(64, 32, bias=False).to(torch.bfloat16)
    with torch.inference_mode():
        Linear(team).install(module)
        module.weight.zero_()
        assert module(numbers(1, 3, 64)).abs().max() == 0
        module.weight[5, 7] = torch.nan
        made = module(numbers(1, 3, 64))
        assert made[..., 5].isnan().all()
        assert not made[..., :5].isnan().any()


@pytest.mark.parametrize("shape", [(32, 48), (33, 64), (8, 33, 64)])
def test_what_doesnt_fit_is_left_alone(shape: tuple[int, ...]) -> None:
    assert not Linear.fits(torch.zeros(*shape, dtype=torch.bfloat16))
    assert Linear.fits(torch.zeros(32, 64, dtype=torch.bfloat16))
    assert not Linear.fits(torch.zeros(64, 32, dtype=torch.bfloat16).T)
    assert not Linear.fits(torch.zeros(32, 64))


@with_tiles
def test_small_operations_are_transformers_own() -> None:
    norm = LlamaRMSNorm(96, eps=1e-5).to(torch.bfloat16)
    mlp = LlamaMLP(LlamaConfig(hidden_size=96, intermediate_size=64)).to(torch.bfloat16)
    assert is_norm(norm)
    assert is_gated(mlp)
    x = numbers(1, 9, 96) * 3
    with torch.inference_mode():
        norm.weight.copy_(numbers(96, seed=1))
        expected = (norm(x), mlp(x))
        install_norm(norm)
        install_gated(mlp)
        for mine, theirs in zip((norm(x), mlp(x)), expected, strict=True):
            assert (mine != theirs).float().mean() < 0.05  # sums in another order round otherwise now and then
            assert (mine.float() - theirs.float()).abs().max() <= theirs.abs().max() * BF16 * 2


def test_float32_is_left_to_torch() -> None:
    assert not is_norm(LlamaRMSNorm(32))
    assert not is_gated(LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=32)))
    assert not Linear.fits(nn.Linear(32, 32).weight)


def model_of(heads: int, kv_heads: int, size: int) -> LoadedModel:
    config = SimpleNamespace(num_attention_heads=heads)
    shape = {"kv_heads": kv_heads, "head_dim": size, "layers": 1, "dtype": torch.bfloat16}
    return cast("LoadedModel", SimpleNamespace(module=SimpleNamespace(config=config), **shape))


def attended(query: Any, key: Any, value: Any, scale: float) -> torch.Tensor:
    shared = query.shape[1] // key.shape[1]
    spread = [states.float().repeat_interleave(shared, 1) for states in (key, value)]
    truth = functional.scaled_dot_product_attention(query.float(), *spread, is_causal=True, scale=scale)
    return truth[0].transpose(0, 1)


@with_tiles
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 32), (16, 1, 96), (6, 2, 128)])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_attention_is_right_and_the_same_in_any_pieces(
    heads: int, kv_heads: int, size: int, data: st.DataObject
) -> None:
    team = Team(2)
    rows = TileRows(model_of(heads, kv_heads, size), slots=3, window=96, team=team)
    for held in (*rows._keys, *rows._values):  # pyright: ignore[reportPrivateUsage]
        held[:] = 0x7FC1  # what others left behind is never read: one NaN would show
    query, key, value = (
        numbers(1, heads, 90, size),
        numbers(1, kv_heads, 90, size, seed=1),
        numbers(1, kv_heads, 90, size, seed=2),
    )
    cuts = sorted({0, 90, *data.draw(st.lists(st.integers(1, 89), max_size=5))})
    made: list[torch.Tensor] = []
    with team.awake():
        for begin, end in pairwise(cuts):
            rows.aim(Batch.of([Piece(slot=1, start=begin, tokens=[0] * (end - begin))]))
            rows.put(0, key[:, :, begin:end], value[:, :, begin:end])
            made.append(rows.attend(0, query[:, :, begin:end], 0.2)[0])
        rows.copy(2, source=1, count=89)
        rows.aim(Batch.of([Piece(slot=0, start=0, tokens=[0] * 90), Piece(slot=2, start=89, tokens=[0])]))
        both = [torch.cat([states, states[:, :, 89:]], dim=2) for states in (query, key, value)]
        rows.put(0, *both[1:])
        whole = rows.attend(0, both[0], 0.2)[0]
    team.close()
    truth = attended(query, key, value, 0.2)
    assert (whole[:90].float() - truth).abs().max() <= truth.abs().max() * BF16
    assert torch.equal(torch.cat(made), whole[:90])
    assert torch.equal(whole[89], whole[90])


@with_tiles
def test_no_number_of_a_later_token_reaches_an_earlier_one() -> None:
    team, nan = Team(1), torch.nan
    rows = TileRows(model_of(4, 4, 32), slots=1, window=96, team=team)
    query, key, value = numbers(1, 4, 70, 32), numbers(1, 4, 70, 32, seed=1), numbers(1, 4, 70, 32, seed=2)
    rows.aim(Batch.of([Piece(slot=0, start=0, tokens=[0] * 70)]))
    rows.put(0, key, value)
    sound = rows.attend(0, query, 0.2)[0]
    for place in (33, 45, 69):
        for spoilt in ((key.clone(), value), (key, value.clone())):
            (spoilt[0] if spoilt[1] is value else spoilt[1])[0, 2, place, 5] = nan
            rows.put(0, *spoilt)
            made = rows.attend(0, query, 0.2)[0]
            assert torch.equal(made[:place], sound[:place])
            assert made[place:, 2, 5].isnan().all()
            assert torch.equal(made[place:, :2], sound[place:, :2])
    team.close()
