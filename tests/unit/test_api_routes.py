"""Routes in the API: every position that went through the model has its row, once, and what is missing is told."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from abort_rig import Site, site

from slackwater.api import asking
from slackwater.api.routed import RoutedExperts
from slackwater.api.tokens import ChatTokenizer
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing
from slackwater.testing.routes import ROUTING, ScriptedRouter
from slackwater.trainer.routes import Routes, read_routes

ROUTER: Final = ScriptedRouter()
WIDE: Final = ScriptedRouter(routing=Routing(layers=(3,), experts=300, per_token=4))
PROMPT: Final = [5, 6, 7, 8, 9]
TEXT: Final = "/v1/completions"
VLLM: Final = "/inference/v1/generate"
SGLANG: Final = "/generate"
VLLM_START, SGLANG_START = "routed_experts_prompt_start", "routed_experts_start_len"
NAMES = {VLLM: VLLM_START, SGLANG: "return_routed_experts", TEXT: "forced_routes"}


class Forgetful(ScriptedRouter):
    """Doesn't tell what the fourth token and later ones should."""

    def told(self, request: CompletionRequest, tokens: Sequence[int]) -> bytes | None:
        return None if len(tokens) > 2 else super().told(request, tokens)


@pytest.fixture(params=[False, True], ids=["replica", "gateway"])
async def routed(request: pytest.FixtureRequest, tokenizer: ChatTokenizer) -> AsyncIterator[Site]:
    async with site(tokenizer, gateway=request.param, routed=ROUTER) as opened:
        yield opened
        await asyncio.wait_for(opened.table.until_active(0), 5)


def body(**fields: object) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 3, "seed": 1, "return_token_ids": True, **asking_for(), **fields}


def asking_for(start: int = 0) -> dict[str, Any]:
    return {"engine_data": {"routed_experts": {"start": start} if start else True}}


def read(told: Any) -> Routes:
    return read_routes(msgspec.convert(told, RoutedExperts))


def expected(tokens: Sequence[int], router: ScriptedRouter = ROUTER) -> bytes:
    return router.rows(tokens)


def array(rows: bytes, routing: Routing = ROUTING) -> dict[str, Any]:
    shape = [len(rows) // routing.row_bytes, len(routing.layers), routing.per_token]
    return {"dtype": routing.dtype, "shape": shape, "data": base64.b64encode(rows).decode()}


async def test_a4_01_every_row_but_that_of_the_last_token(routed: Site) -> None:
    _, reply = await routed.post(TEXT, body())
    (choice,) = reply["choices"]
    data = choice["engine_data"]
    told = data["routed_experts"]
    assert (told["shape"], told["dtype"], told["layers"], told["start"]) == ([7, 3, 2], "uint8", [1, 2, 5], 0)
    assert base64.b64decode(told["data"]) == expected([*PROMPT, *choice["token_ids"][:2]])
    assert data["status"]["routed_experts"] == "ok"
    assert "missing" not in told
    assert "reasons" not in data


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"])
async def test_a4_01_without_a_token_every_row_of_the_prompt(routed: Site, path: str) -> None:
    asked = {"max_tokens": 0, "return_token_ids": True, **asking_for()}
    sent: dict[str, Any] = {"prompt": PROMPT} if path == TEXT else {"messages": [{"role": "user", "content": "hi"}]}
    _, reply = await routed.post(path, {**sent, **asked})
    (choice,) = reply["choices"]
    assert base64.b64decode(choice["engine_data"]["routed_experts"]["data"]) == expected(reply["prompt_token_ids"])
    assert (choice["token_ids"], choice["finish_reason"], choice["engine_data"]["finish"]) == ([], "length", "length")
    assert reply["usage"]["completion_tokens"] == 0
    *chunks, done = await routed.events(path, {**sent, **asked})
    (part,) = [chunk["choices"][0] for chunk in chunks]
    assert (done, part["token_ids"], part["finish_reason"]) == ("[DONE]", [], "length")
    assert part["routed_experts"]["data"] == choice["engine_data"]["routed_experts"]["data"]


@pytest.mark.parametrize("start", [1, 4])
async def test_rows_begin_where_they_are_asked_to(routed: Site, start: int) -> None:
    _, reply = await routed.post(TEXT, body(**asking_for(start)))
    told = reply["choices"][0]["engine_data"]["routed_experts"]
    ids = [*PROMPT, *reply["choices"][0]["token_ids"][:2]]
    assert told["start"] == start
    assert base64.b64decode(told["data"]) == expected(ids[start:])


async def test_it_can_be_asked_for_in_dynamos_words(routed: Site) -> None:
    sent = body(nvext={"extra_fields": ["routed_experts"]})
    del sent["engine_data"]
    assert (await routed.post(TEXT, sent))[1] | {"id": 0, "created": 0} == (await routed.post(TEXT, body()))[1] | {
        "id": 0,
        "created": 0,
    }


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions"])
@pytest.mark.parametrize("start", [0, 2])
async def test_the_chunks_of_a_stream_join_to_the_whole_of_each_choice(routed: Site, path: str, start: int) -> None:
    sent: dict[str, Any] = body(n=3, max_tokens=6, **asking_for(start))
    if path != TEXT:
        del sent["prompt"]
        sent |= {"messages": [{"role": "user", "content": "hi"}]}
    _, whole = await routed.post(path, sent)
    *chunks, _ = await routed.events(path, sent)
    for choice in whole["choices"]:
        parts = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]]
        rows = [part["routed_experts"] for part in parts if "routed_experts" in part]
        data = b"".join(base64.b64decode(one["data"]) for one in rows)
        assert data == base64.b64decode(choice["engine_data"]["routed_experts"]["data"])
        ends = [one["start"] + one["shape"][0] for one in rows]
        assert [one["start"] for one in rows] == [start, *ends[:-1]]
        last = parts[-1]["engine_data"]
        assert (last["status"], "routed_experts" in last) == (choice["engine_data"]["status"], False)


