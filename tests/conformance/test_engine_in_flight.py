"""Answers in flight in the embedded engine: recomputing is exact, spoilt weights leave nothing, drains end."""

import asyncio
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from core_rig import flips

from slackwater.checkpoint.tensor import TileWrite, tiles
from slackwater.config.in_flight import InFlight
from slackwater.engine.torch.batch import CHUNK, Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.engine import TorchEngine
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.replay import Replayer
from slackwater.engine.torch.sampler import Drawn
from slackwater.engine.torch.sequence import Event, Failed, Made, Sequence
from slackwater.engine.torch.weights import WeightBits
from slackwater.errors import PolicyUnmetError, SwapError, UnavailableError
from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.rollout.evidence import Finish, PolicySpan, TokenStep, grown, kv_spans
from slackwater.rollout.request import ANY_POLICY, CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

V7, V8, V9 = Version(7), Version(8), Version(9)
ANY_KV = PolicyConstraint(any_kv=True)
INVARIANT = Shaping(slots=4, invariant=True)
LONGER = INVARIANT.budget + 40
"""Tokens of a prompt that one step doesn't compute."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, dtype="float32")


class Bench:
    """A core of four slots, and its weights."""

    def __init__(self, folder: Path) -> None:
        self.model: LoadedModel = load(folder)
        self.core = Core(self.model, INVARIANT, window=256, version=V7)
        self.weights = WeightBits(self.model.parameters, self.model.specs)

    def add(self, key: int, length: int, *, tokens: int = 60, policy: PolicyConstraint = ANY_POLICY) -> None:
        self.core.add(key, request(key, length, tokens=tokens, policy=policy), seed=key)

    def steps(self, count: int) -> list[Event]:
        return [event for _ in range(count) for event in self.core.step()]

    def run(self) -> list[Event]:
        events: list[Event] = []
        while self.core.busy:
            events += self.core.step()
        return events

    def swap(self, version: Version, mode: InFlight, *, seed: int = 0) -> list[Event]:
        self.weights.commit(self.weights.stage(flips(self.weights, seed)))
        return self.core.relabel(version, in_flight=mode)


def sampling(tokens: int) -> SamplingSpec:
    return SamplingSpec(max_tokens=tokens, temperature=0.5)


def prompt_of(key: int, length: int) -> tuple[int, ...]:
    return tuple(1 + (7 * key + 3 * index) % 500 for index in range(length))


def request(key: int, length: int, *, tokens: int = 60, policy: PolicyConstraint = ANY_POLICY) -> CompletionRequest:
    return CompletionRequest(
        request_id=RequestId(f"r{key}"), prompt_ids=prompt_of(key, length), sampling=sampling(tokens), policy=policy
    )


def nans(weights: WeightBits) -> list[TileWrite]:
    return [
        TileWrite(name=name, tile=tile, positions=None, values=np.full(tile.count, 0x7FC00000, dtype=np.uint32))
        for name, spec in weights.specs.items()
        for tile in tiles(spec)
    ]


def made(events: Iterable[Event], key: int = 0) -> list[TokenStep]:
    return [event.step for event in events if isinstance(event, Made) and event.key == key]


def ids(steps: Iterable[TokenStep]) -> list[int]:
    return [step.token_id for step in steps]


def logprobs(steps: Iterable[TokenStep]) -> list[float]:
    return [step.logprob for step in steps]


def replayed(folder: Path, answers: Mapping[int, tuple[int, list[TokenStep]]]) -> dict[int, list[float]]:
    """By key: prompt length and steps, with a recompute before the first token of V8."""
    replayer = Replayer(folder, version=V7, slots=4, window=256)
    names = {f"{key}": key for key in answers}
    replayer.begin({name: (prompt_of(key, answers[key][0]), sampling(60)) for name, key in names.items()})
    tokens = {name: ids(answers[key][1]) for name, key in names.items()}
    cuts = {name: [step.version for step in answers[key][1]].index(V8) for name, key in names.items()}
    heads = replayer.extend({name: tokens[name][: cuts[name]] for name in names})
    replayer.commit(flips(WeightBits(*_fresh(folder))), V8, in_flight=InFlight.RECOMPUTE)
    tails = replayer.extend({name: tokens[name][cuts[name] :] for name in names})
    return {key: heads[name] + tails[name] for name, key in names.items()}


def _fresh(folder: Path) -> tuple[Any, Any]:
    model = load(folder)
    return model.parameters, model.specs


def plain(folder: Path, model: LoadedModel, prompt: tuple[int, ...], steps: list[TokenStep]) -> list[float]:
    """Log-probabilities by one forward pass of transformers' own, without any KV, under the weights in ``model``."""
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(model.parameters[name])
        whole = torch.tensor([[*prompt, *ids(steps)]])
        table = (reference(whole, use_cache=False).logits[0] / 0.5).log_softmax(-1)
    return [float(table[len(prompt) + at - 1, step.token_id]) for at, step in enumerate(steps)]


