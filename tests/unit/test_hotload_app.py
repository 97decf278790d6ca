from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from hotload_rig import Fleet
from http_rig import CONTROL, Client, gated, silent
from replica_rig import RUN, Rig, until

from slackwater.checkpoint.keys import head_key, manifest_key
from slackwater.clock import SystemClock
from slackwater.config.in_flight import InFlight
from slackwater.errors import AuthError, CorruptError, NotFoundError, UnavailableError
from slackwater.hotload.app import hotload_routes
from slackwater.hotload.conductor import Conductor, ConductorLimits
from slackwater.hotload.operation import OperationState, ReplicaStage
from slackwater.hotload.remote import HttpTarget
from slackwater.hotload.snapshots import BucketSnapshots
from slackwater.ids import ReplicaId, Version
from slackwater.replica.app import control_routes
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.loopback import Loopback


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
async def front(fleet: Fleet, session: aiohttp.ClientSession) -> AsyncIterator[Client]:
    async with Loopback(gated(hotload_routes(fleet.conductor))) as server:
        yield Client(session, server.url, CONTROL)
    await fleet.conductor.close()


async def test_a_hot_load_is_accepted_watched_listed_and_cancelled(fleet: Fleet, front: Client) -> None:
    accepted = await front.post("/v1/hot-loads", {"snapshot": "demo/7"}, headers={"Idempotency-Key": "k"})
    assert accepted.status == 202
    name = accepted.json()["id"]
    await fleet.polls()
    seen = (await front.get(f"/v1/hot-loads/{name}")).json()
    assert (seen["snapshot"], seen["state"], seen["idempotency_key"]) == ("demo/7", "running", "k")
    assert [part["stage"] for part in seen["replicas"]] == ["under_way"] * 3
    cancelled = await front.post(f"/v1/hot-loads/{name}/cancel")
    assert (cancelled.status, cancelled.json()["state"]) == (200, "cancelled")
    again = await front.post("/v1/hot-loads", {"snapshot": "demo/7"}, headers={"Idempotency-Key": "k"})
    assert (again.status, again.json()["id"]) == (200, name)
    assert [item["id"] for item in (await front.get("/v1/hot-loads")).json()["hot_loads"]] == [name]


async def test_snapshots_and_fleet_are_listed(fleet: Fleet, front: Client) -> None:
    fleet.targets[1].error = UnavailableError("replica r1 did not answer within 5 s")
    chain = (await front.get("/v1/snapshots")).json()["snapshots"]
    members = (await front.get("/v1/fleet")).json()["replicas"]
    assert [item["kind"] for item in chain[:2]] == ["anchor", "delta"]
    assert set(chain[0]) == {"name", "version", "kind", "state", "bytes", "step", "created_at"}
    assert [member["status"] is None for member in members] == [False, True, False]
    assert members[1]["error"]["kind"] == "unavailable"


async def test_following_is_a_standing_order(fleet: Fleet, front: Client) -> None:
    reply = (await front.post("/v1/follow")).json()
    assert reply["mode"] == "follow"
    assert [set(goals) for goals in fleet.goals()] == [{"head"}] * 3
    (standing,) = (await front.get("/v1/hot-loads")).json()["hot_loads"]
    assert (standing["snapshot"], standing["standing"], standing["state"]) == ("demo/head", True, "running")


async def test_a_canary_is_shown_with_its_phase_and_its_times(fleet: Fleet, front: Client) -> None:
    body = {"snapshot": "demo/7", "replicas": ["r2", "r0"], "canary": {"count": 1, "hold_s": 5}}
    name = (await front.post("/v1/hot-loads", body)).json()["id"]
    await fleet.polls()
    fleet.targets[2].reach()
    await fleet.polls()
    seen = (await front.get(f"/v1/hot-loads/{name}")).json()
    assert (seen["phase"], seen["canary"], seen["group"]) == ("holding", {"count": 1, "hold_s": 5.0}, None)
    first, second = seen["replicas"]
    assert (first["replica"], first["stage"], second["stage"]) == ("r2", "done", "pending")
    times = {key: value for key, value in first["timings"].items() if value is not None}
    assert times == {"version": 7, "from_version": 0, "prepare_s": 2.0, "pause_s": 0.25, "verify_s": 1.0}
    assert 0 < first["settled_at"] - first["told_at"] < 1


