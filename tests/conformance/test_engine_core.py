"""The core, step by step: what one step does, what a swap between two steps changes, and what it doesn't."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from core_rig import run, steps

from slackwater.checkpoint.tensor import TileWrite, tiles
from slackwater.engine.torch.batch import CHUNK, Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.replay import Replayer
from slackwater.engine.torch.sequence import Began, Ended, Event, Failed
from slackwater.engine.torch.weights import StagedWrites, WeightBits
from slackwater.errors import CorruptError, InvalidInputError, PolicyUnmetError
from slackwater.ids import RequestId, Version
from slackwater.rollout.evidence import Finish, PolicySpan, TokenStep, spans
from slackwater.rollout.request import ANY_POLICY, CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

V7, V8 = Version(7), Version(8)
PROMPT = tuple(range(1, 41))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture
def model(folder: Path) -> LoadedModel:
    return load(folder)


def core_of(model: LoadedModel, *, slots: int = 4) -> Core:
    return Core(model, Shaping(slots=slots, invariant=True), window=256, version=V7)


def sampling(max_tokens: int = 20) -> SamplingSpec:
    return SamplingSpec(max_tokens=max_tokens, temperature=0.5, seed=3)


def request(
    prompt: Iterable[int] = PROMPT, *, max_tokens: int = 20, policy: PolicyConstraint = ANY_POLICY
) -> CompletionRequest:
    return CompletionRequest(
        request_id=RequestId("r"), prompt_ids=tuple(prompt), sampling=sampling(max_tokens), policy=policy
    )


def began(events: Iterable[Event], key: int) -> Began:
    return next(event for event in events if isinstance(event, Began) and event.key == key)


def alone(model: LoadedModel, asked: CompletionRequest) -> list[TokenStep]:
    core = core_of(model)
    core.add(0, asked, seed=3)
    return steps(run(core), 0)


def writes(model: LoadedModel, seed: int = 0) -> list[TileWrite]:
    weights, random = WeightBits(model.parameters, model.specs), np.random.default_rng(seed)
    made: list[TileWrite] = []
    for name, spec in model.specs.items():
        for tile in tiles(spec):
            positions = np.flatnonzero(random.random(tile.count) < 0.3).astype(np.uint32)
            values = weights.read(name, tile)[positions] ^ np.uint16(0x8000)
            made.append(TileWrite(name=name, tile=tile, positions=positions, values=values))
    return made


def swap(core: Core, model: LoadedModel) -> list[Event]:
    weights = WeightBits(model.parameters, model.specs)
    weights.commit(weights.stage(writes(model)))
    return core.relabel(V8)


def poison(weights: WeightBits, names: Iterable[str]) -> StagedWrites:
    """Make every number of these tensors NaN; undo the writes to have the old ones back."""
    nan = [
        TileWrite(name=name, tile=tile, positions=None, values=np.full(tile.count, 0x7FC0, dtype=np.uint16))
        for name in names
        for tile in tiles(weights.specs[name])
    ]
    staged = weights.stage(nan)
    weights.commit(staged)
    return staged


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "vocab_size": 512,
    "bos_token_id": 509,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": torch.float32,
}


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("llama", False), ("mistral", False), ("qwen2", True), ("qwen3", True)]
)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    config = transformers.AutoConfig.for_model(family, tie_word_embeddings=tied, **SMALL)
    torch.manual_seed(5)
    reference: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    greedy = SamplingSpec(max_tokens=20, temperature=0.0)
    asked = CompletionRequest(request_id=RequestId("r"), prompt_ids=PROMPT, sampling=greedy)
    whole = reference.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), max_new_tokens=20, do_sample=False
    )
    assert [step.token_id for step in alone(load(tmp_path), asked)] == whole[0][len(PROMPT) :].tolist()


def test_logprobs_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "f32", tokenizer=False, dtype="float32")
    made = alone(load(folder), request())
    ids = [*PROMPT, *(step.token_id for step in made)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = (reference(torch.tensor([ids])).logits[0] / 0.5).log_softmax(-1)
    for at, step in enumerate(made, start=len(PROMPT)):
        assert step.logprob == pytest.approx(float(wanted[at - 1, step.token_id]), abs=1e-4)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 100])
def test_shared_prompt_rows_change_no_bit(model: LoadedModel, length: int) -> None:
    prompt = PROMPT * 3
    wanted = alone(model, request(prompt[:length]))
    core = core_of(model)
    core.add(0, request(prompt[:110]), seed=9)
    run(core)
    for key in (1, 2):
        core.add(key, request(prompt[:length]), seed=3)
    events = run(core)
    assert steps(events, 1) == steps(events, 2) == wanted
    assert began(events, 1).cached_tokens == (length - 1) // CHUNK * CHUNK
    assert began(events, 2).cached_tokens == length


def test_neighbours_of_any_length_change_no_bit(model: LoadedModel) -> None:
    wanted = alone(model, request())
    core = core_of(model)
    for key, length in enumerate((200, 3, 130)):
        core.add(key, request([key + 7] * length, max_tokens=50), seed=key)
    core.add(9, request(), seed=3)
    assert steps(run(core), 9) == wanted


def test_a2_20_a_swap_after_40_tokens_of_100(model: LoadedModel) -> None:
    core = core_of(model)
    core.add(0, request(max_tokens=100), seed=3)
    made: list[TokenStep] = []
    while len(made) < 40:
        made += steps(core.step(), 0)
    assert len(made) == 40
    assert swap(core, model) == []
    made += steps(run(core), 0)
    assert spans(step.version for step in made) == (
        PolicySpan(version=V7, start=0, end=40),
        PolicySpan(version=V8, start=40, end=100),
    )


def test_a_replay_over_a_swap_agrees_to_the_last_bit(model: LoadedModel, folder: Path) -> None:
    core = core_of(model)
    for key in range(3):
        core.add(key, request((key + 1, *PROMPT), max_tokens=60), seed=key)
    events = [event for _ in range(13) for event in core.step()]
    swap(core, model)
    events += run(core)
    answers = {str(key): steps(events, key) for key in range(3)}
    cuts = {name: [step.version for step in made].index(V8) for name, made in answers.items()}

    replayer = Replayer(folder, version=V7, slots=4, window=256)
    fresh = load(folder)
    replayer.begin({str(key): ((key + 1, *PROMPT), sampling(60)) for key in range(3)})
    ids = {name: [step.token_id for step in made] for name, made in answers.items()}
    heads = replayer.extend({name: ids[name][: cuts[name]] for name in ids})
    replayer.commit(writes(fresh), V8)
    tails = replayer.extend({name: ids[name][cuts[name] :] for name in ids})
    assert replayer.version == V8
    for name, made in answers.items():
        assert heads[name] + tails[name] == [step.logprob for step in made]


def test_a_replayer_refuses_what_it_cannot_hold(folder: Path) -> None:
    replayer = Replayer(folder, version=V7, slots=1, window=64)
    replayer.begin({"a": (PROMPT, sampling())})
    with pytest.raises(InvalidInputError, match="only 1"):
        replayer.begin({"b": (PROMPT, sampling())})
    with pytest.raises(InvalidInputError, match="hasn't begun"):
        replayer.extend({"b": [1]})
    with pytest.raises(InvalidInputError, match="pass its 20"):
        replayer.extend({"a": [1] * 21})
    assert len(replayer.extend({"a": [1, 2]})["a"]) == 2
    with pytest.raises(InvalidInputError, match="vocabulary"):
        replayer.extend({"a": [512]})
    replayer.drop("a")
    replayer.begin({"b": (PROMPT, sampling())})
    assert len(replayer.extend({"b": [1, 2, 3]})["b"]) == 3


def test_a_swap_during_prefill_starts_the_prompt_over(model: LoadedModel, folder: Path) -> None:
    long = [5] * (Shaping(slots=4, invariant=True).budget + 40)
    core = core_of(model)
    core.add(0, request(long), seed=3)
    assert core.step() == []
    swap(core, model)
    events = run(core)
    assert began(events, 0) == Began(key=0, cached_tokens=0, prompt_version=V8)
    cold = load(folder)
    swap(core_of(cold), cold)
    assert [step.logprob for step in steps(events, 0)] == [step.logprob for step in alone(cold, request(long))]


def test_decoding_goes_on_while_a_long_prompt_is_prefilled(model: LoadedModel) -> None:
    core = core_of(model)
    core.add(0, request(), seed=3)
    core.step()
    core.add(1, request([5] * 220), seed=3)
    events = core.step()
    assert len(steps(events, 0)) == 1
    assert steps(events, 1) == []


def test_exact_version_ends_between_two_tokens(model: LoadedModel) -> None:
    core = core_of(model)
    core.add(0, request(policy=PolicyConstraint(exact_version=V7)), seed=3)
    core.add(1, request(policy=PolicyConstraint(min_version=V7)), seed=3)
    core.step()
    assert swap(core, model) == [Ended(key=0, finish=Finish.POLICY_CHANGED)]
    assert steps(run(core), 1)[-1].finish is Finish.LENGTH


def test_an_unmet_policy_fails_that_request_alone(model: LoadedModel) -> None:
    core = core_of(model)
    core.add(0, request(policy=PolicyConstraint(min_version=V8)), seed=3)
    core.add(1, request(), seed=3)
    events = run(core)
    assert isinstance(events[0], Failed)
    assert isinstance(events[0].error, PolicyUnmetError)
    assert len(steps(events, 1)) == 20
    assert core.active == 0


def test_f42_numbers_that_are_none_fail_the_answer_and_leave_nothing_behind(model: LoadedModel) -> None:
    wanted = alone(model, request())
    core = core_of(model, slots=2)
    weights = WeightBits(model.parameters, model.specs)
    core.add(0, request(), seed=3)
    core.step()
    staged = poison(weights, ["model.layers.0.self_attn.v_proj.weight"])
    core.relabel(V8)
    core.add(1, request([9] * 90), seed=3)
    events = run(core)
    assert [type(event) for event in events if not isinstance(event, Began)] == [Failed, Failed]
    assert all(isinstance(event.error, CorruptError) for event in events if isinstance(event, Failed))
    weights.undo(staged)
    core.relabel(V7)
    for key in (2, 3):
        core.add(key, request(), seed=3)
    events = run(core)
    assert steps(events, 2) == steps(events, 3) == wanted


def test_f42_a_prompt_begun_under_weights_that_are_nan_is_answered_by_good_ones(model: LoadedModel) -> None:
    long = tuple(range(1, Shaping(slots=4, invariant=True).budget + 40))
    other = (*long[: 2 * CHUNK], *range(300, 340))
    wanted = {0: alone(model, request(long)), 1: alone(model, request(long)), 2: alone(model, request(other))}
    core = core_of(model)
    weights = WeightBits(model.parameters, model.specs)
    staged = poison(weights, model.specs)
    core.add(0, request(long), seed=3)
    assert core.step() == []
    weights.undo(staged)
    core.relabel(V7)
    for key, prompt in enumerate((long, long, other)):
        if key:
            core.add(key, request(prompt), seed=3)
        assert steps(run(core), key) == wanted[key]


def test_f42_a_prompt_whose_logits_are_no_numbers_is_not_shared(model: LoadedModel) -> None:
    core = core_of(model)
    poison(WeightBits(model.parameters, model.specs), ["model.norm.weight"])
    for key in range(2):
        core.add(key, request(), seed=3)
        events = run(core)
        assert began(events, key).cached_tokens == 0
        assert isinstance(events[-1], Failed)


def test_an_abort_frees_the_slot_in_every_state(model: LoadedModel) -> None:
    core = core_of(model, slots=1)
    core.add(0, request([5] * 220), seed=3)
    core.add(1, request(), seed=3)
    core.step()
    assert core.abort(1)
    assert core.abort(0)
    assert not core.abort(0)
    assert (core.active, core.busy) == (0, False)
    core.add(2, request(), seed=3)
    core.step()
    assert core.abort_all() == [Ended(key=2, finish=Finish.ABORT)]
    assert core.active == 0


def test_an_idle_step_does_nothing(model: LoadedModel) -> None:
    assert core_of(model).step() == []
