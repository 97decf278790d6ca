"""Passes that answers share: what is in them, and that logits are those of a plain forward pass whoever shares them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from core_rig import run, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.engine.torch.batch import PASS_TOKENS, Batch, Piece, Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.kernels.attention import attend, put
from slackwater.engine.torch.model import load
from slackwater.engine.torch.sequence import Began, Event
from slackwater.errors import UnsupportedError
from slackwater.ids import RequestId, Version
from slackwater.rollout.evidence import TokenStep
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

V7, V8 = Version(7), Version(8)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, dtype="float32")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def core_of(folder: Path, *, slots: int = 4, threads: int = 1) -> Core:
    return Core(load(folder), Shaping(slots=slots, invariant=False), window=1024, version=V7, threads=threads)


def request(prompt: Sequence[int], tokens: int = 12) -> CompletionRequest:
    sampling = SamplingSpec(max_tokens=tokens, temperature=1.0)
    return CompletionRequest(request_id=RequestId("r"), prompt_ids=tuple(prompt), sampling=sampling)


def cached(events: Sequence[Event], key: int) -> int:
    return next(event.cached_tokens for event in events if isinstance(event, Began) and event.key == key)


def truth(reference: Any, prompt: Sequence[int], made: Sequence[TokenStep]) -> list[float]:
    ids = [*prompt, *(step.token_id for step in made)]
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logits[len(prompt) - 1 + at, step.token_id]) for at, step in enumerate(made)]


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(1, 500, length))


def test_pieces_lie_side_by_side_and_padding_comes_last() -> None:
    batch = Batch.of([Piece(slot=3, start=5, tokens=[9]), Piece(slot=1, start=0, tokens=[7, 8])], padded_to=5)
    assert batch.ids.tolist() == [[9, 7, 8, 0, 0]]
    assert batch.positions.tolist() == [[5, 0, 1, 0, 0]]
    assert (batch.slots.tolist(), batch.places.tolist(), batch.ends) == ([3, 1, 1], [5, 0, 1], (0, 2))


@settings(max_examples=12)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=8
    )
)
def test_whoever_shares_the_passes_log_probabilities_are_those_of_a_plain_forward_pass(
    folder: Path, reference: Any, asked: list[tuple[int, int, int, int]]
) -> None:
    """Prompts come at any time, begin alike or not, and are longer or shorter than what a step takes."""
    core = core_of(folder, slots=3)
    events: list[Event] = []
    for key, (seed, length, tokens, wait) in enumerate(asked):
        core.add(key, request(prompt_of(seed, length), tokens), seed=key)
        for _ in range(wait):
            events += core.step()
    events += run(core)
    for key, (seed, length, tokens, _) in enumerate(asked):
        made = steps(events, key)
        assert len(made) == tokens or made[-1].finish
        wanted = truth(reference, prompt_of(seed, length), made)
        assert [step.logprob for step in made] == pytest.approx(wanted, abs=TOLERANCE)


def test_the_next_turn_takes_up_the_rows_of_the_answer_before(folder: Path, reference: Any) -> None:
    core = core_of(folder)
    prompt = prompt_of(5, 40)
    core.add(0, request(prompt), seed=1)
    first = steps(run(core), 0)
    longer = (*prompt, *(step.token_id for step in first), *prompt_of(6, 10))
    core.add(1, request(longer), seed=2)
    events = run(core)
    assert cached(events, 1) == len(prompt) + len(first) - 1
    made = steps(events, 1)
    assert [step.logprob for step in made] == pytest.approx(truth(reference, longer, made), abs=TOLERANCE)


def test_one_prompt_asked_for_many_times_is_computed_once(folder: Path) -> None:
    core = core_of(folder, slots=8)
    for key in range(8):
        core.add(key, request(prompt_of(1, 300)), seed=key)
    events = run(core)
    assert [cached(events, key) for key in range(8)] == [0, *[300] * 7]


def test_no_rows_of_an_answer_that_began_before_a_swap_are_shared_after_it(folder: Path) -> None:
    core = core_of(folder)
    prompt = prompt_of(2, 30)
    core.add(0, request(prompt), seed=1)
    core.step()
    core.relabel(V8)
    first = steps(run(core), 0)
    core.add(1, request((*prompt, *(step.token_id for step in first), 3)), seed=2)
    assert cached(run(core), 1) == 0


def test_a_step_prefills_no_more_than_its_budget_while_others_decode(folder: Path) -> None:
    core = core_of(folder)
    core.add(0, request(prompt_of(1, 5), 50), seed=1)
    core.step()
    core.add(1, request(prompt_of(2, 2 * PASS_TOKENS + 10)), seed=2)
    made = [core.step() for _ in range(4)]
    assert [len(steps(events, 0)) for events in made] == [1, 1, 1, 1]
    assert [len(steps(events, 1)) for events in made] == [0, 0, 1, 1]


def test_two_threads_give_the_bits_of_one(folder: Path) -> None:
    found: list[list[TokenStep]] = []
    for threads in (1, 2):
        core = core_of(folder, slots=16, threads=threads)
        for key in range(16):
            core.add(key, request(prompt_of(key, 400), 4), seed=key)
        events = run(core)
        core.close()
        found.append([step for key in range(16) for step in steps(events, key)])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 7, 8, 33, 100])
def test_attention_is_the_formula(dtype: str, count: int) -> None:
    torch.manual_seed(count)
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    states = [torch.randn(2, count, 16).to(kind) for _ in range(2)]
    shapes = ((1, 2, 16, 128), (1, 2, 128, 16))
    rows = [np.full(shape, 0x7FC0, np.uint16) if kind == torch.bfloat16 else np.full(shape, np.nan, np.float32)
            for shape in shapes]  # fmt: skip
    bits = [state.view(torch.uint16).numpy() if kind == torch.bfloat16 else state.numpy() for state in states]
    put(rows[0], rows[1], bits[0], bits[1], np.zeros(count, np.int64), np.arange(count))
    queries = torch.randn(1, 6, 16)
    out = np.empty((1, 6, 16), np.float32)
    slot, place = np.zeros(1, np.int64), np.array([count - 1])
    attend(queries.numpy(), rows[0], rows[1], slot, place, 0, 1, np.float32(0.25), out, np.empty(128, np.float32))
    keys, values = (state.double().repeat_interleave(3, 0) for state in states)
    weights = (queries[0].double()[:, None] @ keys.transpose(1, 2) * 0.25).softmax(-1)
    np.testing.assert_allclose(out[0], (weights @ values)[:, 0].numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_numbers_that_are_none_never_become_some(bad: float, which: int) -> None:
    """Two keys agree with the query in sign, so that an infinite one makes an infinite score."""
    rows = [np.ones((1, 1, 8, 32), np.float32), np.ones((1, 1, 32, 8), np.float32)]
    rows[which][(0, 0, 3, 5) if which == 0 else (0, 0, 5, 3)] = bad
    out, one = np.empty((1, 1, 8), np.float32), np.zeros(1, np.int64)
    ask, scratch = np.ones((1, 1, 8), np.float32), np.empty(32, np.float32)
    attend(ask, rows[0], rows[1], one, one + 9, 0, 1, np.float32(1.0), out, scratch)
    if which == 0 and bad == -np.inf:
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)  # its weight is zero
    else:
        assert not np.isfinite(out).all()


def test_heads_of_odd_sizes_are_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=36, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3,
        vocab_size=64, head_dim=12,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="12 dimensions"):
        load(tmp_path)
