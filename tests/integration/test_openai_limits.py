"""The official OpenAI client and a full server: it is told why, and its own retries succeed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from load_rig import IDS, KEYS, PLACES, TEXT, Busy, Counted, Told, busy
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types import Completion
from replica_rig import until

from slackwater.testing.tiny_model import write_tiny_tokenizer

HI: Final[list[Any]] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[Busy]:
    """Every place is taken until its engine is released."""
    tokenizer = Counted(write_tiny_tokenizer(tmp_path / "tokenizer"))
    async with busy(tmp_path, tokenizer) as opened:
        opened.engine.hold()
        holders = [asyncio.create_task(opened.post(TEXT, IDS)) for _ in range(PLACES)]
        await until(lambda: opened.load == PLACES)
        yield opened
        opened.engine.release()
        assert {reply.status for reply in await asyncio.gather(*holders)} == {200}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_server_is_an_error_of_the_clients_own_with_its_wait(full: Busy, *, stream: bool) -> None:
    async with AsyncOpenAI(base_url=f"{full.url}/v1", api_key=KEYS.inference, max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="m", messages=HI, stream=stream)
    assert (refused.value.status_code, refused.value.code) == (503, "overloaded")
    assert refused.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_retries_succeed_once_there_is_a_place(full: Busy, *, stream: bool) -> None:
    statuses: list[int] = []

    async def note(response: Any) -> None:
        statuses.append(response.status_code)
        full.engine.release()
        await until(lambda: full.load == 0)

    http = DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    async with AsyncOpenAI(base_url=f"{full.url}/v1", api_key=KEYS.inference, http_client=http) as client:
        reply = await client.completions.create(model="m", prompt=[1, 2, 3], seed=5, max_tokens=3, stream=stream)
        parts = [reply] if isinstance(reply, Completion) else [part async for part in reply]
    assert statuses == [503, 200]
    undisturbed: Told = await full.post(TEXT, IDS)
    assert "".join(part.choices[0].text for part in parts) == undisturbed.json()["choices"][0]["text"]