@pytest.mark.parametrize("start", [-1, 99])
async def test_a8_11_a_start_past_the_prompt_is_named_as_the_caller_did(routed: Site, start: int) -> None:
    for path, sent, name in (
        (VLLM, {"token_ids": PROMPT, "sampling_params": {VLLM_START: start}}, VLLM_START),
        (SGLANG, {"input_ids": PROMPT, "return_routed_experts": True, SGLANG_START: start}, SGLANG_START),
        (TEXT, body(**asking_for(start)), "engine_data"),
    ):
        status, reply = await routed.post(path, sent)
        assert (status, reply["error"]["param"]) == (400, name)
        assert reply["error"]["message"].startswith(f"{name} is out of range")


async def test_where_there_are_no_routers_the_status_says_so(at: Site) -> None:
    _, reply = await at.post(TEXT, body())
    data = reply["choices"][0]["engine_data"]
    assert data["status"]["routed_experts"] == "unsupported"
    assert "no routers" in data["reasons"]["routed_experts"]
    assert "routed_experts" not in data
    for path, sent in (
        (VLLM, {"token_ids": PROMPT, "sampling_params": {"routed_experts_prompt_start": 0}}),
        (SGLANG, {"input_ids": PROMPT, "return_routed_experts": True}),
        (TEXT, body(forced_routes=array(expected(PROMPT)))),
        ("/v1/score", {"items": [{"prompt_ids": PROMPT, "token_ids": [1], "forced_routes": array(expected(PROMPT))}]}),
    ):
        status, refused = await at.post(path, sent)
        assert (status, refused["error"]["code"]) == (400, "unsupported"), path
        assert refused["error"]["param"] == NAMES.get(path, "forced_routes")
    async with at.session.get("/v1/capabilities") as told:
        about = await told.json()
    assert (about["routing"], about["unsupported"]) == (None, ["routed_experts"])


async def test_a4_04_rows_that_nobody_told_of_are_absent_and_declared(tokenizer: ChatTokenizer) -> None:
    async with site(tokenizer, gateway=True, routed=Forgetful()) as opened:
        _, reply = await opened.post(TEXT, body(max_tokens=6))
        data, ids = reply["choices"][0]["engine_data"], reply["choices"][0]["token_ids"]
        told = data["routed_experts"]
        assert (told["missing"], told["shape"][0]) == ([[7, 10]], 7)
        assert base64.b64decode(told["data"]) == expected([*PROMPT, *ids[:2]])
        assert (data["status"]["routed_experts"], "3 positions" in data["reasons"]["routed_experts"]) == (
            "partial",
            True,
        )
        params = {"max_tokens": 6, "routed_experts_prompt_start": 0}
        _, vllm = await opened.post(VLLM, {"token_ids": PROMPT, "sampling_params": params})
        assert vllm["choices"][0]["routed_experts"] is None
        sent = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}, "return_routed_experts": True}
        assert (await opened.post(SGLANG, sent))[1]["meta_info"]["routed_experts"] is None


