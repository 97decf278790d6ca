"""One answer read: what a reply holds is bounded, and what is left out is told."""

import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from slackwater.api import serving
from slackwater.api.app import create_app
from slackwater.api.auth import Keys
from slackwater.api.foreign import masks
from slackwater.api.reading import Reading
from slackwater.api.text import TextStream, TokenTable
from slackwater.api.tokens import ChatTokenizer
from slackwater.rollout.evidence import mask_ids
from slackwater.testing.completer import TableCompleter
from slackwater.testing.conformance_completer import REQUEST
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import TINY_VOCAB, write_tiny_tokenizer

KEYS = Keys(inference="inference-key", control="control-key")
TABLE = TokenTable(pieces=tuple(bytes([97 + token]) for token in range(8)), special=frozenset())
MASKED = replace(REQUEST, sampling=replace(REQUEST.sampling, top_k=3, sampling_mask=True, max_tokens=6))


async def told(most: int) -> Reading:
    reading = Reading(0, MASKED, TextStream(TABLE, ()), mask_ids=most)
    await reading.read(TableCompleter([[float(token) for token in range(8)]]))
    return reading


@pytest.mark.parametrize(("most", "whole"), [(18, 6), (17, 5), (7, 2), (3, 1), (2, 0), (0, 0)])
async def test_masks_are_told_as_long_as_they_have_few_enough_ids_together(most: int, whole: int) -> None:
    reading = await told(most)
    lengths = [len(mask_ids(step.mask)) for step in reading.steps if step.mask is not None]
    assert lengths == [3] * whole + [0] * (6 - whole)
    assert [step.token_id for step in reading.steps] == [step.token_id for step in (await told(99)).steps]
    assert (masks(reading.steps) is None) is (whole < 6)


@pytest.mark.parametrize("prompts", [1, 2, 3])
async def test_the_prompts_of_a_batch_share_what_masks_a_reply_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: int
) -> None:
    monkeypatch.setattr(serving, "MAX_REPLY_MASK_IDS", 24)
    table = TableCompleter([[float(token % 7) for token in range(TINY_VOCAB)]])
    app = create_app(table, ChatTokenizer(write_tiny_tokenizer(tmp_path)), KEYS, model_name="m")
    body = {
        "input_ids": [[1, 2]] * prompts,
        "sampling_params": {"max_new_tokens": 6, "top_k": 2, "n": 2},
        "return_sampling_mask": True,
        "engine_data": True,
    }
    headers = {"Authorization": f"Bearer {KEYS.inference}"}
    async with (
        Loopback(app) as server,
        aiohttp.ClientSession(server.url, headers=headers) as session,
        session.post("/generate", data=json.dumps(body)) as reply,
    ):
        told = await reply.json()
    ids = [one["meta_info"]["engine_data"]["sampling_mask"]["indices"]["shape"][0] for one in told]
    assert ids == [24 // (2 * prompts) // 2 * 2] * (2 * prompts)
