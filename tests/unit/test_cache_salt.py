"""``cache_salt``, whatever a route calls it, reaches the engine with every request that it is for."""

import json
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from slackwater.api.app import create_app
from slackwater.api.auth import Keys
from slackwater.api.tokens import ChatTokenizer
from slackwater.testing.completer import TableCompleter
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import TINY_VOCAB, write_tiny_tokenizer

KEYS = Keys(inference="inference-key", control="control-key")
SGLANG = {"sampling_params": {"max_new_tokens": 2}, "return_logprob": True, "logprob_start_len": 0}
SALTED: Mapping[str, tuple[Mapping[str, object], list[str]]] = {
    "/v1/completions": ({"prompt": [1, 2], "max_tokens": 2, "n": 2, "cache_salt": "s"}, ["s", "s"]),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "cache_salt": "s"},
        ["s"],
    ),
    "/v1/score": ({"items": [{"prompt_ids": [1], "token_ids": [2]}], "cache_salt": "s"}, ["s"]),
    "/inference/v1/generate": ({"token_ids": [1], "sampling_params": {"max_tokens": 2}, "cache_salt": "s"}, ["s"]),
    "/generate": ({**SGLANG, "input_ids": [[1, 2], [3, 4]], "extra_key": ["s", "t"]}, ["s", "s", "t", "t"]),
    "/v1/generate": (
        {"request_id": "r", "prompt_ids": [1], "sampling": {"max_tokens": 2}, "cache_salt": "s"},
        ["s"],
    ),
}


@pytest.mark.parametrize("path", SALTED)
async def test_every_route_passes_it_on(tmp_path: Path, path: str) -> None:
    body, salts = SALTED[path]
    table = TableCompleter([[float(token % 7) for token in range(TINY_VOCAB)]])
    app = create_app(table, ChatTokenizer(write_tiny_tokenizer(tmp_path)), KEYS, model_name="m")
    headers = {"Authorization": f"Bearer {KEYS.inference}"}
    async with Loopback(app) as server, aiohttp.ClientSession(server.url, headers=headers) as session:
        for sent in (body, {**body, "cache_salt": None, "extra_key": None}):
            table.requests.clear()
            if path == "/v1/generate" and sent is not body:
                continue
            async with session.post(path, data=json.dumps(sent)) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
            told = sorted(request.cache_salt for request in table.requests)
            assert told == (salts if sent is body else [""] * len(salts))
