"""The five supported models, as toys: masks are those of a plain forward pass, and sixty-three others change no bit."""

from functools import cache
from importlib import util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from core_rig import run, steps

from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.ids import RequestId, Version
from slackwater.rollout.evidence import TokenStep, mask_ids
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.testing.nemo_toys import NEMO_TOYS, write_nemo_toy
from slackwater.testing.toys import write_toy

pytestmark = pytest.mark.usefixtures("one_thread")

FIVE = (
    "Qwen3_5ForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "Glm5NextForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "DeepseekV41ForCausalLM",
)
TOP_P = 0.8
EDGE = 2e-5
"""Of probability: masks are compared where nothing in a row lies so near to the cut."""


@cache
def model_of(architecture: str) -> LoadedModel:
    """A toy in single precision."""
    if architecture in NEMO_TOYS and util.find_spec("nemo_automodel") is None:
        pytest.skip("nemo-automodel isn't installed")
    with TemporaryDirectory() as folder:
        write = write_nemo_toy if architecture in NEMO_TOYS else write_toy
        return load(write(Path(folder), architecture, dtype="float32"))


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(1, 500, length))


def request(prompt: tuple[int, ...], tokens: int) -> CompletionRequest:
    sampling = SamplingSpec(
        max_tokens=tokens, temperature=0.9, top_p=TOP_P, sampling_mask=True, raw_logprobs=True, ignore_eos=True
    )
    return CompletionRequest(request_id=RequestId("r"), prompt_ids=prompt, sampling=sampling, routes_from=0)


def answers(model: LoadedModel, prompts: dict[int, tuple[int, ...]], *, slots: int, tokens: int) -> list[TokenStep]:
    """The first prompt's, beside the others'."""
    core = Core(model, Shaping(slots=slots, invariant=True), window=64, version=Version(7))
    for key, prompt in prompts.items():
        core.add(key, request(prompt, tokens), seed=key)
    return steps(run(core), 0)


def support(logits: torch.Tensor) -> tuple[set[int], bool]:
    """What ``top_p`` keeps of one row, and whether the row tells it beyond rounding."""
    probabilities, order = (logits.double() / 0.9).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    return set(order[before < TOP_P].tolist()), bool(((before - TOP_P).abs() > EDGE).all())


@pytest.mark.parametrize("architecture", FIVE)
def test_masks_and_log_probabilities_are_a_plain_passs(architecture: str) -> None:
    model = model_of(architecture)
    prompt = prompt_of(1, 21)
    made = answers(model, {0: prompt, 1: prompt_of(2, 7)}, slots=2, tokens=16)
    module: Any = model.module
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *(step.token_id for step in made)]])
        logits = module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    sure = 0
    for row, step in zip(logits, made, strict=True):
        kept, told = support(row)
        assert step.token_id in mask_ids(step.mask or b"")
        assert step.raw_logprob == pytest.approx(float(row.log_softmax(-1)[step.token_id]), abs=1e-3)
        if told:
            assert set(mask_ids(step.mask or b"")) == kept
            scaled = (row / 0.9)[sorted(kept)].log_softmax(-1)
            assert step.logprob == pytest.approx(float(scaled[sorted(kept).index(step.token_id)]), abs=1e-3)
        sure += told
    assert sure >= len(made) // 2


@pytest.mark.parametrize("architecture", FIVE)
def test_sixty_three_others_change_no_bit(architecture: str) -> None:
    model = model_of(architecture)
    asked = {key: prompt_of(key, 5 + key % 4) for key in range(64)}
    together = answers(model, asked, slots=64, tokens=3)
    assert together == answers(model, {0: asked[0]}, slots=64, tokens=3)
    assert len(together) == 3
