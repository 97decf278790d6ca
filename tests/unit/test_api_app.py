"""The API's routes on a real socket: keys, limits, and evidence that covers exactly the sampled tokens."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.app import create_app
from slackwater.api.arrays import Array
from slackwater.api.auth import INFERENCE_PATHS, Keys
from slackwater.api.respond import read_body
from slackwater.api.tokens import ChatTokenizer
from slackwater.config.process import GatewaySettings, ReplicaSettings
from slackwater.errors import InvalidInputError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish, PolicySpan
from slackwater.testing.completer import TableCompleter
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import IM_END, TINY_VOCAB, write_tiny_tokenizer

KEYS = Keys(inference="inference-key", control="control-key")
ROWS = [[((token * 31 + position * 17) % 97) / 12 for token in range(TINY_VOCAB)] for position in range(9)]


async def control(request: Request) -> Response:
    return Response(await read_body(request, 10))


async def broken(request: Request) -> Response:
    raise RuntimeError(str(request.url))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def completer() -> TableCompleter:
    return TableCompleter(ROWS, end_token=IM_END, versions=(4, 4, 4, 5))


@pytest.fixture
async def session(completer: TableCompleter, tokenizer: ChatTokenizer) -> AsyncIterator[aiohttp.ClientSession]:
    routes = [
        Route("/control/v1/target", control, methods=["POST"]),
        Route("/v1/hot-loads", control, methods=["POST"]),
        Route("/control/v1/broken", broken),
    ]
    app = create_app(completer, tokenizer, KEYS, model_name="m", extra_routes=routes)
    async with Loopback(app) as server, aiohttp.ClientSession(server.url) as opened:
        yield opened


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def post(session: aiohttp.ClientSession, path: str, body: object) -> tuple[int, Any]:
    data = io.BytesIO(json.dumps(body).encode())
    async with session.post(path, data=data, headers=bearer(KEYS.inference)) as reply:
        return reply.status, json.loads(await reply.read(), parse_constant=pytest.fail)


async def events(session: aiohttp.ClientSession, path: str, body: dict[str, object]) -> list[Any]:
    async with session.post(path, json={**body, "stream": True}, headers=bearer(KEYS.inference)) as reply:
        assert reply.content_type == "text/event-stream"
        text = (await reply.read()).decode()
    *data, done, rest = [part.removeprefix("data: ") for part in text.split("\n\n")]
    assert (done, rest) == ("[DONE]", "")
    return [json.loads(part, parse_constant=pytest.fail) for part in data]


async def test_a8_01_every_path_is_shut_without_its_key(session: aiohttp.ClientSession) -> None:
    inference = ["/v1/chat/completions", "/v1/completions", "/v1/generate", "/v1/abort", "/v1/models"]
    controls = ["/control/v1/target", "/v1/hot-loads", "/no/such", "/v1/models/", "/", "/health/x"]
    for path in [*inference, *controls]:
        right, wrong = (KEYS.inference, KEYS.control) if path in inference else (KEYS.control, KEYS.inference)
        for headers, expected in (
            ({}, 401),
            (bearer(""), 401),
            (bearer("x"), 401),
            ({"Authorization": right}, 401),
            (bearer(wrong), 403),
        ):
            async with session.post(path, data=b"{}", headers=headers) as reply:
                assert (path, reply.status) == (path, expected)
                assert (await reply.json())["error"]["type"] == "auth"
        async with session.post(path, data=b"{}", headers=bearer(right), allow_redirects=False) as reply:
            assert reply.status not in (401, 403)
    async with session.get("/health") as reply:
        assert (reply.status, (await reply.json())["status"]) == (200, "serving")


def test_keys_differ_and_hide() -> None:
    assert "inference-key" not in repr(KEYS)
    for inference, control_key in (("", "x"), ("x", ""), ("x", "x")):
        with pytest.raises(InvalidInputError):
            Keys(inference=inference, control=control_key)


async def test_every_failure_has_the_envelope(session: aiohttp.ClientSession) -> None:
    headers = bearer(KEYS.control)
    for method, path, body, status in (
        ("GET", "/no/such", b"", 404),
        ("PUT", "/control/v1/target", b"", 405),
        ("POST", "/control/v1/target", b"x" * 11, 413),
        ("GET", "/control/v1/broken", b"", 500),
    ):
        async with session.request(method, path, data=body, headers=headers) as reply:
            assert reply.status == status
            assert (await reply.json())["error"]["message"]


async def test_another_method_is_told_which_there_are(session: aiohttp.ClientSession) -> None:
    async with session.get("/v1/chat/completions", headers=bearer(KEYS.inference)) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, reply.headers["Allow"], error["code"]) == (405, "POST", "invalid_input")
    assert error["message"] == "/v1/chat/completions doesn't answer GET (allowed: POST)"


async def test_a_body_past_the_limit_is_told_the_limit(session: aiohttp.ClientSession) -> None:
    async with session.post("/control/v1/target", data=b"x" * 11, headers=bearer(KEYS.control)) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (413, "invalid_input")
        assert "longer than 10 bytes" in (await reply.json())["error"]["message"]


async def test_a8_14_a_browser_gets_nothing_from_another_origin(session: aiohttp.ClientSession) -> None:
    """A page can't send a key without a preflight, which has none."""
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    paths = [*sorted(INFERENCE_PATHS), "/v1/hot-loads", "/control/v1/target", "/control/v1/status"]
    for path in paths:
        for method in ("OPTIONS", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE"):
            headers = {"Origin": "https://elsewhere.example", **preflight}
            async with session.request(method, path, headers=headers) as reply:
                assert (path, method, reply.status) == (path, method, 401)
                assert not [name for name in reply.headers if name.lower().startswith("access-control-")]
    async with session.get("/health", headers={"Origin": "https://elsewhere.example"}) as reply:
        assert "Access-Control-Allow-Origin" not in reply.headers, "a page can't read it"


def test_a8_14_processes_listen_on_loopback_unless_they_are_told_otherwise() -> None:
    for settings in (ReplicaSettings, GatewaySettings):
        (host,) = [field.default for field in fields(settings) if field.name == "host"]
        assert host == "127.0.0.1"


async def test_a8_11_bad_bodies_leave_the_server_well(session: aiohttp.ClientSession) -> None:
    for body in ({"prompt": "x", "stop": ["y"] * 50_000}, {"prompt": "x", "n": 10**6}, {"prompt": 5}, [], "x"):
        status, reply = await post(session, "/v1/completions", body)
        assert (status, reply["error"]["type"]) == (400, "invalid_input")
    status, _ = await post(session, "/v1/completions", {"prompt": "x" * 300})
    assert status == 400
    status, _ = await post(session, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert status == 200


async def test_a5_09_a_prompt_that_cannot_fit_is_never_encoded(
    session: aiohttp.ClientSession, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_backend", None)
    huge = "x" * 5_000_000
    for path, body in (
        ("/v1/completions", {"prompt": huge}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": huge}]}),
    ):
        status, reply = await post(session, path, body)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert "256 tokens, the window" in reply["error"]["message"]
        status, _ = await post(session, path, {**body, "model": "another"})
        assert status == 404


async def test_a5_09_the_window_cuts_an_answer_and_refuses_a_prompt(session: aiohttp.ClientSession) -> None:
    fits, full = list(range(1, 245)), list(range(1, 258))
    status, reply = await post(
        session, "/v1/completions", {"prompt": fits, "max_tokens": 400, "return_token_ids": True}
    )
    choice = reply["choices"][0]
    assert (status, len(choice["token_ids"]), choice["finish_reason"]) == (200, 256 - 244, "length")
    status, reply = await post(session, "/v1/completions", {"prompt": full[:256]})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("limits", [{"stop": "e"}, {"stop_token_ids": [40, 41, 42, 43]}, {"max_tokens": 12}], ids=str)
async def test_a3_08_evidence_covers_the_sampled_tokens_however_they_end(
    session: aiohttp.ClientSession, completer: TableCompleter, limits: dict[str, object]
) -> None:
    status, reply = await post(
        session,
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "engine_data": {"raw_logprobs": True, "sampling_mask": True},
            "top_p": 0.2,
            "seed": 1,
            **limits,
        },
    )
    assert status == 200
    choice = reply["choices"][0]
    data = choice["engine_data"]
    ids = choice["token_ids"]
    assert reply["prompt_token_ids"] == list(completer.requests[0].prompt_ids)
    assert Array(**data["token_ids"]).values() == tuple(ids)
    assert len(choice["logprobs"]["content"]) == len(ids) == data["logprobs"]["values"]["shape"][0]
    assert data["top"]["ids"]["shape"] == [len(ids), 2]
    assert data["raw_logprobs"]["values"]["shape"] == [len(ids)]
    begins = Array(**data["sampling_mask"]["indptr"]).values()
    masks = Array(**data["sampling_mask"]["indices"]).values()
    assert len(begins) == len(ids) + 1
    assert all(token in masks[int(begins[at]) : int(begins[at + 1])] for at, token in enumerate(ids))
    assert (data["status"]["raw_logprobs"], data["status"]["sampling_mask"]) == ("ok", "ok")
    assert data["policy"][-1][2] == len(ids)
    assert (data["replica"], data["boot_id"], data["run"]) == ("table", "boot-0", "demo")
    assert (data["seed"], data["prompt_version"]) == (1, 4)
    assert reply["usage"]["completion_tokens"] == len(ids)
    assert completer.active == 0


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": [1, 2, 3]})


@pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT], ids=["chat", "text"])
async def test_an_exchange_that_cuts_is_an_abort_to_openai_and_swapped_in_the_evidence(
    session: aiohttp.ClientSession, completer: TableCompleter, path: str, prompt: dict[str, object]
) -> None:
    for finish, reason in ((Finish.SWAPPED, "abort"), (Finish.ABORT, "abort"), (Finish.POLICY_CHANGED,) * 2):
        completer.cut_after(3, finish)
        body = {**prompt, "max_tokens": 9, "return_token_ids": True, "engine_data": True}
        _, whole = await post(session, path, body)
        *_, last = await events(session, path, body)
        for choice in (whole["choices"][0], last["choices"][0]):
            assert (choice["finish_reason"], choice["engine_data"]["finish"]) == (reason, finish)
            assert choice["engine_data"]["policy"] == [[4, 0, 3]]
        assert len(whole["choices"][0]["token_ids"]) == 3


async def test_evidence_tells_who_built_the_kv_and_which_labels_are_not_confirmed(
    session: aiohttp.ClientSession, completer: TableCompleter
) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 6, "seed": 1, "engine_data": True}

    async def evidence() -> Any:
        return (await post(session, "/v1/completions", body))[1]["choices"][0]["engine_data"]

    plain = await evidence()
    assert (plain["kv"], plain["prompt_version"]) == ([[4, 0, 5], [5, 5, 8]], 4)
    assert (plain["status"]["policy"], plain["status"]["kv"]) == ("ok", "ok")
    completer.kv = {0: (span(2, 0, 1), span(3, 1, 3))}
    mixed = await evidence()
    assert (mixed["kv"], mixed["prompt_version"]) == ([[2, 0, 1], [3, 1, 3], [4, 3, 5], [5, 5, 8]], None)
    completer.kv, completer.provisional = {3: (span(5, 0, 6),)}, (5,)
    anew = await evidence()
    assert anew["kv"] == [[5, 0, 8]]
    assert (anew["status"]["policy"], anew["status"]["kv"]) == ("provisional", "ok")
    completer.cut_after(0, Finish.SWAPPED)
    nothing = await evidence()
    assert (nothing["kv"], nothing["policy"], nothing["status"]["policy"]) == ([], [], "ok")


