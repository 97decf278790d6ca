"""A front in the shape of CoreWeave's ``/v1alpha1/inference/hotLoads``, so that its published client drives this fleet.

Source of the shape: CoreWeave's API documentation and the wire of ``cwtrain`` 1.0.2. docs/hot-load.md says what is
taken, and what is refused because it can't be done here. Errors are ``{"code", "message"}``, as that client reads them.
"""

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, ParamSpec

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slackwater.api.respond import json_reply
from slackwater.errors import ConflictError, InvalidInputError, NotFoundError, SlackwaterError, UnsupportedError
from slackwater.hotload.bodies import bounded, decode
from slackwater.hotload.conductor import Conductor
from slackwater.hotload.foreign import group_of, identity_of, snapshot_of
from slackwater.hotload.groups import DEFAULT_GROUP
from slackwater.hotload.operation import Operation, OperationState, ReplicaProgress, ReplicaStage

PREFIX: Final = "/v1alpha1/inference/hotLoads"
MAX_PAGE: Final = 1000
_PAGE: Final = 50

P = ParamSpec("P")
Word = Annotated[str, msgspec.Meta(max_length=300)]

CODES: Final[Mapping[str, tuple[str, int]]] = {
    "invalid_input": ("invalid_argument", 400),
    "unsupported": ("unimplemented", 501),
    "auth": ("unauthenticated", 401),
    "not_found": ("not_found", 404),
    "conflict": ("failed_precondition", 412),
    "unavailable": ("unavailable", 503),
}
"""That API's code and status by our kind; every other kind is ``internal``, 500."""
STATES: Final[Mapping[OperationState, str]] = {
    OperationState.QUEUED: "PENDING",
    OperationState.RUNNING: "IN_PROGRESS",
    OperationState.SUCCEEDED: "COMPLETED",
    OperationState.PARTLY_FAILED: "FAILED",
    OperationState.FAILED: "FAILED",
    OperationState.CANCELLED: "CANCELED",
    OperationState.SUPERSEDED: "CANCELED",
}
STAGES: Final[Mapping[ReplicaStage, str]] = {
    ReplicaStage.PENDING: "PENDING_UPDATE",
    ReplicaStage.SKIPPED: "PENDING_UPDATE",
    ReplicaStage.UNDER_WAY: "UPDATING",
    ReplicaStage.DONE: "READY",
    ReplicaStage.FAILED: "ERROR",
    ReplicaStage.UNKNOWN: "ERROR",
}


class Increment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What the client says of a delta. Replicas find their own way to a snapshot: only the order is checked."""

    previous_snapshot_identity: Word
    compression_format: Word = ""
    checksum_format: Word = ""


class HotLoadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Body of a hot-load."""

    deployment_id: Word
    identity: Word
    hot_load_id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,128}$")] | None = None
    """The idempotency key."""
    type: Literal["SNAPSHOT_TYPE_UNSPECIFIED", "SNAPSHOT_TYPE_FULL", "SNAPSHOT_TYPE_INCREMENTAL"] = "SNAPSHOT_TYPE_FULL"
    incremental_snapshot_metadata: Increment | None = None
    prompt_cache_policy: Literal[
        "PROMPT_CACHE_POLICY_UNSPECIFIED", "PROMPT_CACHE_POLICY_PRESERVE", "PROMPT_CACHE_POLICY_RESET_ALL"
    ] = "PROMPT_CACHE_POLICY_UNSPECIFIED"


def coreweave_routes(conductor: Conductor) -> list[Route]:
    """What to give `slackwater.api.app.create_app` as ``extra_routes``."""
    front = _Front(conductor)
    return [
        Route(PREFIX, bounded(_named(front.submit), _refusal), methods=["POST"]),
        Route(PREFIX, _named(front.list)),
        Route(PREFIX + "/{id}:cancel", bounded(_named(front.cancel), _refusal), methods=["POST"]),
        Route(PREFIX + "/{id}/replicas", _named(front.replicas)),
        Route(PREFIX + "/{id}", _named(front.get)),
    ]