@pytest.mark.parametrize("together", [True, False])
def test_a_recompute_is_bit_exact_whatever_else_is_served(folder: Path, together: bool) -> None:
    lengths = {0: 64, 1: 33, 2: LONGER - 30}
    bench = Bench(folder)
    for key, length in lengths.items():
        bench.add(key, length)
    bench.add(9, 11, tokens=20)
    events = bench.steps(17)
    assert bench.swap(V8, InFlight.RECOMPUTE) == []
    bench.add(10, 90)
    events += bench.run()
    answers = {key: (length, made(events, key)) for key, length in lengths.items()}
    groups = [answers] if together else [{key: answer} for key, answer in answers.items()]
    for group in groups:
        for key, again in replayed(folder, group).items():
            assert again == logprobs(answers[key][1])


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64])
@pytest.mark.parametrize("before", [1, 2, 32, 33])
def test_a_recomputed_answer_is_that_of_transformers_at_every_edge_of_a_chunk(
    folder: Path, length: int, before: int
) -> None:
    bench = Bench(folder)
    bench.add(0, length)
    events: list[Event] = []
    while len(made(events)) < before:
        events += bench.core.step()
    bench.swap(V8, InFlight.RECOMPUTE)
    events += bench.run()
    steps = made(events)
    cut = [step.version for step in steps].index(V8)
    assert len(steps) == 60
    assert [index for index, step in enumerate(steps) if step.kv] == [cut]
    assert kv_spans(length, steps) == (PolicySpan(version=V8, start=0, end=length + 59),)
    assert logprobs(steps[cut:]) == pytest.approx(
        plain(folder, bench.model, prompt_of(0, length), steps)[cut:], abs=1e-4
    )
    assert replayed(folder, {0: (length, steps)})[0] == logprobs(steps)


def test_kept_kv_is_not_what_the_new_weights_alone_would_make(folder: Path) -> None:
    """So the comparison above can fail."""
    bench = Bench(folder)
    bench.add(0, 64)
    events = bench.steps(5)
    bench.swap(V8, InFlight.CONTINUE)
    events += bench.run()
    cut = [step.version for step in made(events)].index(V8)
    alone = plain(folder, bench.model, prompt_of(0, 64), made(events))
    assert logprobs(made(events))[cut:] != pytest.approx(alone[cut:], abs=1e-2)


@pytest.mark.parametrize(
    ("length", "tokens", "due"), [(64, 1, 64), (64, 2, 65), (32, 33, 64), (1, 33, 33), (33, 40, 72), (5, 0, 5)]
)
def test_chunks_are_the_prompt_and_all_tokens_but_the_newest(length: int, tokens: int, due: int) -> None:
    row = Sequence(key=0, request=request(0, length), seed=0, limit=60, ends=frozenset())
    for token in range(400, 400 + tokens):
        row.accept(Drawn(token_id=token, logprob=-1.0), V7)
    row.restart()
    chunks: list[int] = []
    while row.filled < row.due:
        chunk = row.chunk(CHUNK)
        assert len(chunk) == min(CHUNK, due - row.filled)
        chunks += chunk
        row.kv = grown(row.kv, V8, row.filled + len(chunk))
    assert row.due == due
    assert chunks == [*prompt_of(0, length), *range(400, 400 + tokens)][:due]
    assert list(row.chunk(CHUNK)) == []


