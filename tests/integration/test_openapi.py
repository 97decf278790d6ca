"""The OpenAPI document against the server: whatever fits it is answered as it says, and so is what doesn't."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings

from slackwater.api.app import create_app
from slackwater.api.auth import INFERENCE_PATHS, Keys
from slackwater.api.openapi import document
from slackwater.api.tokens import ChatTokenizer
from slackwater.testing.completer import TableCompleter
from slackwater.testing.loopback import Loopback
from slackwater.testing.routes import ScriptedRouter
from slackwater.testing.tiny_model import TINY_VOCAB, write_tiny_tokenizer

schemathesis = pytest.importorskip("schemathesis")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

KEYS = Keys(inference="inference-key", control="control-key")
ROWS = [[((token * 31 + position * 17) % 97) / 12 for token in range(TINY_VOCAB)] for position in range(9)]
SHOWN = {
    "max_tokens": 5,
    "n": 2,
    "return_token_ids": True,
    "engine_data": {"raw_logprobs": True, "routed_experts": {"start": 0}},
}
ROUTER = ScriptedRouter()
FORCED = {"dtype": "uint8", "shape": [1, 3, 2], "data": b64encode(ROUTER.rows([1])).decode()}
GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, **SHOWN}
    ],
    "/v1/completions": [
        {"prompt": "hi", "logprobs": 2, **SHOWN},
        {"prompt": [1], "max_tokens": 0, "forced_routes": FORCED},
    ],
    "/v1/score": [
        {
            "items": [
                {"prompt": "hi", "token_ids": [1, 2], "forced_routes": FORCED},
                {"prompt_ids": [1], "token_ids": [3]},
            ]
        }
    ],
    "/v1/tokenize": [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}],
    "/v1/detokenize": [{"tokens": [1, 2]}],
    "/inference/v1/generate": [
        {
            "token_ids": [1],
            "sampling_params": {"logprobs": 2, "max_tokens": 4, "n": 2, "routed_experts_prompt_start": 0},
            "output_mode": mode,
            **shown,
        }
        for mode in ("tokens", "text")
        for shown in ({}, {"engine_data": True, "return_token_ids": True})
    ],
    "/generate": [
        {"text": "hello", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "engine_data": True},
        {
            "input_ids": [[1], [2]],
            "sampling_params": {"max_new_tokens": 3, "stop_token_ids": [4]},
            "return_routed_experts": True,
        },
    ],
}


@pytest.fixture
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    tokenizer = ChatTokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    completer = TableCompleter(ROWS, versions=(4, 4, 5), router=ROUTER)
    async with Loopback(create_app(completer, tokenizer, KEYS, model_name="m")) as server:
        yield server.url
        await asyncio.wait_for(completer.until_active(0), 5)


def operations() -> dict[str, Any]:
    found = [one.ok() for one in schemathesis.openapi.from_dict(document()).get_all_operations()]
    return {operation.path: operation for operation in found}


def checks() -> list[Callable[..., Any]]:
    names = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
    return schemathesis.checks.CHECKS.get_by_names(names)


def answered(url: str, case: Any) -> int:
    """Ask, and hold the reply against the document."""
    reply = case.call(base_url=url, headers={"Authorization": f"Bearer {KEYS.inference}"})
    case.validate_response(reply, checks=checks())
    return reply.status_code


def explore(url: str, operation: Any) -> None:
    mode = schemathesis.GenerationMode.NEGATIVE if operation.body else schemathesis.GenerationMode.POSITIVE
    for kind in {schemathesis.GenerationMode.POSITIVE, mode}:

        @settings(
            max_examples=25,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
        )
        @given(case=operation.as_strategy(generation_mode=kind))
        def hold(case: Any) -> None:
            answered(url, case)

        hold()


@pytest.mark.parametrize("path", sorted(INFERENCE_PATHS - {"/v1/replicas", "/openapi.json"}))
async def test_a8_15_whatever_is_sent_is_answered_as_the_document_says(url: str, path: str) -> None:
    await asyncio.to_thread(explore, url, operations()[path])


async def test_good_requests_are_answered_as_the_document_says(url: str) -> None:
    known = operations()
    for path, bodies in GOOD.items():
        for body in bodies:
            case = known[path].Case(body=body, media_type="application/json")
            assert await asyncio.to_thread(answered, url, case) == 200, path


STREAMED = {path: bodies[0] for path, bodies in GOOD.items() if "completions" in path or path.endswith("/generate")}


@pytest.mark.parametrize("path", STREAMED)
async def test_every_event_is_as_the_document_says(url: str, path: str) -> None:
    told = document()
    content = told["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    (_, event) = content["itemSchema"]["properties"]["data"]["anyOf"]
    fits = jsonschema_rs.validator_for({**event["contentSchema"], "components": told["components"]})
    headers = {"Authorization": f"Bearer {KEYS.inference}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url + path, json={**STREAMED[path], "stream": True}) as reply,
    ):
        *events, done, rest = (await reply.read()).decode().split("\n\n")
    assert (reply.status, done, rest) == (200, "data: [DONE]", "")
    for one in events:
        fits.validate(json.loads(one.removeprefix("data: ")))
    assert not fits.is_valid({"no": "event"})
