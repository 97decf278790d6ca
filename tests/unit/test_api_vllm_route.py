"""vLLM's tokens-in, tokens-out route, on a real socket: at a replica, and at a gateway before one."""

import asyncio
import io
import json
from typing import Any

import pytest
from abort_rig import Site

from slackwater.api.arrays import Array
from slackwater.errors import UnavailableError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish
from slackwater.testing.tiny_model import IM_END, TINY_VOCAB

PATH = "/inference/v1/generate"
PROMPT = [1, 2, 3]


def body(**params: object) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9, "seed": 1, **params}}


async def test_a_reply_has_what_trainers_read(at: Site) -> None:
    at.table.versions = tuple(map(Version, (4, 4, 4, 5)))
    sent = {**body(logprobs=1), "model": "m", "request_id": "job", "return_token_ids": True, "engine_data": True}
    status, reply = await at.post(PATH, sent)
    assert status == 200
    _, plain = await at.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "seed": 1, "logprobs": 1, "return_token_ids": True}
    )
    (choice,) = reply["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    assert ids == plain["choices"][0]["token_ids"]
    assert [entry["logprob"] for entry in content] == plain["choices"][0]["logprobs"]["token_logprobs"]
    assert [(entry["token_id"], entry["token"]) for entry in content] == [(one, f"token_id:{one}") for one in ids]
    assert all(entry["top_logprobs"][0]["token_id"] == one for entry, one in zip(content, ids, strict=True))
    assert choice["weight_versions"] == [
        {"version": "4", "start": 0, "end": 3},
        {"version": "5", "start": 3, "end": 9},
    ]
    assert choice["engine_data"]["policy"] == [[4, 0, 3], [5, 3, 9]]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert (reply["request_id"], reply["prompt_token_ids"]) == ("generate-tokens-job", PROMPT)
    assert reply["usage"]["completion_tokens"] == 9


async def test_a3_03_raw_alternatives_come_where_raw_evidence_is_asked_for(replica: Site) -> None:
    for params in ({}, {"temperature": 0.5, "top_p": 0.0001}):
        sent = {**body(logprobs=3, **params), "engine_data": {"raw_logprobs": True}}
        _, reply = await replica.post(PATH, sent)
        data = reply["choices"][0]["engine_data"]
        assert (data["status"]["raw_top"], data["raw_top"]["ids"]["shape"]) == ("ok", [9, 3])
        assert data["status"]["sampling_mask"] == "not_requested"


@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize(
    "params", [{}, {"n": 3}, {"stop": ["e"]}, {"stop_token_ids": [27]}, {"skip_special_tokens": False, "n": 2}], ids=str
)
async def test_a3_11_a_stream_is_the_whole_in_pieces(replica: Site, mode: str, params: dict[str, object]) -> None:
    sent = {**body(max_tokens=60, logprobs=2, **params), "output_mode": mode, "engine_data": True}
    sent["stream_options"] = {"include_usage": True}
    _, whole = await replica.post(PATH, sent)
    *chunks, counted, done = await replica.events(PATH, sent)
    assert (done, counted["usage"], counted["choices"]) == ("[DONE]", whole["usage"], [])
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [one for part in parts for one in part["token_ids"]] == choice["token_ids"]
        assert [one for part in parts for one in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert "".join(part.get("text", "") for part in parts) == choice.get("text", "")
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        for name in ("weight_versions", "engine_data", "stop_reason"):
            assert parts[-1][name] == choice[name]
        assert ("text" in choice) is (mode == "text")


async def test_a3_08_the_end_is_told_and_ids_and_logprobs_cover_the_same_tokens(replica: Site) -> None:
    sent: dict[str, Any] = {**body(max_tokens=60, logprobs=0), "output_mode": "text"}
    _, plain = await replica.post(PATH, sent)
    ids, text = plain["choices"][0]["token_ids"], plain["choices"][0]["text"]
    cut = text[5:7]
    for params, reason in (({"stop": [cut]}, cut), ({"stop_token_ids": [ids[7]]}, ids[7])):
        _, reply = await replica.post(PATH, {**sent, "sampling_params": {**sent["sampling_params"], **params}})
        (choice,) = reply["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
        assert choice["token_ids"] == ids[: len(choice["token_ids"])]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert text.startswith(choice["text"])
        assert cut not in choice["text"] or reason != cut


async def test_text_keeps_the_stop_where_it_is_asked_to(replica: Site) -> None:
    sent: dict[str, Any] = {**body(trace_decode_token_ids=[104, IM_END, 105]), "output_mode": "text"}
    for shown, text in (({}, "hi"), ({"skip_special_tokens": False}, "h<|im_end|>i")):
        _, reply = await replica.post(PATH, {**sent, "sampling_params": {**sent["sampling_params"], **shown}})
        assert reply["choices"][0]["text"] == text
    for kept, text in ((False, "h"), (True, "hi")):
        params = {**sent["sampling_params"], "stop": ["i"], "include_stop_str_in_output": kept}
        _, reply = await replica.post(PATH, {**sent, "sampling_params": params})
        assert (reply["choices"][0]["text"], reply["choices"][0]["stop_reason"]) == (text, "i")


async def test_a3_04_an_impossible_token_has_a_number(replica: Site) -> None:
    _, reply = await replica.post(PATH, {**body(trace_decode_token_ids=[9], top_k=1, logprobs=5), "engine_data": True})
    (choice,) = reply["choices"]
    assert (choice["token_ids"], choice["logprobs"]["content"][0]["logprob"]) == ([9], -9999.0)
    assert Array(**choice["engine_data"]["logprobs"]["values"]).values() == (float("-inf"),)


async def test_a5_09_an_answer_without_a_limit_fills_the_window(replica: Site) -> None:
    status, reply = await replica.post(PATH, {"token_ids": [1] * 250})
    assert (status, len(reply["choices"][0]["token_ids"]), reply["choices"][0]["finish_reason"]) == (200, 6, "length")
    for prompt in ([1] * 256, [1] * 9000):
        status, reply = await replica.post(PATH, {"token_ids": prompt})
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a5_01_a5_03_an_abort_by_name_ends_with_the_tokens_so_far(at: Site, *, streamed: bool) -> None:
    sent = {**body(max_tokens=200, logprobs=0), "request_id": "job1", "engine_data": True}
    at.table.hold(position=100)
    ask = asyncio.create_task(at.events(PATH, sent) if streamed else at.post(PATH, sent))
    await at.held()
    assert await at.abort("job10") == (404, (await at.abort("job10"))[1])
    assert await at.abort("job1") == (200, {"request_id": "job1", "aborted": 1})
    reply = await asyncio.wait_for(ask, 5)
    parts = [chunk["choices"][0] for chunk in reply[:-1]] if isinstance(reply, list) else reply[1]["choices"]
    assert len([one for part in parts for one in part["token_ids"]]) == 100
    assert (parts[-1]["finish_reason"], parts[-1]["engine_data"]["finish"]) == ("abort", "abort")
    assert parts[-1]["weight_versions"] == [{"version": "7", "start": 0, "end": 100}]
    assert (reply[-1] == "[DONE]") is streamed


async def test_what_cuts_an_answer_is_an_abort_and_the_evidence_tells_which(replica: Site) -> None:
    for finish in (Finish.SWAPPED, Finish.POLICY_CHANGED, Finish.ABORT):
        replica.table.cut_after(3, finish)
        _, reply = await replica.post(PATH, {**body(), "engine_data": True})
        (choice,) = reply["choices"]
        assert (choice["finish_reason"], choice["engine_data"]["finish"]) == ("abort", finish)
        assert len(choice["token_ids"]) == 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_a5_05_a_client_that_goes_away_frees_its_answers(at: Site, *, streamed: bool) -> None:
    at.table.hold(position=2)
    asks = [asyncio.create_task(at.post(PATH, {**body(n=4), "stream": streamed})) for _ in range(5)]
    await at.table.until_waiting(20)
    for ask in asks:
        ask.cancel()
    await asyncio.wait_for(at.table.until_active(0), 5)


async def test_a_version_that_nobody_holds_is_refused_before_a_token(at: Site) -> None:
    status, reply = await at.post(PATH, {**body(), "policy": {"exact_version": 8}})
    assert (status, reply["error"]["code"], reply["error"]["versions"]) == (409, "policy_unmet", [7])


UNSUPPORTED = (
    ({"priority": 1}, "priority"),
    ({"features": {"mm_hashes": {}}}, "features"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"return_token_logprobs": True}, "return_token_logprobs"),
    ({"sampling_params": {"prompt_logprobs": 3}}, "prompt_logprobs"),
    ({"sampling_params": {"allowed_token_ids": [4]}}, "allowed_token_ids"),
    ({"sampling_params": {"no_such": 0.5}}, "no_such"),
)


@pytest.mark.parametrize(("extra", "name"), UNSUPPORTED, ids=[name for _, name in UNSUPPORTED])
async def test_what_is_not_done_is_refused_by_name(replica: Site, extra: dict[str, object], name: str) -> None:
    status, reply = await replica.post(PATH, {"token_ids": PROMPT, **extra})
    assert (status, reply["error"]["code"]) == (400, "unsupported")
    assert reply["error"]["message"].startswith(f"{name} ")
    assert reply["error"]["param"] == name
    assert not replica.table.requests


async def test_what_asks_for_nothing_passes(replica: Site) -> None:
    params = {"detokenize": False, "top_k": -1, "allowed_token_ids": None, "extra_args": {}, "max_tokens": 1}
    extra = {"session_id": "s", "priority": 0, "kv_transfer_params": None, "cache_salt": ""}
    status, _ = await replica.post(PATH, {"token_ids": PROMPT, "sampling_params": params, **extra})
    assert status == 200


HOSTILE = (
    b"", b"[]", b"{", b"null", b'{"token_ids": null}', b'{"token_ids": [1], "sampling_params": []}', b'"\xff"',
    b'{"token_ids": [1], "sampling_params": {"temperature": 1e999}}', b"[" * 100_000, b'{"token_ids": [1e30]}',
    b'{"token_ids": [99999999999999999999]}', b'{"token_ids": [true]}', b'{"token_ids": [1], "model": 7}',
)  # fmt: skip
VALUES: tuple[object, ...] = (-1, 10**30, "x", [], {}, [[1]], True, 0.5, "\x00", ["s"] * 500_000)


async def test_a8_11_a8_15_hostile_bodies_leave_the_server_well(replica: Site) -> None:
    names = ("n", "temperature", "top_p", "seed", "stop", "stop_token_ids", "max_tokens", "logprobs", "logit_bias")
    bodies = [*HOSTILE, *(json.dumps({"token_ids": [value]}).encode() for value in (-1, TINY_VOCAB, 2**31))]
    bodies += [json.dumps(body(**{name: value})).encode() for name in names for value in VALUES]
    for data in bodies:
        async with replica.session.post(PATH, data=io.BytesIO(data)) as reply:
            error = json.loads(await reply.read())
            assert reply.status in (200, 400), data[:80]
            assert reply.status == 200 or error["error"]["message"]
    status, _ = await replica.post(PATH, body(max_tokens=1))
    assert status == 200


async def test_an_error_under_way_is_the_last_event(replica: Site) -> None:
    replica.table.fail_after(3, UnavailableError("gone"))
    async with replica.session.post(PATH, json={**body(), "stream": True}) as reply:
        *events, rest = (await reply.read()).decode().split("\n\n")
    assert (rest, len(events)) == ("", 4)
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    replica.table.fail_after(0, UnavailableError("gone"))
    async with replica.session.post(PATH, json={**body(), "stream": True}) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
