"""``GET /v1/capabilities``: what this server answers, the fields that it takes, its evidence and its bounds."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType, ModuleType
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api import (
    asking,
    conversation,
    mask_budget,
    schema,
    score,
    sglang,
    sglang_shapes,
    structured,
    vllm,
    wire,
)
from slackwater.api.admission import Capacity
from slackwater.api.auth import INFERENCE_PATHS
from slackwater.api.engine_data import EngineData
from slackwater.api.respond import json_reply
from slackwater.api.serving import Serving
from slackwater.rollout import grammar
from slackwater.rollout import request as asked
from slackwater.rollout.evidence import Finish
from slackwater.rollout.request import PolicyConstraint, SamplingSpec
from slackwater.rollout.routes import Routing

API_VERSION: Final = 1
"""Counts changes of this API that break its callers."""
_BOUNDED: Final[tuple[ModuleType, ...]] = (
    asked, grammar, schema, asking, conversation, mask_budget, structured, score, sglang_shapes, wire,
)  # fmt: skip
_NO_EVIDENCE: Final = frozenset({"status", "reasons"})


class RoutingCard(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's routers choose from; see `slackwater.rollout.routes.Routing`."""

    layers: tuple[int, ...]
    experts: int
    per_token: int
    dtype: Literal["uint8", "uint16"]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of ``GET /v1/capabilities``."""

    api_version: int
    model: str
    window: int
    """Tokens of prompt and completion together."""
    vocabulary: int
    """Ids count from 0 to one below it. The model's own table may be longer."""
    routes: tuple[str, ...]
    """Paths here that the inference key opens."""
    sampling: tuple[str, ...]
    """Fields of ``sampling`` in ``/v1/generate``."""
    completions: tuple[str, ...]
    """Fields of both completion routes, those that are refused left out."""
    vllm_sampling_params: tuple[str, ...]
    """Of ``/inference/v1/generate``."""
    sglang_sampling_params: tuple[str, ...]
    """Of ``/generate``."""
    policy: tuple[str, ...]
    """Fields of a policy constraint."""
    evidence: tuple[str, ...]
    """Fields of ``engine_data``; its ``status`` says what each is worth."""
    unsupported: tuple[str, ...]
    """Those of them that this model can't give."""
    routing: RoutingCard | None
    """null: the model has no routers, or that isn't known."""
    logprobs: tuple[Literal["processed", "raw"], ...]
    """Kinds of log-probabilities."""
    finish: tuple[Finish, ...]
    """How answers may end."""
    limits: Mapping[str, float]
    """Bounds by their names: largest values, counts and lengths; how much this server takes on at once."""


def routes(serving: Serving) -> list[Route]:
    """The route, for `slackwater.api.app.create_app`. Normative page: docs/rl-api.md."""

    async def capabilities(request: Request) -> Response:
        return json_reply(_capabilities(serving, _paths(request)))

    return [Route("/v1/capabilities", capabilities)]


def _capabilities(serving: Serving, paths: tuple[str, ...]) -> Capabilities:
    spec = tuple(field.name for field in fields(SamplingSpec))
    routing = serving.completer.routing()
    return Capabilities(
        api_version=API_VERSION,
        model=serving.model,
        window=serving.completer.window(),
        vocabulary=len(serving.tokenizer.table.pieces),
        routes=paths,
        sampling=spec,
        completions=_completions(),
        vllm_sampling_params=_taken(vllm.SAMPLING.taken),
        sglang_sampling_params=_taken(sglang_shapes.SAMPLING.taken),
        policy=tuple(field.name for field in fields(PolicyConstraint)),
        evidence=tuple(name for name in EngineData.__struct_fields__ if name not in _NO_EVIDENCE),
        unsupported=() if routing else ("routed_experts",),
        routing=_card(routing) if routing else None,
        logprobs=("processed", "raw") if "raw_logprobs" in spec else ("processed",),
        finish=tuple(Finish),
        limits={**LIMITS, **_load(serving.admission.capacity)},
    )


def _paths(request: Request) -> tuple[str, ...]:
    """What the app that was asked has."""
    return tuple(sorted({route.path for route in request.app.routes if isinstance(route, Route)} & INFERENCE_PATHS))


def _load(capacity: Capacity) -> dict[str, float]:
    prompts = {} if capacity.prompt_tokens is None else {"max_prompt_tokens": capacity.prompt_tokens}
    waiting = capacity.places - capacity.at_once
    return {"places": capacity.places, "slots": capacity.at_once, "max_waiting": waiting, **prompts}


def _card(routing: Routing) -> RoutingCard:
    return RoutingCard(layers=routing.layers, experts=routing.experts, per_token=routing.per_token, dtype=routing.dtype)


def _completions() -> tuple[str, ...]:
    return _taken(schema.FIELDS)


def _taken(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names - _refused()))


def _refused() -> frozenset[str]:
    return frozenset(schema.Refused.__struct_fields__) - schema.ChatBody.honoured


def _limits() -> dict[str, float]:
    named = {name: value for module in _BOUNDED for name, value in vars(module).items()}
    bounds = {name.lower(): value for name, value in named.items() if name.startswith(("MAX_", "DEFAULT_"))}
    return {**bounds, "scores_at_once": score.SCORES_AT_ONCE, "sparse_from": sglang.SPARSE_FROM}


LIMITS: Final[Mapping[str, float]] = MappingProxyType(_limits())
"""Every bound of a request, in small letters."""
