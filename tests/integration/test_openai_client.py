"""The official OpenAI client against the API on a real socket."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from slackwater.api.app import create_app
from slackwater.api.auth import Keys
from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import PolicyUnmetError, ReplicaLostError
from slackwater.rollout.evidence import Finish
from slackwater.testing.completer import TableCompleter
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import IM_END, TINY_VOCAB, write_tiny_tokenizer

KEYS = Keys(inference="inference-key", control="control-key")
MODEL = "tiny"
TEXT = "Hi \U0001f60a, ok. Bye"
"""What the completer says at temperature 0, one byte a token, until it says the end token."""


def rows_for(text: str) -> list[list[float]]:
    ids = [*text.encode(), IM_END]
    return [[8.0 if token == chosen else token / TINY_VOCAB for token in range(TINY_VOCAB)] for chosen in ids]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def completer() -> TableCompleter:
    return TableCompleter(rows_for(TEXT), end_token=IM_END)


@pytest.fixture
async def server(completer: TableCompleter, tokenizer: ChatTokenizer) -> AsyncIterator[Loopback]:
    async with Loopback(create_app(completer, tokenizer, KEYS, model_name=MODEL)) as loopback:
        yield loopback


@pytest.fixture
async def client(server: Loopback) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEYS.inference, max_retries=0) as made:
        yield made


async def test_a_whole_chat_reply(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], temperature=0
    )
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.content == TEXT
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(TEXT.encode()) + 1


async def test_a_stream_joins_to_the_whole_and_ends_with_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(parts) == TEXT
    assert all("\ufffd" not in part for part in parts)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_a3_18_logprobs_carry_true_bytes(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        temperature=0.5,
        seed=3,
        logprobs=True,
        top_logprobs=3,
    )
    shown = reply.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    raw = [byte for entry in shown.content[:-1] for byte in entry.bytes or []]
    assert bytes(raw).decode("utf-8", "replace") == reply.choices[0].message.content
    for entry in shown.content:
        values = [other.logprob for other in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len({bytes(other.bytes or []) for other in entry.top_logprobs}) == 3


async def test_n_choices_have_their_own_seeds(client: AsyncOpenAI, completer: TableCompleter) -> None:
    reply = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], n=3, seed=5
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert sorted(request.sampling.seed or 0 for request in completer.requests) == [5, 6, 7]


async def test_stop_strings_cut_text_and_free_the_answer(client: AsyncOpenAI, completer: TableCompleter) -> None:
    reply = await client.completions.create(model=MODEL, prompt="hello", temperature=0, stop=[", ok", "zzz"])
    assert reply.choices[0].text == "Hi \U0001f60a"
    assert reply.choices[0].finish_reason == "stop"
    assert completer.active == 0


async def test_prompts_may_be_ids(client: AsyncOpenAI, completer: TableCompleter) -> None:
    reply = await client.completions.create(model=MODEL, prompt=[1, 2, 3], temperature=0, logprobs=2)
    assert completer.requests[0].prompt_ids == (1, 2, 3)
    shown = reply.choices[0].logprobs
    assert shown is not None
    assert len(shown.tokens or []) == len(shown.token_logprobs or []) == len(shown.text_offset or [])


async def test_errors_are_the_clients_own_classes(server: Loopback, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="suffix"):
        await client.completions.create(model=MODEL, prompt="x", suffix="y")
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.PermissionDeniedError):
        await client.with_options(api_key=KEYS.control).models.list()
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert server.url in str(client.base_url)


async def test_an_unmet_policy_is_a_retryable_conflict_with_versions(client: AsyncOpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.ConflictError) as conflict:
            await client.completions.create(
                model=MODEL, prompt="x", stream=stream, extra_body={"policy": {"min_version": 9}}
            )
        assert conflict.value.response.headers["retry-after"] == "1"
        body = conflict.value.body
        assert isinstance(body, dict)
        assert body["versions"] == [7]
        assert body["code"] == PolicyUnmetError.kind


async def test_an_error_within_a_stream_reaches_the_client(client: AsyncOpenAI, completer: TableCompleter) -> None:
    completer.fail_after(4, ReplicaLostError("the replica is gone"))
    stream = await client.completions.create(model=MODEL, prompt="x", temperature=0, stream=True)
    shown: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            shown.extend(choice.text for choice in chunk.choices)

    with pytest.raises(openai.APIError, match="the replica is gone"):
        await read()
    assert "".join(shown) == "Hi "
    assert completer.active == 0


async def test_a5_03_an_abort_is_the_last_events_finish(client: AsyncOpenAI, completer: TableCompleter) -> None:
    completer.hold(position=2)
    stream = await client.completions.create(model=MODEL, prompt="x", temperature=0, stream=True)
    reasons: list[str | None] = []
    async for chunk in stream:
        completer.abort_all()
        completer.release()
        reasons.extend(choice.finish_reason for choice in chunk.choices)
    assert reasons[-1] == "abort"


async def abort(client: AsyncOpenAI, name: str) -> object:
    return await client.post("/abort", body={"request_id": name}, cast_to=object)


async def test_a5_01_an_aborted_request_is_a_partial_rollout(client: AsyncOpenAI, completer: TableCompleter) -> None:
    completer.hold(position=2)
    ask = asyncio.create_task(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            temperature=0,
            logprobs=True,
            n=2,
            extra_body={"request_id": "job1", "return_token_ids": True},
        )
    )
    await completer.until_waiting(2)
    assert await abort(client, "job1") == {"request_id": "job1", "aborted": 2}
    reply = await ask
    assert reply.id == "chatcmpl-job1"
    for choice in reply.choices:
        assert (choice.message.content, str(choice.finish_reason)) == ("Hi", "abort")
        assert choice.logprobs is not None
        assert [entry.token for entry in choice.logprobs.content or []] == ["H", "i"]
        assert (choice.model_extra or {})["token_ids"] == list(b"Hi")
    with pytest.raises(openai.NotFoundError):
        await abort(client, "job1")


async def test_a5_03_an_aborted_stream_ends_as_any_other(client: AsyncOpenAI, completer: TableCompleter) -> None:
    completer.hold(position=2)
    stream = await client.completions.create(
        model=MODEL, prompt="x", temperature=0, stream=True, extra_body={"request_id": "job1"}
    )
    await completer.until_waiting(1)
    with pytest.raises(openai.ConflictError) as conflict:
        await client.completions.create(model=MODEL, prompt="x", extra_body={"request_id": "job1"})
    assert conflict.value.param == "request_id"
    with pytest.raises(openai.BadRequestError):
        await abort(client, "")
    assert await abort(client, "job1") == {"request_id": "job1", "aborted": 1}
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {"cmpl-job1"}
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hi"
    assert [str(choice.finish_reason) for chunk in chunks for choice in chunk.choices][-1] == "abort"


async def test_an_answer_that_an_exchange_ended_is_a_partial_rollout(
    client: AsyncOpenAI, completer: TableCompleter
) -> None:
    completer.cut_after(2, Finish.SWAPPED)
    reply = await client.completions.create(
        model=MODEL, prompt="x", temperature=0, extra_body={"policy": {"kv": "any"}, "engine_data": True}
    )
    assert (reply.choices[0].text, str(reply.choices[0].finish_reason)) == ("Hi", "abort")
    assert (reply.choices[0].model_extra or {})["engine_data"]["finish"] == "swapped"
    assert completer.requests[0].policy.any_kv


@pytest.mark.parametrize("streamed", [True, False])
async def test_a5_05_clients_that_leave_free_their_answers(
    client: AsyncOpenAI, completer: TableCompleter, *, streamed: bool
) -> None:
    completer.hold()

    async def ask() -> None:
        await client.completions.create(model=MODEL, prompt="x", n=2, stream=streamed)

    asks = [asyncio.create_task(ask()) for _ in range(10)]
    await completer.until_active(20)
    for task in asks:
        task.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    await asyncio.wait_for(completer.until_active(0), 2)


async def test_a5_05_leaving_in_mid_stream_frees_the_answer(client: AsyncOpenAI, completer: TableCompleter) -> None:
    completer.hold(position=1)
    stream = await client.completions.create(
        model=MODEL, prompt="x", stream=True, extra_body={"return_token_ids": True}
    )
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(completer.until_active(0), 2)
