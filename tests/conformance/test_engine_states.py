"""Models that remember states, and those that remember nothing: answers are those of a plain forward pass, whatever is
shared, swapped or given up on the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from core_rig import run, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.config.in_flight import InFlight
from slackwater.engine.torch.architectures import MEMORY, Memory
from slackwater.engine.torch.batch import CHUNK, Pass, Piece, Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.rerun_runner import RerunRunner
from slackwater.engine.torch.runner import Runner
from slackwater.engine.torch.sequence import Began, Event
from slackwater.engine.torch.state_runner import StateRunner
from slackwater.engine.torch.tap import RouterTap
from slackwater.errors import InternalError
from slackwater.ids import RequestId, Version
from slackwater.rollout.evidence import PolicySpan, TokenStep, kv_spans
from slackwater.rollout.request import ANY_POLICY, CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.nemo_toys import NEMO_TOYS, write_nemo_toy
from slackwater.testing.toys import TOYS, write_toy

pytestmark = pytest.mark.usefixtures("one_thread")

V7, V8 = Version(7), Version(8)
TOLERANCE = 1e-4
STATES = [name for name in TOYS if MEMORY[name] is Memory.STATES]
ROUTED = ["Qwen3_5MoeForCausalLM", "GlmMoeDsaForCausalLM", "Glm5NextForConditionalGeneration", "KimiLinearForCausalLM"]
QWEN, GLM = "Qwen3_5ForCausalLM", "GlmMoeDsaForCausalLM"
KINDS = [QWEN, GLM, "Glm5NextForConditionalGeneration", "KimiLinearForCausalLM"]
"""One of each kind of memory."""
LENGTHS = (1, 5, CHUNK, CHUNK + 1, 70)


def loaded(architecture: str) -> LoadedModel:
    """A toy in single precision, with weights small enough for its rounding to stay small."""
    with TemporaryDirectory() as folder:
        model = load(write_toy(Path(folder), architecture, dtype="float32"))
    for parameter in model.module.parameters():
        if parameter.ndim > 1:
            parameter.mul_(0.5)
    return model


kept = cache(loaded)
"""For tests that don't write to it."""


def forgetful(model: LoadedModel) -> LoadedModel:
    """The same, as if its code had no cache."""
    return replace(model, memory=Memory.NOTHING)


def core_of(model: LoadedModel, *, slots: int = 4, invariant: bool = False, kv_tokens: int | None = None) -> Core:
    return Core(model, Shaping(slots=slots, invariant=invariant), window=256, version=V7, kv_tokens=kv_tokens)


def request(
    prompt: Sequence[int], tokens: int = 6, *, policy: PolicyConstraint = ANY_POLICY, **more: Any
) -> CompletionRequest:
    sampling = SamplingSpec(max_tokens=tokens, temperature=0.0, raw_logprobs=True, ignore_eos=True)
    return CompletionRequest(
        request_id=RequestId("r"), prompt_ids=tuple(prompt), sampling=sampling, policy=policy, **more
    )


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(1, 500, length))


def cached(events: Sequence[Event], key: int) -> int:
    return next(event.cached_tokens for event in events if isinstance(event, Began) and event.key == key)


def ids(made: Sequence[TokenStep]) -> tuple[int, ...]:
    return tuple(step.token_id for step in made)


def bits(made: Sequence[TokenStep]) -> list[tuple[int, float | None, bytes | None]]:
    return [(step.token_id, step.raw_logprob, step.routes) for step in made]


def plain(model: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    """``[tokens, vocab]``: log-probabilities of a forward pass without a cache."""
    module: Any = model.module
    with torch.inference_mode():
        return module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)


def check(model: LoadedModel, prompt: Sequence[int], made: Sequence[TokenStep], *, begin: int = 0) -> None:
    """Hold an answer's tokens from the ``begin``th on against a forward pass without a cache."""
    wanted = plain(model, [*prompt, *ids(made)])[len(prompt) - 1 :]
    assert len(made) > begin
    for at in range(begin, len(made)):
        step = made[at]
        assert step.raw_logprob == pytest.approx(float(wanted[at, step.token_id]), abs=TOLERANCE)
        assert float(wanted[at].max()) == pytest.approx(float(wanted[at, step.token_id]), abs=TOLERANCE)


