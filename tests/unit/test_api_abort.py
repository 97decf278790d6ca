"""Aborts by name, on a real socket: at a replica, and at a gateway before one."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from abort_rig import CHAT, SHOWN, TEXT, Site, site

import slackwater.api.app as app_module
from slackwater.api.arrays import Array
from slackwater.api.live import Live
from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import UnavailableError

ROUTES = pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT], ids=["chat", "text"])


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> list[Live]:
    """The registries of the apps that are made, in their order."""
    made: list[Live] = []

    def make() -> Live:
        made.append(Live())
        return made[-1]

    monkeypatch.setattr(app_module, "Live", make)
    return made


@pytest.fixture(params=[False, True], ids=["replica", "gateway"])
async def at(request: pytest.FixtureRequest, tokenizer: ChatTokenizer, live: list[Live]) -> AsyncIterator[Site]:
    async with site(tokenizer, gateway=request.param) as opened:
        yield opened
        await asyncio.wait_for(opened.table.until_active(0), 5)
        assert opened.router is None or opened.router.statistics().in_flight == 0
    assert [len(one) for one in live] == [0] * len(live)


@pytest.fixture
async def replica(tokenizer: ChatTokenizer) -> AsyncIterator[Site]:
    async with site(tokenizer, gateway=False) as opened:
        yield opened


def evidence(choice: Any) -> tuple[list[int], list[float]]:
    data = choice["engine_data"]
    ids, logprobs = (list(Array(**shown).values()) for shown in (data["token_ids"], data["logprobs"]["values"]))
    assert [int(token) for token in ids] == choice["token_ids"]
    return choice["token_ids"], logprobs


def shown_logprobs(choice: Any) -> list[float]:
    shown = choice["logprobs"]
    return shown["token_logprobs"] if "token_logprobs" in shown else [entry["logprob"] for entry in shown["content"]]


@ROUTES
async def test_a5_01_an_aborted_request_has_exactly_its_tokens_so_far(
    at: Site, path: str, prompt: dict[str, object]
) -> None:
    body = {**prompt, **SHOWN}
    _, whole = await at.post(path, body)
    at.table.hold(position=100)
    ask = asyncio.create_task(at.post(path, {**body, "request_id": "job1"}))
    await at.held()
    assert await at.abort("job1") == (200, {"request_id": "job1", "aborted": 1})
    status, reply = await asyncio.wait_for(ask, 5)
    (choice,), (reference,) = reply["choices"], whole["choices"]
    ids, logprobs = evidence(choice)
    assert (status, choice["finish_reason"], choice["engine_data"]["finish"]) == (200, "abort", "abort")
    assert (len(ids), ids) == (100, reference["token_ids"][:100])
    assert logprobs == evidence(reference)[1][:100]
    assert shown_logprobs(choice) == shown_logprobs(reference)[:100]
    assert choice["engine_data"]["policy"] == [[7, 0, 100]]
    assert reply["usage"]["completion_tokens"] == 100
    assert reply["id"].endswith("-job1")


@ROUTES
async def test_a5_03_a_stream_ends_with_the_abort_and_then_done(at: Site, path: str, prompt: dict[str, object]) -> None:
    body = {**prompt, **SHOWN}
    _, whole = await at.post(path, body)
    at.table.hold(position=100)
    options = {"request_id": "job1", "stream_options": {"include_usage": True}}
    ask = asyncio.create_task(at.events(path, {**body, **options}))
    await at.held()
    assert await at.abort("job1") == (200, {"request_id": "job1", "aborted": 1})
    *chunks, counted, done = await asyncio.wait_for(ask, 5)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert [part["finish_reason"] for part in parts] == [None] * 100 + ["abort"]
    ids = [token for part in parts for token in part["token_ids"]]
    assert (ids, counted["usage"]["completion_tokens"]) == (whole["choices"][0]["token_ids"][:100], 100)
    assert Array(**parts[-1]["engine_data"]["token_ids"]).values() == tuple(ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a5_01_a_request_that_waits_for_its_first_token_ends_with_none(at: Site, *, streamed: bool) -> None:
    path, prompt = CHAT
    body = {**prompt, **SHOWN, "request_id": "job1", "n": 2}
    at.table.hold()
    ask = asyncio.create_task(at.events(path, body) if streamed else at.post(path, body))
    await at.table.until_waiting(2)
    assert await at.abort("job1") == (200, {"request_id": "job1", "aborted": 2})
    reply = await asyncio.wait_for(ask, 5)
    choices = [chunk["choices"][0] for chunk in reply[:-1]] if isinstance(reply, list) else reply[1]["choices"]
    assert [(one["finish_reason"], one["token_ids"]) for one in choices] == [("abort", [])] * 2
    assert all(one["engine_data"]["policy"] == [] for one in choices)
    assert (reply[-1] == "[DONE]") is streamed


@pytest.mark.parametrize("streamed", [False, True])
async def test_a5_01_a_request_that_is_not_admitted_yet_ends_once_it_is(at: Site, *, streamed: bool) -> None:
    path, prompt = TEXT
    at.table.opened.clear()
    body = {**prompt, **SHOWN, "request_id": "job1"}
    ask = asyncio.create_task(at.events(path, body) if streamed else at.post(path, body))
    await at.table.knocked.acquire()
    assert await at.abort("job1") == (200, {"request_id": "job1", "aborted": 1})
    assert await at.abort("job1") == (200, {"request_id": "job1", "aborted": 0})
    at.table.opened.set()
    reply = await asyncio.wait_for(ask, 5)
    choice = reply[0]["choices"][0] if isinstance(reply, list) else reply[1]["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])


async def test_a5_01_choices_that_had_ended_keep_their_end(replica: Site) -> None:
    path, prompt = TEXT
    body = {**prompt, **SHOWN, "n": 3, "max_tokens": 40}
    _, whole = await replica.post(path, body)
    (first, *others), stop = (choice["token_ids"] for choice in whole["choices"]), whole["choices"][0]["token_ids"][3]
    cut = first.index(stop) + 1
    assert not any(stop in other[:5] for other in others)
    replica.table.hold(position=5)
    ask = asyncio.create_task(replica.post(path, {**body, "request_id": "job1", "stop_token_ids": [stop]}))
    await replica.table.until_waiting(2)
    assert await replica.abort("job1") == (200, {"request_id": "job1", "aborted": 2})
    _, reply = await asyncio.wait_for(ask, 5)
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "abort", "abort"]
    assert [len(choice["token_ids"]) for choice in reply["choices"]] == [cut, 5, 5]


async def test_a5_07_only_the_very_name_is_aborted(at: Site) -> None:
    path, prompt = TEXT
    at.table.hold(position=2)
    names = ("job1", "job10", "job", "job1:0", "job1-0")
    asks = {name: asyncio.create_task(at.post(path, {**prompt, **SHOWN, "request_id": name})) for name in names}
    await at.table.until_waiting(5)
    assert await at.abort("job1") == (200, {"request_id": "job1", "aborted": 1})
    _, reply = await asyncio.wait_for(asks.pop("job1"), 5)
    assert reply["choices"][0]["finish_reason"] == "abort"
    at.table.release()
    for ask in asks.values():
        assert (await asyncio.wait_for(ask, 5))[1]["choices"][0]["finish_reason"] == "length"


HOSTILE: list[object] = [
    "",
    None,
    5,
    ["job1"],
    {},
    "*",
    "job*",
    "job1\n",
    " job1",
    "j\u00f6b1",
    "job1/",
    "x" * 129,
    "\x00",
]


@pytest.mark.parametrize("name", HOSTILE, ids=repr)
async def test_a5_07_what_is_no_name_aborts_nothing(replica: Site, name: object) -> None:
    path, prompt = TEXT
    replica.table.hold(position=1)
    asks = [
        asyncio.create_task(replica.post(path, {**prompt, **SHOWN, **named})) for named in ({}, {"request_id": "job1"})
    ]
    await replica.table.until_waiting(2)
    status, reply = await replica.abort(name)
    assert (status, reply["error"]["type"], reply["error"]["param"]) == (400, "invalid_input", "request_id")
    assert replica.table.active == 2
    replica.table.release()
    assert [(await ask)[1]["choices"][0]["finish_reason"] for ask in asks] == ["length"] * 2


async def test_a5_07_bodies_without_a_name_abort_nothing(replica: Site) -> None:
    path, prompt = TEXT
    replica.table.hold(position=1)
    ask = asyncio.create_task(replica.post(path, {**prompt, **SHOWN, "request_id": "job1"}))
    await replica.table.until_waiting(1)
    for body in ({}, [], "job1", None, {"all": True}, {"abort_all": True, "rid": "job1"}, {"request_ids": ["job1"]}):
        status, _ = await replica.post("/v1/abort", body)
        assert (body, status, replica.table.active) == (body, 400, 1)
    for raw in (b"", b"{", b"\xff", b'{"request_id":' + b"[" * 99_999):
        async with replica.session.post("/v1/abort", data=raw) as reply:
            assert (raw[:20], reply.status, replica.table.active) == (raw[:20], 400, 1)
    for other in ("job", "job10", "JOB1", "1", "chatcmpl-job1", "cmpl-job1", "job1-0"):
        status, reply = await replica.abort(other)
        assert (other, status, reply["error"]["type"]) == (other, 404, "not_found")
    replica.table.release()
    assert (await ask)[1]["choices"][0]["finish_reason"] == "length"


@ROUTES
@pytest.mark.parametrize("streamed", [False, True])
async def test_names_out_of_range_are_refused(
    replica: Site, path: str, prompt: dict[str, object], *, streamed: bool
) -> None:
    for name in HOSTILE:
        if name is not None:
            status, reply = await replica.post(path, {**prompt, "request_id": name, "stream": streamed})
            assert (name, status, reply["error"]["param"]) == (name, 400, "request_id")
    for name in ("x" * 128, "a.b_c:d-E9", "-", ":"):
        status, reply = await replica.post(path, {**prompt, "request_id": name, "max_tokens": 1})
        assert (status, reply["id"].partition("-")[2]) == (200, name)
    assert (await replica.post(path, {**prompt, "request_id": None, "max_tokens": 1}))[0] == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_name_in_use_is_a_conflict_and_free_after_its_end(at: Site, *, streamed: bool) -> None:
    body = {**SHOWN, "request_id": "job1"}
    at.table.hold(position=1)
    ask = asyncio.create_task(at.post(CHAT[0], {**CHAT[1], **body}))
    await at.table.until_waiting(1)
    for path, prompt in (CHAT, TEXT):
        status, reply = await at.post(path, {**prompt, **body, "stream": streamed})
        assert (status, reply["error"]["type"], reply["error"]["param"]) == (409, "conflict", "request_id")
    assert at.table.active == 1
    at.table.release()
    assert (await ask)[0] == 200
    assert (await at.post(TEXT[0], {**TEXT[1], **body}))[0] == 200


async def test_aborts_at_the_same_time_end_a_request_once(at: Site) -> None:
    path, prompt = TEXT
    at.table.hold(position=3)
    ask = asyncio.create_task(at.post(path, {**prompt, **SHOWN, "n": 4, "request_id": "job1"}))
    await at.table.until_waiting(4)
    aborts = await asyncio.gather(*(at.abort("job1") for _ in range(8)))
    assert {status for status, _ in aborts} <= {200, 404}
    assert sum(reply.get("aborted", 0) for _, reply in aborts) == 4
    assert {choice["finish_reason"] for choice in (await ask)[1]["choices"]} == {"abort"}
    assert (await at.abort("job1"))[0] == 404


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_abort_as_the_request_finishes_gives_one_end(at: Site, *, streamed: bool) -> None:
    path, prompt = TEXT
    body = {**prompt, **SHOWN, "max_tokens": 6}
    _, whole = await at.post(path, body)
    expected = whole["choices"][0]["token_ids"]
    for turns in range(25):
        at.table.hold(position=3)
        name = f"job{turns}"
        ask = at.events(path, {**body, "request_id": name}) if streamed else at.post(path, {**body, "request_id": name})
        asked = asyncio.create_task(ask)
        await at.table.until_waiting(1)
        abort = asyncio.create_task(at.abort(name))
        for _ in range(turns):
            await asyncio.sleep(0)
        at.table.release()
        status, told = await abort
        reply = await asyncio.wait_for(asked, 5)
        parts = [one["choices"][0] for one in (reply[:-1] if isinstance(reply, list) else [reply[1]])]
        ids = [token for part in parts for token in part["token_ids"]]
        reasons = [part["finish_reason"] for part in parts if part["finish_reason"]]
        assert status in (200, 404)
        assert reasons == ["length" if len(ids) == 6 else "abort"]
        assert told.get("aborted", 0) == (reasons == ["abort"])
        assert ids == expected[: len(ids)]


async def test_a_request_without_a_name_is_aborted_by_the_one_it_was_given(at: Site) -> None:
    at.table.hold(position=1)
    body = {**TEXT[1], **SHOWN, "stream": True}
    async with at.session.post(TEXT[0], json=body) as reply:
        first = json.loads((await reply.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        given = first["id"].removeprefix("cmpl-")
        assert await at.abort(given) == (200, {"request_id": given, "aborted": 1})
        rest = (await reply.read()).decode()
    assert '"finish_reason":"abort"' in rest
    assert rest.endswith("data: [DONE]\n\n")


async def test_requests_of_tokens_are_aborted_by_their_name_too(replica: Site) -> None:
    replica.table.hold(position=2)
    body = {"request_id": "r1", "prompt_ids": [1, 2], "sampling": {"max_tokens": 9, "seed": 1}}

    async def ask() -> list[Any]:
        async with replica.session.post("/v1/generate", json=body) as reply:
            return [json.loads(line) for line in (await reply.read()).splitlines()]

    # A router that lost its connection asks again under the name that the first may still have.
    asks = [asyncio.create_task(ask()) for _ in range(2)]
    await replica.table.until_waiting(2)
    assert await replica.abort("r1") == (200, {"request_id": "r1", "aborted": 2})
    for lines in await asyncio.gather(*asks):
        assert [line["type"] for line in lines] == ["origin", "token", "token", "end"]
        assert lines[-1]["finish"] == "abort"


async def test_one_name_at_two_gateways_is_two_requests_to_a_replica(replica: Site) -> None:
    for _ in range(2):
        await replica.post(TEXT[0], {**TEXT[1], "request_id": "job1", "max_tokens": 1})
    first, second = (request.request_id for request in replica.table.requests)
    assert first != second
    assert first.startswith("job1:")


async def settled(live: list[Live]) -> None:
    """Return once nothing is under way; a client that left is noticed some turns of the loop later."""
    for _ in range(10_000):
        if not any(map(len, live)):
            return
        await asyncio.sleep(0)
    pytest.fail(f"{list(map(len, live))} requests are left")


ENDINGS = ("finish", "abort", "leave", "fail")


async def test_nothing_is_left_of_200_requests_however_they_end(at: Site, live: list[Live]) -> None:
    async def ask(number: int) -> int:
        path, prompt = (CHAT, TEXT)[number % 2]
        fields = {"request_id": f"job{number}", "stream": bool(number % 3), "n": 1 + number % 2, "max_tokens": 6}
        body = {**prompt, **SHOWN, **fields}
        async with at.session.post(path, json=body) as reply:
            await reply.read()
            return reply.status

    async def ending(how: str, asks: list[asyncio.Task[int]]) -> None:
        match how:
            case "abort":
                aborts = await asyncio.gather(*(at.abort(f"job{number}") for number in range(50)))
                assert sum(reply["aborted"] for _, reply in aborts) == 75
            case "leave":
                for leaving in asks:
                    leaving.cancel()
            case "fail":
                at.table.fail_after(2, UnavailableError("taken back"))
                at.table.release()
            case _:
                at.table.release()

    for how in ENDINGS:
        at.table.hold(position=2)
        asks = [asyncio.create_task(ask(number)) for number in range(50)]
        await asyncio.wait_for(at.table.until_waiting(75), 10)
        assert len(live[-1]) == 50
        await ending(how, asks)
        ends = await asyncio.gather(*asks, return_exceptions=True)
        assert set(map(str, ends)) <= {"200", "503" if how == "fail" else "200", ""}
        await asyncio.wait_for(at.table.until_active(0), 10)
        await settled(live)
        assert {status for status, _ in [await at.abort(f"job{number}") for number in range(50)]} == {404}
