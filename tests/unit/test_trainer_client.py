"""The trainer's client: whole evidence or a typed error, and patience with what will pass."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slackwater.api.app import create_app
from slackwater.api.auth import Keys
from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import (
    AuthError,
    CorruptError,
    InternalError,
    InvalidInputError,
    OverloadedError,
    PolicyUnmetError,
    UnavailableError,
    UnsupportedError,
)
from slackwater.ids import BootId, ReplicaId, Version
from slackwater.rollout.evidence import Finish, PolicySpan, ReplicaSpan
from slackwater.rollout.request import PolicyConstraint
from slackwater.testing.clock import ManualClock
from slackwater.testing.completer import TableCompleter
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import TINY_VOCAB, write_tiny_tokenizer
from slackwater.trainer.client import RolloutClient, RolloutSampling
from slackwater.trainer.samples import SamplingMask, read_samples

KEYS = Keys(inference="inference-key", control="control-key")
ROWS = [[((token * 31 + position * 17) % 97) / 12 for token in range(TINY_VOCAB)] for position in range(9)]
HELLO = [{"role": "user", "content": "hello"}]
SHORT = RolloutSampling(max_tokens=6, seed=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def completer() -> TableCompleter:
    return TableCompleter(ROWS, versions=(4, 4, 5))


@pytest.fixture
async def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def server(completer: TableCompleter, tokenizer: ChatTokenizer) -> AsyncIterator[Loopback]:
    async with Loopback(create_app(completer, tokenizer, KEYS, model_name="m")) as opened:
        yield opened


@pytest.fixture
async def client(server: Loopback, clock: ManualClock) -> AsyncIterator[RolloutClient]:
    opened = RolloutClient(server.url, KEYS.inference, model="m", deadline_s=10, clock=clock, jitter=lambda: 0.5)
    async with opened:
        yield opened


async def test_samples_carry_the_evidence(
    client: RolloutClient, completer: TableCompleter, tokenizer: ChatTokenizer
) -> None:
    samples = await client.chat(HELLO, n=3, sampling=SHORT)
    assert [sample.seed for sample in samples] == [3, 4, 5]
    by_seed = {request.sampling.seed: request for request in completer.requests}
    for sample in samples:
        assert sample.prompt_ids == by_seed[sample.seed].prompt_ids
        assert sample.versions == (4, 4, 5, 5, 5, 5)
        assert sample.logprobs.dtype == np.float32
        assert sample.logprobs.shape == (6,)
        assert not sample.logprobs.flags.writeable
        assert sample.text == tokenizer.decode(sample.token_ids)
        assert (sample.finish, sample.run, sample.replica) == (Finish.LENGTH, "demo", "table")


async def test_a_prompt_of_ids_is_passed_as_it_is(client: RolloutClient) -> None:
    first = (await client.chat(HELLO, sampling=SHORT))[0]
    again = (await client.complete(first.prompt_ids, sampling=SHORT))[0]
    assert again.token_ids == first.token_ids
    assert np.array_equal(again.logprobs, first.logprobs)


async def test_an_unmet_policy_is_waited_for(
    client: RolloutClient, completer: TableCompleter, clock: ManualClock
) -> None:
    policy = PolicyConstraint(min_version=Version(9))
    task = asyncio.create_task(client.chat(HELLO, sampling=SHORT, policy=policy))
    await clock.parked()
    completer.versions = (Version(9),)
    await clock.advance(0.1)
    assert (await task)[0].versions == (9,) * 6


async def test_retries_end_at_the_deadline(
    client: RolloutClient, completer: TableCompleter, clock: ManualClock
) -> None:
    completer.admission_error = OverloadedError("full")
    task = asyncio.create_task(client.chat(HELLO))
    started = clock.monotonic()
    while not task.done():
        parked = asyncio.create_task(clock.parked())
        await asyncio.wait((task, parked), return_when=asyncio.FIRST_COMPLETED)
        parked.cancel()
        await clock.advance(2.0)
    with pytest.raises(OverloadedError):
        await task
    assert 6 <= clock.monotonic() - started <= 16


@pytest.mark.parametrize(
    ("status", "told", "wait"),
    [(429, "3", 3.375), (503, "3", 3.375), (503, "", 0.1), (503, "soon", 0.1), (409, "3", 0.1), (503, "9" * 9, None)],
)
async def test_a_wait_that_is_asked_for_is_kept_to_within_bounds(
    clock: ManualClock, status: int, told: str, wait: float | None
) -> None:
    asked: list[float] = []

    async def later(request: Request) -> Response:
        del request
        asked.append(clock.monotonic())
        error = {"message": "later", "type": "policy_unmet" if status == 409 else "unavailable"}
        body = {"detail": "slow down"} if status == 429 else {"error": error}
        return JSONResponse(body, status, {"Retry-After": told} if told else None)

    app = Starlette(routes=[Route("/v1/chat/completions", later, methods=["POST"])])
    async with Loopback(app) as server:
        client = RolloutClient(server.url, "x", deadline_s=10, clock=clock, jitter=lambda: 0.5)
        async with client:
            task = asyncio.ensure_future(client.chat(HELLO))
            if wait is None:
                with pytest.raises(UnavailableError):  # a minute is believed, and past the deadline
                    await task
                return
            await clock.parked()
            await clock.advance(wait - 0.01)
            assert len(asked) == 1
            await clock.advance(0.02)
            await clock.parked()
            assert len(asked) == 2
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_429_without_our_words_is_an_overload() -> None:
    async def later(request: Request) -> Response:
        del request
        return Response("slow down", 429)

    app = Starlette(routes=[Route("/v1/chat/completions", later, methods=["POST"])])
    async with Loopback(app) as server, RolloutClient(server.url, "x", deadline_s=0) as client:
        with pytest.raises(OverloadedError):
            await client.chat(HELLO)


async def test_every_sampling_field_reaches_the_engine(client: RolloutClient, completer: TableCompleter) -> None:
    asked = RolloutSampling(
        max_tokens=6, seed=3, temperature=0.7, min_p=0.01, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.2, logit_bias={5: 2.0}, min_tokens=2, ignore_eos=True, raw_logprobs=True,
        sampling_mask=True, top_k=4,
    )  # fmt: skip
    (sample,) = await client.chat(HELLO, sampling=asked)
    spec = completer.requests[-1].sampling
    for name in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos"):
        assert getattr(spec, name) == getattr(asked, name)
    assert spec.logit_bias == ((5, 2.0),)
    assert sample.raw_logprobs is not None
    assert sample.raw_logprobs.shape == sample.logprobs.shape
    assert not sample.raw_logprobs.flags.writeable
    assert sample.sampling_mask is not None
    for place, token in enumerate(sample.token_ids):
        row = sample.sampling_mask.row(place)
        assert row is not None
        assert token in row
        assert len(row) <= 4


async def test_what_was_not_asked_for_is_not_there_and_a_row_that_is_not_told_is_none(client: RolloutClient) -> None:
    (plain,) = await client.chat(HELLO, sampling=SHORT)
    assert (plain.raw_logprobs, plain.sampling_mask) == (None, None)
    mask = SamplingMask(indptr=np.array([0, 2, 2]), ids=np.array([4, 7], dtype=np.int32))
    assert mask.row(1) is None


async def test_a_mask_that_does_not_fit_its_tokens_is_corrupt(client: RolloutClient) -> None:
    reply = await good_reply(client, {"sampling_mask": True, "raw_logprobs": True})
    read_samples(json.dumps(reply).encode(), 1)
    for field, arrays in (("sampling_mask", ["indptr", "indices"]), ("raw_logprobs", ["values"])):
        for name in arrays:
            broken = json.loads(json.dumps(reply))
            array = broken["choices"][0]["engine_data"][field][name]
            array["shape"], array["data"] = [0], ""
            with pytest.raises(CorruptError):
                read_samples(json.dumps(broken).encode(), 1)


async def test_tool_messages_are_passed_on(client: RolloutClient, completer: TableCompleter) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    told = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "s"}]
    await client.chat(told, sampling=SHORT)
    assert len(completer.requests[-1].prompt_ids) > len((await client.chat(HELLO, sampling=SHORT))[0].prompt_ids)


async def test_what_will_not_pass_is_raised_at_once(client: RolloutClient, server: Loopback) -> None:
    with pytest.raises(InvalidInputError):
        await client.chat([{"role": "user", "content": "x", "tool_calls": "y"}])
    async with RolloutClient(server.url, "wrong") as stranger:
        with pytest.raises(AuthError):
            await stranger.chat(HELLO)
    with pytest.raises(InternalError, match="isn't open"):
        await RolloutClient(server.url, "x").chat(HELLO)


async def test_a_server_that_is_not_there_is_unavailable(clock: ManualClock) -> None:
    async with RolloutClient("http://127.0.0.1:1", "x", deadline_s=0, clock=clock) as client:
        with pytest.raises(UnavailableError):
            await client.chat(HELLO)


async def test_an_answer_that_does_not_come_is_asked_for_again(
    server: Loopback, completer: TableCompleter, clock: ManualClock
) -> None:
    completer.hold()
    async with RolloutClient(server.url, KEYS.inference, deadline_s=0, answer_s=0.05, clock=clock) as client:
        with pytest.raises(UnavailableError, match=r"no answer within 0\.05 s"):
            await client.chat(HELLO)
    async with RolloutClient(server.url, KEYS.inference, answer_s=1, clock=clock) as client:
        task = asyncio.create_task(client.chat(HELLO, sampling=SHORT))
        await clock.parked()
        completer.release()
        await clock.advance(2.0)
        assert (await task)[0].seed == 3


async def test_a_stranger_on_the_port_is_told_apart() -> None:
    async def stranger(request: Request) -> Response:
        del request
        return JSONResponse({"detail": "Not Found"}, 404)

    app = Starlette(routes=[Route("/v1/chat/completions", stranger, methods=["POST"])])
    async with Loopback(app) as server, RolloutClient(server.url, "x") as client:
        with pytest.raises(CorruptError, match="404"):
            await client.chat(HELLO)


async def good_reply(client: RolloutClient, engine_data: object = True) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 4, "return_token_ids": True, "engine_data": engine_data}
    return json.loads(await client._post("/v1/chat/completions", json.dumps(body).encode()))


async def test_a3_15_a_reply_without_ids_is_refused(client: RolloutClient) -> None:
    reply = await good_reply(client)
    assert read_samples(json.dumps(reply).encode(), 1)[0].versions == (4, 4, 5, 5)
    for lacking in ("token_ids", "engine_data"):
        choice = {name: value for name, value in reply["choices"][0].items() if name != lacking}
        with pytest.raises(UnsupportedError):
            read_samples(json.dumps({**reply, "choices": [choice]}).encode(), 1)
    del reply["prompt_token_ids"]
    with pytest.raises(UnsupportedError):
        read_samples(json.dumps(reply).encode(), 1)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 2]},
        {"index": 1},
        {"policy": [[4, 0, 2]]},
        {"policy": [[4, 0, 2], [5, 3, 4]]},
        {"policy": [[4, 0, 4], [5, 4, 4]]},
        {"kv": [[4, 0, 4]]},
        {"kv": []},
        {"kv": [[4, 1, 10]]},
        {"replicas": []},
        {"replicas": [["table", "boot-0", 0, 3]]},
        {"replicas": [["table", "boot-0", 0, 2], ["b", "boot-1", 3, 4]]},
        {"replicas": [["table", "boot-0", 0, 4], ["b", "boot-1", 4, 4]]},
        {"replicas": [["b", "boot-1", 0, 2], ["table", "boot-0", 2, 4]]},
        {"replicas": [["table", "boot-1", 0, 4]]},
    ],
    ids=str,
)
async def test_contradictions_are_corrupt(client: RolloutClient, change: dict[str, Any]) -> None:
    reply = await good_reply(client)
    choice = reply["choices"][0]
    if {"policy", "kv", "replicas"} & set(change):
        choice["engine_data"] |= change
    else:
        choice |= change
    with pytest.raises(CorruptError):
        read_samples(json.dumps(reply).encode(), 1)


async def test_a5_10_a_sample_tells_which_replica_sampled_which_tokens(client: RolloutClient) -> None:
    reply = await good_reply(client)
    (sample,) = read_samples(json.dumps(reply).encode(), 1)
    table = ReplicaSpan(replica=ReplicaId("table"), boot=BootId("boot-0"), start=0, end=4)
    assert sample.replicas == (table,)
    reply["choices"][0]["engine_data"]["replicas"] = [["table", "boot-0", 0, 1], ["b", "boot-1", 1, 4]]
    (sample,) = read_samples(json.dumps(reply).encode(), 1)
    other = ReplicaSpan(replica=ReplicaId("b"), boot=BootId("boot-1"), start=1, end=4)
    assert (sample.replicas, sample.replica) == ((replace(table, end=1), other), "table")


async def test_samples_tell_who_built_their_kv_and_whether_labels_are_confirmed(
    client: RolloutClient, completer: TableCompleter
) -> None:
    (plain,) = await client.complete((1, 2, 3), sampling=SHORT)
    assert (plain.kv, plain.provisional, plain.is_partial) == ((span(4, 0, 4), span(5, 4, 8)), False, False)
    completer.kv, completer.provisional = {0: (span(2, 0, 1), span(3, 1, 3)), 3: (span(5, 0, 6),)}, (1,)
    (anew,) = await client.complete((1, 2, 3), sampling=SHORT)
    assert (anew.kv, anew.provisional, anew.prompt_version) == ((span(5, 0, 8),), True, None)


def span(version: int, start: int, end: int) -> PolicySpan:
    return PolicySpan(version=Version(version), start=start, end=end)


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("finish", [Finish.SWAPPED, Finish.ABORT, Finish.POLICY_CHANGED])
async def test_an_answer_that_was_cut_is_a_partial_sample(
    client: RolloutClient, completer: TableCompleter, finish: Finish, tokens: int
) -> None:
    completer.cut_after(tokens, finish)
    (sample,) = await client.complete((1, 2, 3), sampling=SHORT)
    assert (sample.finish, sample.is_partial) == (finish, True)
    assert len(sample.token_ids) == len(sample.logprobs) == len(sample.versions) == tokens
    assert [span.end for span in sample.kv[-1:]] == [6][:tokens]


async def test_kv_of_any_version_is_asked_for_in_words(client: RolloutClient, completer: TableCompleter) -> None:
    asked = PolicyConstraint(min_version=Version(2), any_kv=True)
    await client.complete((1, 2, 3), sampling=SHORT, policy=asked)
    await client.complete((1, 2, 3), sampling=SHORT)
    assert [request.policy for request in completer.requests] == [asked, PolicyConstraint()]


async def test_a_server_that_does_not_tell_of_kv_and_replicas_is_read_without(client: RolloutClient) -> None:
    reply = await good_reply(client)
    del reply["choices"][0]["engine_data"]["kv"], reply["choices"][0]["engine_data"]["replicas"]
    del reply["choices"][0]["engine_data"]["status"]["kv"]
    (sample,) = read_samples(json.dumps(reply).encode(), 1)
    assert (sample.kv, sample.replicas, sample.provisional) == ((), (), False)


async def test_a_policy_error_keeps_its_versions(server: Loopback, clock: ManualClock) -> None:
    async with RolloutClient(server.url, KEYS.inference, deadline_s=0, clock=clock) as client:
        with pytest.raises(PolicyUnmetError) as unmet:
            await client.chat(HELLO, policy=PolicyConstraint(exact_version=Version(1)))
    assert unmet.value.versions == (4,)
