"""SGLang's native route, on a real socket: at a replica, and at a gateway before one."""

import asyncio
import io
import json
from itertools import pairwise
from typing import Any

import pytest
from abort_rig import Site

from slackwater.api.arrays import Array
from slackwater.api.sglang_shapes import MAX_BATCH, MAX_BATCH_ANSWERS
from slackwater.errors import UnavailableError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish
from slackwater.testing.tiny_model import IM_END

PATH = "/generate"
PROMPT = [1, 2, 3]


def body(**params: object) -> dict[str, Any]:
    return {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 9, "sampling_seed": 1, **params},
        "return_logprob": True,
    }


async def test_a_reply_has_what_trainers_read(at: Site) -> None:
    at.table.versions = tuple(map(Version, (4, 4, 4, 5)))
    spaces = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
    status, reply = await at.post(PATH, {**body(**spaces), "rid": "job", "top_logprobs_num": 2, "engine_data": True})
    assert status == 200
    _, plain = await at.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "seed": 1, "logprobs": 2, "return_token_ids": True}
    )
    meta, (choice,) = reply["meta_info"], plain["choices"]
    assert reply["output_ids"] == choice["token_ids"] == [entry[1] for entry in meta["output_token_logprobs"]]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == choice["logprobs"]["token_logprobs"]
    assert [len(entries) for entries in meta["output_top_logprobs"]] == [2] * 9
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("job", 3, 9, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 9}
    assert meta["weight_versions"] == [{"version": "4", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 9}]
    assert (meta["weight_version"], meta["output_token_logprobs_length"]) == ("5", 9)
    assert meta["engine_data"]["policy"] == [[4, 0, 3], [5, 3, 9]]
    assert Array(**meta["engine_data"]["token_ids"]).values() == tuple(reply["output_ids"])


async def test_a3_03_raw_alternatives_come_where_raw_evidence_is_asked_for(replica: Site) -> None:
    raws: list[object] = []
    for params in ({}, {"temperature": 0.5, "top_p": 0.0001}):
        sent = {**body(**params), "top_logprobs_num": 3, "engine_data": {"raw_logprobs": True}}
        _, reply = await replica.post(PATH, {**sent, "input_ids": PROMPT})
        data = reply["meta_info"]["engine_data"]
        assert (data["status"]["raw_top"], data["raw_top"]["ids"]["shape"]) == ("ok", [9, 3])
        raws.append(data["raw_top"])
    assert raws[0] == raws[1], "the table's rows go by position alone"


async def test_without_logprobs_none_are_shown(replica: Site) -> None:
    _, reply = await replica.post(PATH, {**body(), "return_logprob": False, "logprob_start_len": 0})
    assert not [name for name in reply["meta_info"] if "logprob" in name]
    assert "engine_data" not in reply["meta_info"]


async def test_a_batch_is_answered_in_order_and_each_prompt_for_itself(replica: Site) -> None:
    singles = [
        await replica.post(PATH, {**body(max_new_tokens=limit), "input_ids": prompt})
        for prompt, limit in (([1, 2], 3), ([3], 5))
    ]
    batch = {
        "input_ids": [[1, 2], [3]],
        "sampling_params": [{"max_new_tokens": limit, "sampling_seed": 1} for limit in (3, 5)],
        "return_logprob": [True, False],
        "rid": ["a", "b"],
    }
    status, reply = await replica.post(PATH, batch)
    assert (status, [one["meta_info"]["id"] for one in reply]) == (200, ["a", "b"])
    assert [one["output_ids"] for one in reply] == [one["output_ids"] for _, one in singles]
    assert ["output_token_logprobs" in one["meta_info"] for one in reply] == [True, False]
    _, named = await replica.post(PATH, {**batch, "rid": "c"})
    assert [one["meta_info"]["id"] for one in named] == ["c_0", "c_1"]
    _, several = await replica.post(PATH, {"text": ["hi"], "sampling_params": {"n": 3, "max_new_tokens": 1}})
    assert len(several) == 3
    _, one = await replica.post(PATH, {"text": ["hi"], "sampling_params": {"max_new_tokens": 1}})
    assert isinstance(one, list)


