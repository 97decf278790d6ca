"""The official OpenAI client, the embedded engine, and ``response_format``: what comes parses."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel
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
TERSE: Final[dict[str, int]] = {**{str(blank): -100 for blank in b" \n\r\t"}, str(IM_END): 20}


class Tide(BaseModel):
    """What is asked for."""

    kind: Literal["ebb", "flood"]
    rising: bool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[AsyncOpenAI]:
    engine = await TorchEngine.open(
        folder, version=Version(1), run=RunId("demo"), replica=ReplicaId("r0"), boot=BootId("b0"), window=512
    )
    app = create_app(Served(engine), ChatTokenizer(folder), KEYS, model_name="tiny")
    async with (
        Loopback(app) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEYS.inference, max_retries=0) as made,
    ):
        yield made
    await engine.close()


async def test_parsed_answers_are_of_their_class(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.parse(
        model="tiny", messages=HI, response_format=Tide, n=4, seed=1, logit_bias=TERSE, max_tokens=200
    )
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 4
    assert all(isinstance(choice.message.parsed, Tide) for choice in reply.choices)


async def test_a_stream_joins_to_what_its_choice_admits(client: AsyncOpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["slack water", "{ebb}", "é€"]}}
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, seed=1, extra_body=extra)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text in ("slack water", "{ebb}", "é€")


async def test_json_objects_are_objects(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        model="tiny", messages=HI, response_format={"type": "json_object"}, seed=2, temperature=0.5,
        logit_bias={**TERSE, str(ord("}")): 100, str(ord('"')): 20}, max_tokens=300,
    )  # fmt: skip
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cant_be_followed_is_400_and_the_next_request_is_answered(
    client: AsyncOpenAI, *, stream: bool
) -> None:
    for schema in ({"not": {}}, {"$ref": "https://example.com/x"}, {"type": "integer", "multipleOf": 99_999_999}):
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=HI, response_format=form, stream=stream)
        assert (refused.value.code, refused.value.param) == ("invalid_input", "grammar")
    assert (await client.chat.completions.create(model="tiny", messages=HI, max_tokens=1)).usage


async def test_vllms_and_sglangs_routes_take_their_own_names(client: AsyncOpenAI) -> None:
    url = str(client.base_url).removesuffix("v1/")
    theirs: dict[str, Any] = {
        "token_ids": [1], "output_mode": "text", "sampling_params": {"structured_outputs": {"regex": "(ab){2}"}}
    }  # fmt: skip
    reply: Any = await client.post(f"{url}inference/v1/generate", body=theirs, cast_to=object)
    assert reply["choices"][0]["text"] == "abab"
    native: dict[str, Any] = {"input_ids": [1], "sampling_params": {"regex": "(ab){2}"}}
    reply = await client.post(f"{url}generate", body=native, cast_to=object)
    assert (reply["text"], reply["meta_info"]["finish_reason"]["matched"]) == ("abab", IM_END)
