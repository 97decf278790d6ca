"""Ten thousand spoilt bodies over every POST route: none is our fault, and who asks properly doesn't notice."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from copy import deepcopy
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from served_rig import Served
from starlette.applications import Starlette
from starlette.routing import Route

from slackwater.api.admission import Capacity
from slackwater.api.app import create_app
from slackwater.api.auth import Keys
from slackwater.api.faults import STATUS
from slackwater.api.schema import FIELDS
from slackwater.api.tokens import ChatTokenizer
from slackwater.engine.torch.engine import TorchEngine
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import write_tiny_model

KEYS: Final = Keys(inference="inference-key", control="control-key")
BODIES: Final = 10_000
SENDERS: Final = 8
SAMPLED: Final[Mapping[str, Any]] = {
    "max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "n": 2, "seed": 3, "stop": ["zz"],
    "stop_token_ids": [7], "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1.0}, "min_tokens": 1, "policy": {"min_version": 0},
    "engine_data": {"sampling_mask": True, "raw_logprobs": True}, "return_token_ids": True,
}  # fmt: skip
TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
VALID: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, **SAMPLED},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be"}]},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "42"},
                {"role": "user", "content": "x", "name": "y"},
            ],
            "tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {"a": 1}, "max_completion_tokens": 2,
            "stream": True, "stream_options": {"include_usage": True},
        },
        {"messages": [{"role": "user", "content": "hi"}], "prior_token_ids": [510, 117, 511], "append": "fork",
         "max_tokens": 2},
    ),
    "/v1/completions": (
        {"prompt": "hi", "logprobs": 2, **SAMPLED},
        {"prompt": [1, 2], "forced_token_ids": [3, 4], "stream": True, "model": "m", "request_id": "a", "echo": False},
    ),
    "/v1/generate": (
        {
            "request_id": "r1", "prompt_ids": [1, 2],
            "policy": {"min_version": None, "exact_version": 1, "any_kv": False},
            "sampling": {"max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5, "stop_token_ids": [],
                         "top_logprobs": 2, "logit_bias": [[5, 1.0]], "sampling_mask": True, "raw_logprobs": True},
            "forced_ids": [], "streamed": False, "model": "", "continued": 1,
        },
    ),
    "/v1/abort": ({"request_id": "a"},),
    "/v1/score": (
        {"items": [{"prompt_ids": [1, 2], "token_ids": [9, 7]}, {"prompt": "hello", "token_ids": [5]}],
         "policy": {"exact_version": 1}, "request_id": "s1"},
    ),
    "/v1/tokenize": (
        {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True},
        {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True},
    ),
    "/v1/detokenize": ({"tokens": [1, 2, 3]},),
    "/inference/v1/generate": (
        {"token_ids": [1, 2], "model": "m", "request_id": "v", "stream": False, "output_mode": "text",
         "return_token_ids": True, "sampling_params": {"max_tokens": 2, "logprobs": 1, "seed": 5, "n": 2,
         "stop": ["zz"], "skip_special_tokens": False, "include_stop_str_in_output": True, "min_tokens": 1}},
        {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "trace_decode_token_ids": [4, 5]}, "stream": True},
    ),
    "/generate": (
        {"input_ids": [1, 2], "rid": "g", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
         "sampling_params": {"max_new_tokens": 2, "sampling_seed": 5, "n": 2}, "return_text_in_logprobs": True},
        {"text": ["hi", "ho"], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}], "stream": True,
         "return_sampling_mask": True},
    ),
}  # fmt: skip
"""Bodies that are right, by route."""
JUNK: Final[Sequence[Any]] = (
    None, True, False, 0, -1, 1, 2, 65, 511, 512, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e-300, 1e308,
    "", "x", "\x00", "\ud800", "\u202e\U0001f60a", "<|im_end|>", "1", "-1", "NaN", "../x", "x" * 300, [], {}, [[]],
    [None], [1, "x"], [-1], [2**31], {"a": {"b": []}}, {"type": "json_object"}, [[1, 2], [3]], ["hi", 1], {"5": 1e9},
    float("nan"), float("inf"), float("-inf"), [1] * 70, ["s"] * 17, {str(number): 1 for number in range(1100)},
)  # fmt: skip
KNOWN: Final = (("/v1/completions", b'{"prompt": "hi", "min_tokens": 1, "stop_token_ids": [-9223372036854775808]}'),)
"""What was found so: it ended the engine."""
NAMES: Final = sorted({*FIELDS, *(name for bodies in VALID.values() for body in bodies for name in body), "x", ""})
CALLERS_FAULT: Final = frozenset(kind for kind, status in STATUS.items() if status < HTTPStatus.INTERNAL_SERVER_ERROR)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key within a body."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def another(body: Any, chance: random.Random) -> None:
    container, key = chance.choice(places(body) or [(body, "x")])
    container[key] = deepcopy(chance.choice(JUNK))


def one_less(body: Any, chance: random.Random) -> None:
    container, key = chance.choice(places(body) or [({"x": 1}, "x")])
    del container[key]


def one_more(body: Any, chance: random.Random) -> None:
    body[chance.choice(NAMES)] = deepcopy(chance.choice(JUNK))


def swapped(body: Any, chance: random.Random) -> None:
    (one, first), (other, second) = chance.choices(places(body) or [(body, "x")], k=2)
    one[first] = deepcopy(other.get(second) if isinstance(other, dict) else other[second])


CHANGES: Final[Sequence[Callable[[Any, random.Random], None]]] = (another, another, one_less, one_more, swapped)


def bitten(data: bytes, chance: random.Random) -> bytes:
    """Bytes that needn't be JSON any more."""
    where = chance.randrange(len(data) + 1)
    match chance.randrange(5):
        case 0:
            return data[:where]
        case 1:
            return data[:where] + chance.randbytes(chance.randrange(1, 4)) + data[where:]
        case 2:
            return data[:where] + data[where + 1 :]
        case 3:
            return data + data
        case _:
            depth = chance.choice((10, 5_000))
            return data[:where] + b"[" * depth + b"]" * depth + data[where:]


