import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from replica_rig import SPECS, request, until, weights_at

from slackwater.checkpoint.tensor import Tile, TileWrite, tiles
from slackwater.engine.base import Engine
from slackwater.errors import InvalidInputError, NotFoundError, PolicyUnmetError, SwapError, UnavailableError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish
from slackwater.rollout.request import PolicyConstraint
from slackwater.testing.conformance_engine import FIRST, EngineTests, OpenEngine
from slackwater.testing.conformance_in_flight import InFlightTests
from slackwater.testing.engine import TableEngine, stamp_tokens, weights_stamp


@pytest.fixture
async def engine() -> AsyncIterator[TableEngine]:
    made = TableEngine(weights_at(0), SPECS, Version(0), slots=2, window=16)
    yield made
    await made.close()


def writes_to(step: int) -> list[TileWrite]:
    new = weights_at(step)
    return [
        TileWrite(name=name, tile=tile, positions=None, values=tile.take(new[name]))
        for name, spec in SPECS.items()
        for tile in tiles(spec)
    ]


async def test_tokens_are_the_stamps_of_the_weights(engine: TableEngine) -> None:
    answer = await engine.generate(request(5))
    tokens = [step.token_id async for step in answer]
    assert tokens == stamp_tokens((1, 2, 3), [weights_stamp(weights_at(0))] * 5)
    assert answer.origin.prompt_version == 0
    assert answer.finish is Finish.LENGTH


async def test_a_stray_bit_changes_the_tokens(engine: TableEngine) -> None:
    engine.poke("c.bias", 2)
    answer = await engine.generate(request(5))
    tokens = [step.token_id async for step in answer]
    assert tokens != stamp_tokens((1, 2, 3), [weights_stamp(weights_at(0))] * 5)


async def test_commit_and_undo_are_bit_exact(engine: TableEngine) -> None:
    staged = await engine.stage(writes_to(1))
    report = await engine.commit(staged, Version(1))
    assert engine.stamp == weights_stamp(weights_at(1))
    assert (engine.stats().version, report.bytes_written) == (1, sum(bits.nbytes for bits in weights_at(1).values()))
    await engine.undo(staged, Version(0))
    assert engine.stamp == weights_stamp(weights_at(0))
    with pytest.raises(SwapError):
        await engine.undo(staged, Version(0))


@pytest.mark.parametrize("write", range(4))
async def test_f33_a_commit_that_raises_at_any_write_puts_everything_back(engine: TableEngine, write: int) -> None:
    staged = await engine.stage(writes_to(1))
    engine.faults.commit_at_write = write
    with pytest.raises(SwapError):
        await engine.commit(staged, Version(1))
    assert engine.stamp == weights_stamp(weights_at(0))
    assert engine.stats().version == 0


async def test_a_cancelled_commit_never_happens_later(engine: TableEngine) -> None:
    staged = await engine.stage(writes_to(1))
    engine.faults.stall = True
    committing = asyncio.create_task(engine.commit(staged, Version(1)))
    await asyncio.sleep(0)
    committing.cancel()
    await asyncio.gather(committing, return_exceptions=True)
    engine.faults.stall = False
    engine.release()
    answer = await engine.generate(request(2))
    assert [step.version async for step in answer] == [0, 0]


async def test_more_answers_than_slots_wait_in_order(engine: TableEngine) -> None:
    engine.hold()
    answers = [await engine.generate(request(1, prompt=(n,))) for n in range(1, 5)]
    assert (engine.stats().active, engine.stats().waiting) == (2, 2)
    engine.release(1)
    await until(lambda: engine.stats().active + engine.stats().waiting == 2)
    assert [answer.finish for answer in answers] == [Finish.LENGTH, Finish.LENGTH, None, None]


async def test_an_abort_keeps_the_tokens_and_frees_the_slot(engine: TableEngine) -> None:
    engine.hold()
    answer = await engine.generate(request(9))
    engine.release(2)
    steps = aiter(answer)
    got = [await anext(steps), await anext(steps)]
    await answer.aclose()
    await answer.aclose()
    assert len(got) == 2
    assert [step async for step in steps] == []
    assert answer.finish is Finish.ABORT
    assert engine.stats().active == 0


async def test_a_policy_that_is_not_held_is_refused_before_any_token(engine: TableEngine) -> None:
    answer = await engine.generate(request(2, policy=PolicyConstraint(min_version=Version(3))))
    with pytest.raises(PolicyUnmetError) as refusal:
        _ = [step async for step in answer]
    assert refusal.value.versions == (0,)


async def test_bounds_are_checked_and_the_window_cuts(engine: TableEngine) -> None:
    answer = await engine.generate(request(500))
    assert len([step async for step in answer]) == 13
    with pytest.raises(InvalidInputError):
        await engine.generate(request(1, prompt=tuple(range(16))))
    with pytest.raises(InvalidInputError):
        await engine.generate(request(1, prompt=(1000,)))


async def test_writes_that_do_not_fit_are_not_staged(engine: TableEngine) -> None:
    write = writes_to(1)[0]
    with pytest.raises(NotFoundError):
        await engine.stage([TileWrite(name="zz", tile=write.tile, positions=None, values=write.values)])
    with pytest.raises(InvalidInputError):
        await engine.stage([TileWrite(name=write.name, tile=write.tile, positions=None, values=write.values[1:])])
    with pytest.raises(NotFoundError):
        engine.read("zz", Tile(index=0, start=0, cols=1))


async def test_reads_are_views_that_cannot_be_written(engine: TableEngine) -> None:
    view = engine.read("b.weight", Tile(index=0, start=2, cols=3))
    assert np.array_equal(view, weights_at(0)["b.weight"][2:5])
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


async def test_a_closed_engine_ends_its_answers_and_refuses(engine: TableEngine) -> None:
    engine.hold()
    answer = await engine.generate(request(3))
    await engine.close()
    assert [step async for step in answer] == []
    with pytest.raises(UnavailableError):
        await engine.generate(request(1))


class TestTheWholeContract(EngineTests, InFlightTests):
    """The fake keeps every promise that real engines keep."""

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        async def opened() -> Engine:
            return TableEngine(weights_at(0), SPECS, FIRST, slots=16, window=512)

        return opened
