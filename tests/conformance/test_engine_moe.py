"""Mixtures of experts through the core: right numbers, routes without gaps, and bits that company doesn't change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from core_rig import run, steps

from slackwater.checkpoint.tensor import Tile, TileWrite
from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.experts import use_experts
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.sequence import Began, Event
from slackwater.engine.torch.weights import WeightBits
from slackwater.ids import RequestId, Version
from slackwater.rollout.evidence import TokenStep
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.testing.tiny_model import Dtype
from slackwater.testing.toys import write_toy

pytestmark = pytest.mark.usefixtures("one_thread")

V7, V8 = Version(7), Version(8)
TOLERANCE = 1e-4
MODES = pytest.mark.parametrize("invariant", [False, True], ids=["together", "invariant"])


def toy(tmp_path_factory: pytest.TempPathFactory, architecture: str, dtype: Dtype) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), architecture, dtype=dtype)


@pytest.fixture(scope="module", params=["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory, request.param, "float32")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def core_of(model: LoadedModel, *, invariant: bool = True) -> Core:
    return Core(model, Shaping(slots=4, invariant=invariant), window=256, version=V7)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(1, 500, length))


def request(
    prompt: Sequence[int], tokens: int = 12, *, routes_from: int | None = 0, **fields: Any
) -> CompletionRequest:
    sampling = SamplingSpec(max_tokens=tokens, temperature=1.0)
    return CompletionRequest(
        request_id=RequestId("r"), prompt_ids=tuple(prompt), sampling=sampling, routes_from=routes_from, **fields
    )


def answer(core: Core, asked: CompletionRequest, key: int = 0) -> list[TokenStep]:
    core.add(key, asked, seed=3)
    return steps(run(core), key)


def routes(made: Sequence[TokenStep], model: LoadedModel) -> np.ndarray:
    """``[positions, layers, per_token]`` of all that the steps tell."""
    assert model.routing is not None
    flat = np.frombuffer(b"".join(step.routes or b"" for step in made), dtype=model.routing.dtype)
    return flat.reshape(-1, len(model.routing.layers), model.routing.per_token)


def truth(reference: Any, ids: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
    """Log-probabilities ``[tokens, vocab]`` and routes of a plain forward pass."""
    chosen: list[torch.Tensor] = []
    gates = [part for name, part in reference.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda *parts: chosen.append(parts[-1][-1])) for gate in gates]
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.log_softmax(-1), torch.stack(chosen, dim=1).numpy()


@MODES
def test_log_probabilities_and_routes_are_those_of_a_plain_forward_pass(
    folder: Path, reference: Any, invariant: bool
) -> None:
    model = load(folder)
    core = core_of(model, invariant=invariant)
    prompts = [prompt_of(seed, length) for seed, length in enumerate((40, 3, 70))]
    for key, prompt in enumerate(prompts):
        core.add(key, request(prompt), seed=key)
    events = run(core)
    for key, prompt in enumerate(prompts):
        made = steps(events, key)
        ids = [*prompt, *(step.token_id for step in made)]
        logprobs, chosen = truth(reference, ids)
        wanted = [float(logprobs[len(prompt) - 1 + at, step.token_id]) for at, step in enumerate(made)]
        assert [step.logprob for step in made] == pytest.approx(wanted, abs=TOLERANCE)
        told = routes(made, model)
        assert np.array_equal(np.sort(told, axis=-1), np.sort(chosen[: len(ids) - 1], axis=-1))


@MODES
def test_a4_01_five_tokens_of_prompt_and_three_new_ones_have_seven_rows(folder: Path, invariant: bool) -> None:
    model = load(folder)
    made = answer(core_of(model, invariant=invariant), request(prompt_of(1, 5), tokens=3))
    assert len(made) == 3
    assert len(routes(made, model)) == 7
    assert len(routes(made[:1], model)) == 5


@MODES
def test_a4_02_a_prefix_hit_has_the_routes_of_what_it_didnt_compute(folder: Path, invariant: bool) -> None:
    model, asked = load(folder), request(prompt_of(2, 64))
    core = core_of(model, invariant=invariant)
    first = answer(core, asked)
    for key in (1, 2):
        core.add(key, asked, seed=3)
    events = run(core)
    assert [event.cached_tokens for event in events if isinstance(event, Began)] == [64, 64]
    for key in (1, 2):  # in the first one's slot, and in another
        again = steps(events, key)
        assert [step.token_id for step in again] == [step.token_id for step in first]
        assert [step.routes for step in again] == [step.routes for step in first]
        assert len(routes(again, model)) == 64 + len(again) - 1


def test_rows_before_the_first_that_is_asked_for_arent_told(folder: Path) -> None:
    model, prompt = load(folder), prompt_of(2, 64)
    whole = routes(answer(core_of(model), request(prompt)), model)
    part = routes(answer(core_of(model), request(prompt, routes_from=40)), model)
    assert np.array_equal(part, whole[40:])
    assert not len(routes(answer(core_of(model), request(prompt, routes_from=None)), model))


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_alone_with_company_and_behind_a_prefix_hit_the_bits_are_the_same(
    tmp_path: Path, architecture: str, dtype: Dtype
) -> None:
    model, asked = load(write_toy(tmp_path, architecture, dtype=dtype)), request(prompt_of(3, 50), tokens=30)
    alone = answer(core_of(model), asked)
    core = core_of(model)
    for key, length in enumerate((100, 7, 33)):
        core.add(key, request(prompt_of(10 + key, length), tokens=60), seed=key)
    for _ in range(5):
        core.step()
    core.add(8, asked, seed=3)
    company: list[Event] = run(core)
    assert steps(company, 8) == alone
    assert answer(core, asked, key=9) == alone


@MODES
def test_forced_routes_are_taken_and_told_and_nobody_shares_their_rows(folder: Path, invariant: bool) -> None:
    model, asked = load(folder), request(prompt_of(4, 40), tokens=4)
    core = core_of(model, invariant=invariant)
    free = answer(core, asked)
    forced_ids = tuple(step.token_id for step in free)
    other = (routes(free, model)[..., ::-1] + 3) % 8
    core.add(1, request(asked.prompt_ids, tokens=4, forced_ids=forced_ids, forced_routes=other.tobytes()), seed=3)
    replayed = steps(run(core), 1)
    assert np.array_equal(routes(replayed, model), other)
    assert [step.logprob for step in replayed] != pytest.approx([step.logprob for step in free], abs=TOLERANCE)
    natural = routes(free, model).tobytes()
    core.add(2, request(asked.prompt_ids, tokens=4, forced_ids=forced_ids, forced_routes=natural), seed=3)
    same = steps(run(core), 2)
    assert [step.logprob for step in same] == pytest.approx([step.logprob for step in free], abs=TOLERANCE)
    again = answer(core, asked, key=3)
    assert [step.routes for step in again] == [step.routes for step in free]


@MODES
def test_a_swap_of_one_expert_is_seen_by_the_next_token(folder: Path, invariant: bool) -> None:
    name = next(name for name in load(folder).specs if ".1." in name and ".experts.5." in name)
    model, prompt = load(folder), prompt_of(5, 30)
    core = core_of(model, invariant=invariant)
    core.add(0, request(prompt, tokens=20), seed=3)
    for _ in range(6):
        core.step()
    weights, tile = (
        WeightBits(model.parameters, model.specs),
        Tile(index=0, start=0, cols=model.parameters[name].numel()),
    )
    values = np.roll(weights.read(name, tile), 1)
    weights.commit(weights.stage([TileWrite(name=name, tile=tile, positions=None, values=values)]))
    core.relabel(V8)
    run(core)
    swapped = answer(core, request(prompt), key=1)
    fresh = answer(core_of(model, invariant=invariant), request(prompt))
    assert [step.version for step in swapped] == [V8] * len(swapped)
    assert [step.logprob for step in swapped] == pytest.approx([step.logprob for step in fresh], abs=TOLERANCE)
    old = answer(core_of(load(folder), invariant=invariant), request(prompt))
    assert [step.logprob for step in swapped] != pytest.approx([step.logprob for step in old], abs=TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 8, 9, 32])
def test_experts_are_multiplied_as_transformers_does(folder: Path, tokens: int) -> None:
    model = load(folder)
    experts: Any = next(part for name, part in model.module.named_modules() if name.endswith("mlp.experts"))
    random = torch.Generator().manual_seed(tokens)
    states = torch.randn(tokens, 64, generator=random)
    ids = torch.rand(tokens, 8, generator=random).topk(2).indices
    weights = torch.rand(tokens, 2, generator=random)
    made: list[torch.Tensor] = []
    for invariant in (False, True):
        use_experts(model.module, invariant=invariant)
        made.append(experts(states, ids, weights))
    assert torch.allclose(*made, atol=1e-4, rtol=1e-4)