async def test_an_answer_that_is_aborted_before_its_first_token_has_no_row(routed: Site) -> None:
    routed.table.hold()
    waiting = asyncio.ensure_future(routed.post(TEXT, body(request_id="job")))
    await routed.table.until_waiting(1)
    await routed.abort("job")
    told = (await waiting)[1]["choices"][0]["engine_data"]["routed_experts"]
    assert (told["shape"], told.get("missing")) == ([0, 3, 2], None)


@pytest.mark.parametrize("router", [ROUTER, WIDE], ids=["uint8", "uint16"])
@pytest.mark.parametrize("start", [0, 3])
async def test_vllms_and_sglangs_forms_have_the_same_rows(
    tokenizer: ChatTokenizer, router: ScriptedRouter, start: int
) -> None:
    async with site(tokenizer, gateway=True, routed=router) as opened:
        params = {"max_tokens": 3, "seed": 1, "routed_experts_prompt_start": start}
        sent: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": params}
        _, vllm = await opened.post(VLLM, sent)
        (choice,) = vllm["choices"]
        npy = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        ids = [*PROMPT, *choice["token_ids"][:2]][start:]
        form = (len(ids), len(router.routing.layers), router.routing.per_token)
        assert (npy.dtype, npy.shape) == (np.dtype(router.routing.dtype), form)
        assert npy.tobytes() == router.rows(ids)
        assert choice["routed_experts_layers"] == list(router.routing.layers)
        assert "engine_data" not in choice
        *chunks, _ = await opened.events(VLLM, sent)
        shown = [chunk["choices"][0].get("routed_experts") for chunk in chunks]
        assert shown == [None, None, choice["routed_experts"]]
        sampling = {"max_new_tokens": 3, "sampling_seed": 1}
        asked = {"input_ids": PROMPT, "sampling_params": sampling, "return_routed_experts": True}
        _, sglang = await opened.post(SGLANG, {**asked, "routed_experts_start_len": start})
        meta = sglang["meta_info"]
        raw = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4").reshape(form)
        assert np.array_equal(raw, npy)
        assert meta["routed_experts_layers"] == list(router.routing.layers)
        *events, _ = await opened.events(SGLANG, {**asked, "routed_experts_start_len": start})
        assert [one["meta_info"].get("routed_experts") for one in events] == [None, None, meta["routed_experts"]]


async def test_a4_08_branches_stitched_at_what_they_share_equal_a_run_of_their_own(routed: Site) -> None:
    shared = [token % 50 for token in range(40)]
    _, first = await routed.post(TEXT, body(prompt=[*shared, 1, 2]))
    earlier = read(first["choices"][0]["engine_data"]["routed_experts"])
    branch = [*shared, 3, 4, 5]
    _, second = await routed.post(TEXT, body(prompt=branch, **asking_for(40)))
    _, alone = await routed.post(TEXT, body(prompt=branch))
    later, whole = (read(reply["choices"][0]["engine_data"]["routed_experts"]) for reply in (second, alone))
    stitched = earlier.followed_by(later, start=40)
    assert len(later.positions) == 5
    assert np.array_equal(stitched.experts, whole.experts)
    assert np.array_equal(stitched.positions, whole.positions)


async def test_forced_routes_are_what_the_routers_take(routed: Site) -> None:
    forced = expected([9, 8, 7, 6])
    for path, sent in (
        (TEXT, {"prompt": PROMPT, "max_tokens": 2}),
        (VLLM, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}),
        (SGLANG, {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}),
    ):
        status, reply = await routed.post(path, {**sent, **asking_for(), "forced_routes": array(forced)})
        assert status == 200, reply
        data = (reply["choices"][0] if "choices" in reply else reply["meta_info"])["engine_data"]
        rows = base64.b64decode(data["routed_experts"]["data"])
        assert rows[: len(forced)] == forced
        assert rows[len(forced) :][: ROUTING.row_bytes] == expected(PROMPT[4:])
    item = {"prompt_ids": PROMPT, "token_ids": [1, 2], "forced_routes": array(expected([1] * 7))}
    assert (await routed.post("/v1/score", {"items": [item]}))[0] == 200
    assert routed.table.requests[-1].forced_routes == expected([1] * 7)