def span(version: int, start: int, end: int) -> PolicySpan:
    return PolicySpan(version=Version(version), start=start, end=end)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a3_11_a_stream_is_the_whole_in_pieces(session: aiohttp.ClientSession, path: str) -> None:
    for seed in range(8):
        body: dict[str, object] = {
            "seed": seed,
            "stop": ["th", "\n", "zq"],
            "max_tokens": 40,
            "temperature": 3,
            "return_token_ids": True,
            "engine_data": True,
            **({"prompt": "hi", "logprobs": 2} if path == "/v1/completions" else {}),
            **(
                {} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
            ),
        }
        _, whole = await post(session, path, body)
        chunks = await events(session, path, body)
        (choice,), parts = whole["choices"], [chunk["choices"][0] for chunk in chunks]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert parts[-1]["engine_data"]["logprobs"] == choice["engine_data"]["logprobs"]
        assert all(len(_positions(part)) == len(part["token_ids"]) for part in parts)
        assert [entry for part in parts for entry in _positions(part)] == _positions(choice)
        assert "".join(_text(part) for part in parts) == _text(choice)


def _positions(choice: Any) -> list[Any]:
    shown = choice["logprobs"]
    if "content" in shown:
        return shown["content"]
    return list(zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], shown["text_offset"], strict=True))


