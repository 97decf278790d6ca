"""SGLang's shapes: the body of ``POST /generate``, how it becomes requests, and its replies. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from slackwater.api.arrays import Array
from slackwater.api.asking import Wanted, text_wanted
from slackwater.api.bodies import read_known
from slackwater.api.engine_data import EngineData
from slackwater.api.foreign import Dialect, TextView, WeightVersion, text_body, with_routes
from slackwater.api.schema import EngineDataField, PolicyField, TextBody
from slackwater.api.text import TokenTable
from slackwater.errors import InvalidInputError

MAX_BATCH: Final = 64
"""Most prompts of one request."""
MAX_BATCH_ANSWERS: Final = 256
"""Most answers to one request: prompts times ``n``."""
DEFAULT_NEW_TOKENS: Final = 128
"""Most tokens of an answer whose request names no limit, as SGLang has it."""

SAMPLING: Final = Dialect(
    same=frozenset({
        "n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "logit_bias",
    }),
    renamed=MappingProxyType({
        "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
        "json_schema": "guided_json", "regex": "guided_regex", "ebnf": "guided_grammar",
    }),
    neutral=MappingProxyType({
        "skip_special_tokens": (), "no_stop_trim": (), "spaces_between_special_tokens": (), "stream_interval": (1,),
        "structural_tag": ("",), "stop_regex": ("", []),
        "custom_params": ({},),
    }),
    words=MappingProxyType({
        "top_logprobs_num": "top_logprobs", "rid": "request_id", "input_ids": "prompt", "extra_key": "cache_salt",
    }),
)  # fmt: skip
"""SGLang's sampling parameters. Some shape the text alone."""
HINTS: Final = frozenset({"session_id", "routing_key", "log_metrics"})
"""Fields without effect."""

_Params = Annotated[
    dict[str, object], msgspec.Meta(extra_json_schema={"propertyNames": {"enum": sorted(SAMPLING.names)}})
]


class SglangBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /generate``: one prompt, or a batch. In a batch a list has one value for each prompt."""

    text: str | tuple[str, ...] | None = None
    input_ids: tuple[int | tuple[int, ...], ...] | None = None
    """One prompt's ids, or a list of such lists. Either this or ``text``."""
    sampling_params: _Params | tuple[_Params, ...] | None = None
    rid: str | tuple[str, ...] | None = None
    """The caller's name for the request. One name for a batch gets the number of each prompt behind it, ``_0`` on."""
    return_logprob: bool | tuple[bool, ...] | None = None
    logprob_start_len: int | tuple[int, ...] | None = None
    """The first position of the prompt whose log-probabilities are shown; -1: none."""
    top_logprobs_num: int | tuple[int, ...] | None = None
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | tuple[int, ...] | None = None
    """The first position whose routes are shown."""
    stream: bool | None = None
    model: str | None = None
    extra_key: str | tuple[str, ...] | None = None
    """What completions call ``cache_salt``."""
    policy: PolicyField | None = None
    engine_data: bool | EngineDataField | None = None
    forced_routes: Array | tuple[Array, ...] | None = None


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer ended."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | UnsetType = UNSET
    """The token or the stop string that stopped it."""
    length: int | UnsetType = UNSET
    """Tokens, where that was the limit."""
    message: str | UnsetType = UNSET
    """What aborted it."""


Scored = tuple[float | None, int, str | None]
"""Log-probability, id, and the text on request. The first entry of a prompt has no log-probability."""


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer tells of itself."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    weight_versions: tuple[WeightVersion, ...]
    """Over the answer's tokens."""
    weight_version: str | UnsetType = UNSET
    """Of the last token; without one, of the prompt."""
    cached_tokens: int | UnsetType = UNSET
    """At the end alone."""
    e2e_latency: float | UnsetType = UNSET
    """Seconds; at the end alone."""
    output_token_logprobs: tuple[Scored, ...] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    output_token_sampling_mask: tuple[tuple[int, ...], ...] | UnsetType | None = UNSET
    """The ids that each token was drawn from, on request."""
    routed_experts: str | UnsetType | None = UNSET
    """On request, at the end: base64 of int32 values of shape [rows, layers, experts per token]. null where rows are
    missing."""
    routed_experts_layers: tuple[int, ...] | UnsetType = UNSET
    """An addition: the layers on its second axis, those that have a router. Where ``routed_experts`` is."""
    output_top_logprobs: tuple[tuple[Scored, ...], ...] | UnsetType = UNSET
    input_token_logprobs: tuple[Scored, ...] | UnsetType = UNSET
    input_top_logprobs: tuple[tuple[Scored, ...] | None, ...] | UnsetType = UNSET
    input_weight_versions: tuple[WeightVersion, ...] | UnsetType = UNSET
    """An addition: over positions of the prompt, as far as they are scored."""
    engine_data: EngineData | UnsetType = UNSET
    """An addition: on request, at the end."""


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or in a stream the whole of it so far."""

    text: str
    output_ids: tuple[int, ...]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    """Which of several answers, in a stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of a request, checked."""

    body: TextBody
    wanted: Wanted
    view: TextView
    first: int
    """Number of its first answer."""
    names: bool
    """Log-probabilities have the text of their tokens."""
    masks: bool
    """The reply shows what tokens were drawn from."""
    shows_data: bool
    """The reply shows ``engine_data``."""
    routes: bool
    """The reply shows routes in SGLang's form."""
    start: int | None
    """The first position whose log-probabilities are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A request, checked."""

    prompts: tuple[Prompt, ...]
    is_list: bool
    """Whether the reply is a list."""
    stream: bool
    model: str