@pytest.mark.parametrize(
    "params", [{}, {"n": 2}, {"stop": ["e"]}, {"stop": ["e"], "no_stop_trim": True}, {"stop_token_ids": [27]}], ids=str
)
async def test_a3_11_events_have_the_answer_so_far_and_the_last_one_all(
    replica: Site, params: dict[str, object]
) -> None:
    sent = {**body(max_new_tokens=60, **params), "input_ids": [PROMPT, [4]], "top_logprobs_num": 1, "engine_data": True}
    _, whole = await replica.post(PATH, sent)
    *chunks, done = await replica.events(PATH, sent)
    assert done == "[DONE]"
    for index, answer in enumerate(whole):
        parts = [chunk for chunk in chunks if chunk["index"] == index]
        for part in parts:
            ids, meta = part["output_ids"], part["meta_info"]
            assert ids == answer["output_ids"][: len(ids)]
            assert answer["text"].startswith(part["text"])
            assert meta["output_token_logprobs"] == answer["meta_info"]["output_token_logprobs"][: len(ids)]
            assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == len(ids)
        last = {name: value for name, value in parts[-1].items() if name != "index"}
        for one in (last, answer):
            assert one["meta_info"].pop("e2e_latency") >= 0
            one["meta_info"].pop("id")
        assert last == answer


