"""The official OpenAI client, the embedded engine, and tools: what the model says is forced, so it is known."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from chat_rig import THINKING, TOOLS, tokenizer_with
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from served_rig import Served

from slackwater.api.app import create_app
from slackwater.api.auth import Keys
from slackwater.api.tokens import ChatTokenizer
from slackwater.engine.torch.engine import TorchEngine
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import IM_END, write_tiny_model

KEYS: Final = Keys(inference="inference-key", control="control-key")
HI: Final[list[Any]] = [{"role": "user", "content": "hi"}]
ARGUMENTS: Final = '{"word": "\u00e9\u20ac"}'
CALL: Final = '<tool_call>\n{"name": "look_up", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
SAID: Final = f"It is a word.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return tokenizer_with(folder, THINKING)


@pytest.fixture
async def client(folder: Path, tokenizer: ChatTokenizer) -> AsyncIterator[AsyncOpenAI]:
    engine = await TorchEngine.open(
        folder, version=Version(1), run=RunId("demo"), replica=ReplicaId("r0"), boot=BootId("b0"), window=1024
    )
    app = create_app(Served(engine), tokenizer, KEYS, model_name="tiny")
    async with (
        Loopback(app) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEYS.inference, max_retries=0) as made,
    ):
        yield made
    await engine.close()


def forcing(text: str, **more: Any) -> dict[str, Any]:
    return {"forced_token_ids": [*text.encode(), IM_END], "return_token_ids": True, **more}


async def whole(client: AsyncOpenAI, text: str, **fields: Any) -> ChatCompletion:
    extra = forcing(text, **fields.pop("extra", {}))
    return await client.chat.completions.create(model="tiny", messages=HI, extra_body=extra, **fields)


async def chunks(client: AsyncOpenAI, text: str, **fields: Any) -> list[ChatCompletionChunk]:
    extra = forcing(text, **fields.pop("extra", {}))
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, extra_body=extra, **fields)
    return [chunk async for chunk in stream]


def token_ids(parts: Sequence[Any]) -> list[int]:
    return [token for part in parts for token in (part.model_extra or {})["token_ids"]]


async def test_a_whole_reply_tells_reasoning_content_and_calls_apart(client: AsyncOpenAI) -> None:
    (choice,) = (await whole(client, SAID, tools=TOOLS)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert (choice.message.model_extra or {})["reasoning_content"] == "It is a word."
    calls = choice.message.tool_calls or []
    assert [(call.type, getattr(call, "function").name) for call in calls] == [("function", "look_up")] * 2  # noqa: B009
    assert {getattr(call, "function").arguments for call in calls} == {ARGUMENTS}  # noqa: B009
    assert len({call.id for call in calls}) == 2
    assert token_ids([choice]) == [*SAID.encode(), IM_END]


async def test_a3_12_a_stream_has_the_clients_shapes_and_every_sampled_id(client: AsyncOpenAI) -> None:
    found = [choice for chunk in await chunks(client, SAID, tools=TOOLS, logprobs=True) for choice in chunk.choices]
    assert token_ids(found) == [*SAID.encode(), IM_END]
    assert sum(len(choice.logprobs.content or []) for choice in found if choice.logprobs) == len(SAID.encode()) + 1
    assert [choice.delta.role for choice in found] == ["assistant"] + [None] * (len(found) - 1)
    assert "".join(choice.delta.content or "" for choice in found) == "Let me see."
    thoughts = [(choice.delta.model_extra or {}).get("reasoning_content", "") for choice in found]
    assert "".join(thoughts) == "It is a word."
    calls = [call for choice in found for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 0, 1, 1]
    for opening, rest in (calls[:2], calls[2:]):
        assert opening.function
        assert (opening.type, opening.function.name, opening.function.arguments) == ("function", "look_up", "")
        assert rest.function
        assert (rest.id, rest.type, rest.function.name, rest.function.arguments) == (None, None, None, ARGUMENTS)
    assert len({call.id for call in calls}) == 3
    assert [choice.finish_reason for choice in found if choice.finish_reason] == ["tool_calls"]
    assert found[-1].finish_reason == "tool_calls"


async def test_the_clients_own_accumulator_makes_the_whole_of_a_stream(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="tiny", messages=HI, tools=TOOLS, extra_body=forcing(SAID)
    ) as stream:
        names = [event.name async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    assert names == ["look_up"] * 2
    (choice,) = final.choices
    assert choice.message.content == "Let me see."
    assert [call.function.arguments for call in choice.message.tool_calls or []] == [ARGUMENTS] * 2


async def test_content_is_null_where_only_calls_came(client: AsyncOpenAI) -> None:
    (choice,) = (await whole(client, f"</think>\n\n{CALL}", tools=TOOLS)).choices
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"
    found = await chunks(client, f"</think>\n\n{CALL}", tools=TOOLS)
    assert all(choice.delta.content is None for chunk in found for choice in chunk.choices)


async def test_malformed_calls_and_calls_without_tools_are_content(client: AsyncOpenAI) -> None:
    broken = CALL.replace('"arguments"', "arguments")
    for text, fields in ((broken, {"tools": TOOLS}), (CALL, {}), (CALL, {"tools": TOOLS, "tool_choice": "none"})):
        (choice,) = (await whole(client, f"</think>\n\n{text}", **fields)).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


async def test_an_answer_cut_at_its_limit_says_so_whatever_it_called(client: AsyncOpenAI) -> None:
    text = f"</think>{CALL}"
    for tokens, calls, content in ((len(text.encode()), 1, None), (len(text.encode()) - 1, 0, CALL[:-1])):
        (choice,) = (await whole(client, text + " and more", tools=TOOLS, max_tokens=tokens)).choices
        assert choice.finish_reason == "length"
        assert len(choice.message.tool_calls or []) == calls
        assert choice.message.content == content


async def test_a3_14_a_conversation_with_tools_goes_on_by_ids(client: AsyncOpenAI) -> None:
    first = await whole(client, SAID, tools=TOOLS)
    prior = [*(first.model_extra or {})["prompt_token_ids"], *token_ids(first.choices)]
    call = (first.choices[0].message.tool_calls or [])[0]
    new: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "a coin"}]
    for streamed in (False, True):
        extra = forcing("ok</think>Yes.", prior_token_ids=prior)
        asked = client.chat.completions.create
        if streamed:
            stream = await asked(model="tiny", messages=new, tools=TOOLS, stream=True, extra_body=extra)
            shown = [(chunk.model_extra or {}) async for chunk in stream][0]  # noqa: RUF015
        else:
            reply = await asked(model="tiny", messages=new, tools=TOOLS, extra_body=extra)
            shown = reply.model_extra or {}
            assert reply.choices[0].message.content == "Yes."
        assert shown["prompt_token_ids"][: len(prior)] == prior
        assert len(shown["prompt_token_ids"]) > len(prior)
        assert shown["prior_kept"] == len(prior)


async def test_what_a_reply_says_can_be_sent_back_as_a_message(client: AsyncOpenAI) -> None:
    reply = await whole(client, SAID, tools=TOOLS)
    said = reply.choices[0].message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "a coin"} for call in said["tool_calls"]]
    messages: list[Any] = [*HI, said, *results]
    next_one = await client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, extra_body=forcing("</think>Yes.")
    )
    prompt = bytes(token for token in (next_one.model_extra or {})["prompt_token_ids"] if token < 256)
    assert "\u00e9\u20ac".encode() in prompt
    assert next_one.choices[0].message.content == "Yes."


async def test_what_cannot_be_had_is_the_clients_own_error(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await whole(client, "x", extra={"append": "fork"})
    assert bad.value.param == "append"
    with pytest.raises(openai.BadRequestError) as refused:
        await whole(client, "x", tools=TOOLS, tool_choice="required")
    assert refused.value.param == "tool_choice"