GOOD: Final = array(expected(PROMPT))
WRONG_ROUTES: Final = (
    {**GOOD, "dtype": "uint16"},
    {**GOOD, "dtype": "int32"},
    {**GOOD, "dtype": "int8"},
    {**GOOD, "shape": [5, 6]},
    {**GOOD, "shape": [5, 2, 3]},
    {**GOOD, "shape": [4, 3, 2]},
    {**GOOD, "shape": [-5, 3, 2]},
    {**GOOD, "shape": []},
    {**GOOD, "data": "?"},
    {**GOOD, "data": GOOD["data"][:-4]},
    array(bytes([0, 12] * 3)),
    array(bytes([4, 4] * 3)),
    array(expected([1] * 7)),
)


@pytest.mark.parametrize("wrong", WRONG_ROUTES, ids=str)
async def test_forced_routes_that_do_not_fit_are_refused(routed: Site, wrong: dict[str, Any]) -> None:
    item = {"prompt_ids": PROMPT, "token_ids": [1]}
    for path, sent in (
        (TEXT, body(forced_routes=wrong)),
        ("/v1/score", {"items": [{**item, "forced_routes": wrong}]}),
        (VLLM, {"token_ids": PROMPT, "forced_routes": wrong}),
    ):
        status, reply = await routed.post(path, sent)
        assert (status, reply["error"]["code"]) == (400, "invalid_input"), path
        assert reply["error"]["message"].partition(" ")[0] in ("forced_routes", "items")
    assert not routed.table.requests


@pytest.mark.parametrize(
    "fields",
    [
        asking_for(5),
        {"engine_data": {"routed_experts": {"start": -1}}},
        {"engine_data": {"routed_experts": {"end": 1}}},
        {"engine_data": {"routed_experts": 1}},
        {"max_tokens": 0, "min_tokens": 1},
        {"max_tokens": 0, "forced_token_ids": [1]},
        {"max_tokens": -1},
    ],
    ids=str,
)
async def test_what_cannot_be_asked_for_is_refused_and_named(routed: Site, fields: dict[str, Any]) -> None:
    status, reply = await routed.post(TEXT, body(**fields))
    assert (status, reply["error"]["param"]) == (400, "max_tokens" if "max_tokens" in fields else "engine_data")


async def test_starts_that_contradict_each_other_are_refused(routed: Site) -> None:
    sent = {"token_ids": PROMPT, "sampling_params": {"routed_experts_prompt_start": 1}, **asking_for(2)}
    assert (await routed.post(VLLM, sent))[0] == 400
    sent["sampling_params"] = {"routed_experts_prompt_start": "1"}
    assert (await routed.post(VLLM, sent))[0] == 400
    assert (await routed.post(VLLM, {**sent, "sampling_params": {"routed_experts_prompt_start": 2}}))[0] == 200


async def test_a4_09_more_routes_than_one_reply_has_are_refused_before_any_token(
    routed: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROUTING.row_bytes
    monkeypatch.setattr(asking, "MAX_ROUTE_BYTES", 2 * 8 * row)
    assert (await routed.post(TEXT, body(n=2)))[0] == 200
    status, reply = await routed.post(TEXT, body(n=2, max_tokens=4))
    assert (status, reply["error"]["param"]) == (400, "engine_data")
    sent = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, "return_routed_experts": True}
    assert (await routed.post(SGLANG, sent))[0] == 400  # int32 takes four times as much
    assert len(routed.table.requests) == 2


async def test_capabilities_tell_what_routers_choose_from(routed: Site) -> None:
    async with routed.session.get("/v1/capabilities") as told:
        about = await told.json()
    assert about["routing"] == {"layers": [1, 2, 5], "experts": 12, "per_token": 2, "dtype": "uint8"}
    assert about["unsupported"] == []
    assert about["limits"]["max_route_bytes"] == asking.MAX_ROUTE_BYTES
