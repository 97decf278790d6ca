"""What hot-loads say about requests in flight, and what comes back of it and of refusals; on a manual clock."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hotload_rig import RUN, Fleet, stages, status
from http_rig import CONTROL, Client, gated

from slackwater.config.in_flight import InFlight
from slackwater.errors import ConflictError, CorruptError, InvalidInputError, UnsupportedError
from slackwater.hotload.app import hotload_routes
from slackwater.hotload.coreweave import PREFIX, coreweave_routes
from slackwater.hotload.fireworks import HOT_LOAD, fireworks_routes
from slackwater.hotload.groups import Mode
from slackwater.hotload.ledger import open_ledger
from slackwater.hotload.operation import OperationState, Order, obeys
from slackwater.hotload.target import TargetError
from slackwater.ids import Version
from slackwater.testing.conformance_ledger import operation
from slackwater.testing.loopback import Loopback

FIREWORKS = {**CONTROL, "fireworks-model": "m", "fireworks-deployment": "fleet"}
TEXT = "layers.0.mlp: tile 3 doesn't make the manifest's digest"


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    await made.conductor.start()
    yield made
    await made.conductor.close()


@pytest.fixture
async def front(fleet: Fleet) -> AsyncIterator[Client]:
    conductor = fleet.conductor
    routes = [*hotload_routes(conductor), *fireworks_routes(conductor), *coreweave_routes(conductor)]
    async with aiohttp.ClientSession() as session, Loopback(gated(routes)) as server:
        yield Client(session, server.url, CONTROL)


def modes(fleet: Fleet) -> list[list[InFlight | None]]:
    return [target.modes for target in fleet.targets]


@pytest.mark.parametrize("word", [None, *InFlight])
async def test_a_hot_load_tells_every_replica_its_mode_and_shows_it(
    fleet: Fleet, front: Client, word: InFlight | None
) -> None:
    reply = await front.post("/v1/hot-loads", {"snapshot": "demo/7", "in_flight": word})
    assert (reply.status, reply.json()["in_flight"]) == (202, word)
    await fleet.polls()
    assert modes(fleet) == [[word]] * 3


@pytest.mark.parametrize("path", ["/v1/hot-loads", "/v1/groups/default"])
async def test_a_mode_that_there_is_not_is_refused_and_the_others_named(fleet: Fleet, front: Client, path: str) -> None:
    for word in ("retract", "", "Drain", "drain ", "x" * 300):
        body = {"snapshot": "demo/7", "in_flight": word, **({"mode": "pinned"} if "groups" in path else {})}
        reply = await front.post(path, body)
        assert reply.status == 400
        assert "continue, recompute, drain, abort" in str(reply.json())
    assert (await front.post(path, {"snapshot": "demo/7", "in_flight": 7})).status == 400
    assert fleet.goals() == [[], [], []]


async def test_one_key_is_one_mode(fleet: Fleet) -> None:
    first = await fleet.conductor.submit("demo/7", "key", in_flight=InFlight.DRAIN)
    assert (await fleet.conductor.submit("demo/7", "key", in_flight=InFlight.DRAIN)).id == first.id
    for other in (None, InFlight.ABORT):
        with pytest.raises(ConflictError, match="key"):
            await fleet.conductor.submit("demo/7", "key", in_flight=other)


async def test_a_replica_that_somebody_gave_another_mode_is_told_again(fleet: Fleet) -> None:
    await fleet.conductor.submit("demo/7", in_flight=InFlight.DRAIN)
    await fleet.polls()
    fleet.targets[0].change(swap_mode="abort")
    await fleet.polls()
    assert modes(fleet) == [[InFlight.DRAIN] * 2, [InFlight.DRAIN], [InFlight.DRAIN]]


@pytest.mark.parametrize(
    ("wanted", "told", "obeyed"),
    [(None, "drain", True), (None, None, True), (InFlight.DRAIN, "drain", True), (InFlight.DRAIN, "continue", False),
     (InFlight.DRAIN, None, False)],
)  # fmt: skip
def test_whoever_does_not_tell_the_mode_that_was_asked_for_does_not_obey(
    wanted: InFlight | None, told: str | None, *, obeyed: bool
) -> None:
    order = Order(run=RUN, version=Version(7), in_flight=wanted)
    assert obeys(order, status(version=7, target=7, swap_mode=told)) == obeyed


async def test_a_standing_order_tells_its_mode_also_to_those_that_follow_already_and_after_a_restart(
    fleet: Fleet,
) -> None:
    for target in fleet.targets:
        target.change(mode="follow")
    made = await fleet.conductor.set_mode("default", Mode.FOLLOW, in_flight=InFlight.RECOMPUTE)
    await fleet.polls(2.5)
    assert (made.in_flight, fleet.conductor.groups()) == (InFlight.RECOMPUTE, (made,))
    assert modes(fleet) == [[InFlight.RECOMPUTE]] * 3
    fleet.targets[0].restart()
    await fleet.polls(2.5)
    assert modes(fleet)[0] == [InFlight.RECOMPUTE] * 2
    assert (await fleet.conductor.set_mode("default", Mode.FOLLOW)).in_flight is None
    await fleet.polls(2.5)
    assert modes(fleet)[1] == [InFlight.RECOMPUTE, None]


async def test_a_manual_group_has_no_mode_for_requests_in_flight(fleet: Fleet) -> None:
    with pytest.raises(InvalidInputError, match="follow and pinned"):
        await fleet.conductor.set_mode("default", Mode.MANUAL, in_flight=InFlight.DRAIN)


def test_a_ledger_of_before_there_were_modes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = open_ledger(path, RUN)
    ledger.save(operation(1))
    ledger.close()
    with sqlite3.connect(path) as connection:
        (body,) = connection.execute("SELECT body FROM operations").fetchone()
        old = msgspec.json.decode(body)
        del old["order"]["in_flight"]
        timings = old["replicas"][0]["timings"]
        timings["check_s"] = 0.5
        del timings["ended"], timings["drain_s"]
        connection.execute("UPDATE operations SET body = ?", (msgspec.json.encode(old),))
    connection.close()
    ledger = open_ledger(path, RUN)
    (read,) = ledger.newest(9)
    ledger.close()
    assert (read.id, read.order.in_flight, read.order.group) == ("op1", None, "train")
    assert read.replicas[0].timings is not None
    assert (read.replicas[0].timings.fetch_s, read.replicas[0].timings.ended) == (0.1, None)


@pytest.mark.parametrize("at", ["refuses", "fails"])
async def test_a2_02_an_engine_without_what_a_mode_takes_fails_with_that_kind_and_stays(
    fleet: Fleet, front: Client, at: str
) -> None:
    lacking = fleet.targets[1]
    if at == "refuses":
        lacking.refusal = UnsupportedError("the engine can't compute KV again")
    name = (await front.post("/v1/hot-loads", {"snapshot": "demo/7", "in_flight": "recompute"})).json()["id"]
    await fleet.polls()
    if at == "fails":
        lacking.fail("unsupported")
    fleet.targets[0].reach()
    fleet.targets[2].reach()
    await fleet.polls()
    ended = (await front.get(f"/v1/hot-loads/{name}")).json()
    assert (ended["state"], [part["stage"] for part in ended["replicas"]]) == (
        "partly_failed", ["done", "failed", "done"]
    )  # fmt: skip
    assert ended["replicas"][1]["error"]["kind"] == "unsupported"
    assert lacking.now.version == 0


async def test_a2_02_a_standing_order_shows_the_refusal_and_not_that_all_is_well(fleet: Fleet) -> None:
    fleet.targets[1].change(mode="follow")
    fleet.targets[1].refusal = UnsupportedError("the engine can't drain")
    await fleet.conductor.set_mode("default", Mode.FOLLOW, in_flight=InFlight.DRAIN)
    seen: set[str] = set()
    for _ in range(20):
        await fleet.polls(0.5)
        seen.add(stages(fleet.conductor.list()[0])[1])
    assert seen == {"failed"}
    assert fleet.conductor.list()[0].replicas[1].error == TargetError(
        kind="unsupported", message="the engine can't drain"
    )
    fleet.targets[1].refusal = None
    await fleet.polls(2.0)
    assert fleet.targets[1].modes == [InFlight.DRAIN]


async def texts(front: Client, operation_id: str, name: str) -> dict[str, Any]:
    """The error of r1 in the three shapes."""
    native = (await front.get(f"/v1/hot-loads/{operation_id}")).json()["replicas"][1]
    fireworks = (await front.get(HOT_LOAD, headers=FIREWORKS)).json()["replicas"][0]
    coreweave = (await front.get(f"{PREFIX}/{name}/replicas")).json()["replicas"][1]
    whole = (await front.get(f"{PREFIX}/{name}")).json()["hotLoad"]["status"]
    return {
        "native": (native["stage"], native["error"]["message"]),
        "fireworks": (
            fireworks["identity"],
            fireworks["loading_state"]["stage"],
            fireworks["loading_state"]["message"],
        ),
        "coreweave": (coreweave["state"], coreweave["errorReason"]),
        "whole": (whole["state"], whole["conditions"][0]["message"]),
    }


@pytest.mark.parametrize("at", ["refuses", "fails"])
async def test_a2_13_the_replicas_own_words_reach_every_client_at_once(fleet: Fleet, front: Client, at: str) -> None:
    if at == "refuses":
        fleet.targets[1].refusal = CorruptError(TEXT)
    await front.post(PREFIX, {"deploymentId": "fleet", "hotLoadId": "one", "identity": "demo-7"})
    name = fleet.conductor.list()[0].id
    await fleet.polls()
    if at == "fails":
        fleet.targets[1].change(stage="idle", waiting=True, last_error=TargetError(kind="corrupt", message=TEXT))
    fleet.targets[0].reach()
    fleet.targets[2].reach()
    await fleet.polls()
    assert await texts(front, name, "one") == {
        "native": ("failed", TEXT),
        "fireworks": ("r1", "error", TEXT),
        "coreweave": ("ERROR", f"corrupt: {TEXT}"),
        "whole": ("HOT_LOAD_STATE_FAILED", f"r1: {TEXT}"),
    }


async def test_a2_13_a_replica_that_hangs_is_told_of_by_the_deadline(fleet: Fleet, front: Client) -> None:
    name = (await front.post("/v1/hot-loads", {"snapshot": "demo/7", "replicas": ["r1"]})).json()["id"]
    await fleet.polls(60.5)
    ended = (await front.get(f"/v1/hot-loads/{name}")).json()
    assert (ended["state"], ended["replicas"][0]["stage"]) == ("failed", "unknown")
    assert ended["replicas"][0]["error"] == {
        "kind": "unavailable",
        "message": "not settled within 60 s: preparing, 0 answers in flight",
    }


async def test_a2_19_a_drain_that_never_ends_ends_within_the_limit_and_tells_what_it_waited_for(fleet: Fleet) -> None:
    made = await fleet.conductor.submit("demo/7", in_flight=InFlight.DRAIN)
    await fleet.polls()
    fleet.targets[0].reach(drain_s=30.0, ended=3)
    fleet.targets[1].reach(drain_s=0.5, ended=0)
    fleet.targets[2].change(stage="staged", in_flight=4)
    await fleet.polls(61.0)
    ended = fleet.conductor.get(made.id)
    assert (ended.state, stages(ended)) == (OperationState.PARTLY_FAILED, ["done", "done", "unknown"])
    cut = [None if part.timings is None else (part.timings.drain_s, part.timings.ended) for part in ended.replicas]
    assert cut == [(30.0, 3), (0.5, 0), None]
    assert ended.replicas[2].error is not None
    assert ended.replicas[2].error.message == "not settled within 60 s: staged, 4 answers in flight"
