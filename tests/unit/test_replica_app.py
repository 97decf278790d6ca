import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from http_rig import CONTROL, Client, gated
from replica_rig import Rig

from slackwater.ids import Version
from slackwater.replica.app import control_routes
from slackwater.testing.loopback import Loopback


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[Client]:
    app = gated(control_routes(rig.replica))
    async with Loopback(app) as server, aiohttp.ClientSession() as session:
        yield Client(session, server.url)


async def test_health_is_open_and_follows_the_state(rig: Rig, client: Client) -> None:
    before = (await client.get("/health")).json()
    await rig.start(versions=3)
    after = (await client.get("/health")).json()
    assert (before["status"], before["version"], before["window"]) == ("starting", None, None)
    assert after == {
        "status": "serving",
        "replica": "replica-0",
        "boot_id": "boot-1",
        "run": "demo",
        "version": 2,
        "in_flight": 0,
        "draining": False,
        "reason": None,
        "window": 4096,
        "routing": None,
    }


async def test_health_says_that_there_is_nothing_to_serve_yet(rig: Rig, client: Client) -> None:
    starting = asyncio.create_task(rig.replica.start())
    await rig.clock.parked()
    assert (await client.get("/health")).json()["reason"] == "run demo has no version yet"
    rig.publish()
    await rig.clock.advance(1.0)
    await starting
    assert (await client.get("/health")).json()["reason"] is None


async def test_control_needs_the_control_key(rig: Rig, client: Client) -> None:
    await rig.start()
    for method, path in [("GET", "status"), ("POST", "target"), ("POST", "rollback"), ("GET", "weights")]:
        bare = await client.call(method, f"/control/v1/{path}")
        wrong = await client.call(method, f"/control/v1/{path}", headers={"Authorization": "Bearer i"})
        assert (bare.status, wrong.status) == (401, 403)


async def test_a_target_is_taken_twice_and_reached_once(rig: Rig, client: Client) -> None:
    await rig.start()
    rig.publish(2)
    for _ in range(2):
        reply = await client.post("/control/v1/target", {"version": 2}, headers=CONTROL)
        assert reply.status == 200
        assert reply.json()["target"] == 2
    await rig.replica.settled()
    status = (await client.get("/control/v1/status", headers=CONTROL)).json()
    assert (status["version"], status["mode"], status["stage"]) == (2, "manual", "idle")
    assert [(swap["from_version"], swap["version"], swap["deltas"]) for swap in status["swaps"]] == [(0, 2, 2)]
    head = await client.post("/control/v1/target", {"version": "head"}, headers=CONTROL)
    assert head.json()["mode"] == "follow"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"version": -1}', b'{"version": "tail"}', b'{"version": 1.5}', b'{"version": true}',
     b'{"version": 99999999999999999999}', b'{"version": 1, "x": 2}', b'{"version": 0, "in_flight": "kill"}',
     b'{"version": 0, "in_flight": 1}', b'{"version": 0, "in_flight": ""}', b'{"snapshot": "../x"}', b"\xff"],
)  # fmt: skip
async def test_a8_04_a_target_that_is_none_is_a_bad_request(rig: Rig, client: Client, body: bytes) -> None:
    await rig.start()
    reply = await client.post("/control/v1/target", body, headers=CONTROL)
    assert reply.status == 400
    assert reply.json()["error"]["type"] == "invalid_input"
    assert rig.replica.status().target == 0


async def test_an_unknown_version_is_not_found(rig: Rig, client: Client) -> None:
    await rig.start()
    reply = await client.post("/control/v1/target", {"version": 5}, headers=CONTROL)
    assert reply.status == 404


async def test_a2_16_a_target_in_another_state_is_a_conflict_that_names_it(rig: Rig, client: Client) -> None:
    starting = asyncio.create_task(rig.replica.start())
    early = await client.post("/control/v1/target", {"version": 0}, headers=CONTROL)
    rig.publish()
    await rig.clock.parked()
    await rig.clock.advance(1.0)
    await starting
    await rig.replica.close()
    late = await client.post("/control/v1/target", {"version": 0}, headers=CONTROL)
    assert (early.status, late.status) == (409, 409)
    assert "starting" in early.json()["error"]["message"]
    assert "closed" in late.json()["error"]["message"]


async def test_weights_are_digested_from_memory_and_a_roll_back_answers_when_it_is_done(
    rig: Rig, client: Client
) -> None:
    await rig.start(versions=2)
    weights = (await client.get("/control/v1/weights", headers=CONTROL)).json()
    assert weights == {"version": 1, "state_digest": rig.fetcher.manifest(Version(1)).state}
    back = (await client.post("/control/v1/rollback", headers=CONTROL)).json()
    assert (back["version"], back["mode"]) == (0, "manual")
    again = await client.post("/control/v1/rollback", headers=CONTROL)
    assert again.status == 409


async def test_a_target_names_what_becomes_of_answers_in_flight(rig: Rig, client: Client) -> None:
    await rig.start()
    reply = await client.post("/control/v1/target", {"version": 0, "in_flight": "drain"}, headers=CONTROL)
    assert reply.json()["swap_mode"] == "drain"
    reply = await client.post("/control/v1/target", {"version": 0}, headers=CONTROL)
    assert reply.json()["swap_mode"] == "continue"


async def test_a2_05_no_call_claims_to_have_reset_a_cache(rig: Rig, client: Client) -> None:
    """A swap switches the namespace by itself; what other engines call a reset is no call here, never a success."""
    await rig.start()
    for path in ("/reset_prefix_cache", "/flush_cache", "/control/v1/reset", "/control/v1/flush"):
        for method in ("GET", "POST"):
            assert (await client.call(method, path, headers=CONTROL)).status == 404
