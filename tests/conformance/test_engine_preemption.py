"""Answers that give up their KV for others, and go on later: no bit, token, route or span differs for their readers."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from core_rig import flips, run, steps
from hypothesis import example, given, settings
from hypothesis import strategies as st
from traced_rig import WINDOW, Traced

from slackwater.config.in_flight import InFlight
from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.engine import TorchEngine
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.engine.torch.replay import Replayer
from slackwater.engine.torch.sequence import Began, Ended, Made
from slackwater.engine.torch.weights import WeightBits
from slackwater.errors import ContextLengthError, InvalidInputError
from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.rollout.evidence import Finish, PolicySpan, TokenStep, kv_spans
from slackwater.rollout.request import ANY_POLICY, CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

V7, V8 = Version(7), Version(8)
SLOTS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, dtype="float32")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    """Its weights never change."""
    return load(folder)


def prompt_of(kind: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(kind).integers(1, 500, length))


def request(
    kind: int, length: int, tokens: int, *, policy: PolicyConstraint = ANY_POLICY, routes_from: int | None = 0
) -> CompletionRequest:
    """Its draws depend on the tokens before."""
    sampling = SamplingSpec(max_tokens=tokens, temperature=0.7, frequency_penalty=0.5, ignore_eos=True)
    prompt = prompt_of(kind, length)
    return CompletionRequest(
        request_id=RequestId(f"r{kind}"), prompt_ids=prompt, sampling=sampling, policy=policy, routes_from=routes_from
    )


def crowded(model: LoadedModel, *, kv_tokens: int | None, invariant: bool = True, slots: int = SLOTS) -> Traced:
    """Three answers that begin, of which not all can stay: the last is preempted before its 20th token."""
    bench = Traced(model, invariant=invariant, slots=slots, kv_tokens=kv_tokens)
    for key in range(3):
        bench.core.add(key, request(key, 20 + key, 30), seed=key)
    return bench


def preempted(bench: Traced) -> int:
    """Step until an answer with tokens has been preempted; its key."""
    while not bench.core.preempted:
        bench.step()
    return bench.core._waiting[0].key


def ids(made: Iterable[TokenStep]) -> list[int]:
    return [step.token_id for step in made]


BOUND = 100
"""Positions for `crowded`: all three prompts fit, and not all of their answers."""

Plan = list[tuple[int, int, int, int]]
"""Of each answer: kind of prompt, its length, tokens, steps until the next one comes."""
PLANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(1, 30), st.integers(0, 6)), min_size=2, max_size=7
)


def answered(bench: Traced, plan: Plan) -> list[list[TokenStep]]:
    for key, (kind, length, tokens, wait) in enumerate(plan):
        bench.core.add(key, request(kind, length, tokens), seed=key)
        for _ in range(wait):
            if bench.core.busy:
                bench.step()
    bench.run()
    return [steps(bench.events, key) for key in range(len(plan))]


@settings(max_examples=12)
@example(plan=[(0, 40, 30, 2), (0, 40, 30, 2), (1, 33, 30, 0), (0, 70, 30, 0), (2, 1, 30, 0)], bound=101)
@given(plan=PLANS, bound=st.integers(101, 220))
def test_no_bit_of_an_answer_tells_that_it_was_preempted(model: LoadedModel, plan: Plan, bound: int) -> None:
    """Tokens, log-probabilities, spans of KV and routes: of any answers that come at any time."""
    calm, bench = (Traced(model, invariant=True, slots=SLOTS, kv_tokens=kv) for kv in (None, bound))
    assert answered(bench, plan) == answered(calm, plan)


@settings(max_examples=12)
@given(
    plan=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 70), st.integers(1, 30)), min_size=3, max_size=6),
    deeds=st.lists(st.sampled_from(["add", "ahead", "step", "step", "step", "abort", "drain", "proceed"]), max_size=60),
    bound=st.integers(101, 160),
)
def test_aborts_and_drains_at_any_time_leave_the_other_answers_as_they_are(
    model: LoadedModel, plan: list[tuple[int, int, int]], deeds: list[str], bound: int
) -> None:
    calm, bench = (Traced(model, invariant=True, slots=SLOTS, kv_tokens=kv) for kv in (None, bound))
    coming, aborted = list(enumerate(plan)), set[int]()
    for deed in deeds:
        if deed in ("add", "ahead") and coming:
            key, asked = coming.pop(0)
            bench.core.add(key, request(*asked), seed=key, ahead=deed == "ahead")
        elif deed == "step" and bench.core.busy:
            bench.step()
        elif deed == "abort" and bench.core._rows:
            aborted.add(next(reversed(bench.core._rows)))
            bench.core.abort(next(reversed(bench.core._rows)))
        elif deed == "drain":
            begun = bench.core.drain()
            bench.run()
            assert not set(begun) & set(bench.core._rows)
        elif deed == "proceed":
            bench.core.proceed()
    bench.core.proceed()
    for key, asked in coming:
        bench.core.add(key, request(*asked), seed=key)
    bench.run()
    for key, asked in enumerate(plan):
        calm.core.add(key, request(*asked), seed=key)
    calm.run()
    for key in range(len(plan)):
        made, wanted = steps(bench.events, key), steps(calm.events, key)
        assert made == wanted[: len(made)] if key in aborted else made == wanted


@settings(max_examples=8)
@given(plan=PLANS, bound=st.integers(101, 220))
def test_log_probabilities_of_preempted_answers_are_those_of_a_plain_forward_pass(
    folder: Path, model: LoadedModel, plan: Plan, bound: int
) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    bench = Traced(model, invariant=False, slots=SLOTS, kv_tokens=bound)
    plain = [(kind, length, min(tokens, bound - length), wait) for kind, length, tokens, wait in plan]
    for key, (kind, length, tokens, wait) in enumerate(plain):
        asked = request(kind, length, tokens)
        asked = replace(asked, sampling=replace(asked.sampling, temperature=1.0, frequency_penalty=0.0))
        bench.core.add(key, asked, seed=key)
        for _ in range(wait):
            if bench.core.busy:
                bench.step()
    bench.run()
    for key, (kind, length, tokens, _) in enumerate(plain):
        made = steps(bench.events, key)
        whole = torch.tensor([[*prompt_of(kind, length), *ids(made)]])
        with torch.inference_mode():
            table = reference(whole).logits[0].log_softmax(-1)
        wanted = [float(table[length - 1 + at, step.token_id]) for at, step in enumerate(made)]
        assert len(made) == tokens
        assert [step.logprob for step in made] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("invariant", [True, False])
def test_tokens_are_the_same_with_and_without_a_bound(model: LoadedModel, invariant: bool) -> None:
    calm, bench = (crowded(model, kv_tokens=kv, invariant=invariant) for kv in (None, BOUND))
    for one in (calm, bench):
        one.run()
    assert (calm.core.preemptions, bench.core.preemptions > 0) == (0, True)
    for key in range(3):
        assert ids(steps(bench.events, key)) == ids(steps(calm.events, key))
        assert [event for event in bench.events if isinstance(event, Began) and event.key == key] == [
            Began(key=key, cached_tokens=0, prompt_version=V7)
        ]


def test_the_youngest_gives_way_and_the_oldest_never_waits(model: LoadedModel) -> None:
    bench = crowded(model, kv_tokens=BOUND)
    assert preempted(bench) == 2
    assert (bench.core.active, bench.core.preempted) == (2, 1)
    bench.core.add(9, request(5, 5, 5), seed=9)
    bench.run()
    ends = [event.key for event in bench.events if isinstance(event, Made) and event.step.finish]
    assert ends.index(0) == 0


def test_rows_of_tokens_come_back_one_by_one_where_no_bit_may_change(model: LoadedModel) -> None:
    """Recomputed in a prompt's shape they'd have other bits; in the other mode they go with the prompt."""
    for invariant, more in ((True, True), (False, False)):
        bench = crowded(model, kv_tokens=BOUND, invariant=invariant)
        key = preempted(bench)
        row = bench.core._rows[key]
        while row.slot < 0:
            bench.step()
        assert (row.due < row.position - 1) is more
        bench.run()


def test_kept_rows_are_given_up_before_any_answer(model: LoadedModel) -> None:
    bench = Traced(model, invariant=True, slots=3, kv_tokens=140)
    bench.core.add(0, request(0, 64, 2), seed=0)
    bench.run()
    assert bench.core.kv_used == 64
    bench.core.add(1, request(1, 40, 30), seed=1)
    bench.core.add(2, request(2, 40, 20), seed=2)
    bench.run()
    assert bench.core.preemptions == 0
    bench.core.add(3, request(0, 64, 2), seed=3)
    bench.run()
    assert next(event for event in bench.events if isinstance(event, Began) and event.key == 3).cached_tokens == 0


@pytest.mark.parametrize("key", [0, 2])
def test_an_abort_frees_what_a_preempted_answer_or_its_rival_had(model: LoadedModel, key: int) -> None:
    calm, bench = crowded(model, kv_tokens=None), crowded(model, kv_tokens=BOUND)
    calm.run()
    assert preempted(bench) == 2
    assert bench.core.abort(key)
    seen = len(bench.events)
    bench.run()
    assert not [event for event in bench.events[seen:] if event.key == key]
    for other in {0, 1, 2} - {key}:
        assert steps(bench.events, other) == steps(calm.events, other)
    assert (bench.core.active, bench.core.busy, bench.core.abort(key)) == (0, False, False)


@pytest.mark.parametrize("slots", [2, 4])
def test_a_drain_ends_preempted_answers_though_others_have_the_room(model: LoadedModel, slots: int) -> None:
    """One that has no token yet, and must get none, sits where the preempted one needs to be."""
    calm, bench = (crowded(model, kv_tokens=kv, slots=slots) for kv in (None, 80))
    for one in (calm, bench):
        one.core.abort(2)
        one.core.add(3, request(3, 3, 2), seed=3)
    calm.run()
    assert preempted(bench) == 1
    bench.core.add(4, request(1, 70, 9), seed=4, ahead=True)
    bench.core.abort(0)
    assert bench.core._seat() is not None
    begun = bench.core.drain()
    assert 1 in begun
    assert bench.core._rows[4].slot >= 0
    bench.run()
    assert steps(bench.events, 1) == steps(calm.events, 1)
    assert steps(bench.events, 4) == []
    bench.core.proceed()
    bench.run()
    assert len(steps(bench.events, 4)) == 9


@pytest.mark.parametrize("mode", [InFlight.CONTINUE, InFlight.RECOMPUTE])
def test_a_swap_while_it_is_preempted_is_told_and_replays_to_the_bit(folder: Path, mode: InFlight) -> None:
    """Its rows were lost, so the new weights build them all."""
    bench = crowded(load(folder), kv_tokens=BOUND)
    key = preempted(bench)
    weights = WeightBits(bench.core._model.parameters, bench.core._model.specs)
    writes = flips(weights)
    weights.commit(weights.stage(writes))
    assert bench.core.relabel(V8, in_flight=mode) == []
    bench.run()
    made = steps(bench.events, key)
    cut = [step.version for step in made].index(V8)
    length = len(bench_prompt(key))
    assert [at for at, step in enumerate(made) if step.kv] == [cut]
    assert kv_spans(length, made) == (PolicySpan(version=V8, start=0, end=length + len(made) - 1),)
    replayer = Replayer(folder, version=V7, slots=SLOTS, window=WINDOW)
    replayer.begin({"a": (bench_prompt(key), request(key, 1, 30).sampling)})
    head = replayer.extend({"a": ids(made[:cut])})["a"]
    replayer.commit(writes, V8, in_flight=InFlight.RECOMPUTE)
    assert [step.logprob for step in made] == head + replayer.extend({"a": ids(made[cut:])})["a"]


def bench_prompt(key: int) -> tuple[int, ...]:
    """Of `crowded`."""
    return prompt_of(key, 20 + key)


def test_a_swap_that_is_undone_while_it_is_preempted_changes_no_bit(folder: Path) -> None:
    calm, bench = crowded(load(folder), kv_tokens=None), crowded(load(folder), kv_tokens=BOUND)
    calm.run()
    key = preempted(bench)
    weights = WeightBits(bench.core._model.parameters, bench.core._model.specs)
    staged = weights.stage(flips(weights))
    weights.commit(staged)
    bench.core.relabel(V8)
    weights.undo(staged)
    assert bench.core.relabel(V7, spoilt=True) == []
    bench.run()
    assert steps(bench.events, key) == steps(calm.events, key)


def test_what_a_swap_recomputed_in_chunks_comes_back_in_chunks(folder: Path) -> None:
    calm, bench = crowded(load(folder), kv_tokens=None), crowded(load(folder), kv_tokens=BOUND)
    for one in (calm, bench):
        one.step(6)
        assert one.core.preemptions == 0
        weights = WeightBits(one.core._model.parameters, one.core._model.specs)
        weights.commit(weights.stage(flips(weights)))
        one.core.relabel(V8, in_flight=InFlight.RECOMPUTE)
        one.run()
    assert bench.core.preemptions > 0
    for key in range(3):
        assert steps(bench.events, key) == steps(calm.events, key)


@pytest.mark.parametrize(
    ("mode", "policy", "finish"),
    [
        (InFlight.CONTINUE, PolicyConstraint(exact_version=V7), Finish.POLICY_CHANGED),
        (InFlight.ABORT, ANY_POLICY, Finish.SWAPPED),
    ],
)
def test_a_swap_ends_preempted_answers_as_it_does_others(
    model: LoadedModel, mode: InFlight, policy: PolicyConstraint, finish: Finish
) -> None:
    bench = Traced(model, invariant=True, slots=2, kv_tokens=70)
    for key in range(2):
        bench.core.add(key, request(key, 20, 40, policy=policy), seed=key)
    key = preempted(bench)
    assert Ended(key=key, finish=finish) in bench.core.relabel(V8, in_flight=mode)
    assert (bench.core.busy, bench.core.active, bench.core.preempted) == (False, 0, 0)


def test_a_prompt_without_a_token_starts_over(model: LoadedModel) -> None:
    """It is preempted as others are, and begins once."""
    bench = Traced(model, invariant=True, slots=2, kv_tokens=128)
    bench.core.add(0, request(0, 5, 60), seed=0)
    bench.step(2)
    bench.core.add(1, request(1, 110, 9), seed=1)
    bench.step(1)
    bench.run()
    calm = Traced(model, invariant=True, slots=2)
    for key, (length, tokens) in enumerate(((5, 60), (110, 9))):
        calm.core.add(key, request(key, length, tokens), seed=key)
    calm.run()
    for key in range(2):
        assert steps(bench.events, key) == steps(calm.events, key)
        assert sum(isinstance(event, Began) and event.key == key for event in bench.events) == 1


def test_forced_routes_are_forced_again(model: LoadedModel) -> None:
    bench = crowded(model, kv_tokens=BOUND)
    rows = np.arange(30, dtype="<u2").tobytes()
    forced = replace(request(9, 22, 40), forced_routes=rows)
    bench.core.abort(2)
    bench.core.add(9, forced, seed=9)
    assert preempted(bench) == 9
    row = bench.core._rows[9]
    for _ in range(100):
        if row.slot >= 0:
            break
        bench.step()
    told = bench.runner.routes.forced(np.full(3, row.slot), np.array([0, 29, 30]))
    assert told is not None
    assert told[:, 0, 0].tolist() == [0, 29, -1]


def test_held_answers_that_have_nothing_to_take_make_way(model: LoadedModel) -> None:
    """They go on when they are extended, to the bit."""
    tokens = [int(token) for token in prompt_of(7, 40)]
    found: list[list[list[TokenStep]]] = []
    for kv in (None, 70):
        bench = Traced(model, invariant=True, slots=2, kv_tokens=kv)
        for key in range(2):
            bench.core.hold(key, request(key, 20, 40), tokens[:15])
        bench.run()
        for begin, end in ((15, 25), (25, 40)):
            for key in range(2):
                bench.core.extend(key, tokens[begin:end])
            bench.run()
        found.append([steps(bench.events, key) for key in range(2)])
        assert (bench.core.preemptions > 0) is (kv is not None)
    assert found[0] == found[1]
    assert [len(made) for made in found[1]] == [40, 40]


def test_a_prompt_that_never_fits_is_refused_and_answers_end_at_the_bound(model: LoadedModel) -> None:
    core = Core(model, Shaping(slots=2, invariant=True), window=WINDOW, version=V7, kv_tokens=50)
    with pytest.raises(ContextLengthError, match="window of 50"):
        core.check(request(0, 50, 1))
    longest = request(0, 49, 10)
    core.check(longest)
    core.add(0, longest, seed=0)
    core.add(1, request(1, 30, 60), seed=1)
    events = run(core)
    assert [len(steps(events, key)) for key in range(2)] == [1, 20]
    assert steps(events, 1)[-1].finish is Finish.LENGTH


async def test_the_engine_tells_its_bound_and_counts_preemptions(folder: Path) -> None:
    async def opened(kv_tokens: int) -> TorchEngine:
        return await TorchEngine.open(
            folder,
            version=V7,
            run=RunId("run"),
            replica=ReplicaId("r0"),
            boot=BootId("b0"),
            slots=4,
            kv_tokens=kv_tokens,
        )

    with pytest.raises(InvalidInputError, match="serves nobody"):
        await opened(1)
    engine = await opened(BOUND)
    try:
        assert (engine.describe().kv_tokens, engine.describe().window) == (BOUND, BOUND)
        answers = [await engine.generate(request(key, 20, 40)) for key in range(4)]
        made = [[step async for step in answer] for answer in answers]
        assert [len(whole) for whole in made] == [40] * 4
        assert engine.stats().preemptions > 0
        assert 0 < engine.stats().kv_used <= BOUND
    finally:
        await engine.close()
