"""What the API tells of itself and of texts: tokenize, detokenize, capabilities and the OpenAPI document."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from abort_rig import KEYS, Site, site

from slackwater.api import asking, conversation, schema
from slackwater.api.auth import INFERENCE_PATHS
from slackwater.api.openapi import document
from slackwater.api.tokens import ChatTokenizer
from slackwater.rollout.request import SamplingSpec
from slackwater.testing.tiny_model import IM_END, TINY_VOCAB, write_tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(params=[False, True], ids=["replica", "gateway"])
async def at(request: pytest.FixtureRequest, tokenizer: ChatTokenizer) -> AsyncIterator[Site]:
    async with site(tokenizer, gateway=request.param) as opened:
        if opened.router is not None:
            await opened.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        yield opened


async def get(at: Site, path: str) -> tuple[int, Any]:
    async with at.session.get(path) as reply:
        return reply.status, await reply.json()


async def test_the_ids_are_those_that_a_completion_has(at: Site) -> None:
    for path, body in (("/v1/completions", {"prompt": "hello é"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        _, reply = await at.post(path, {**body, "max_tokens": 1, "return_token_ids": True})
        status, told = await at.post("/v1/tokenize", {**body, "model": "m"})
        assert (status, told["tokens"]) == (200, reply["prompt_token_ids"])
        assert (told["count"], told["max_model_len"], told["token_strs"]) == (len(told["tokens"]), 256, None)


async def test_text_goes_to_ids_and_back_with_all_its_special_tokens(at: Site) -> None:
    for text in ("", "hello é 😊", "a<|im_end|>b"):
        _, told = await at.post("/v1/tokenize", {"prompt": text, "return_token_strs": True})
        assert len(told["token_strs"]) == told["count"]
        assert await at.post("/v1/detokenize", {"tokens": told["tokens"]}) == (200, {"prompt": text})
    assert (await at.post("/v1/tokenize", {"prompt": "<|im_end|>"}))[1]["tokens"] == [IM_END]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/tokenize", {"prompt": "x" * 5_000}, "context_length_exceeded"),
        ("/v1/tokenize", {"prompt": [1]}, "invalid_input"),
        ("/v1/tokenize", {}, "invalid_input"),
        ("/v1/tokenize", {"prompt": "x", "model": "other"}, "not_found"),
        ("/v1/tokenize", {"prompt": "x", "truncate": 3}, "unsupported"),
        ("/v1/tokenize", {"messages": []}, "invalid_input"),
        ("/v1/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "invalid_input"),
        ("/v1/tokenize", {"messages": MESSAGES, "best_of": 2}, "unsupported"),
        ("/v1/detokenize", {"tokens": [TINY_VOCAB]}, "invalid_input"),
        ("/v1/detokenize", {"tokens": [-1]}, "invalid_input"),
        ("/v1/detokenize", {"tokens": [1] * 257}, "context_length_exceeded"),
        ("/v1/detokenize", {"tokens": "x"}, "invalid_input"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a8_11_what_cannot_be_is_refused(at: Site, path: str, body: dict[str, object], code: str) -> None:
    status, reply = await at.post(path, body)
    assert (status, reply["error"]["code"]) == (404 if code == "not_found" else 400, code)


async def test_every_bound_is_told_by_its_name(at: Site) -> None:
    status, told = await get(at, "/v1/capabilities")
    assert (status, told["model"], told["window"], told["vocabulary"]) == (200, "m", 256, TINY_VOCAB)
    for module in (asking, schema, conversation):
        bounds = {name.lower(): value for name, value in vars(module).items() if name.startswith(("MAX_", "DEFAULT_"))}
        assert bounds.items() <= told["limits"].items()
    limits, prompt = told["limits"], {"prompt": [1], "max_tokens": 1}
    for field, bound in (("n", "max_choices"), ("top_k", "max_top_k"), ("logprobs", "max_top_logprobs")):
        assert (await at.post("/v1/completions", {**prompt, field: limits[bound]}))[0] == 200
        assert (await at.post("/v1/completions", {**prompt, field: limits[bound] + 1}))[0] == 400


async def test_what_a_server_has_and_takes_on_is_told(at: Site) -> None:
    _, told = await get(at, "/v1/capabilities")
    assert set(told["routes"]) == INFERENCE_PATHS - (set() if at.router else {"/v1/replicas"})
    assert {"places", "slots", "max_waiting", "max_request_id", "max_seed", "max_line_bytes"} <= set(told["limits"])
    assert not {"extra_args", "allowed_token_ids", "logits_processors"} & set(told["vllm_sampling_params"])


async def test_fields_that_are_told_are_taken_and_others_refused(at: Site) -> None:
    _, told = await get(at, "/v1/capabilities")
    assert set(told["sampling"]) == set(SamplingSpec.__slots__)
    assert {"temperature", "tools", "policy"} <= set(told["completions"])
    assert {"response_format", "structured_outputs", "guided_json"} <= set(told["completions"])
    assert "best_of" not in told["completions"]
    assert {"token_ids", "logprobs", "policy", "kv"} <= set(told["evidence"])
    for path, names in (("/inference/v1/generate", "vllm_sampling_params"), ("/generate", "sglang_sampling_params")):
        prompt = {"token_ids": [1]} if path.startswith("/inference") else {"input_ids": [1]}
        for name in ("bad_words_of_theirs", "no_such", *told[names]):
            _, reply = await at.post(path, {**prompt, "sampling_params": {name: None if name in told[names] else "x"}})
            assert ("error" in reply) is (name not in told[names])


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield str(inner)
            yield from references(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from references(inner)


async def test_the_document_has_every_route_and_every_type(at: Site) -> None:
    status, told = await get(at, "/openapi.json")
    assert (status, told["openapi"][:4]) == (200, "3.2.")
    assert set(told["paths"]) == INFERENCE_PATHS - {"/v1/replicas", "/openapi.json"}
    known = {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}
    assert set(references(told)) <= known
    assert known >= {f"#/components/schemas/{name}" for name in ("ChatBody", "SglangBody", "EngineData", "Envelope")}
    for path, methods in told["paths"].items():
        for method in methods:
            async with at.session.request(method, path, data=b"{}") as reply:
                assert reply.status not in (404, 405), path


def test_the_document_is_made_anew_and_equal() -> None:
    assert document() == document()
    assert KEYS.inference not in str(document())


async def test_a8_01_every_route_is_shut_without_the_inference_key(at: Site) -> None:
    for path in INFERENCE_PATHS:
        for key, expected in (("", 401), ("x", 401), (KEYS.control, 403)):
            async with at.session.post(path, data=b"{}", headers={"Authorization": f"Bearer {key}"}) as reply:
                assert (path, reply.status) == (path, expected)
                assert (await reply.json())["error"]["type"] == "auth"
