"""A front in the shape of Fireworks' hot-load endpoint, so that its published client drives this fleet.

Source of the shape: the documentation of Fireworks' hot-load API and the wire of ``fireworks-ai`` 1.2.30.
docs/hot-load.md says what is taken, and what is refused because it can't be done here.
"""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.api.respond import json_reply
from slackwater.errors import InvalidInputError, UnsupportedError
from slackwater.hotload.bodies import bounded, decode
from slackwater.hotload.conductor import Conductor
from slackwater.hotload.foreign import group_of, identity_of, snapshot_of
from slackwater.hotload.groups import find_group
from slackwater.hotload.operation import Operation, ReplicaProgress, ReplicaStage
from slackwater.hotload.roll import FleetMember
from slackwater.hotload.target import TargetStatus
from slackwater.ids import ReplicaId, RunId, Version

HOT_LOAD: Final = "/hot_load/v1/models/hot_load"
ACCOUNTS: Final = "/v1/accounts"
"""Asked by the client for the one account of its key, with the key in a header of its own."""
_ELSEWHERE: Final = ("x-fireworks-hot-load-source-url", "x-fireworks-hot-load-cmek-resource")

Word = Annotated[str, msgspec.Meta(max_length=300)]


class Increment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client says of a delta. Replicas find their own way to a snapshot: only the order is checked."""

    previous_snapshot_identity: Word
    compression_format: Word = ""
    checksum_format: Word = ""


class Validation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of the model's config that may differ; here a run has one config, so it changes nothing."""

    extra_fields_ignore: Annotated[tuple[Word, ...], msgspec.Meta(max_length=1000)] = ()


class HotLoadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a hot-load."""

    identity: Word
    incremental_snapshot_metadata: Increment | None = None
    reset_prompt_cache: bool | Literal["all", "new_session", "none"] = True
    validation: Validation | None = None


def fireworks_routes(conductor: Conductor) -> list[Route]:
    """What to give `slackwater.api.app.create_app` as ``extra_routes``; see `AccountKey`, too."""
    front = _Front(conductor)
    return [
        Route(HOT_LOAD, bounded(front.submit), methods=["POST"]),
        Route(HOT_LOAD, front.status),
        Route(ACCOUNTS, front.accounts),
    ]


class AccountKey:
    """ASGI middleware, in front of the key gate: on `ACCOUNTS` alone, ``X-Api-Key`` is as good as ``Authorization``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"] == ACCOUNTS:
            headers = Headers(scope=scope)
            if "authorization" not in headers and "x-api-key" in headers:
                key = f"Bearer {headers['x-api-key']}".encode("latin-1")
                scope = {**scope, "headers": [*scope["headers"], (b"authorization", key)]}
        await self._app(scope, receive, send)


class _Front:
    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    async def submit(self, request: Request, body: bytes) -> Response:
        """``POST`` of a hot-load."""
        for name in _ELSEWHERE:
            if name in request.headers:
                raise UnsupportedError(
                    f"{name}: snapshots come from this fleet's bucket alone", hint="publish it there"
                )
        wanted = decode(body, HotLoadBody, 'send {"identity": "<run>-<version>"}')
        if wanted.reset_prompt_cache in (False, "none"):
            raise UnsupportedError(
                "reset_prompt_cache can't be off: new requests never see KV of another version", hint="leave it out"
            )
        increment = wanted.incremental_snapshot_metadata
        previous = None if increment is None else increment.previous_snapshot_identity
        snapshot = snapshot_of(wanted.identity, self._conductor.run, previous)
        operation = await self._conductor.submit(snapshot, group=self._group(request))
        return json_reply({"identity": wanted.identity, "hot_load": operation.id, "state": operation.state})

    async def status(self, request: Request) -> Response:
        """``GET``: every replica, those that aren't ready in front, for the client looks at the first alone."""
        group = self._group(request)
        names = None if group is None else find_group(self._conductor.groups(), group).replicas
        members = [each for each in await self._conductor.fleet() if names is None or each.replica in names]
        latest = _latest(self._conductor.list())
        rows = [_row(member, self._conductor.run, latest.get(member.replica)) for member in members]
        return json_reply({"replicas": sorted(rows, key=_readiness)})

    async def accounts(self, request: Request) -> Response:
        """The one account of whoever has the control key."""
        del request
        return json_reply({"accounts": [{"name": "accounts/slackwater"}]})

    def _group(self, request: Request) -> str | None:
        deployment = request.headers.get("fireworks-deployment", "")
        if not deployment:
            raise InvalidInputError("no header fireworks-deployment", hint="name a group there, or the fleet")
        return group_of(deployment.rpartition("/")[2], self._conductor.groups())


class LoadingState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica is going."""

    stage: str
    """``done``, ``error``, ``unknown``, or the stage of the exchange under way."""
    target_snapshot_identity: str | None = None
    message: str | None = None


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as that client reads it."""

    identity: str
    readiness: bool
    current_snapshot_identity: str | None
    loading_state: LoadingState
    loaded_adapters: tuple[()] = ()


def _latest(newest: Sequence[Operation]) -> dict[ReplicaId, tuple[Operation, ReplicaProgress]]:
    """By replica, the newest operation about it and its part in that."""
    found: dict[ReplicaId, tuple[Operation, ReplicaProgress]] = {}
    for operation in newest:
        for part in operation.replicas:
            found.setdefault(part.replica, (operation, part))
    return found


def _row(member: FleetMember, run: RunId, latest: tuple[Operation, ReplicaProgress] | None) -> ReplicaRow:
    """What a replica says; where it refused the newest hot-load, and so has no word of it, that refusal."""
    status = member.status
    if status is None:
        told = "" if member.error is None else member.error.message
        state = LoadingState(stage="unknown", message=told)
        return ReplicaRow(identity=member.replica, readiness=False, current_snapshot_identity=None, loading_state=state)
    state = _refused(latest, status, run) or LoadingState(
        stage=_stage(status),
        target_snapshot_identity=_identity(run, status.target),
        message=None if status.last_error is None else status.last_error.message,
    )
    return ReplicaRow(
        identity=member.replica,
        readiness=status.state == "serving",
        current_snapshot_identity=None if status.provisional else _identity(run, status.version),
        loading_state=state,
    )


def _refused(latest: tuple[Operation, ReplicaProgress] | None, status: TargetStatus, run: RunId) -> LoadingState | None:
    if latest is None or latest[0].order.version in (None, status.target, status.version):
        return None
    operation, part = latest
    if part.stage is not ReplicaStage.FAILED or part.error is None:
        return None
    wanted = _identity(run, operation.order.version)
    return LoadingState(stage="error", target_snapshot_identity=wanted, message=part.error.message)


def _stage(status: TargetStatus) -> str:
    if status.state in ("retired", "closed") or (status.waiting and status.last_error is not None):
        return "error"
    there = status.stage == "idle" and status.version == status.target and not status.provisional
    return "done" if there else "loading" if status.stage == "idle" else status.stage


def _identity(run: RunId, version: Version | None) -> str | None:
    return None if version is None else identity_of(run, version)


def _readiness(row: ReplicaRow) -> tuple[bool, bool]:
    there = row.current_snapshot_identity == row.loading_state.target_snapshot_identity
    return (row.readiness and there and row.loading_state.stage == "done", row.loading_state.stage != "error")