class _Front:
    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    async def submit(self, request: Request, body: bytes) -> Response:
        """``POST``: one hot-load of a deployment at a time, unlike the native front."""
        del request
        wanted = decode(body, HotLoadBody, 'send {"deploymentId", "hotLoadId", "identity": "<run>-<version>", "type"}')
        if wanted.prompt_cache_policy == "PROMPT_CACHE_POLICY_PRESERVE":
            raise UnsupportedError("the prompt cache can't be preserved: new requests never see KV of another version")
        increment = wanted.incremental_snapshot_metadata
        if (wanted.type == "SNAPSHOT_TYPE_INCREMENTAL") != (increment is not None):
            raise InvalidInputError(
                "incrementalSnapshotMetadata goes with SNAPSHOT_TYPE_INCREMENTAL, and with no other"
            )
        previous = None if increment is None else increment.previous_snapshot_identity
        snapshot = snapshot_of(wanted.identity, self._conductor.run, previous)
        group = group_of(wanted.deployment_id, self._conductor.groups())
        key = wanted.hot_load_id
        known = None if key is None else await self._conductor.find(key)
        if known is None:
            self._check_idle(group)
        elif (known.order.group, self._identity(known)) != (group, wanted.identity):
            raise InvalidInputError(f"hotLoadId {key} was used for another hot-load", hint="take a new one")
        return self._reply(await self._conductor.submit(snapshot, key, group=group))

    async def list(self, request: Request) -> Response:
        """``GET``: newest first."""
        wanted = request.query_params.get("parentDeploymentId")
        group = None if not wanted else group_of(wanted, self._conductor.groups())
        loads = [each for each in self._conductor.list() if not each.order.standing]
        shown = [self._shown(each) for each in loads if group is None or each.order.group == group]
        return _page(request, "hotLoads", shown)

    async def get(self, request: Request) -> Response:
        """``GET …/{id}``."""
        return self._reply(await self._find(request))

    async def replicas(self, request: Request) -> Response:
        """``GET …/{id}/replicas``, by name."""
        operation = await self._find(request)
        parts = sorted(operation.replicas, key=lambda part: part.replica)
        return _page(request, "replicas", [self._replica(operation, part) for part in parts])

    async def cancel(self, request: Request, body: bytes) -> Response:
        """``POST …/{id}:cancel``: what is committed stays."""
        del body
        operation = await self._find(request)
        return self._reply(await self._conductor.cancel(operation.id))

    async def _find(self, request: Request) -> Operation:
        name: str = request.path_params["id"]
        operation = await self._conductor.find(name)
        if operation is None or operation.order.standing:
            raise NotFoundError(f"there is no hot-load {name[:80]!r}", hint="list them")
        return operation

    def _check_idle(self, group: str | None) -> None:
        """Refuse while any of the replicas meant is being loaded."""
        groups = self._conductor.groups()
        meant = {name for each in groups if group in (None, each.name) for name in each.replicas}
        for operation in self._conductor.list():
            if not operation.ended and not operation.order.standing and meant & set(operation.names):
                raise ConflictError(f"a hot-load is already in progress: {operation.idempotency_key}")

    def _identity(self, operation: Operation) -> str:
        version = operation.order.version
        return "" if version is None else identity_of(self._conductor.run, version)

    def _reply(self, operation: Operation) -> Response:
        return json_reply({"hotLoad": self._shown(operation)})

    def _shown(self, operation: Operation) -> dict[str, Any]:
        """That client's object. A snapshot is always whole here, whatever was uploaded for it."""
        name, identity = operation.idempotency_key, self._identity(operation)
        snapshot = {"identity": identity, "type": "SNAPSHOT_TYPE_FULL", "hotLoadId": name}
        settled = [part.settled_at for part in operation.replicas if part.settled_at is not None]
        deployment = operation.order.group or DEFAULT_GROUP
        return {
            "spec": {
                "id": name,
                "deploymentId": deployment,
                "identity": identity,
                "type": "SNAPSHOT_TYPE_FULL",
                "snapshotChain": [snapshot],
            },
            "status": {
                "state": f"HOT_LOAD_STATE_{STATES[operation.state]}",
                "createdAt": _time(operation.created_at),
                "updatedAt": _time(max([operation.created_at, *settled])),
                "finishedAt": _time(max(settled)) if operation.ended and settled else None,
                "conditions": [_condition(operation)],
            },
        }

    def _replica(self, operation: Operation, part: ReplicaProgress) -> dict[str, Any]:
        silent = part.stage is ReplicaStage.UNKNOWN and not operation.ended
        return {
            "name": part.replica,
            "zone": "",
            "state": "UPDATING" if silent else STAGES[part.stage],
            "currentSnapshotIdentity": "" if part.version is None else identity_of(self._conductor.run, part.version),
            "errorReason": "" if part.error is None else f"{part.error.kind}: {part.error.message}",
            "startedAt": _time(part.told_at),
            "finishedAt": _time(part.settled_at),
            "updatedAt": _time(part.settled_at or part.told_at),
            "transitionedAt": _time(part.settled_at or part.told_at),
        }


def _condition(operation: Operation) -> dict[str, str]:
    failed = [f"{part.replica}: {part.error.message}" for part in operation.replicas if part.error is not None]
    return {
        "type": "Completed",
        "status": "STATUS_TRUE" if operation.state is OperationState.SUCCEEDED else "STATUS_FALSE",
        "reason": operation.state.value,
        "message": "; ".join(failed),
    }


def _page(request: Request, name: str, rows: list[dict[str, Any]]) -> Response:
    size, start = _number(request, "maxPageSize", _PAGE), _number(request, "pageToken", 0)
    if not 0 < size <= MAX_PAGE:
        raise InvalidInputError(f"maxPageSize must be 1 to {MAX_PAGE}")
    more = start + size < len(rows)
    return json_reply({name: rows[start : start + size], "nextPageToken": str(start + size) if more else ""})


def _number(request: Request, name: str, otherwise: int) -> int:
    text = request.query_params.get(name, "")
    if text and not (text.isascii() and text.isdigit() and len(text) <= len(str(10**9))):
        raise InvalidInputError(f"{name} can't be read")
    return int(text) if text else otherwise


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def _refusal(error: SlackwaterError) -> Response:
    code, status = CODES.get(error.kind, ("internal", 500))
    return json_reply({"code": code, "message": str(error)}, status)


def _named(answer: Callable[P, Awaitable[Response]]) -> Callable[P, Awaitable[Response]]:
    """An endpoint whose errors have that API's shape."""

    async def endpoint(*given: P.args, **named: P.kwargs) -> Response:
        try:
            return await answer(*given, **named)
        except SlackwaterError as error:
            return _refusal(error)

    return endpoint