@pytest.mark.parametrize("mode", [InFlight.CONTINUE, InFlight.RECOMPUTE])
def test_a_swap_in_the_midst_of_a_recompute(folder: Path, mode: InFlight) -> None:
    """Continued, the rest of the rows is the newest weights'; recomputed, all of them are."""
    bench = Bench(folder)
    bench.add(0, LONGER)
    events = bench.steps(3)
    bench.swap(V8, InFlight.RECOMPUTE)
    assert made(bench.steps(1)) == []
    bench.swap(V9, mode, seed=1)
    events += bench.run()
    steps = made(events)
    cut = [step.version for step in steps].index(V9)
    halves = (PolicySpan(version=V8, start=0, end=INVARIANT.budget),)
    wanted = grown(halves if mode is InFlight.CONTINUE else (), V9, LONGER + cut)
    assert [step.version for step in steps] == [V7] * cut + [V9] * (60 - cut)
    assert steps[cut].kv == wanted


def test_a_swap_between_a_recompute_and_its_next_token_is_told(folder: Path) -> None:
    """The row of the newest token is built by the step that follows it, whichever weights that has."""
    bench = Bench(folder)
    bench.add(0, 64)
    events = bench.steps(2)
    rows = 64 + len(made(events)) - 1
    bench.swap(V8, InFlight.RECOMPUTE)
    while fills := bench.core._fills(CHUNK):
        list(bench.core._pass([], fills, padded_to=CHUNK))
    bench.swap(V9, InFlight.CONTINUE, seed=1)
    (step,) = made(bench.core.step())
    assert step.kv == (PolicySpan(version=V8, start=0, end=rows), PolicySpan(version=V9, start=rows, end=rows + 1))


def test_decoding_goes_on_while_another_answer_is_recomputed(folder: Path) -> None:
    bench = Bench(folder)
    bench.add(0, 10)
    bench.add(1, LONGER)
    bench.steps(4)
    bench.swap(V8, InFlight.RECOMPUTE)
    events = bench.core.step()
    assert (len(made(events, 0)), len(made(events, 1))) == (1, 0)


@pytest.mark.parametrize("mode", [InFlight.ABORT, InFlight.DRAIN])
def test_an_answer_that_is_being_recomputed_can_be_cut_and_aborted(folder: Path, mode: InFlight) -> None:
    bench = Bench(folder)
    for key in range(3):
        bench.add(key, LONGER)
    bench.steps(12)
    bench.swap(V8, InFlight.RECOMPUTE)
    bench.core.step()
    assert bench.core.abort(0)
    assert bench.core.abort(2)
    (ended,) = bench.swap(V9, mode, seed=1)
    assert getattr(ended, "finish", None) is Finish.SWAPPED
    assert (bench.core.active, bench.core.busy) == (0, False)


def test_a_recompute_goes_on_in_a_drain_and_first_tokens_do_not(folder: Path) -> None:
    bench = Bench(folder)
    bench.add(0, LONGER, tokens=5)
    bench.steps(3)
    bench.swap(V8, InFlight.RECOMPUTE)
    bench.add(1, 10, tokens=5)
    assert bench.core.drain() == [0]
    events = bench.run()
    assert (made(events, 0)[-1].finish, made(events, 1)) == (Finish.LENGTH, [])
    bench.core.proceed()
    assert len(made(bench.run(), 1)) == 5


