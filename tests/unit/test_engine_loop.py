"""The engine around the core: a loop that dies, callers that give up, an event loop that goes away."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slackwater.engine.torch.engine import TorchEngine
from slackwater.engine.torch.weights import StagedWrites
from slackwater.errors import InvalidInputError, SwapError, UnavailableError
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.testing.conformance_engine import LONG, answered, first_token, flips, request
from slackwater.testing.tiny_model import write_tiny_model

V7, V8 = Version(7), Version(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


async def opened(folder: Path, *, window: int | None = 512) -> TorchEngine:
    return await TorchEngine.open(
        folder, version=V7, run=RunId("demo"), replica=ReplicaId("r0"), boot=BootId("b0"), slots=4, window=window
    )


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TorchEngine]:
    engine = await opened(folder)
    yield engine
    await engine.close()


async def held(engine: TorchEngine) -> threading.Event:
    """Park the engine's thread between two steps until the event is set."""
    parked, gate = threading.Event(), threading.Event()

    def wait() -> None:
        parked.set()
        gate.wait()

    engine._loop.between_steps(wait)
    await asyncio.to_thread(parked.wait)
    return gate


async def test_the_origin_names_replica_boot_run_and_seed(engine: TorchEngine) -> None:
    origin = (await answered(engine, request(seed=42))).origin
    assert (origin.replica, origin.boot, origin.run, origin.seed) == ("r0", "b0", "demo", 42)
    assert (origin.cached_tokens, origin.prompt_version) == (0, V7)


async def test_a_dead_loop_fails_every_answer_and_says_so(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> None:
        raise ZeroDivisionError("injected")

    gate = await held(engine)
    answers = [await engine.generate(request(max_tokens=LONG)) for _ in range(6)]
    assert engine._core is not None
    monkeypatch.setattr(engine._core, "step", explode)
    gate.set()
    for answer in answers:
        with pytest.raises(UnavailableError, match="injected"):
            await first_token(answer)
        await answer.aclose()
    with pytest.raises(UnavailableError, match="its loop died"):
        await engine.generate(request())
    with pytest.raises(UnavailableError):
        await engine.abort_all()
    assert "injected" in engine.stats().failure
    assert engine.describe().window == 512


async def test_what_was_asked_for_as_the_loop_died_is_refused(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = await engine.stage(flips(engine))
    gate = await held(engine)
    assert isinstance(staged, StagedWrites)

    def explode(_: Version) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(engine._core, "relabel", explode)
    first, second = asyncio.create_task(engine.commit(staged, V8)), asyncio.create_task(engine.abort_all())
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(UnavailableError):
        await first
    with pytest.raises(UnavailableError):
        await second


async def test_a_commit_cancelled_before_its_turn_never_happens(engine: TorchEngine) -> None:
    staged = await engine.stage(flips(engine))
    gate = await held(engine)
    commit = asyncio.create_task(engine.commit(staged, V8))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    gate.set()
    assert await engine.abort_all() == 0
    assert engine.stats().version == V7
    await engine.commit(staged, V8)
    assert engine.stats().version == V8


async def test_a_commit_reports_who_went_on_across_it(engine: TorchEngine) -> None:
    answers = [await engine.generate(request(max_tokens=LONG, seed=seed)) for seed in range(3)]
    for answer in answers:
        await first_token(answer)
    report = await engine.commit(await engine.stage(flips(engine)), V8)
    assert report.in_flight == 3
    assert 0.0 < report.pause_s < 5.0
    for answer in answers:
        await answer.aclose()


async def test_writes_of_another_engine_are_refused(engine: TorchEngine) -> None:
    class Foreign:
        num_bytes = 0

    with pytest.raises(SwapError, match="another engine"):
        await engine.commit(Foreign(), V8)


async def test_closing_ends_the_thread_and_frees_the_weights(folder: Path) -> None:
    engine = await opened(folder)
    await engine.close()
    assert not engine._loop._thread.is_alive()
    with pytest.raises(UnavailableError, match="closed"):
        engine.tensors()
    assert engine.stats().version == V7


def test_a_forgotten_engine_ends_with_its_event_loop(folder: Path) -> None:
    async def forget() -> TorchEngine:
        engine = await opened(folder)
        await first_token(await engine.generate(request(max_tokens=LONG)))
        return engine

    engine = asyncio.run(forget())
    engine._loop.join()


@pytest.mark.parametrize("window", [1, 1025])
async def test_a_window_that_the_model_lacks_is_refused(folder: Path, window: int) -> None:
    with pytest.raises(InvalidInputError, match="window"):
        await opened(folder, window=window)