def _text(choice: Any) -> str:
    if "text" in choice:
        return choice["text"]
    return choice["message"]["content"] if "message" in choice else choice["delta"].get("content", "")


async def test_a_stream_of_many_choices_keeps_them_apart(session: aiohttp.ClientSession) -> None:
    body: dict[str, object] = {"prompt": "hi", "n": 4, "seed": 9, "max_tokens": 7}
    _, whole = await post(session, "/v1/completions", body)
    chunks = await events(session, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a3_04_forced_tokens_outside_the_support_are_finite_in_json(session: aiohttp.ClientSession) -> None:
    body = {"prompt": "x", "top_k": 1, "logprobs": 5, "forced_token_ids": [0, 1, 2], "engine_data": True}
    status, reply = await post(session, "/v1/completions", body)
    assert status == 200
    shown = reply["choices"][0]["logprobs"]
    assert -9999.0 in shown["token_logprobs"]
    assert [len(row) for row in shown["top_logprobs"]] == [1, 1, 1]
    exact = Array(**reply["choices"][0]["engine_data"]["logprobs"]["values"]).values()
    assert float("-inf") in exact


async def test_one_failing_choice_fails_the_reply_and_frees_the_others(
    session: aiohttp.ClientSession, completer: TableCompleter
) -> None:
    completer.fail_after(3, InvalidInputError("n is too much for this fake"))
    status, reply = await post(session, "/v1/completions", {"prompt": "x", "n": 3})
    assert (status, reply["error"]["param"]) == (400, "n")
    await asyncio.wait_for(completer.until_active(0), 2)
