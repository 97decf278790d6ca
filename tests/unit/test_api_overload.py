"""An app that is full: who is refused, who isn't, and that nobody else is harmed."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from time import perf_counter

import aiohttp
import pytest
from load_rig import HI, IDS, KEYS, PLACES, SLOTS, TEXT, Busy, Counted, Told, busy, busy_app
from replica_rig import Rig, until, weights_at

import slackwater.api.app as app_module
from slackwater.api.admission import Admission, Capacity
from slackwater.api.app import create_app
from slackwater.checkpoint.canary import Canary
from slackwater.ids import ReplicaId
from slackwater.router.app import create_gateway
from slackwater.router.policy import Health
from slackwater.router.remote import RemoteReplica
from slackwater.router.router import Router
from slackwater.testing.completer import TableCompleter
from slackwater.testing.engine import stamp_tokens, weights_stamp
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import TINY_VOCAB, write_tiny_tokenizer

_log = logging.getLogger(__name__)
STAMP = weights_stamp(weights_at(0))
STREAM = {"stream": True}
GENERATE = {"request_id": "g", "prompt_ids": [1], "sampling": {"max_tokens": 3}}
EVERY: list[tuple[str, Mapping[str, object]]] = [
    (TEXT, {"prompt": "hi", "max_tokens": 3}),
    (TEXT, {"prompt": "hi", "max_tokens": 3, **STREAM}),
    ("/v1/chat/completions", HI),
    ("/v1/chat/completions", {**HI, **STREAM}),
    ("/v1/generate", GENERATE),
    ("/v1/score", {"items": [{"prompt": "hi", "token_ids": [5]}]}),
    ("/inference/v1/generate", {"token_ids": [1]}),
    ("/inference/v1/generate", {"token_ids": [1], **STREAM}),
    ("/generate", {"text": "hi"}),
    ("/generate", {"text": ["hi", "ho"], **STREAM}),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return Counted(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch) -> list[Admission]:
    """Of the apps that are made, in their order."""
    made: list[Admission] = []

    def make(capacity: Capacity) -> Admission:
        made.append(Admission(capacity))
        return made[-1]

    monkeypatch.setattr(app_module, "Admission", make)
    return made


@pytest.fixture
async def at(tmp_path: Path, tokenizer: Counted, admissions: list[Admission]) -> AsyncIterator[Busy]:
    async with busy(tmp_path, tokenizer) as opened:
        opened.engine.hold()
        yield opened
        opened.engine.release()
        await until(lambda: (opened.load, admissions[0].taken) == (0, 0))


def drawn(seed: int, tokens: int = 3, prompt: tuple[int, ...] = (1, 2, 3)) -> list[int]:
    return stamp_tokens(prompt, [STAMP] * tokens, seed)


async def fill(at: Busy, answers: int = PLACES, **fields: object) -> list["asyncio.Task[Told]"]:
    """Requests under way, each with a seed of its own, in the engine."""
    before = at.load
    tasks = [asyncio.create_task(at.post(TEXT, {**IDS, "seed": seed, **fields})) for seed in range(answers)]
    await until(lambda: at.load == before + answers)
    return tasks


@pytest.mark.parametrize(("path", "body"), EVERY, ids=lambda value: str(value)[:60])
async def test_a_full_app_says_so_on_every_route_before_it_makes_a_prompt(
    at: Busy, path: str, body: Mapping[str, object]
) -> None:
    tasks = await fill(at)
    before = at.tokenizer.made
    refused = await at.post(path, body)
    assert (refused.status, refused.code, refused.retry_after) == (503, "overloaded", "1")
    assert refused.json()["error"]["retry_after_s"] == 1
    assert (at.tokenizer.made, at.load) == (before, PLACES)
    at.engine.release()
    assert [(await task).ids for task in tasks] == [[drawn(seed)] for seed in range(PLACES)]


async def test_refusals_come_while_the_engine_makes_no_step(at: Busy) -> None:
    """The engine is held, so nothing that it does can come first; how long each takes is logged."""
    tasks = await fill(at)
    waits: list[float] = []
    for _ in range(50):
        begun = perf_counter()
        assert (await at.post(TEXT, IDS)).code == "overloaded"
        waits.append(perf_counter() - begun)
    assert (at.load, any(task.done() for task in tasks)) == (PLACES, False)
    _log.info("50 refusals: median %.1f ms, longest %.1f ms", sorted(waits)[25] * 1e3, max(waits) * 1e3)
    at.engine.release()
    assert {(await task).status for task in tasks} == {200}


@pytest.mark.parametrize("body", [{"prompt": [1] * 7, "max_tokens": 1}, {"prompt": [1] * 7, "max_tokens": 1, "n": 2}])
async def test_prompts_of_too_many_tokens_together_are_refused(tokenizer: Counted, body: Mapping[str, object]) -> None:
    table = TableCompleter([[float(token % 7) for token in range(TINY_VOCAB)]])
    table.hold()
    capacity = Capacity(places=9, at_once=9, prompt_tokens=10)
    app = create_app(table, tokenizer, KEYS, model_name="m", capacity=capacity)
    headers = {"Authorization": f"Bearer {KEYS.inference}"}
    async with Loopback(app) as server, aiohttp.ClientSession(server.url, headers=headers) as session:

        async def ask(sent: Mapping[str, object]) -> tuple[int, str | None]:
            async with session.post(TEXT, data=json.dumps(sent)) as reply:
                await reply.read()
                return reply.status, reply.headers.get("Retry-After")

        first = asyncio.ensure_future(ask(body))
        await until(lambda: table.waiting > 0)
        admitted = len(table.requests)
        assert await ask(body) == (503, "1")
        assert len(table.requests) == admitted
        small = asyncio.ensure_future(ask({**body, "prompt": [1] * 3}))
        await until(lambda: len(table.requests) > admitted)
        table.release()
        assert (await first, await small) == ((200, None), (200, None))
        assert await ask({**body, "prompt": [1] * 30}) == (200, None), "alone, whatever it has"


@pytest.mark.parametrize("streamed", [False, True])
async def test_those_under_way_end_untouched_and_each_end_lets_one_more_in(at: Busy, *, streamed: bool) -> None:
    tasks = await fill(at, stream=streamed)
    assert (await at.post(TEXT, IDS)).code == "overloaded"
    at.engine.release(3)
    await asyncio.gather(*tasks[:SLOTS])
    assert at.load == PLACES - SLOTS
    later = await fill(at, SLOTS)
    assert (await at.post(TEXT, IDS)).code == "overloaded"
    at.engine.release()
    told = await asyncio.gather(*tasks, *later)
    assert {reply.status for reply in told} == {200}
    ids = [streamed_ids(reply) if streamed else reply.ids for reply in told[:PLACES]]
    assert [*ids, *(reply.ids for reply in told[PLACES:])] == [
        *([drawn(seed)] for seed in range(PLACES)),
        *([drawn(seed)] for seed in range(SLOTS)),
    ]


def streamed_ids(reply: Told) -> list[list[int]]:
    *events, done = reply.body.decode().replace("data: ", "").split("\n\n")[:-1]
    assert done == "[DONE]"
    return [[token for chunk in events for token in json.loads(chunk)["choices"][0]["token_ids"]]]


async def test_choices_are_taken_all_or_none(at: Busy) -> None:
    await fill(at, SLOTS)
    refused = await at.post(TEXT, {**IDS, "n": 3})
    assert (refused.code, at.load) == ("overloaded", SLOTS)
    task = asyncio.create_task(at.post(TEXT, {**IDS, "n": 2}))
    await until(lambda: at.load == PLACES)
    at.engine.release()
    assert (await task).ids == [drawn(5), drawn(6)]


async def test_what_never_fits_is_named(at: Busy) -> None:
    refused = await at.post(TEXT, {**IDS, "n": PLACES + 1})
    assert (refused.status, refused.retry_after, refused.json()["error"]["param"]) == (400, None, "n")


async def test_a_batch_is_taken_all_or_none(at: Busy, admissions: list[Admission]) -> None:
    await fill(at, SLOTS)
    batch = {"input_ids": [[1], [2], [3]], "sampling_params": {"max_new_tokens": 2}}
    assert ((await at.post("/generate", batch)).code, at.load) == ("overloaded", SLOTS)
    assert admissions[0].taken == SLOTS


async def test_an_answer_that_ends_frees_its_place_while_others_of_its_request_go_on(
    at: Busy, admissions: list[Admission]
) -> None:
    sampling = [{"max_new_tokens": tokens} for tokens in (1, 1, 9, 9)]
    task = asyncio.create_task(at.post("/generate", {"input_ids": [[1]] * 4, "sampling_params": sampling}))
    await until(lambda: at.load == 4)
    assert admissions[0].taken == 4
    at.engine.release(1)
    await until(lambda: admissions[0].taken == 2)
    at.engine.release()
    assert [len(one["output_ids"]) for one in (await task).json()] == [1, 1, 9, 9]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_waiting_request_whose_client_leaves_frees_its_place(at: Busy, *, streamed: bool) -> None:
    await fill(at, PLACES - 1)
    gone = await fill(at, 1, stream=streamed)
    assert (await at.post(TEXT, IDS)).code == "overloaded"
    gone[0].cancel()
    await until(lambda: at.load == PLACES - 1)
    (taken,) = await fill(at, 1)
    at.engine.release()
    assert (await taken).ids == [drawn(0)]


async def test_an_aborted_waiting_request_frees_its_place(at: Busy) -> None:
    await fill(at, PLACES - 1)
    (gone,) = await fill(at, 1, request_id="job1")
    assert (await at.post("/v1/abort", {"request_id": "job1"})).json()["aborted"] == 1
    assert (await gone).json()["choices"][0]["finish_reason"] == "abort"
    await fill(at, 1)


async def test_scores_of_more_items_than_places_take_turns(at: Busy, admissions: list[Admission]) -> None:
    items = [{"prompt_ids": [1], "token_ids": [token]} for token in range(20)]
    task = asyncio.create_task(at.post("/v1/score", {"items": items}))
    await until(lambda: at.load == PLACES)
    assert admissions[0].taken == PLACES
    at.engine.release()
    assert len((await task).json()["items"]) == 20


async def test_a_full_replica_still_asks_its_engine_for_a_canary(at: Busy) -> None:
    tokens = stamp_tokens((5, 6), [weights_stamp(weights_at(1))])
    canary = Canary(prompt=(5, 6), tokens=tuple(tokens), logprobs=(-1.5,), tolerance=9.0)
    tasks = await fill(at, max_tokens=40)
    at.rig.publish(canary=canary)
    following = asyncio.create_task(at.rig.follow())
    await until(lambda: at.load == PLACES + 1)
    assert (await at.post(TEXT, IDS)).code == "overloaded"
    at.engine.release()
    assert (await following).version == 1
    assert {(await task).status for task in tasks} == {200}


async def test_a_gateway_asks_another_replica_and_then_tells_whom_it_asked(
    at: Busy, tmp_path: Path, tokenizer: Counted
) -> None:
    other = Rig(tmp_path, "replica-1", at.rig.bucket)
    await other.replica.start()
    async with Loopback(busy_app(other, tokenizer)) as second:
        router = Router({ReplicaId(url): RemoteReplica(url, KEYS.inference) for url in (at.url, second.url)})
        async with Loopback(create_gateway(router, tokenizer, KEYS, model_name="m")) as gateway:
            await fill(at)
            headers = {"Authorization": f"Bearer {KEYS.inference}"}
            async with aiohttp.ClientSession(gateway.url, headers=headers) as session:
                front = Busy(rig=other, tokenizer=tokenizer, session=session, url=gateway.url)
                assert [(await front.post(TEXT, IDS)).ids for _ in range(4)] == [[drawn(5)]] * 4
                other.engine.hold()
                tasks = [asyncio.create_task(front.post(TEXT, IDS)) for _ in range(PLACES)]
                await until(lambda: front.load == PLACES)
                refused = await front.post(TEXT, {**IDS, **STREAM})
                assert (refused.status, refused.code, refused.retry_after) == (503, "overloaded", "1")
                assert {member.health for member in router.members().values()} == {Health.GOOD}
                assert (router.statistics().losses, router.statistics().in_flight) == (0, PLACES)
                other.engine.release()
                assert [(await task).ids for task in tasks] == [[drawn(5)]] * PLACES
    await other.close()