def test_prompts_built_in_a_recompute_are_shared_and_change_no_bit(folder: Path) -> None:
    bench, cold = Bench(folder), Bench(folder)
    bench.add(0, 100)
    bench.steps(3)
    for one in (bench, cold):
        one.swap(V8, InFlight.RECOMPUTE)
    bench.run()
    warm = request(0, 100)
    for one in (bench, cold):
        one.core.add(5, warm, seed=5)
    events, wanted = bench.run(), cold.run()
    assert getattr(events[0], "cached_tokens", 0) == 96
    assert made(events, 5) == made(wanted, 5)


@pytest.mark.parametrize("undone", [InFlight.CONTINUE, InFlight.RECOMPUTE])
def test_f42_what_spoilt_weights_computed_is_computed_again(folder: Path, undone: InFlight) -> None:
    """Half recomputed by NaN, then taken back: later logits are those of a recompute by the good weights."""
    bench, good = Bench(folder), Bench(folder)
    for one in (bench, good):
        one.add(0, LONGER)
        one.steps(3)
    staged = bench.weights.stage(nans(bench.weights))
    bench.weights.commit(staged)
    bench.core.relabel(V8, in_flight=InFlight.RECOMPUTE)
    bench.add(1, LONGER)
    assert made(bench.core.step()) == []
    bench.weights.undo(staged)
    assert bench.core.relabel(V7, in_flight=undone, spoilt=True) == []
    good.core.relabel(V7, in_flight=InFlight.RECOMPUTE)
    good.add(1, LONGER)
    events, wanted = bench.run(), good.run()
    for key in (0, 1):
        assert made(events, key) == made(wanted, key)
        assert made(events, key)
    assert {span.version for span in kv_spans(LONGER, made(events))} == {V7}


def test_f42_answers_with_no_token_of_spoilt_weights_go_on_with_their_kv(folder: Path) -> None:
    """A commit and its undo with no step between change no bit of what follows."""
    bench, calm = Bench(folder), Bench(folder)
    for one in (bench, calm):
        one.add(0, 64)
        one.steps(3)
    staged = bench.weights.stage(nans(bench.weights))
    bench.weights.commit(staged)
    bench.core.relabel(V8)
    bench.weights.undo(staged)
    assert bench.core.relabel(V7, spoilt=True) == []
    assert made(bench.run()) == made(calm.run())


def test_f42_an_answer_with_a_token_of_spoilt_weights_fails_and_its_rows_are_no_ones(folder: Path) -> None:
    bench = Bench(folder)
    bench.add(0, 100)
    bench.steps(3)
    staged = bench.weights.stage(flips(bench.weights))
    bench.weights.commit(staged)
    bench.core.relabel(V8, in_flight=InFlight.RECOMPUTE)
    bench.steps(2)
    bench.weights.undo(staged)
    (failed,) = bench.core.relabel(V7, spoilt=True)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, UnavailableError)
    assert bench.core.active == 0
    bench.core.add(1, request(0, 100, policy=ANY_KV), seed=1)
    assert getattr(bench.core.step()[0], "cached_tokens", None) == 0


def test_kv_of_any_version_makes_the_logits_of_the_new_weights_over_old_rows(folder: Path) -> None:
    """Equal to an answer that kept its KV over the swap and is asked for the same position."""
    bench = Bench(folder)
    bench.add(0, 96)
    bench.run()
    bench.swap(V8, InFlight.CONTINUE)
    bench.core.add(1, request(0, 96, policy=ANY_KV), seed=1)
    (first, *_) = made(bench.run(), 1)
    old = PolicySpan(version=V7, start=0, end=64)
    assert first.kv == (old, PolicySpan(version=V8, start=64, end=96))
    kept = Bench(folder)
    kept.add(0, 96)
    kept.steps(1)
    kept.swap(V8, InFlight.CONTINUE)
    row = kept.core._rows[0]
    row.tokens.clear()
    row.kv = (old,)
    list(kept.core._pass([], kept.core._fills(CHUNK), padded_to=CHUNK))
    wanted = (kept.core._prompt_logits[row.slot] / 0.5).log_softmax(-1)
    assert first.logprob == pytest.approx(float(wanted[first.token_id]), abs=1e-6)