async def test_a_long_stream_stays_in_proportion_to_its_answer(replica: Site) -> None:
    *chunks, _ = await replica.events(PATH, body(max_new_tokens=250))
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths[:64] == list(range(1, 65))
    assert all(later - earlier == max(1, earlier // 64) for earlier, later in pairwise(lengths[:-1]))
    assert lengths[-1] == 250


async def test_the_text_shows_the_end_as_asked(replica: Site) -> None:
    _, plain = await replica.post(PATH, body(max_new_tokens=30))
    ids = plain["output_ids"]
    place = next(index for index in range(3, 30) if 32 < ids[index] < 127 and ids[index] not in ids[:index])
    stop = chr(ids[place])
    before = plain["text"].partition(stop)[0]
    for params, matched in (({"stop_token_ids": [ids[place]]}, ids[place]), ({"stop": stop}, stop)):
        for keeps, text in ((False, before), (True, before + stop)):
            _, reply = await replica.post(PATH, body(max_new_tokens=30, no_stop_trim=keeps, **params))
            assert (reply["text"], reply["output_ids"]) == (text, ids[: place + 1])
            assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


async def test_special_tokens_are_text_where_they_are_wanted(replica: Site) -> None:
    replica.table.rows = tuple(tuple(9.0 * (token == IM_END) for token in range(512)) for _ in range(2))
    for skips, text in ((True, ""), (False, "<|im_end|>" * 2)):
        _, reply = await replica.post(PATH, body(max_new_tokens=2, temperature=0, skip_special_tokens=skips))
        assert (reply["text"], reply["output_ids"]) == (text, [IM_END] * 2)


async def test_a3_21_the_prompts_logprobs_are_those_that_scoring_gives(at: Site) -> None:
    at.table.versions = tuple(map(Version, (4, 5)))
    prompt = [5, 6, 7, 8]
    _, reply = await at.post(PATH, {**body(), "input_ids": prompt, "logprob_start_len": 1, "top_logprobs_num": 1})
    meta = reply["meta_info"]
    _, scored = await at.post("/v1/score", {"items": [{"prompt_ids": prompt[:2], "token_ids": prompt[2:]}]})
    values = Array(**scored["items"][0]["logprobs"]).values()
    (first, *rest) = meta["input_token_logprobs"]
    assert (first, [entry[1] for entry in rest]) == ([None, 6, None], [7, 8])
    assert [entry[0] for entry in rest] == pytest.approx(values)
    assert (meta["input_top_logprobs"][0], len(meta["input_top_logprobs"])) == (None, 3)
    assert meta["input_weight_versions"] == [
        {"version": "4", "start": 2, "end": 3},
        {"version": "5", "start": 3, "end": 4},
    ]
    for start in (-1, 3, 99):
        _, reply = await at.post(PATH, {**body(), "input_ids": prompt, "logprob_start_len": start})
        shown = [] if start == -1 else [[None, token, None] for token in prompt[start : start + 1]]
        assert reply["meta_info"]["input_token_logprobs"] == shown


@pytest.mark.parametrize("streamed", [False, True])
async def test_a5_01_a5_07_an_abort_by_name_ends_that_prompt_alone(at: Site, *, streamed: bool) -> None:
    sent = {**body(max_new_tokens=200), "input_ids": [[1], [2]], "rid": ["job1", "job10"]}
    at.table.hold(position=100)
    ask = asyncio.create_task(at.events(PATH, sent) if streamed else at.post(PATH, sent))
    await at.table.until_waiting(2)
    assert (await at.post(PATH, {**body(max_new_tokens=1)}))[0] == 200
    assert await at.abort("job1") == (200, {"request_id": "job1", "aborted": 1})
    at.table.release()
    reply = await asyncio.wait_for(ask, 5)
    answers = {one["meta_info"]["id"]: one for one in (reply[:-1] if isinstance(reply, list) else reply[1])}
    assert answers["job1"]["meta_info"]["finish_reason"] == {"type": "abort", "message": "abort"}
    assert len(answers["job1"]["meta_info"]["output_token_logprobs"]) == 100
    assert answers["job10"]["meta_info"]["finish_reason"] == {"type": "length", "length": 200}


async def test_an_answer_without_a_token_has_its_prompts_version(replica: Site) -> None:
    replica.table.cut_after(0, Finish.SWAPPED)
    _, reply = await replica.post(PATH, body())
    meta = reply["meta_info"]
    assert (reply["output_ids"], meta["weight_versions"], meta["weight_version"]) == ([], [], "7")
    assert meta["finish_reason"] == {"type": "abort", "message": "swapped"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a5_05_a_client_that_goes_away_frees_its_answers(at: Site, *, streamed: bool) -> None:
    at.table.hold(position=2)
    sent = {**body(n=4), "input_ids": [[1], [2]], "stream": streamed}
    asks = [asyncio.create_task(at.post(PATH, sent)) for _ in range(3)]
    await at.table.until_waiting(24)
    for ask in asks:
        ask.cancel()
    await asyncio.wait_for(at.table.until_active(0), 5)


async def test_an_error_under_way_is_the_last_event_and_ends_the_batch(replica: Site) -> None:
    replica.table.fail_after(3, UnavailableError("gone"))
    async with replica.session.post(PATH, json={**body(), "input_ids": [[1], [2]], "stream": True}) as reply:
        *events, rest = (await reply.read()).decode().split("\n\n")
    assert rest == ""
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"


WRONG = (
    ({"text": "x"}, "text"),
    ({"input_ids": None}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": "x"}, "input_ids"),
    ({"input_ids": [[1]] * (MAX_BATCH + 1)}, "input_ids"),
    ({"input_ids": [[1]] * MAX_BATCH, "sampling_params": {"n": MAX_BATCH_ANSWERS // MAX_BATCH + 1}}, "n"),
    ({"rid": ["a", "b"]}, "rid"),
    ({"rid": "a b"}, "rid"),
    ({"top_logprobs_num": 21}, "top_logprobs_num"),
    ({"top_logprobs_num": 1, "return_logprob": False}, "top_logprobs_num"),
    ({"logprob_start_len": -2}, "logprob_start_len"),
    ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"sampling_params": {"sampling_seed": -1}}, "sampling_seed"),
    ({"sampling_params": [{}]}, "sampling_params"),
    ({"policy": {"max_lag": -1}}, "policy"),
    ({"extra_key": "x" * 257}, "extra_key"),
)


@pytest.mark.parametrize(("extra", "name"), WRONG, ids=str)
async def test_what_is_wrong_is_named_as_the_caller_named_it(
    replica: Site, extra: dict[str, object], name: str
) -> None:
    status, reply = await replica.post(PATH, {**body(), **extra})
    assert (status, reply["error"]["code"]) == (400, "invalid_input")
    assert reply["error"]["message"].partition(" ")[0] == name
    assert not replica.table.requests


UNSUPPORTED = (
    ({"return_routed_experts": True}, "return_routed_experts"),
    ({"image_data": "x"}, "image_data"),
    ({"lora_path": "x"}, "lora_path"),
    ({"session_params": {"id": 1}}, "session_params"),
    ({"sampling_params": {"structural_tag": "a"}}, "structural_tag"),
    ({"sampling_params": {"stream_interval": 4}}, "stream_interval"),
    ({"sampling_params": {"no_such": 1}}, "no_such"),
)


@pytest.mark.parametrize(("extra", "name"), UNSUPPORTED, ids=[name for _, name in UNSUPPORTED])
async def test_what_is_not_done_is_refused_by_name(replica: Site, extra: dict[str, object], name: str) -> None:
    status, reply = await replica.post(PATH, {**body(), **extra})
    assert (status, reply["error"]["code"]) == (400, "unsupported")
    assert reply["error"]["message"].startswith(f"{name} ")
    assert not replica.table.requests


HOSTILE = (b"", b"[]", b"{", b"null", b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"[" * 100_000, b'{"text": {}}')
VALUES: tuple[object, ...] = (-1, 10**30, "x", [], {}, [[1]], True, 0.5, "\x00", ["s"] * 100_000)


async def test_a8_11_a8_15_hostile_bodies_leave_the_server_well(replica: Site) -> None:
    fields = ("text", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "sampling_params", "stream")
    params = ("n", "temperature", "top_p", "sampling_seed", "stop", "stop_token_ids", "max_new_tokens", "logit_bias")
    bodies = list(HOSTILE)
    bodies += [json.dumps({"text": "x", name: value}).encode() for name in fields for value in VALUES]
    bodies += [json.dumps(body(**{name: value})).encode() for name in params for value in VALUES]
    for data in bodies:
        async with replica.session.post(PATH, data=io.BytesIO(data)) as reply:
            await reply.read()
            assert reply.status in (200, 400), data[:80]
    status, _ = await replica.post(PATH, body())
    assert status == 200
