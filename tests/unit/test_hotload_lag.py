"""Who is behind the head, by how much and for how long, and whom that alarms."""

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from hotload_rig import Fleet, ListedSnapshots, status

from slackwater.errors import InvalidInputError, NotFoundError, UnavailableError
from slackwater.hotload.conductor import ConductorLimits
from slackwater.hotload.lag import MAX_SIGHTINGS, Follower, Lag, Sightings, alarmed, heard_of, lag_of, sighted
from slackwater.hotload.snapshots import Snapshot
from slackwater.ids import ReplicaId, Version

R0 = ReplicaId("r0")
SINCE_EVER = {R0: Follower(boot_id="boot", since=0.0)}
LIMITS = ConductorLimits(standing_poll_s=1.0, lookup_s=5.0, lag_limit_s=10.0)


def seen(*moves: tuple[int, float]) -> Sightings:
    known: Sightings = ()
    for version, at in moves:
        known = sighted(known, Version(version), at)
    return known


@pytest.mark.parametrize(
    ("version", "mode", "lag"),
    [
        (9, "follow", Lag(behind=0, behind_s=0.0)),
        (8, "follow", Lag(behind=1, behind_s=5.0)),
        (6, "follow", Lag(behind=3, behind_s=15.0)),
        (2, "follow", Lag(behind=7, behind_s=35.0)),
        (10, "follow", Lag(behind=0, behind_s=0.0)),
        (2, "manual", Lag(behind=7, behind_s=None)),
    ],
)
def test_one_is_behind_since_the_first_version_above_its_own(version: int, mode: str, lag: Lag) -> None:
    known = seen((5, 5.0), (7, 25.0), (6, 26.0), (8, 30.0), (9, 35.0))
    assert lag_of(known, SINCE_EVER, status(version=version, target=9, mode=mode), 40.0) == lag


def test_what_is_not_known_is_no_lag() -> None:
    assert lag_of((), {}, status(mode="follow"), 1.0) is None
    assert lag_of(seen((5, 1.0)), {}, status(version=0, mode="follow"), 2.0) is not None
    assert lag_of(seen((5, 1.0)), {}, status(mode="follow", version=None), 2.0) is None  # type: ignore[arg-type]  # it has none yet


@pytest.mark.parametrize("state", ["starting", "retired", "closed"])
def test_who_does_not_serve_is_not_behind(state: str) -> None:
    assert lag_of(seen((5, 1.0)), SINCE_EVER, status(version=0, mode="follow", state=state), 2.0) is None


def test_a_start_is_behind_only_since_it_was_heard_to_serve_and_follow() -> None:
    known = seen((5, 0.0), (7, 10.0))

    def behind_s(story: list[tuple[float, dict[str, object]]]) -> float | None:
        followers: Mapping[ReplicaId, Follower] = {}
        for at, changes in story:
            followers = heard_of(followers, status(**{"version": 5, "mode": "follow", **changes}), at)  # type: ignore[arg-type]  # a test names what it changes
        lag = lag_of(known, followers, status(version=5, mode="follow", boot_id="now"), 100.0)
        return None if lag is None else lag.behind_s

    now: dict[str, object] = {"boot_id": "now"}
    assert behind_s([]) == 0.0
    assert behind_s([(1.0, {})]) == 0.0, "another start"
    assert behind_s([(1.0, now)]) == 90.0
    assert behind_s([(1.0, {}), (40.0, {**now, "state": "starting"}), (60.0, now), (70.0, now)]) == 40.0
    assert behind_s([(1.0, now), (40.0, {**now, "mode": "manual"}), (60.0, now)]) == 40.0, "it was manual"
    assert behind_s([(1.0, now), (40.0, {"replica": "r1", "state": "starting"})]) == 90.0, "another replica"


def test_a_stuck_replica_is_behind_for_ever_longer_while_the_head_moves_fast() -> None:
    known = seen(*((number, float(number)) for number in range(2 * MAX_SIGHTINGS)))
    assert len(known) == MAX_SIGHTINGS
    lag = lag_of(known, SINCE_EVER, status(version=3, mode="follow"), 2.0 * MAX_SIGHTINGS)
    assert lag is not None
    assert lag.behind_s is not None
    assert lag.behind_s > MAX_SIGHTINGS - 10


def test_an_alarm_is_one_until_it_is_half_as_late() -> None:
    def late(seconds: float | None) -> dict[ReplicaId, Lag]:
        return {R0: Lag(behind=1, behind_s=seconds)}

    before: frozenset[ReplicaId] = frozenset()
    told: list[bool] = []
    for lags in (late(9.0), late(10.5), late(11.0), {}, late(6.0), late(12.0), late(5.0), late(12.0), late(None)):
        before, new = alarmed(before, lags, 10.0)
        told.append(bool(new))
    assert told == [False, True, False, False, False, False, False, True, False]
    assert before == frozenset()