async def test_groups_are_listed_and_their_modes_set(fleet: Fleet, front: Client) -> None:
    reply = await front.post("/v1/groups/default", {"mode": "pinned", "snapshot": "demo/3"})
    assert reply.status == 200
    (shown,) = (await front.get("/v1/groups")).json()["groups"]
    (standing,) = fleet.conductor.list()
    assert shown == reply.json()
    assert shown == {
        "name": "default",
        "mode": "pinned",
        "snapshot": "demo/3",
        "in_flight": None,
        "replicas": ["r0", "r1", "r2"],
        "hot_load": standing.id,
    }
    assert (await front.post("/v1/hot-loads", {"snapshot": "demo/7"})).status == 409
    await fleet.polls()
    events = (await front.get("/v1/fleet/events?limit=1000")).json()["events"]
    assert events[-1] == {"at": 1000.0, "kind": "group", "version": 3, "detail": "default pinned"}
    assert len((await front.get("/v1/fleet/events?limit=1")).json()["events"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/groups/default", {"mode": "frozen"}, 400),
        ("/v1/groups/default", {"mode": "pinned"}, 400),
        ("/v1/groups/default", {"mode": "pinned", "snapshot": "demo/99"}, 404),
        ("/v1/groups/other", {"mode": "manual"}, 404),
        ("/v1/hot-loads", {"snapshot": "demo/7", "group": "other"}, 404),
        ("/v1/hot-loads", {"snapshot": "demo/7", "replicas": ["r9"]}, 404),
        ("/v1/hot-loads", {"snapshot": "demo/7", "replicas": []}, 400),
        ("/v1/hot-loads", {"snapshot": "demo/7", "canary": {"count": 3}}, 400),
        ("/v1/hot-loads", {"snapshot": "demo/7", "canary": {"count": 0}}, 400),
        ("/v1/hot-loads", {"snapshot": "demo/7", "canary": {"hold_s": -1}}, 400),
    ],
)
async def test_a_group_or_rollout_that_cannot_be_is_refused(
    fleet: Fleet, front: Client, path: str, body: object, status: int
) -> None:
    assert (await front.post(path, body)).status == status
    assert fleet.goals() == [[], [], []]


async def test_the_number_of_events_has_bounds(front: Client) -> None:
    for limit in ("0", "1001", "-1", "x", "\u0661", "9" * 5000, ""):
        assert (await front.get(f"/v1/fleet/events?limit={limit}")).status == 400


async def test_two_bodies_under_one_idempotency_key_are_a_conflict(front: Client) -> None:
    key = {"Idempotency-Key": "k"}
    assert (await front.post("/v1/hot-loads", {"snapshot": "demo/7"}, headers=key)).status == 202
    for body in ({"snapshot": "demo/6"}, {"snapshot": "demo/7", "replicas": ["r0"]}):
        reply = await front.post("/v1/hot-loads", body, headers=key)
        assert (reply.status, reply.json()["error"]["type"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"snapshot": "../x"}', 400),
        (b'{"snapshot": "http://169.254.169.254/"}', 400),
        (b'{"snapshot": 7}', 400),
        (b'{"snapshot": "demo/7", "url": "file:///etc"}', 400),
        (b"{", 400),
        (b'{"snapshot": "demo/99"}', 404),
        (b'{"snapshot": "other/1"}', 404),
    ],
)
async def test_a8_04_bad_snapshots_are_refused_and_nobody_is_told(
    fleet: Fleet, front: Client, body: bytes, status: int
) -> None:
    reply = await front.post("/v1/hot-loads", body)
    assert reply.status == status
    assert all(not target.goals for target in fleet.targets)


