"""What a single request asks of the core: whose rows it may share, and where it ends."""

from dataclasses import replace
from pathlib import Path

import pytest
from core_rig import run, steps

from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.sequence import Began
from slackwater.ids import RequestId, Version
from slackwater.rollout.evidence import Finish
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tuple(range(1, 41))
DRAWN = SamplingSpec(max_tokens=12, temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


def core_of(model: LoadedModel, *, invariant: bool = False) -> Core:
    return Core(model, Shaping(slots=4, invariant=invariant), window=256, version=Version(7))


def request(salt: str = "") -> CompletionRequest:
    return CompletionRequest(request_id=RequestId("r"), prompt_ids=PROMPT, sampling=DRAWN, cache_salt=salt)


@pytest.mark.parametrize("invariant", [False, True])
def test_rows_are_shared_by_requests_of_one_salt_alone(folder: Path, *, invariant: bool) -> None:
    core = core_of(load(folder), invariant=invariant)
    cached: list[int] = []
    answers: list[list[int]] = []
    for key, salt in enumerate(["", "", "a", "b", "a", ""]):
        core.add(key, request(salt), seed=1)
        events = run(core)
        cached += [event.cached_tokens for event in events if isinstance(event, Began)]
        answers.append([step.token_id for step in steps(events, key)])
    assert cached == [0, len(PROMPT), 0, 0, len(PROMPT), len(PROMPT)]
    assert answers == answers[:1] * len(answers)


def test_prompts_of_two_salts_are_computed_side_by_side(folder: Path) -> None:
    core = core_of(load(folder))
    for key, salt in enumerate("abab"):
        core.add(key, request(salt), seed=1)
    begun = [event for event in run(core) if isinstance(event, Began)]
    assert sorted((event.key % 2, event.cached_tokens) for event in begun) == [
        *((0, count) for count in (0, len(PROMPT))),
        *((1, count) for count in (0, len(PROMPT))),
    ]


def test_a3_10_every_end_token_of_the_model_ends_an_answer(folder: Path) -> None:
    model = load(folder)
    core = core_of(model)
    core.add(0, request(), seed=1)
    free = [step.token_id for step in steps(run(core), 0)]
    second = next(token for token in free[1:] if token != free[0])
    unseen = next(token for token in range(model.vocab_size) if token not in free)
    core = core_of(replace(model, eos_token_ids=(unseen, second)))
    core.add(0, request(), seed=1)
    made = steps(run(core), 0)
    assert [step.token_id for step in made] == free[: free.index(second) + 1]
    assert made[-1].finish is Finish.STOP