def spoil(model: LoadedModel) -> None:
    """Put other weights in place."""
    for parameter in model.module.parameters():
        if parameter.ndim > 1:
            parameter.mul_(0.8)


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return kept(request.param)


@pytest.fixture(params=[False, True], ids=["default", "invariant"])
def invariant(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("architecture", STATES)
def test_every_answer_is_that_of_a_plain_forward_pass(architecture: str, invariant: bool) -> None:
    model = kept(architecture)
    core = core_of(model, slots=3, invariant=invariant)
    for key, length in enumerate(LENGTHS):
        core.add(key, request(prompt_of(key, length)), seed=key)
    events = run(core)
    for key, length in enumerate(LENGTHS):
        check(model, prompt_of(key, length), steps(events, key))


def test_a_prompt_asked_for_again_is_not_computed_again_and_has_the_same_bits(
    model: LoadedModel, invariant: bool
) -> None:
    core = core_of(model, invariant=invariant)
    prompt = prompt_of(1, 40)
    made: list[list[TokenStep]] = []
    for key in range(3):
        core.add(key, request(prompt), seed=key)
        events = run(core)
        assert cached(events, key) == (40 if key else 0)
        made.append(steps(events, key))
    assert bits(made[0]) == bits(made[1]) == bits(made[2])


def test_a_prompt_is_shared_while_those_who_share_it_are_further_on(model: LoadedModel) -> None:
    core = core_of(model, slots=5)
    prompt = prompt_of(1, 40)
    events: list[Event] = []
    for key in range(5):
        core.add(key, request(prompt), seed=key)
        events += [*core.step(), *core.step()]
    events += run(core)
    assert [cached(events, key) for key in range(5)] == [0, *[40] * 4]
    assert all(bits(steps(events, key)) == bits(steps(events, 0)) for key in range(5))
    check(model, prompt, steps(events, 0))


def test_the_next_turn_takes_up_the_state_that_an_answer_ended_in(model: LoadedModel) -> None:
    core = core_of(model)
    prompt = prompt_of(5, 40)
    core.add(0, request(prompt), seed=1)
    first = steps(run(core), 0)
    longer = (*prompt, *ids(first), *prompt_of(6, 10))
    core.add(1, request(longer), seed=2)
    core.add(2, request((*prompt, *prompt_of(7, 10))), seed=3)
    events = run(core)
    assert cached(events, 1) == len(prompt) + len(first) - 1
    check(model, longer, steps(events, 1))
    check(model, (*prompt, *prompt_of(7, 10)), steps(events, 2))


def test_a_prompt_that_forks_before_any_state_begins_anew(model: LoadedModel, invariant: bool) -> None:
    core = core_of(model, invariant=invariant)
    prompt = prompt_of(5, 64)
    fork = (*prompt[:50], *prompt_of(6, 20))
    core.add(0, request(prompt), seed=1)
    run(core)
    core.add(1, request(fork), seed=1)
    events = run(core)
    assert cached(events, 1) == 0
    check(model, fork, steps(events, 1))


def test_a_state_that_is_forked_serves_both_sides(model: LoadedModel) -> None:
    """Both go on from one end at once, and a third from it after them."""
    core = core_of(model)
    prompt = prompt_of(5, 40)
    core.add(0, request(prompt), seed=1)
    run(core)
    for key, seed in ((1, 6), (2, 7)):
        core.add(key, request((*prompt, *prompt_of(seed, 9))), seed=1)
    events = [*core.step(), *core.step()]
    core.add(3, request(prompt), seed=1)
    events += run(core)
    assert [cached(events, key) for key in (1, 2)] == [40, 40]
    for key, more in ((1, prompt_of(6, 9)), (2, prompt_of(7, 9)), (3, ())):
        check(model, (*prompt, *more), steps(events, key))


def test_batch_invariant_answers_have_the_same_bits_in_any_company_and_with_any_hit(model: LoadedModel) -> None:
    asked = request((*prompt_of(1, 2 * CHUNK), *prompt_of(2, 9)))
    alone = core_of(model, slots=1, invariant=True)
    alone.add(0, asked, seed=1)
    wanted = bits(steps(run(alone), 0))
    crowd = core_of(model, slots=6, invariant=True)
    for key in range(1, 5):
        crowd.add(key, request(prompt_of(10 + key, 20 * key)), seed=key)
        crowd.step()
    crowd.add(0, asked, seed=1)
    assert bits(steps(run(crowd), 0)) == wanted
    hit = core_of(model, slots=3, invariant=True)
    for key, prompt in enumerate((prompt_of(1, 2 * CHUNK), asked.prompt_ids, asked.prompt_ids)):
        hit.add(key, request(prompt), seed=1)
        events = run(hit)
        assert cached(events, key) == (0, 2 * CHUNK, len(asked.prompt_ids))[key]
        if key:
            assert bits(steps(events, key)) == wanted


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("architecture", [QWEN, GLM])
def test_preempted_answers_are_the_same(architecture: str, invariant: bool, remembers: bool) -> None:
    model = kept(architecture) if remembers else forgetful(kept(architecture))
    found: list[list[list[TokenStep]]] = []
    for kv_tokens in (None, 120):
        core = core_of(model, slots=3, invariant=invariant, kv_tokens=kv_tokens)
        for key in range(3):
            core.add(key, request((*prompt_of(1, CHUNK), *prompt_of(key, 3)), 12), seed=1)
        events = run(core)
        assert bool(core.preemptions) == bool(kv_tokens)
        found.append([steps(events, key) for key in range(3)])
    for key in range(3):
        check(model, (*prompt_of(1, CHUNK), *prompt_of(key, 3)), found[1][key])
    if invariant:
        assert [bits(made) for made in found[0]] == [bits(made) for made in found[1]]


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("architecture", KINDS[:3])
def test_an_abort_leaves_nothing_wrong(architecture: str, invariant: bool, after: int) -> None:
    model = kept(architecture)
    core = core_of(model, slots=2, invariant=invariant)
    prompt = prompt_of(3, 5 * CHUNK)
    core.add(0, request(prompt, 20), seed=1)
    for _ in range(after):
        core.step()
    core.abort(0)
    for key, asked in enumerate(((*prompt, 7, 8), prompt, prompt[: 2 * CHUNK]), start=1):
        core.add(key, request(asked, 3), seed=1)
    events = run(core)
    for key, asked in enumerate(((*prompt, 7, 8), prompt, prompt[: 2 * CHUNK]), start=1):
        check(model, asked, steps(events, key))


@pytest.mark.parametrize("in_flight", [InFlight.CONTINUE, InFlight.RECOMPUTE])
@pytest.mark.parametrize("architecture", [QWEN, GLM])
def test_no_state_of_other_weights_is_shared_after_a_swap(
    architecture: str, invariant: bool, in_flight: InFlight
) -> None:
    model = loaded(architecture)
    core = core_of(model, slots=6, invariant=invariant)
    prompt = prompt_of(3, CHUNK)
    core.add(0, request(prompt, 8), seed=1)
    events = [*core.step(), *core.step()]
    spoil(model)
    core.relabel(V8, in_flight=in_flight)
    core.add(1, request(prompt), seed=1)
    core.add(2, request((*prompt, 5)), seed=1)
    events += run(core)
    made = steps(events, 0)
    core.add(3, request((*prompt, *ids(made), 9)), seed=1)
    core.add(4, request((*prompt, 5, 6), policy=replace(ANY_POLICY, any_kv=True)), seed=1)
    events += run(core)
    assert cached(events, 1) == 0
    for key, asked in ((1, prompt), (2, (*prompt, 5)), (3, (*prompt, *ids(made), 9)), (4, (*prompt, 5, 6))):
        check(model, asked, steps(events, key))
    if in_flight is InFlight.RECOMPUTE:
        first = next(at for at, step in enumerate(made) if step.version == V8)
        check(model, prompt, made, begin=first)


def test_states_of_other_weights_are_shared_with_who_takes_them() -> None:
    model = loaded(QWEN)
    core = core_of(model)
    prompt = prompt_of(3, 40)
    core.add(0, request(prompt), seed=1)
    run(core)
    spoil(model)
    core.relabel(V8)
    core.add(1, request((*prompt, 5, 6), policy=replace(ANY_POLICY, any_kv=True)), seed=1)
    events = run(core)
    assert cached(events, 1) == 40
    spans = kv_spans(42, steps(events, 1))
    assert spans[0] == PolicySpan(version=V7, start=0, end=40)


@settings(max_examples=examples(24))
@given(data=st.data())
@pytest.mark.parametrize("architecture", KINDS)
def test_any_interleaving_answers_as_a_plain_forward_pass(architecture: str, data: st.DataObject) -> None:
    model = kept(architecture)
    core = core_of(model, slots=3, invariant=data.draw(st.booleans()))
    asked: list[tuple[int, ...]] = [prompt_of(1, 40)]
    events: list[Event] = []
    for key in range(data.draw(st.integers(1, 7))):
        base = asked[data.draw(st.integers(0, len(asked) - 1))]
        answer = ids(steps(events, asked.index(base) - 1)) if asked.index(base) else ()
        more = prompt_of(key, data.draw(st.sampled_from([0, 0, 3, 30])))
        prompt = (*base[: data.draw(st.sampled_from([len(base), len(base), 20]))], *answer, *more)
        asked.append(prompt)
        core.add(key, request(prompt, data.draw(st.integers(1, 5))), seed=key)
        for _ in range(data.draw(st.sampled_from([0, 1, 2, 9]))):
            events += core.step()
        if not data.draw(st.integers(0, 5)):
            core.abort(data.draw(st.integers(0, key)))
    events += run(core)
    for key, prompt in enumerate(asked[1:]):
        if made := steps(events, key):
            check(model, prompt, made)


@pytest.mark.parametrize("runner", [StateRunner, RerunRunner])
def test_what_a_slot_does_not_remember_is_an_error(runner: Callable[..., Runner]) -> None:
    made = runner(kept(QWEN), slots=2, window=64)
    with torch.inference_mode():
        made.run(Pass(pieces=[Piece(slot=0, start=0, tokens=[1, 2, 3])], wanted=[]))
        with pytest.raises(InternalError):
            made.run(Pass(pieces=[Piece(slot=0, start=2, tokens=[4])], wanted=[0]))
        with pytest.raises(InternalError):
            made.run(Pass(pieces=[Piece(slot=1, start=2, tokens=[4])], wanted=[0]))
        with pytest.raises(InternalError):
            made.copy(1, source=0, count=2)
        with pytest.raises(InternalError):
            made.copy(0, source=1, count=2)


def routes_of(model: LoadedModel, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """What routers choose in a forward pass without a cache."""
    assert model.routing
    with RouterTap(model.routers, model.routing).watching() as seen:
        plain(model, tokens)
    return seen.chosen(len(tokens))


def told(made: Sequence[TokenStep], model: LoadedModel) -> np.ndarray[Any, Any]:
    assert model.routing
    rows = b"".join(step.routes or b"" for step in made)
    return np.frombuffer(rows, dtype=np.uint8).reshape(-1, len(model.routing.layers), model.routing.per_token)


def agree(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether the same experts were chosen; their order in a token means nothing."""
    return bool(np.array_equal(np.sort(one, axis=-1), np.sort(other, axis=-1)))


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("architecture", ROUTED)
def test_a4_01_and_a4_02_routes_are_those_of_a_plain_forward_pass_with_and_without_a_hit(
    architecture: str, remembers: bool
) -> None:
    model = kept(architecture) if remembers else forgetful(kept(architecture))
    core = core_of(model)
    prompt = prompt_of(4, 5)
    for key in range(2):
        core.add(key, request(prompt, 3, routes_from=0), seed=key)
        events = run(core)
        assert cached(events, key) == (5 if key and remembers else 0)
        made = steps(events, key)
        rows = told(made, model)
        assert len(rows) == 7
        assert agree(rows, routes_of(model, (*prompt, *ids(made)[:-1])))


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("architecture", ROUTED)
def test_forced_routes_are_taken_and_shared_with_nobody(architecture: str, remembers: bool) -> None:
    model = kept(architecture) if remembers else forgetful(kept(architecture))
    assert model.routing
    core, prompt = core_of(model), prompt_of(4, 12)
    core.add(0, request(prompt, 3, routes_from=0), seed=1)
    natural = steps(run(core), 0)
    rows = told(natural, model)
    core.add(1, request(prompt, 3, routes_from=0, forced_routes=rows[:12].tobytes()), seed=1)
    events = run(core)
    assert cached(events, 1) == 0
    assert [step.raw_logprob for step in steps(events, 1)] == pytest.approx(
        [step.raw_logprob for step in natural], abs=TOLERANCE
    )
    other = (rows[:12] + np.uint8(1)) % np.uint8(model.routing.experts)
    core.add(2, request(prompt, 3, routes_from=0, forced_routes=other.tobytes()), seed=1)
    made = steps(run(core), 2)
    assert agree(told(made, model)[:12], other)
    assert made[0].raw_logprob != pytest.approx(natural[0].raw_logprob, abs=TOLERANCE)
    core.add(3, request((*prompt, 1), 3), seed=1)
    check(model, (*prompt, 1), steps(run(core), 3))


@pytest.mark.parametrize("architecture", [QWEN, GLM])
def test_a_model_without_a_cache_answers_alike_and_claims_no_hit(architecture: str, invariant: bool) -> None:
    model = forgetful(kept(architecture))
    core = core_of(model, slots=2, invariant=invariant)
    prompt = prompt_of(1, 40)
    asked = [prompt, prompt, (*prompt, 5), prompt[:9]]
    for key, one in enumerate(asked):
        core.add(key, request(one, 4), seed=key)
    events = run(core)
    assert [cached(events, key) for key in range(4)] == [0] * 4
    assert bits(steps(events, 0)) == bits(steps(events, 1))
    for key, one in enumerate(asked):
        check(model, one, steps(events, key))


def test_without_a_cache_nothing_of_other_weights_is_left_after_a_swap() -> None:
    model = forgetful(loaded(GLM))
    core = core_of(model)
    prompt = prompt_of(3, 20)
    core.add(0, request(prompt, 8, routes_from=0), seed=1)
    events = [*core.step(), *core.step()]
    spoil(model)
    core.relabel(V8)
    events += run(core)
    made = steps(events, 0)
    first = next(at for at, step in enumerate(made) if step.version == V8)
    assert 0 < first < 7
    check(model, prompt, made, begin=first)
    assert kv_spans(len(prompt), made) == (PolicySpan(version=V8, start=0, end=27),)
    assert len(told(made, model)) == 27


@pytest.mark.skipif(util.find_spec("nemo_automodel") is None, reason="nemo-automodel isn't installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:nemo_automodel.*")
@pytest.mark.parametrize("architecture", NEMO_TOYS)
def test_models_of_nemo_answer_as_a_plain_forward_pass(tmp_path: Path, architecture: str) -> None:
    model = load(write_nemo_toy(tmp_path, architecture, tokenizer=False, dtype="float32"))
    core = core_of(model, slots=2)
    prompt = prompt_of(1, 20)
    for key in range(2):
        core.add(key, request(prompt, 3, routes_from=0), seed=key)
    events = run(core)
    for key in range(2):
        assert cached(events, key) == 0
        made = steps(events, key)
        wanted = nemo_logprobs(model, [*prompt, *ids(made)])[len(prompt) - 1 :]
        assert [step.raw_logprob for step in made] == pytest.approx(
            [float(wanted[at, step.token_id]) for at, step in enumerate(made)], abs=TOLERANCE
        )
        assert len(told(made, model)) == len(prompt) + 2


def nemo_logprobs(model: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    """As `plain`; its code knows no caches to do without."""
    with torch.inference_mode():
        return model.module(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