async def test_every_path_needs_the_control_key(front: Client) -> None:
    for path in ("/v1/hot-loads", "/v1/snapshots", "/v1/fleet", "/v1/hot-loads/x"):
        assert (await front.get(path, headers={"Authorization": ""})).status == 401
        assert (await front.get(path, headers={"Authorization": "Bearer i"})).status == 403


async def test_a_long_or_empty_idempotency_key_is_refused(front: Client) -> None:
    for key in ("", "k" * 201):
        reply = await front.post("/v1/hot-loads", {"snapshot": "demo/7"}, headers={"Idempotency-Key": key})
        assert reply.status == 400


async def test_a1_12_a_fleet_over_http_ends_with_a_state_for_each_replica(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    bucket = MemoryBucket()
    rigs = [Rig(tmp_path, f"r{number}", bucket) for number in range(2)]
    rigs[0].publish(2)
    async with AsyncExitStack() as stack:
        targets: list[HttpTarget] = []
        for rig in rigs:
            await rig.replica.start(Version(0))
            stack.push_async_callback(rig.close)
            server = await stack.enter_async_context(Loopback(gated(control_routes(rig.replica))))
            targets.append(HttpTarget(rig.replica.status().replica, server.url, "c", session))
        hung = await stack.enter_async_context(silent())
        targets.append(HttpTarget(ReplicaId("r2"), hung, "c", session, deadline_s=0.1))
        limits = ConductorLimits(deadline_s=2.0, poll_s=0.01)
        conductor = Conductor(targets, BucketSnapshots(bucket, RUN), SystemClock(), limits)
        rigs[1].engine.faults.flip_bit = True
        operation = await conductor.submit("demo/1")
        await until(lambda: conductor.get(operation.id).ended)
        ended = conductor.get(operation.id)
    assert ended.state is OperationState.PARTLY_FAILED
    assert [part.stage for part in ended.replicas] == [
        ReplicaStage.DONE,
        ReplicaStage.FAILED,
        ReplicaStage.UNKNOWN,
    ]
    assert [part.version for part in ended.replicas] == [1, 0, None]
    timings = ended.replicas[0].timings
    assert timings is not None
    assert timings.from_version == 0
    told = (timings.fetch_s, timings.decode_s, timings.stage_s, timings.drain_s, timings.prepare_s, timings.pause_s)
    assert None not in told
    assert timings.ended == 0


async def test_a_target_maps_what_a_replica_refuses_and_what_is_no_replica(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    rig = Rig(tmp_path)
    await rig.start()
    async with Loopback(gated(control_routes(rig.replica))) as server:
        base = server.url
        target = HttpTarget(ReplicaId("replica-0"), base, "c", session)
        assert (await target.status()).version == 0
        assert (await target.set_target(Version(0), InFlight.DRAIN)).swap_mode == "drain"
        assert (await target.set_target(Version(0))).swap_mode == "continue"
        with pytest.raises(NotFoundError):
            await target.set_target(Version(8))
        with pytest.raises(AuthError):
            await HttpTarget(ReplicaId("replica-0"), base, "wrong", session).status()
        with pytest.raises(CorruptError, match="not 'other'"):
            await HttpTarget(ReplicaId("other"), base, "c", session).status()
    with pytest.raises(UnavailableError):
        await target.status()
    await rig.close()


def test_snapshots_are_listed_from_the_last_gap_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.publish(5)
    rig.bucket.delete(manifest_key(RUN, Version(1)))
    rig.bucket.put(head_key(RUN), b'{"version": 4}')
    snapshots = BucketSnapshots(rig.bucket, RUN)
    assert [each.version for each in snapshots.chain()] == [2, 3, 4]
    rig.fetcher.close()
