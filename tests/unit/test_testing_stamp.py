from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
from replica_rig import SPECS, request, until, weights_at

from slackwater.checkpoint.tensor import Bits, TileWrite, tiles
from slackwater.config.in_flight import InFlight
from slackwater.engine.base import Engine
from slackwater.ids import Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import PolicySpan, TokenStep
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.testing.conformance_engine import FIRST, EngineTests, OpenEngine
from slackwater.testing.conformance_in_flight import InFlightTests
from slackwater.testing.stamp import KvRow, StampEngine, built, replayed, tensor_stamp, weights_mark

OLD, NEW = weights_mark(weights_at(0)), weights_mark(weights_at(1))


@pytest.fixture
async def engine() -> AsyncIterator[StampEngine]:
    made = StampEngine(weights_at(0), SPECS, Version(0), slots=2, window=64)
    yield made
    await made.close()


def writes_to(weights: Mapping[str, Bits]) -> list[TileWrite]:
    return [
        TileWrite(name=name, tile=tile, positions=None, values=tile.take(weights[name]))
        for name, spec in SPECS.items()
        for tile in tiles(spec)
    ]


async def swap(engine: StampEngine, step: int = 1) -> None:
    await engine.commit(await engine.stage(writes_to(weights_at(step))), Version(step))


async def steps_of(answer: Answer) -> list[TokenStep]:
    return [step async for step in answer]


def proved(asked: CompletionRequest, steps: list[TokenStep], marks: list[int]) -> bool:
    """Whether those weights make those tokens."""
    claimed = [replace(step, version=Version(mark)) for step, mark in zip(steps, marks, strict=True)]
    right = replayed(asked, 0, claimed, {Version(mark): mark for mark in marks})
    return [(step.token_id, step.logprob) for step in steps] == right


@pytest.mark.parametrize(
    "bits",
    [
        np.array([0x8000], dtype=np.uint16),
        np.array([0x7FC1], dtype=np.uint16),
        np.zeros(0, dtype=np.uint16),
        np.zeros(2, dtype=np.uint16),
    ],
    ids=["minus zero", "a NaN's payload", "empty", "one more element"],
)
def test_a_stamp_is_of_the_bits_and_not_of_the_values(bits: Bits) -> None:
    others = [np.array([value], dtype=np.uint16) for value in (0x0000, 0x7FC0)]
    assert tensor_stamp("a", bits) not in {tensor_stamp("a", other) for other in others}
    assert tensor_stamp("a", bits) != tensor_stamp("b", bits)


def test_tensors_that_change_places_change_the_mark() -> None:
    first, second = np.zeros(4, dtype=np.uint16), np.ones(4, dtype=np.uint16)
    assert weights_mark({"a": first, "b": second}) != weights_mark({"a": second, "b": first})
    assert weights_mark({"a": first, "b": second}) == weights_mark({"b": second, "a": first})


def test_every_mix_of_two_versions_makes_another_token() -> None:
    one, asked = request(1), {}
    for chosen in range(2 ** len(SPECS)):
        mixed = {name: weights_at(chosen >> place & 1)[name] for place, name in enumerate(SPECS)}
        step = TokenStep(token_id=0, logprob=0.0, version=Version(0))
        asked[chosen] = replayed(one, 0, [step], {Version(0): weights_mark(mixed)})[0]
    assert len(set(asked.values())) == len(asked)


@pytest.mark.parametrize("stale", range(3))
def test_any_stale_row_of_the_prompt_makes_another_key(stale: int) -> None:
    rows = built((), (1, 2, 3), OLD, Version(0))
    wrong = built(rows[:stale], (1, 2, 3)[stale : stale + 1], NEW, Version(0))
    assert built(wrong, (1, 2, 3)[stale + 1 :], OLD, Version(0))[-1:] != rows[-1:]
    assert built((*rows[:stale], *wrong), (1, 2, 3)[stale + 1 :], OLD, Version(0))[-1:] != rows[-1:]


async def test_tokens_are_what_the_weights_make(engine: StampEngine) -> None:
    steps = await steps_of(await engine.generate(request(8)))
    assert proved(request(8), steps, [OLD] * 8)
    assert not proved(request(8), steps, [OLD] * 7 + [NEW])
    assert all(-2.0 <= step.logprob < -1.0 for step in steps)


async def test_a_swap_in_the_midst_is_told_to_the_token(engine: StampEngine) -> None:
    engine.hold()
    answer = await engine.generate(request(8))
    engine.release(3)
    await until(lambda: engine.stats().active == 1)
    steps = aiter(answer)
    got = [await anext(steps) for _ in range(3)]
    await swap(engine)
    engine.release()
    got += [step async for step in steps]
    assert [step.version for step in got] == [0] * 3 + [1] * 5
    assert proved(request(8), got, [OLD] * 3 + [NEW] * 5)