class MovingSnapshots(ListedSnapshots):
    """A lineage whose head a test moves; its first versions are gone."""

    def __init__(self, head: int) -> None:
        super().__init__(head + 1)
        self.head = head
        self.broken: Exception | None = None

    def find(self, version: Version) -> Snapshot:
        if self.broken is not None:
            raise self.broken
        if not 4 <= version <= self.head:
            raise NotFoundError(f"there is no version {version}")
        self._count = self.head + 1
        return super().find(version)


class Lagging(Fleet):
    """Two that follow, one that doesn't, all at 5, which is the head."""

    def __init__(self) -> None:
        super().__init__(limits=LIMITS)
        self.head = MovingSnapshots(5)
        self.snapshots = self.head
        self.conductor = self.conduct(())
        for target in self.targets:
            target.change(version=Version(5), target=Version(5), mode="follow")
        self.targets[2].change(mode="manual")

    async def lags(self) -> list[tuple[int | None, float | None]]:
        return [(member.behind, member.behind_s) for member in await self.conductor.fleet()]

    async def lagging(self) -> list[Any]:
        return [(each.replica, each.version) for each in await self.conductor.events(99) if each.kind == "lagging"]


@pytest.fixture
async def fleet() -> AsyncIterator[Lagging]:
    made = Lagging()
    await made.conductor.start()
    yield made
    await made.conductor.close()


async def test_p16_the_fleet_shows_how_far_each_is_behind_and_warns_once(
    fleet: Lagging, caplog: pytest.LogCaptureFixture
) -> None:
    assert await fleet.lags() == [(None, None)] * 3
    await fleet.rounds(1)
    assert await fleet.lags() == [(0, 0.0), (0, 0.0), (0, None)]
    fleet.head.head = 7
    await fleet.rounds(1)
    fleet.targets[0].change(version=Version(7), target=Version(7))
    await fleet.rounds(10)
    assert await fleet.lags() == [(0, 0.0), (2, 10.0), (2, None)]
    assert await fleet.lagging() == []
    with caplog.at_level(logging.WARNING):
        await fleet.rounds(20)
    assert await fleet.lagging() == [("r1", 5)]
    assert caplog.text.count("replica r1 lags: it serves version 5, 2 behind 7 for 11 s") == 1
    fleet.targets[1].change(version=Version(7))
    await fleet.rounds(1)
    fleet.head.head = 8
    await fleet.rounds(15)
    assert sorted(await fleet.lagging()) == [("r0", 7), ("r1", 5), ("r1", 7)]


async def test_f17_while_the_head_does_not_move_nothing_is_wrong(fleet: Lagging) -> None:
    await fleet.rounds(100)
    assert await fleet.lags() == [(0, 0.0), (0, 0.0), (0, None)]
    assert await fleet.lagging() == []


async def test_a_restart_is_no_lag_and_no_version_that_it_does_not_serve_is_told(fleet: Lagging) -> None:
    await fleet.rounds(1)
    fleet.head.head = 8
    for target in fleet.targets[:2]:
        target.change(version=Version(8), target=Version(8))
    await fleet.rounds(100)
    restarted = fleet.targets[0]
    restarted.restart()
    restarted.change(state="starting", version=Version(0), target=Version(8))
    await fleet.rounds(20)
    assert (await fleet.lags())[0] == (None, None)
    restarted.change(state="serving", version=Version(5))
    await fleet.rounds(5)
    assert (await fleet.lags())[0] == (3, 4.0)
    assert await fleet.lagging() == []
    events = [(e.kind, e.version) for e in reversed(await fleet.conductor.events(99)) if e.replica == "r0"]
    assert events == [("serves", 5), ("follows", 5), ("serves", 8), ("restarted", 0), ("serves", 5)]
    await fleet.rounds(10)
    assert await fleet.lagging() == [("r0", 5)]


async def test_a_silent_replica_or_bucket_is_unknown_and_no_alarm(
    fleet: Lagging, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.rounds(1)
    fleet.targets[0].error = UnavailableError("replica r0 did not answer within 5 s")
    fleet.head.broken = UnavailableError("the store is away")
    await fleet.rounds(20)
    first = (await fleet.conductor.fleet())[0]
    assert (first.behind, first.behind_s, first.status) == (None, None, None)
    assert caplog.text.count("the newest version can't be looked for: the store is away") == 1
    assert await fleet.lagging() == []


async def test_a_replica_of_another_run_moves_no_head(fleet: Lagging) -> None:
    fleet.targets[2].change(run="other", version=Version(99), target=Version(99))
    await fleet.rounds(2)
    assert (await fleet.lags())[0] == (0, 0.0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(InvalidInputError, match="lag_limit_s"):
        ConductorLimits(lag_limit_s=value)
