"""Any story of calls, replicas that fail and restart, and a gateway that dies: the promises hold after each chapter."""

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

from hotload_rig import Fleet, group
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.config.in_flight import InFlight
from slackwater.errors import SlackwaterError, UnavailableError
from slackwater.hotload.conductor import Conductor
from slackwater.hotload.groups import Group, Mode
from slackwater.hotload.operation import Operation
from slackwater.hotload.rollout import Canary
from slackwater.testing.ledger import MemoryLedger

SIZE = 4
NAMES = [f"r{number}" for number in range(SIZE)]
GROUPS = [group("train", "r0", "r1", "r2"), group("eval", "r3", mode=Mode.PINNED, version=3)]
VERSIONS = st.integers(0, 8)


@dataclass(frozen=True)
class Load:
    """A hot-load."""

    version: int
    key: str | None
    replicas: tuple[str, ...] | None
    canary: Canary | None
    in_flight: InFlight | None


@dataclass(frozen=True)
class SetMode:
    """A group's mode; of the pin, the version."""

    name: str
    mode: Mode
    version: int
    in_flight: InFlight | None


@dataclass(frozen=True)
class Happens:
    """Something happens to a replica, or to the gateway."""

    what: str
    replica: int
    seconds: float


Chapter: TypeAlias = Load | SetMode | Happens
CANARIES = st.none() | st.builds(Canary, count=st.integers(1, 2), hold_s=st.sampled_from([0.0, 3.0]))
SUBSETS = st.none() | st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple)
IN_FLIGHT = st.none() | st.sampled_from(InFlight)
LOADS = st.builds(Load, VERSIONS, st.none() | st.sampled_from(["a", "b"]), SUBSETS, CANARIES, IN_FLIGHT)
MODES = st.builds(SetMode, st.sampled_from(["train", "eval"]), st.sampled_from(list(Mode)), VERSIONS, IN_FLIGHT)
EVENTS = ["reach", "reach", "commit", "fail", "restart", "silent", "heard", "gateway", "cancel", "wait"]
HAPPENINGS = st.builds(Happens, st.sampled_from(EVENTS), st.integers(0, SIZE - 1), st.sampled_from([0.1, 1.0, 20.0]))


async def take_place(fleet: Fleet, chapter: Chapter) -> None:
    """One chapter; what it asks for may be refused."""
    conductor = fleet.conductor
    try:
        match chapter:
            case Load():
                await conductor.submit(
                    f"demo/{chapter.version}",
                    chapter.key,
                    replicas=chapter.replicas,
                    canary=chapter.canary,
                    in_flight=chapter.in_flight,
                )
            case SetMode():
                snapshot = f"demo/{chapter.version}" if chapter.mode is Mode.PINNED else None
                await conductor.set_mode(chapter.name, chapter.mode, snapshot, chapter.in_flight)
            case Happens(what="gateway"):
                await fleet.restart(GROUPS)
            case Happens(what="cancel"):
                for operation in conductor.list()[:1]:
                    await conductor.cancel(operation.id)
            case Happens():
                happen(fleet, chapter)
    except SlackwaterError:
        return


def happen(fleet: Fleet, event: Happens) -> None:
    """Something happens to one replica."""
    target = fleet.targets[event.replica]
    match event.what:
        case "reach":
            target.reach()
        case "commit":
            target.change(stage="committing" if target.now.stage == "preparing" else target.now.stage)
        case "fail":
            target.fail("corrupt")
        case "restart":
            target.restart()
        case "silent":
            target.error = UnavailableError("no answer")
        case "heard":
            target.error = None
        case _:
            return


def check(before: tuple[Operation, ...], conductor: Conductor) -> None:
    """What holds after each chapter."""
    now = conductor.list()
    known = {each.id: each for each in now}
    assert len(known) == len(now)
    assert len({each.idempotency_key for each in now}) == len(now)
    assert all(known[each.id] == each for each in before if each.ended), "an ended operation has changed"
    driven = [name for each in now if not each.ended for name in each.names]
    assert len(set(driven)) == len(driven), "two operations move one replica"


async def tell(story: list[Chapter]) -> None:
    """The story, then everything heals, and everything settles."""
    fleet = Fleet(size=SIZE, ledger=MemoryLedger(), groups=GROUPS)
    await fleet.conductor.start()
    for chapter in story:
        before = fleet.conductor.list()
        await take_place(fleet, chapter)
        await fleet.polls(chapter.seconds if isinstance(chapter, Happens) else 0.2)
        check(before, fleet.conductor)
    for target in fleet.targets:
        target.error = None
    for _ in range(8):
        for target in fleet.targets:
            if not target.now.waiting:
                target.reach()
        await fleet.polls(20.0)
    assert all(each.ended or each.order.standing for each in fleet.conductor.list())
    check_modes(fleet, fleet.conductor.groups())
    await fleet.conductor.close()


def check_modes(fleet: Fleet, groups: tuple[Group, ...]) -> None:
    """In the end everyone is where its group's mode wants it."""
    for each in groups:
        for target in (target for target in fleet.targets if target.replica in each.replicas):
            if each.mode is Mode.PINNED:
                assert (target.now.version, target.now.mode) == (each.version, "manual")
            if each.mode is Mode.FOLLOW:
                assert target.now.mode == "follow"
            if each.mode is not Mode.MANUAL:
                assert target.now.swap_mode == (each.in_flight or "continue")


@settings(max_examples=examples(40), deadline=None)
@given(story=st.lists(LOADS | MODES | HAPPENINGS, max_size=14))
def test_any_story_keeps_the_promises(story: list[Chapter]) -> None:
    asyncio.run(tell(story))
