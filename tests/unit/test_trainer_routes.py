"""A trainer's view of routes: what can't be is refused, and what is missing stays missing."""

import base64
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from abort_rig import KEYS, site
from abort_rig import ROWS as ROWS_OF_LOGITS

from slackwater.api.app import create_app
from slackwater.api.routed import RoutedExperts
from slackwater.api.tokens import ChatTokenizer
from slackwater.errors import CorruptError, InvalidInputError
from slackwater.testing.completer import TableCompleter
from slackwater.testing.loopback import Loopback
from slackwater.testing.routes import ROUTING, ScriptedRouter
from slackwater.trainer.client import RolloutClient, RolloutSampling
from slackwater.trainer.routes import read_routes
from slackwater.trainer.samples import read_samples

ROWS: Final = ScriptedRouter().rows(range(6))


def told(rows: bytes = ROWS, **fields: Any) -> RoutedExperts:
    plain: dict[str, Any] = {
        "dtype": "uint8",
        "shape": (len(rows) // ROUTING.row_bytes, 3, 2),
        "data": base64.b64encode(rows).decode(),
        "start": 0,
        "layers": ROUTING.layers,
        "experts": ROUTING.experts,
        **fields,
    }
    return msgspec.convert(plain, RoutedExperts)


def test_rows_are_by_position_layer_and_rank() -> None:
    routes = read_routes(told(start=4))
    assert routes.experts.shape == (6, 3, 2)
    assert routes.experts.tobytes() == ROWS
    assert routes.positions.tolist() == [4, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="read-only"):
        routes.experts[0, 0, 0] = 1


def test_a4_04_missing_positions_have_no_row() -> None:
    assert read_routes(told(start=1, missing=((2, 4), (7, 8)))).positions.tolist() == [1, 4, 5, 6, 8, 9]
    assert read_routes(told(start=1, missing=((1, 3), (9, 10)))).positions.tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": bytes([0, 12] * 3)},
        {"rows": bytes([255, 1] * 3)},
        {"rows": bytes([4, 4] * 3)},
        {"experts": 5},
        {"experts": 0},
        {"shape": (5, 3, 2)},
        {"shape": (6, 2, 3)},
        {"shape": (6, 6)},
        {"shape": ()},
        {"layers": (1, 2)},
        {"layers": (2, 1, 5)},
        {"dtype": "uint16", "shape": (3, 3, 2)},
        {"data": "?"},
        {"start": -1},
        {"missing": ((3, 3),)},
        {"missing": ((4, 3),)},
        {"missing": ((4, 5), (3, 4))},
        {"missing": ((90, 91),)},
        {"start": 5, "missing": ((2, 4),)},
    ],
    ids=str,
)
def test_a4_04_what_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        read_routes(told(**fields))


def test_a4_08_a_turn_follows_another_one_from_its_start() -> None:
    earlier, later = read_routes(told()), read_routes(told(start=4))
    whole = earlier.followed_by(later, start=4)
    assert whole.positions.tolist() == list(range(10))
    assert whole.experts.tobytes() == ROWS[: 4 * ROUTING.row_bytes] + ROWS
    assert np.array_equal(earlier.before(2).positions, [0, 1])
    with pytest.raises(InvalidInputError):
        earlier.followed_by(later, start=5)
    with pytest.raises(InvalidInputError):
        earlier.followed_by(read_routes(told(start=4, experts=13)), start=4)


async def reply_of(tokenizer: ChatTokenizer, body: dict[str, Any]) -> Any:
    async with site(tokenizer, gateway=False, routed=ScriptedRouter()) as at:
        sent = {"prompt": [5, 6, 7, 8, 9], "return_token_ids": True, "engine_data": {"routed_experts": True}, **body}
        return (await at.post("/v1/completions", sent))[1]


async def test_a_sample_has_the_routes_that_were_asked_for(tokenizer: ChatTokenizer) -> None:
    table = TableCompleter(ROWS_OF_LOGITS, router=ScriptedRouter())
    app = create_app(table, tokenizer, KEYS, model_name="m")
    async with Loopback(app) as server, RolloutClient(server.url, KEYS.inference) as client:
        asked = RolloutSampling(max_tokens=4, routes_from=2)
        (sample,) = await client.chat([{"role": "user", "content": "hi"}], sampling=asked)
        (plain,) = await client.chat([{"role": "user", "content": "hi"}], sampling=RolloutSampling(max_tokens=4))
    ids = (*sample.prompt_ids, *sample.token_ids[:-1])
    assert sample.routes is not None
    assert sample.routes.positions.tolist() == list(range(2, len(ids)))
    assert sample.routes.experts.tobytes() == ScriptedRouter().rows(ids[2:])
    assert plain.routes is None


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a4_01_rows_that_lack_without_a_word_are_corrupt(tokenizer: ChatTokenizer, max_tokens: int) -> None:
    reply = await reply_of(tokenizer, {"max_tokens": max_tokens})
    (sample,) = read_samples(msgspec.json.encode(reply), 1)
    assert sample.routes is not None
    assert len(sample.routes.positions) == 5 + max(0, max_tokens - 1)
    data = reply["choices"][0]["engine_data"]["routed_experts"]
    rows = base64.b64decode(data["data"])[ROUTING.row_bytes :]
    data |= {"data": base64.b64encode(rows).decode(), "shape": [data["shape"][0] - 1, 3, 2]}
    with pytest.raises(CorruptError):
        read_samples(msgspec.json.encode(reply), 1)
    data["missing"] = [[1, 2]]
    (partial,) = read_samples(msgspec.json.encode(reply), 1)
    assert partial.routes is not None
    assert 1 not in partial.routes.positions