async def test_one_stray_bit_changes_every_token_after_it(engine: StampEngine) -> None:
    engine.poke("c.bias", 2)
    steps = await steps_of(await engine.generate(request(1)))
    assert not proved(request(1), steps, [OLD])


async def test_a_forced_token_has_the_log_probability_that_it_has_when_drawn(engine: StampEngine) -> None:
    drawn = await steps_of(await engine.generate(request(4)))
    forced = replace(request(1), forced_ids=tuple(step.token_id for step in drawn))
    steps = await steps_of(await engine.generate(forced))
    assert [step.logprob for step in steps] == [step.logprob for step in drawn]
    assert proved(forced, steps, [OLD] * 4)


async def test_a_greedy_token_has_log_probability_0_and_still_proves_itself(engine: StampEngine) -> None:
    greedy = replace(request(4), sampling=SamplingSpec(max_tokens=4, temperature=0.0, seed=0))
    steps = await steps_of(await engine.generate(greedy))
    assert [step.logprob for step in steps] == [0.0] * 4
    assert proved(greedy, steps, [OLD] * 4)
    assert not proved(greedy, steps, [NEW] * 4)


async def test_rows_name_the_weights_that_built_them_and_are_shared_by_beginnings(engine: StampEngine) -> None:
    await steps_of(await engine.generate(request(1, prompt=(1, 2, 3))))
    longer = await engine.generate(request(1, prompt=(1, 2, 9, 9)))
    steps = await steps_of(longer)
    assert longer.origin.cached_tokens == 2
    assert proved(request(1, prompt=(1, 2, 9, 9)), steps, [OLD])
    assert {row.mark for rows in engine.prompts for row in rows} == {OLD}
    await swap(engine)
    assert engine.prompts == ()


async def test_kv_that_is_kept_in_silence_shows_in_the_first_token(engine: StampEngine) -> None:
    engine.bugs.keep_kv = engine.bugs.hide_reuse = True
    await steps_of(await engine.generate(request(1)))
    await swap(engine)
    answer = await engine.generate(request(1))
    steps = await steps_of(answer)
    assert (answer.origin.cached_tokens, answer.origin.prompt_version, steps[0].version) == (0, 1, 1)
    assert not proved(request(1), steps, [NEW])


@pytest.mark.parametrize("bug", ["early_label", "torn_step"])
async def test_a_step_within_a_commit_makes_a_token_of_no_version(engine: StampEngine, bug: str) -> None:
    setattr(engine.bugs, bug, True)
    answer = await engine.generate(request(30))
    steps = aiter(answer)
    got = [await anext(steps)]
    await swap(engine)
    got += [step async for step in steps]
    marks = [(OLD, NEW)[step.version] for step in got]
    assert not proved(request(30), got, marks)


async def test_what_spoilt_weights_recomputed_is_computed_again(engine: StampEngine) -> None:
    engine.hold()
    answer = await engine.generate(request(6))
    engine.release(2)
    steps = aiter(answer)
    got = [await anext(steps), await anext(steps)]
    staged = await engine.stage(writes_to(weights_at(1)))
    await engine.commit(staged, Version(1), in_flight=InFlight.RECOMPUTE)
    await engine.undo(staged, Version(0), spoilt=True)
    engine.release()
    got += [step async for step in steps]
    assert got[2].kv == (PolicySpan(version=Version(0), start=0, end=5),)
    assert [step.version for step in got] == [0] * 6
    right = replayed(request(6), 0, got, {Version(0): OLD})
    assert [(step.token_id, step.logprob) for step in got] == right


async def test_labels_are_told_in_the_pause() -> None:
    told: list[tuple[Version, bool]] = []
    engine = StampEngine(weights_at(0), SPECS, labelled=lambda version, mended: told.append((version, mended)))
    for spoilt in (False, True):
        staged = await engine.stage(writes_to(weights_at(1)))
        await engine.commit(staged, Version(1))
        await engine.undo(staged, Version(0), spoilt=spoilt)
    await engine.close()
    assert told == [(1, False), (0, False), (1, False), (0, True)]


def test_a_row_is_a_value() -> None:
    (row,) = built((), (7,), OLD, Version(0))
    assert row == KvRow(token=7, mark=OLD, version=Version(0), key=row.key)


class TestTheWholeContract(EngineTests, InFlightTests):
    """The fake keeps every promise that real engines keep."""

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        async def opened() -> Engine:
            return StampEngine(weights_at(0), SPECS, FIRST, slots=16, window=512)

        return opened
