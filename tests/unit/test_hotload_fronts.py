"""The foreign fronts on the wire. Real clients drive them in tests/integration."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
from hotload_rig import RUN, Fleet, group
from http_rig import CONTROL, Client, Reply, gated

from slackwater.errors import InvalidInputError, NotFoundError, UnavailableError
from slackwater.hotload.app import hotload_routes
from slackwater.hotload.coreweave import PREFIX, STAGES, STATES, coreweave_routes
from slackwater.hotload.fireworks import ACCOUNTS, HOT_LOAD, AccountKey, fireworks_routes
from slackwater.hotload.foreign import identity_of, version_of
from slackwater.hotload.groups import Mode
from slackwater.hotload.operation import OperationState, ReplicaStage
from slackwater.ids import RunId, Version
from slackwater.testing.loopback import Loopback

FIREWORKS = {**CONTROL, "fireworks-model": "m", "fireworks-deployment": "accounts/a/deployments/train"}
HOSTILE = [
    "../x",
    "/etc",
    "s3://other/..",
    "http://169.254.169.254/",
    "file:///",
    "a" * 299,
    "demo-\x00",
    "demo-1\x00",
    "demo-\u0661",
    "\uff0e\uff0e-1",
    "demo-007",
    "demo/7",
    "demo",
    "-7",
    "",
]
POSTS = [
    HOT_LOAD,
    PREFIX,
    "/v1/hot-loads",
    "/v1/groups/default",
    "/v1/follow",
    "/v1/hot-loads/x/cancel",
    f"{PREFIX}/x:cancel",
]


BOTH = pytest.mark.parametrize("fleet", [False, True], ids=["ungrouped", "grouped"], indirect=True)


@pytest.fixture
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    eval_group = group("eval", "r2", mode=Mode.PINNED, version=3)
    made = Fleet(groups=[group("train", "r0", "r1"), eval_group] if getattr(request, "param", False) else [])
    await made.conductor.start()
    yield made
    await made.conductor.close()


@pytest.fixture
async def front(fleet: Fleet) -> AsyncIterator[Client]:
    conductor = fleet.conductor
    app = gated([*hotload_routes(conductor), *fireworks_routes(conductor), *coreweave_routes(conductor)])
    app.add_middleware(AccountKey)
    async with aiohttp.ClientSession() as session, Loopback(app) as server:
        yield Client(session, server.url, CONTROL)


def load(**changes: object) -> dict[str, object]:
    body = {"deploymentId": "train", "hotLoadId": "one", "identity": "demo-7", "type": "SNAPSHOT_TYPE_FULL"}
    return {**body, **changes}


async def rows(front: Client) -> list[dict[str, Any]]:
    return (await front.get(HOT_LOAD, headers=FIREWORKS)).json()["replicas"]


def codes(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.json()["code"]


def test_identities_are_one_segment_and_come_back_as_they_went() -> None:
    for run, version in (("demo", 0), ("a-1", 12), ("step", 42)):
        assert version_of(identity_of(RunId(run), Version(version)), RunId(run)) == version
    with pytest.raises(InvalidInputError, match="write demo-12 for demo/12"):
        version_of("demo-012", RUN)
    with pytest.raises(NotFoundError):
        version_of("other-1", RUN)


@BOTH
async def test_a_fireworks_hot_load_is_shown_worst_first_until_every_replica_is_ready(
    fleet: Fleet, front: Client
) -> None:
    for target in fleet.targets:
        target.change(version=Version(6), target=Version(6))
    told = await front.post(HOT_LOAD, {"identity": "demo-7", "reset_prompt_cache": True}, headers=FIREWORKS)
    assert (told.status, told.json()["identity"]) == (200, "demo-7")
    await fleet.polls()
    fleet.targets[0].reach()
    fleet.targets[1].change(provisional=True, version=Version(7), stage="verifying")
    seen = await rows(front)
    first = next(row for row in seen if row["identity"] == "r1")
    assert seen[-1]["identity"] == "r0"
    assert (first["current_snapshot_identity"], first["readiness"]) == (None, True)
    assert first["loading_state"]["stage"] == "verifying"
    fleet.targets[1].fail("corrupt")
    failed = (await rows(front))[0]
    state = {"stage": "error", "target_snapshot_identity": "demo-7", "message": "broken"}
    assert (failed["identity"], failed["loading_state"]) == ("r1", state)
    for target in fleet.targets[1:]:
        target.change(
            provisional=False, waiting=False, last_error=None, version=Version(7), target=Version(7), stage="idle"
        )
    ready = await rows(front)
    assert all(row["readiness"] and row["current_snapshot_identity"] == "demo-7" for row in ready)
    fleet.targets[0].error = UnavailableError("replica r0 did not answer within 5 s")
    silent = (await rows(front))[0]
    assert (silent["identity"], silent["readiness"], silent["loading_state"]["stage"]) == ("r0", False, "unknown")


@BOTH
async def test_a_fireworks_deployment_is_a_group_where_groups_are_named(fleet: Fleet, front: Client) -> None:
    grouped = len(fleet.conductor.groups()) > 1
    elsewhere = {**FIREWORKS, "fireworks-deployment": "accounts/a/deployments/other"}
    reply = await front.post(HOT_LOAD, {"identity": "demo-7"}, headers=elsewhere)
    assert reply.status == (404 if grouped else 200)
    await front.post(HOT_LOAD, {"identity": "demo-7"}, headers=FIREWORKS)
    await fleet.polls()
    assert [7 in goals for goals in fleet.goals()] == [True, True, not grouped]
    assert len(await rows(front)) == (2 if grouped else 3)
    assert (await front.post(HOT_LOAD, {"identity": "demo-7"})).status == 400


async def test_the_account_of_a_fireworks_key_is_told_to_whoever_has_the_control_key(front: Client) -> None:
    for key, status in (("c", 200), ("i", 403), ("x", 401), ("", 401)):
        reply = await front.get(ACCOUNTS, headers={"X-Api-Key": key, "Authorization": ""})
        assert reply.status == 401, "an Authorization header that is there decides"
        async with aiohttp.ClientSession() as session:
            bare = Client(session, front._base, {"X-Api-Key": key})
            assert (await bare.get(ACCOUNTS)).status == status
            assert (await bare.get("/v1/fleet")).status == 401


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (
            {"incremental_snapshot_metadata": {"previous_snapshot_identity": "demo-6", "compression_format": "arc_v2"}},
            200,
        ),
        ({"incremental_snapshot_metadata": {"previous_snapshot_identity": "demo-7"}}, 400),
        ({"incremental_snapshot_metadata": {"previous_snapshot_identity": "../x"}}, 400),
        ({"validation": {"extra_fields_ignore": ["a"]}, "reset_prompt_cache": "new_session"}, 200),
        ({"reset_prompt_cache": False}, 400),
        ({"reset_prompt_cache": "none"}, 400),
        ({"url": "file:///etc"}, 400),
        ({"identity": "demo-99"}, 404),
        ({"identity": "other-1"}, 404),
    ],
)
async def test_what_fireworks_bodies_may_say(
    fleet: Fleet, front: Client, change: dict[str, object], status: int
) -> None:
    reply = await front.post(HOT_LOAD, {"identity": "demo-7", **change}, headers=FIREWORKS)
    assert reply.status == status
    assert (status == 200) or all(7 not in goals for goals in fleet.goals())


@pytest.mark.parametrize("name", ["x-fireworks-hot-load-source-url", "x-fireworks-hot-load-cmek-resource"])
async def test_a8_04_bytes_from_elsewhere_are_refused(fleet: Fleet, front: Client, name: str) -> None:
    reply = await front.post(HOT_LOAD, {"identity": "demo-7"}, headers={**FIREWORKS, name: "http://169.254.169.254/"})
    assert (reply.status, reply.json()["error"]["type"]) == (400, "unsupported")
    assert fleet.snapshots.asked == 0


async def test_a8_04_hostile_identities_are_refused_on_both_fronts(fleet: Fleet, front: Client) -> None:
    asked = fleet.snapshots.asked
    for name in HOSTILE:
        reply = await front.post(HOT_LOAD, {"identity": name}, headers=FIREWORKS)
        assert reply.status == 400, name
        assert codes(await front.post(PREFIX, load(identity=name))) == (400, "invalid_argument"), name
    assert fleet.snapshots.asked == asked
    assert all(set(goals) <= {3} for goals in fleet.goals())


@BOTH
async def test_a_coreweave_hot_load_from_its_post_to_its_end(fleet: Fleet, front: Client) -> None:
    made = (await front.post(PREFIX, load())).json()["hotLoad"]
    assert (made["spec"]["id"], made["spec"]["identity"]) == ("one", "demo-7")
    assert made["status"]["state"] == "HOT_LOAD_STATE_PENDING"
    await fleet.polls()
    parts = (await front.get(f"{PREFIX}/one/replicas")).json()["replicas"]
    assert {part["state"] for part in parts} == {"UPDATING"}
    for target in fleet.targets:
        target.reach()
    await fleet.polls()
    ended = (await front.get(f"{PREFIX}/one")).json()["hotLoad"]["status"]
    assert (ended["state"], ended["conditions"][0]["status"]) == ("HOT_LOAD_STATE_COMPLETED", "STATUS_TRUE")
    assert ended["finishedAt"] == "1970-01-01T00:16:40.300000+00:00"
    parts = (await front.get(f"{PREFIX}/one/replicas")).json()["replicas"]
    assert {(part["state"], part["currentSnapshotIdentity"]) for part in parts} == {("READY", "demo-7")}
    assert [part["name"] for part in parts] == sorted(part["name"] for part in parts)


async def test_coreweave_admits_one_hot_load_at_a_time_and_the_same_id_is_the_same_one(
    fleet: Fleet, front: Client
) -> None:
    await front.post(PREFIX, load())
    assert (await front.post(PREFIX, load())).json()["hotLoad"]["spec"]["id"] == "one"
    busy = await front.post(PREFIX, load(hotLoadId="two", identity="demo-8"))
    assert codes(busy) == (412, "failed_precondition")
    assert "already in progress" in busy.json()["message"]
    assert codes(await front.post(PREFIX, load(identity="demo-8"))) == (400, "invalid_argument")
    assert codes(await front.post(PREFIX, load(hotLoadId="x/y"))) == (400, "invalid_argument")
    await fleet.polls()
    cancelled = (await front.post(f"{PREFIX}/one:cancel", {})).json()["hotLoad"]
    assert cancelled["status"]["state"] == "HOT_LOAD_STATE_CANCELED"
    assert codes(await front.post(f"{PREFIX}/one:cancel", {})) == (412, "failed_precondition")
    assert (await front.post(PREFIX, load(hotLoadId="two", identity="demo-8"))).status == 200
    assert codes(await front.get(f"{PREFIX}/three")) == (404, "not_found")


@BOTH
async def test_coreweave_lists_page_by_page_and_by_deployment(fleet: Fleet, front: Client) -> None:
    for number in range(3):
        await front.post("/v1/hot-loads", {"snapshot": f"demo/{number}", "replicas": ["r0"]})
    await front.post(PREFIX, load(identity="demo-4")) if len(fleet.conductor.groups()) == 1 else None
    seen: list[str] = []
    token = ""
    while True:
        page = (await front.get(f"{PREFIX}?maxPageSize=2&pageToken={token}")).json()
        seen += [item["spec"]["identity"] for item in page["hotLoads"]]
        token = page["nextPageToken"]
        if not token:
            break
    assert seen[:3] == ["demo-2", "demo-1", "demo-0"]
    for query in ("maxPageSize=0", "maxPageSize=1001", "pageToken=x", "pageToken=-1", "pageToken=" + "9" * 30):
        assert codes(await front.get(f"{PREFIX}?{query}")) == (400, "invalid_argument")
    assert (await front.get(f"{PREFIX}?parentDeploymentId=train")).status == 200


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (
            {
                "type": "SNAPSHOT_TYPE_INCREMENTAL",
                "incrementalSnapshotMetadata": {"previousSnapshotIdentity": "demo-6"},
            },
            200,
        ),
        (
            {
                "type": "SNAPSHOT_TYPE_INCREMENTAL",
                "incrementalSnapshotMetadata": {"previousSnapshotIdentity": "demo-8"},
            },
            400,
        ),
        ({"type": "SNAPSHOT_TYPE_INCREMENTAL"}, 400),
        ({"incrementalSnapshotMetadata": {"previousSnapshotIdentity": "demo-6"}}, 400),
        ({"promptCachePolicy": "PROMPT_CACHE_POLICY_RESET_ALL"}, 200),
        ({"promptCachePolicy": "PROMPT_CACHE_POLICY_PRESERVE"}, 501),
        ({"type": "SNAPSHOT_TYPE_LORA"}, 400),
        ({"url": "file:///etc"}, 400),
        ({"identity": "demo-99"}, 404),
    ],
)
async def test_what_coreweave_bodies_may_say(
    fleet: Fleet, front: Client, change: dict[str, object], status: int
) -> None:
    assert (await front.post(PREFIX, load(**change))).status == status
    assert (status == 200) or all(7 not in goals for goals in fleet.goals())


def test_every_stage_and_state_has_a_word_on_that_wire() -> None:
    assert set(STAGES) == set(ReplicaStage)
    assert set(STATES) == set(OperationState)


async def post_raw(front: Client, path: str, length: str, body: bytes) -> bytes:
    """What comes back for the beginning of a body whose rest never comes."""
    host, port = front._base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer c\r\n{length}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


async def test_a_body_of_a_gigabyte_is_refused_by_its_size_before_it_is_read(front: Client) -> None:
    for path in POSTS:
        answer = await post_raw(front, path, f"Content-Length: {2**30}", b"")
        assert answer.startswith(b"HTTP/1.1 413 "), path
        assert b"longer than 65536 bytes" in answer
    assert codes_of(await post_raw(front, PREFIX, f"Content-Length: {2**30}", b"")) == "invalid_argument"


async def test_a_body_whose_length_is_not_told_is_refused_within_its_bound(front: Client) -> None:
    chunk = b"10001\r\n" + bytes(0x10001) + b"\r\n"
    for path in POSTS:
        assert (await post_raw(front, path, "Transfer-Encoding: chunked", chunk)).startswith(b"HTTP/1.1 413 "), path


def codes_of(answer: bytes) -> str:
    return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["code"]
