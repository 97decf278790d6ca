"""Answers that one task closes while another reads them: of both engines, and as a replica gives them on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from replica_rig import Rig, request

from slackwater.engine.torch.engine import TorchEngine
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Finish, TokenStep
from slackwater.testing.tiny_model import write_tiny_model


class Reader:
    """Reads an answer in a task of its own."""

    def __init__(self, answer: Answer) -> None:
        self.steps: list[TokenStep] = []
        self._answer = answer
        self._came = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def has(self, tokens: int) -> None:
        async with self._came:
            await self._came.wait_for(lambda: len(self.steps) >= tokens)

    async def end(self) -> list[TokenStep]:
        await asyncio.wait_for(self._task, 5)
        return self.steps

    async def _read(self) -> None:
        async for step in self._answer:
            async with self._came:
                self.steps.append(step)
                self._came.notify_all()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = await Rig(tmp_path).start()
    yield made
    await made.close()


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a5_01_a_replicas_answer_ends_with_the_tokens_so_far(rig: Rig, tokens: int) -> None:
    whole = Reader(await rig.replica.complete(request(max_tokens=20)))
    expected = await whole.end()
    rig.engine.hold()
    answer = await rig.replica.complete(request(max_tokens=20))
    reader = Reader(answer)
    if tokens:
        rig.engine.release(tokens)
    await asyncio.wait_for(reader.has(tokens), 5)
    await answer.aclose()
    assert (await reader.end(), answer.finish) == (expected[:tokens], Finish.ABORT)
    rig.engine.release()
    assert rig.replica.status().in_flight == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.mark.parametrize("tokens", [0, 1, 30])
async def test_a5_01_the_embedded_engines_answer_ends_with_the_tokens_so_far(folder: Path, tokens: int) -> None:
    engine = await TorchEngine.open(
        folder, version=Version(0), run=RunId("demo"), replica=ReplicaId("r0"), boot=BootId("b0"), window=512
    )
    try:
        asked = request(max_tokens=400, prompt=tuple(range(1, 40)))
        expected = await Reader(await engine.generate(asked)).end()
        answer = await engine.generate(asked)
        reader = Reader(answer)
        await asyncio.wait_for(reader.has(tokens), 20)
        await answer.aclose()
        steps = await reader.end()
        assert tokens <= len(steps) < len(expected)
        assert [(step.token_id, step.logprob) for step in steps] == [
            (step.token_id, step.logprob) for step in expected[: len(steps)]
        ]
        assert answer.finish is Finish.ABORT
    finally:
        await engine.close()