def spoilt(chance: random.Random) -> tuple[str, bytes]:
    """A route, and a body that was right for it before something happened to it."""
    path = chance.choice(sorted(VALID))
    body = deepcopy(dict(chance.choice(VALID[path])))
    for _ in range(chance.choice((1, 1, 2, 4))):
        chance.choice(CHANGES)(body, chance)
    data = json.dumps(body).encode()
    return path, bitten(data, chance) if chance.random() < 0.2 else data


def wrong(status: int, kind: str, body: bytes) -> str | None:
    """What is wrong with a reply; None: nothing."""
    if status == HTTPStatus.OK:
        return told_within(body) if kind != "application/json" else None if json.loads(body) else "empty"
    if not HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return f"status {status}"
    return misshapen(json.loads(body), status)


def misshapen(reply: Any, status: int | None = None) -> str | None:
    error = reply["error"]
    if not {"message", "type", "param", "code"} <= error.keys() or not isinstance(error["message"], str):
        return "not OpenAI's shape"
    if error["type"] != error["code"] or error["type"] not in CALLERS_FAULT:
        return f"kind {error['type']}"
    return None if status in (None, STATUS[error["type"]]) else f"{error['type']} under {status}"


def told_within(body: bytes) -> str | None:
    """Of a stream: it has an end, or an error of its caller's."""
    lines = [part.removeprefix("data: ") for part in body.decode().split("\n") if part]
    if not lines:
        return "an empty stream"
    last = {"type": "end"} if lines[-1] == "[DONE]" else json.loads(lines[-1])
    return misshapen(last) if "error" in last else None if last.get("type") == "end" else "a stream without an end"


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Starlette]:
    folder = write_tiny_model(tmp_path / "model")
    engine = await TorchEngine.open(
        folder,
        version=Version(1),
        run=RunId("demo"),
        replica=ReplicaId("r0"),
        boot=BootId("b0"),
        window=64,
        batch_invariant=True,
    )
    # The bodies ask for what they like; that there is no place for it is another test's matter.
    yield create_app(Served(engine), ChatTokenizer(folder), KEYS, model_name="m", capacity=Capacity(places=10**6))
    assert (engine.stats().failure, engine.stats().active, engine.stats().waiting) == ("", 0, 0)
    await engine.close()


async def test_a8_15_ten_thousand_spoilt_bodies_are_their_senders_fault_and_harm_nobody(app: Starlette) -> None:
    routes = {route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())}
    assert routes == set(VALID)
    chance, seen, found = random.Random(13), Counter[tuple[str, int]](), list[str]()
    over, known = asyncio.Event(), list(KNOWN)
    async with (
        Loopback(app) as server,
        aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {KEYS.inference}"}) as session,
    ):

        async def send() -> None:
            while sum(seen.values()) < BODIES:
                path, body = known.pop() if known else spoilt(chance)
                seen[path, 0] += 1
                async with session.post(path, data=body) as reply:
                    data = await reply.read()
                seen[path, 0] -= 1
                seen[path, reply.status] += 1
                fault = wrong(reply.status, reply.content_type, data)
                if fault is not None:
                    found.append(f"{fault}: {path} {body[:600]!r} -> {data[:300]!r}")

        async def read_on() -> list[Any]:
            told: list[Any] = []
            while not over.is_set():
                ask = {"prompt": [5, 6, 7], "seed": 9, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
                async with session.post("/v1/completions", json=ask) as reply:
                    told.append((await reply.json())["choices"])
            return told

        reader = asyncio.create_task(read_on())
        await asyncio.gather(*(send() for _ in range(SENDERS)))
        over.set()
        answers = await reader
    assert not found, "\n".join(found[:20])
    assert {path for path, status in seen if status == HTTPStatus.OK} >= set(VALID) - {"/v1/abort"}
    assert {path for (path, status), count in seen.items() if status == HTTPStatus.BAD_REQUEST and count} == set(VALID)
    assert len(answers[0][0]["token_ids"]) == 12
    assert len(answers) > 20
    assert all(answer == answers[0] for answer in answers)
