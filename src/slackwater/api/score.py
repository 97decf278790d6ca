"""``POST /v1/score``: the log-probabilities that a policy gives to tokens which somebody else chose."""

import asyncio
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.arrays import Array, array
from slackwater.api.asking import check_model, check_request_id, policy_constraint
from slackwater.api.bodies import read_known
from slackwater.api.foreign import worded
from slackwater.api.reading import Reading
from slackwater.api.respond import read_body
from slackwater.api.schema import PolicyField
from slackwater.api.scoring import scoring_request
from slackwater.api.serving import Named, Serving, answered
from slackwater.api.stream import together
from slackwater.errors import InvalidInputError
from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.evidence import Completion, Finish
from slackwater.rollout.request import PolicyConstraint

MAX_SCORE_ITEMS: Final = 256
"""Most items of one request."""
SCORES_AT_ONCE: Final = 64
"""Items of one request that are under way at the same time; the rest waits."""


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens, and what comes before them. Either ``prompt`` or ``prompt_ids``."""

    token_ids: tuple[int, ...]
    """What to score."""
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    forced_routes: Array | None = None
    """Router replay, of positions of prompt and tokens; see `slackwater.api.routed.forced_rows`."""


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/score``."""

    items: tuple[ScoreItem, ...]
    model: str | None = None
    policy: PolicyField | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class ItemScore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item's log-probabilities. Where the answer was cut, there are fewer than tokens were sent."""

    index: int
    token_ids: Array
    """int32, those that were scored."""
    logprobs: Array
    """float32, natural logs under the model itself: temperature 1, nothing cut."""
    policy: tuple[tuple[Version, int, int], ...]
    """[version, start, end) over the scored tokens."""
    finish: Finish
    """``stop`` where all tokens were scored."""
    run: RunId
    replica: ReplicaId
    boot_id: BootId
    cached_tokens: int
    """Tokens of the prompt whose KV was reused."""
    provisional: bool = False
    """Some token was scored before its version was confirmed."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of ``POST /v1/score``."""

    request_id: str
    model: str
    items: tuple[ItemScore, ...]
    """In the order of the request's."""


_DECODER: Final = msgspec.json.Decoder(ScoreBody)
_KNOWN: Final = frozenset(ScoreBody.__struct_fields__)
_WORDS: Final = MappingProxyType({"prompt": "prompt_ids", "forced_token_ids": "token_ids"})
"""From what a request calls fields to what an item does."""


def routes(serving: Serving) -> list[Route]:
    """The route, for `slackwater.api.app.create_app`. Normative page: docs/rl-api.md."""
    return [Route("/v1/score", _ScoreRoute(serving).score, methods=["POST"])]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What all items of one request share."""

    known: Named
    policy: PolicyConstraint
    cache_salt: str
    turns: asyncio.Semaphore


class _ScoreRoute:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def score(self, request: Request) -> Response:
        """``POST /v1/score``."""
        body = read_known(_DECODER, await read_body(request), _KNOWN)
        check_model(body.model or "", self._serving.model)
        if body.request_id is not None:
            check_request_id(body.request_id)
        if not 1 <= len(body.items) <= MAX_SCORE_ITEMS:
            raise InvalidInputError("items is out of range", hint=f"allowed: 1 to {MAX_SCORE_ITEMS}")
        for item in body.items:
            _check(item)
        return await answered(request, self._scores(body, policy_constraint(body.policy)))

    async def _scores(self, body: ScoreBody, policy: PolicyConstraint) -> Scores:
        with worded(_WORDS):
            return await self._made(body, policy)

    async def _made(self, body: ScoreBody, policy: PolicyConstraint) -> Scores:
        admission = self._serving.admission
        turns = min(len(body.items), SCORES_AT_ONCE, admission.capacity.places)
        with self._serving.named(body.request_id, choices=len(body.items), taking=admission.taking(turns)) as known:
            salt = body.cache_salt or ""
            job = _Job(known=known, policy=policy, cache_salt=salt, turns=asyncio.Semaphore(turns))
            items = await together(self._item(index, item, job) for index, item in enumerate(body.items))
            return Scores(request_id=known.name, model=self._serving.model, items=tuple(items))

    async def _item(self, index: int, item: ScoreItem, job: _Job) -> ItemScore:
        async with job.turns:
            prompt = await self._serving.encoded(item.prompt or "" if item.prompt_ids is None else item.prompt_ids)
            positions = len(prompt) + len(item.token_ids)
            forced = await self._serving.forced(item.forced_routes, positions=positions)
            ask = scoring_request(
                prompt,
                item.token_ids,
                window=self._serving.completer.window(),
                request_id=f"{job.known.unique}-{index}",
                policy=job.policy,
                model=self._serving.model,
                cache_salt=job.cache_salt,
                forced_routes=forced,
            )
            reading = Reading(index, ask, self._serving.tokenizer.stream())
            with job.known.places.prompting(len(prompt) + len(item.token_ids)):
                await reading.read(job.known.completer)
            return _item_score(index, reading.completion())


def _check(item: ScoreItem) -> None:
    if (item.prompt is None) == (item.prompt_ids is None):
        raise InvalidInputError("prompt or prompt_ids is needed, and not both", hint="send one of them")
    if not item.token_ids:
        raise InvalidInputError("token_ids is empty", hint="send at least one token to score")


def _item_score(index: int, completion: Completion) -> ItemScore:
    return ItemScore(
        index=index,
        token_ids=array("int32", completion.token_ids),
        logprobs=array("float32", completion.logprobs),
        policy=tuple((span.version, span.start, span.end) for span in completion.policy),
        finish=completion.finish,
        run=completion.origin.run,
        replica=completion.origin.replica,
        boot_id=completion.origin.boot,
        cached_tokens=completion.origin.cached_tokens,
        provisional=any(step.provisional for step in completion.steps),
    )
