"""Scoring given tokens, on a real socket: at a replica, and at a gateway before one."""

import asyncio
import io
import json
import math
from typing import Any

import pytest
from abort_rig import ROWS, Site

from slackwater.api.arrays import Array
from slackwater.api.score import MAX_SCORE_ITEMS, SCORES_AT_ONCE
from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import UnavailableError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish
from slackwater.rollout.request import SamplingSpec
from slackwater.testing.distribution import processed

PATH = "/v1/score"


def item(*token_ids: int, **prompt: object) -> dict[str, Any]:
    return {"token_ids": list(token_ids), **(prompt or {"prompt_ids": [1, 2]})}


def values(scored: Any) -> tuple[float, ...]:
    return Array(**scored["logprobs"]).values()


async def test_scores_are_the_models_own_log_probabilities(at: Site, tokenizer: ChatTokenizer) -> None:
    at.table.versions = tuple(map(Version, (4, 4, 5)))
    items = [item(9, 300, 9), item(5, prompt="hello")]
    status, reply = await at.post(PATH, {"items": items, "model": "m", "request_id": "job"})
    assert (status, reply["request_id"], [one["index"] for one in reply["items"]]) == (200, "job", [0, 1])
    first, second = reply["items"]
    plain = [dict(processed(row, SamplingSpec(max_tokens=1))) for row in ROWS]
    assert values(first) == pytest.approx([plain[0][9], plain[1][300], plain[2][9]], rel=1e-6)
    assert values(second) == pytest.approx([plain[0][5]], rel=1e-6)
    assert Array(**first["token_ids"]).values() == (9, 300, 9)
    assert first["policy"] == [[4, 0, 2], [5, 2, 3]]
    assert (first["replica"], first["boot_id"], first["run"], first["finish"]) == ("table", "boot-0", "demo", "stop")
    prompts = {ask.prompt_ids for ask in at.table.requests}
    assert prompts == {(1, 2), tokenizer.encode("hello")}


async def test_only_the_named_policy_scores(at: Site) -> None:
    at.table.versions = tuple(map(Version, (7, 7, 8)))
    status, reply = await at.post(PATH, {"items": [item(1, 2)], "policy": {"exact_version": 8}})
    assert (status, reply["error"]["code"], reply["error"]["versions"]) == (409, "policy_unmet", [7])
    status, reply = await at.post(PATH, {"items": [item(1, 2, 3, 4)], "policy": {"exact_version": 7}})
    (scored,) = reply["items"]
    assert (status, scored["finish"], scored["policy"]) == (200, Finish.POLICY_CHANGED, [[7, 0, 2]])
    assert len(values(scored)) == Array(**scored["token_ids"]).shape[0] == 2


async def test_a_provisional_version_says_so(replica: Site) -> None:
    replica.table.provisional = (1,)
    _, reply = await replica.post(PATH, {"items": [item(1, 2), item(1)]})
    assert [one.get("provisional", False) for one in reply["items"]] == [True, False]


async def test_one_item_that_fails_ends_the_rest(at: Site) -> None:
    at.table.fail_after(1, UnavailableError("gone"))
    status, reply = await at.post(PATH, {"items": [item(1, 2)] * 9})
    assert (status, reply["error"]["code"]) == (503, "unavailable")
    await asyncio.wait_for(at.table.until_active(0), 5)


async def test_many_items_take_turns(replica: Site) -> None:
    replica.table.hold()
    ask = asyncio.create_task(replica.post(PATH, {"items": [item(1)] * MAX_SCORE_ITEMS}))
    await replica.table.until_waiting(SCORES_AT_ONCE)
    assert replica.table.active == SCORES_AT_ONCE
    replica.table.release()
    status, reply = await asyncio.wait_for(ask, 10)
    assert (status, len(reply["items"])) == (200, MAX_SCORE_ITEMS)


async def test_a5_01_an_abort_keeps_what_was_scored(at: Site) -> None:
    at.table.hold(position=2)
    sent = {"items": [item(1, 2, 3), item(4, 5, 6)], "request_id": "job"}
    ask = asyncio.create_task(at.post(PATH, sent))
    await at.held(2)
    status, again = await at.post(PATH, sent)
    assert (status, again["error"]["code"]) == (409, "conflict")
    assert await at.abort("job") == (200, {"request_id": "job", "aborted": 2})
    status, reply = await asyncio.wait_for(ask, 5)
    assert (status, [one["finish"] for one in reply["items"]]) == (200, ["abort"] * 2)
    assert [len(values(one)) for one in reply["items"]] == [2, 2]


async def test_a5_05_a_client_that_goes_away_frees_its_items(at: Site) -> None:
    at.table.hold(position=1)
    ask = asyncio.create_task(at.post(PATH, {"items": [item(1, 2)] * 100}))
    await at.table.until_waiting(SCORES_AT_ONCE)
    ask.cancel()
    await asyncio.wait_for(at.table.until_active(0), 5)


async def test_a3_04_nothing_is_impossible_under_the_model_itself(replica: Site) -> None:
    replica.table.rows = ((0.0, -math.inf, 1.0),)
    _, reply = await replica.post(PATH, {"items": [item(1, prompt_ids=[0]), item(2, prompt_ids=[0])]})
    first, second = (values(one)[0] for one in reply["items"])
    assert first == -math.inf
    assert second == pytest.approx(-math.log(1 + math.exp(-1)))


WRONG: tuple[tuple[dict[str, object], str], ...] = (
    ({}, "items"),
    ({"items": []}, "items"),
    ({"items": [item(1)] * (MAX_SCORE_ITEMS + 1)}, "items"),
    ({"items": [item()]}, "token_ids"),
    ({"items": [{"token_ids": [1]}]}, "prompt"),
    ({"items": [item(1, prompt="x", prompt_ids=[1])]}, "prompt"),
    ({"items": [{**item(1), "logprobs": 3}]}, "items"),
    ({"items": [item(1)], "request_id": "a b"}, "request_id"),
    ({"items": [item(1)], "policy": {"exact_version": -1}}, "policy"),
    ({"items": [item(1)], "policy": {"min_version": 3, "exact_version": 2}}, "policy"),
    ({"items": [item(*[1] * 255)]}, "the"),
    ({"items": [item(1, prompt_ids=[])]}, "prompt_ids"),
    ({"items": [item(-1)]}, "prompt_ids"),
)


@pytest.mark.parametrize(("body", "name"), WRONG, ids=lambda value: str(value)[:40])
async def test_a8_11_what_is_wrong_is_named(replica: Site, body: dict[str, object], name: str) -> None:
    async with replica.session.post(PATH, data=io.BytesIO(json.dumps(body).encode())) as reply:
        error = json.loads(await reply.read())["error"]
        told = error["message"].partition(" ")[0]
    assert (reply.status, told) == (400, name)


async def test_an_unknown_field_is_refused_by_name(replica: Site) -> None:
    status, reply = await replica.post(PATH, {"items": [item(1)], "temperature": 0.5})
    assert (status, reply["error"]["code"]) == (400, "unsupported")
    assert reply["error"]["message"].startswith("temperature ")