def test_rows_reused_across_an_undo_are_not_passed_on_as_fresh(folder: Path) -> None:
    """The label is the same again; whoever doesn't ask for KV of any version has only what was built since."""
    bench = Bench(folder)
    bench.add(0, 100, tokens=2)
    bench.run()
    for version in (V8, V7):
        bench.core.relabel(version)
    for key, policy in ((1, ANY_KV), (2, ANY_POLICY)):
        bench.core.add(key, request(0, 100, tokens=2, policy=policy), seed=key)
    cached = [getattr(event, "cached_tokens", None) for event in bench.run()]
    assert [count for count in cached if count is not None] == [96, 0]


def test_rows_of_the_weights_in_place_are_taken_before_as_many_of_others(folder: Path) -> None:
    bench = Bench(folder)
    bench.add(0, 100, tokens=2)
    bench.run()
    bench.core.relabel(V8)
    bench.core.add(1, request(0, 100, tokens=2), seed=1)
    bench.run()
    bench.core.add(2, request(0, 97, tokens=2, policy=ANY_KV), seed=2)
    (first, *_) = made(bench.run(), 2)
    assert first.kv == ()


def test_an_unmet_policy_says_which_version_is_held(folder: Path) -> None:
    bench = Bench(folder)
    bench.add(0, 10, policy=PolicyConstraint(min_version=V8))
    (failed,) = bench.run()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, PolicyUnmetError)
    assert failed.error.versions == (7,)


def test_writes_staged_while_a_proof_looks_are_stale(folder: Path) -> None:
    """They saved bits that were taken back, or that belong to the next state."""
    bench = Bench(folder)
    weights = bench.weights
    staged = weights.stage(flips(weights))
    for word in ("a tile", None):
        within: list[Any] = []

        def proof(word: str | None = word, within: list[Any] = within) -> str | None:
            within.append(weights.stage(flips(weights, seed=1)))
            return word

        if word:
            with pytest.raises(SwapError, match="a tile"):
                weights.commit(staged, proof)
        else:
            weights.commit(staged, proof)
        with pytest.raises(SwapError, match="the weights changed since"):
            weights.commit(within[0])


def test_writes_staged_on_another_engines_weights_are_refused(folder: Path) -> None:
    one, other = Bench(folder).weights, Bench(folder).weights
    name, spec = next(iter(other.specs.items()))
    (tile, *_) = tiles(spec)
    before = other.read(name, tile).copy()
    with pytest.raises(SwapError):
        one.commit(other.stage(flips(other)))
    assert np.array_equal(other.read(name, tile), before)


async def test_a_commit_that_is_cancelled_before_its_turn_ends_the_drain_before_it(folder: Path) -> None:
    engine = await TorchEngine.open(
        folder, version=V7, run=RunId("demo"), replica=ReplicaId("r0"), boot=BootId("b0"), slots=2, window=256
    )
    gate, reached = threading.Event(), asyncio.Event()
    events = asyncio.get_running_loop()

    def proof() -> str | None:
        events.call_soon_threadsafe(reached.set)
        gate.wait(30)
        return "a tile"

    staged = await engine.stage([])
    blocking = asyncio.create_task(engine.commit(staged, V8, proof=proof))
    await reached.wait()
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    committing = asyncio.create_task(engine.commit(staged, V9))
    waiting = await engine.generate(request(0, 10, tokens=3))
    await asyncio.sleep(0)
    committing.cancel()
    await asyncio.gather(committing, return_exceptions=True)
    gate.set()
    with pytest.raises(SwapError):
        await blocking
    await draining
    assert [step.version async for step in waiting] == [V7] * 3
    assert engine.stats().version == V7
    await engine.close()