_DECODER: Final = msgspec.json.Decoder(SglangBody)
_KNOWN: Final = frozenset(SglangBody.__struct_fields__)


def read_batch(data: bytes, table: TokenTable) -> Batch:
    """Read and check a body.

    Raises:
        InvalidInputError: A field has the wrong type, or a bound is exceeded.
        UnsupportedError: It asks for something that this server doesn't do.
    """
    body = read_known(_DECODER, data, _KNOWN, HINTS)
    texts, is_batch = _prompts(body)
    count = len(texts)
    prompts: list[Prompt] = []
    first = 0
    for index, text in enumerate(texts):
        prompt = _prompt(body, text, index, count if is_batch else 0, table, first)
        first += prompt.body.n or 1
        prompts.append(prompt)
    if first > MAX_BATCH_ANSWERS:
        raise InvalidInputError("n is out of range", hint=f"prompts times n: at most {MAX_BATCH_ANSWERS}")
    return Batch(
        prompts=tuple(prompts),
        is_list=is_batch or first > 1,
        stream=bool(body.stream),
        model=body.model or "",
    )


def _prompts(body: SglangBody) -> tuple[Sequence[str | tuple[int, ...]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidInputError("text or input_ids is needed, and not both", hint="send one of them")
    if body.text is not None:
        single = isinstance(body.text, str)
        return _bounded("text", (body.text,) if isinstance(body.text, str) else body.text), not single
    ids = body.input_ids or ()
    lists = [one for one in ids if isinstance(one, tuple)]
    if lists and len(lists) < len(ids):
        raise InvalidInputError("input_ids is wrong: ids and lists of ids are mixed", hint="send either")
    if lists:
        return _bounded("input_ids", lists), True
    return [tuple(one for one in ids if isinstance(one, int))], False


_One = TypeVar("_One")


def _bounded(name: str, prompts: Sequence[_One]) -> Sequence[_One]:
    if not 1 <= len(prompts) <= MAX_BATCH:
        raise InvalidInputError(f"{name} is out of range", hint=f"a batch has 1 to {MAX_BATCH} prompts")
    return prompts


def _prompt(
    body: SglangBody, text: str | tuple[int, ...], index: int, count: int, table: TokenTable, first: int
) -> Prompt:
    params = _at("sampling_params", body.sampling_params, index, count) or {}
    shows = bool(_at("return_logprob", body.return_logprob, index, count))
    top = _at("top_logprobs_num", body.top_logprobs_num, index, count) or 0
    start = _at("logprob_start_len", body.logprob_start_len, index, count)
    if top and not shows:
        raise InvalidInputError("top_logprobs_num needs return_logprob", hint='send "return_logprob": true as well')
    routes = _at("routed_experts_start_len", body.routed_experts_start_len, index, count) or 0
    with SAMPLING.worded():
        asked = text_body({
            "max_tokens": DEFAULT_NEW_TOKENS,
            **SAMPLING.fields(params),
            **_shared(body, text, index, count),
            **({"logprobs": top} if shows else {}),
            **({"engine_data": with_routes(body.engine_data, routes)} if body.return_routed_experts else {}),
        })  # fmt: skip
        wanted = text_wanted(asked)
    return Prompt(
        body=asked,
        wanted=wanted,
        view=_view(params, table, wanted.stops),
        first=first,
        names=bool(body.return_text_in_logprobs),
        masks=bool(body.return_sampling_mask),
        shows_data=bool(body.engine_data),
        routes=bool(body.return_routed_experts),
        start=_start(start, shows=shows),
    )


def _start(start: int | None, *, shows: bool) -> int | None:
    if start is None or start == -1 or not shows:
        return None
    if start < -1:
        raise InvalidInputError("logprob_start_len is out of range", hint="-1, or a position of the prompt")
    return start


def _view(params: Mapping[str, object], table: TokenTable, stops: tuple[str, ...]) -> TextView:
    return TextView(
        table=table,
        stops=stops,
        specials=params.get("skip_special_tokens") is False,
        keeps_stop=bool(params.get("no_stop_trim")),
    )


def _shared(body: SglangBody, text: str | tuple[int, ...], index: int, count: int) -> dict[str, object]:
    fields = {
        "prompt": text,
        "request_id": _name(body.rid, index, count),
        "cache_salt": _at("extra_key", body.extra_key, index, count),
        "stream": body.stream,
        "policy": body.policy,
        "engine_data": body.engine_data,
        "forced_routes": _at("forced_routes", body.forced_routes, index, count),
        # The mask is captured where the evidence asks for it; what of it is shown is another matter.
        "nvext": {"extra_fields": ("sampling_mask",)} if body.return_sampling_mask else None,
    }
    return {field: value for field, value in fields.items() if value is not None}


def _name(rid: str | tuple[str, ...] | None, index: int, count: int) -> str | None:
    if isinstance(rid, str) and count:
        return f"{rid}_{index}"
    return _at("rid", rid, index, count)


def _at(name: str, value: _One | tuple[_One, ...] | None, index: int, count: int) -> _One | None:
    """The value for one prompt; ``count`` is 0 where there is no batch."""
    if not isinstance(value, tuple):
        return value
    if not count or len(value) != count:
        raise InvalidInputError(
            f"{name} is wrong: it has {len(value)} values for {count or 'no batch of'} prompts",
            hint="send one value, or one for each prompt of a batch",
        )
    return value[index]
