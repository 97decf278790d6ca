"""Errors on the wire: a table from kind to HTTP status, one envelope, and the way back into the error tree."""

import re
from collections.abc import Iterator
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from slackwater.api.schema import FIELDS
from slackwater.errors import (
    CorruptError,
    ForkError,
    InternalError,
    OverloadedError,
    PolicyUnmetError,
    SlackwaterError,
    UnavailableError,
)

STATUS: Final = MappingProxyType(
    {
        "invalid_input": HTTPStatus.BAD_REQUEST,
        "context_length_exceeded": HTTPStatus.BAD_REQUEST,
        "unsupported": HTTPStatus.BAD_REQUEST,
        "auth": HTTPStatus.UNAUTHORIZED,
        "not_found": HTTPStatus.NOT_FOUND,
        "conflict": HTTPStatus.CONFLICT,
        "lost_race": HTTPStatus.CONFLICT,
        "wrong_base": HTTPStatus.CONFLICT,
        "fork": HTTPStatus.CONFLICT,
        "policy_unmet": HTTPStatus.CONFLICT,
        "unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
        "replica_lost": HTTPStatus.SERVICE_UNAVAILABLE,
        "overloaded": HTTPStatus.SERVICE_UNAVAILABLE,
        "corrupt": HTTPStatus.INTERNAL_SERVER_ERROR,
        "swap": HTTPStatus.INTERNAL_SERVER_ERROR,
        "spoilt": HTTPStatus.INTERNAL_SERVER_ERROR,
        "canary": HTTPStatus.INTERNAL_SERVER_ERROR,
        "internal": HTTPStatus.INTERNAL_SERVER_ERROR,
        "error": HTTPStatus.INTERNAL_SERVER_ERROR,
    }
)
"""HTTP status by error kind. A key without the right is 403; every other error has the status of its kind."""

_FURTHER: Final = frozenset({
    "token_ids", "prompt_ids", "items", "sampling_params", "cache_salt", "priority", "features", "output_mode",
    "input_ids", "rid", "max_new_tokens", "min_new_tokens", "sampling_seed", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "return_routed_experts", "routed_experts_start_len", "routed_experts_prompt_start",
    "trace_decode_token_ids", "add_special_tokens", "extra_key",
    "grammar", "json_schema", "regex", "ebnf", "text", "tokens",
})  # fmt: skip
"""Fields of the further routes."""
_REFUSED: Final = re.compile(r"(\S+) isn't supported\b")
"""A field that isn't known here is named by its refusal."""

RETRY_AFTER_S: Final = 1
"""What ``Retry-After`` says where the error doesn't know better."""
MAX_RETRY_AFTER_S: Final = 60
"""The longest wait that is believed of another process."""

RETRYABLE: Final = frozenset({"policy_unmet", "unavailable", "replica_lost", "overloaded"})
"""Kinds whose answer carries ``Retry-After``: the same request may succeed later."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An error as its envelope carries it: OpenAI's four fields, and ours."""

    message: str
    type: str = "error"
    """The kind."""
    param: str | None = None
    """The field of the request that is wrong, where one is."""
    code: str | None = None
    """The kind again: OpenAI's clients show this one."""
    hint: str = ""
    versions: tuple[int, ...] = ()
    """Policy versions held; of ``policy_unmet`` alone."""
    retry_after_s: int | UnsetType = UNSET
    """As in ``Retry-After``; of ``overloaded`` alone."""
    fork: int | UnsetType = UNSET
    """How many of the prior ids can be kept; of ``fork`` alone."""


class Envelope(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: Fault


def fault(error: SlackwaterError) -> Fault:
    """Describe an error. Messages about one field start with its name; that is where ``param`` comes from."""
    return Fault(
        message=str(error),
        type=error.kind,
        param=_param(error),
        code=error.kind,
        hint=error.hint,
        versions=error.versions if isinstance(error, PolicyUnmetError) else (),
        retry_after_s=error.retry_after_s if isinstance(error, OverloadedError) else UNSET,
        fork=error.fork if isinstance(error, ForkError) else UNSET,
    )


def _param(error: SlackwaterError) -> str | None:
    if refused := _REFUSED.match(error.message):
        return refused[1]
    name = re.split("[ .]", error.message, maxsplit=1)[0]
    return name if name in FIELDS or name in _FURTHER else None


def retry_after_s(error: SlackwaterError) -> int | None:
    """What ``Retry-After`` says of an error; None: it isn't retryable."""
    if isinstance(error, OverloadedError):
        return error.retry_after_s
    return RETRY_AFTER_S if error.kind in RETRYABLE else None


def rebuild(seen: Fault) -> SlackwaterError:
    """The error that another process described; an unknown kind is an InternalError."""
    suffix = f" ({seen.hint})" if seen.hint else ""
    message = seen.message.removesuffix(suffix)
    if seen.type == PolicyUnmetError.kind:
        return PolicyUnmetError(message, hint=seen.hint, versions=seen.versions)
    if seen.type == ForkError.kind and seen.fork is not UNSET:
        return ForkError(message, hint=seen.hint, fork=seen.fork)
    if seen.type == OverloadedError.kind and seen.retry_after_s is not UNSET:
        wait = min(max(1, seen.retry_after_s), MAX_RETRY_AFTER_S)
        return OverloadedError(message, hint=seen.hint, retry_after_s=wait)
    return _BY_KIND.get(seen.type, InternalError)(message, hint=seen.hint)


def silent_refusal(base_url: str, status: int) -> SlackwaterError:
    """The error behind a reply without our envelope: some proxy's, or no server of ours."""
    message = f"{base_url} answered {status} without saying why"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return UnavailableError(message)
    return CorruptError(message, hint="is that the right URL?")


def _tree(root: type[SlackwaterError]) -> Iterator[type[SlackwaterError]]:
    yield root
    for branch in root.__subclasses__():
        yield from _tree(branch)


_BY_KIND: Final = MappingProxyType({error.kind: error for error in _tree(SlackwaterError)})
