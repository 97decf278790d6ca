"""``max_lag``: counted from the newest committed version, once, by whoever knows it; unknown is refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest
from hotload_rig import Fleet, status
from hypothesis import given
from hypothesis import strategies as st
from replica_rig import Rig, request, until

from slackwater.api.asking import policy_constraint
from slackwater.api.auth import Keys
from slackwater.api.schema import PolicyField
from slackwater.api.tokens import ChatTokenizer
from slackwater.config.head import GOOD_FOR_S, is_stale
from slackwater.delivery.fetcher import HeadView
from slackwater.delivery.watcher import Watcher
from slackwater.errors import InvalidInputError, PolicyUnmetError, UnavailableError
from slackwater.ids import ReplicaId, Version
from slackwater.rollout.request import PolicyConstraint
from slackwater.router.app import create_gateway
from slackwater.router.pool import ProbeReport
from slackwater.router.router import Router
from slackwater.testing.clock import ManualClock
from slackwater.testing.completer import TableCompleter
from slackwater.testing.conformance_completer import REQUEST, answer
from slackwater.testing.loopback import Loopback
from slackwater.testing.tiny_model import TINY_VOCAB, write_tiny_tokenizer

KEYS = Keys(inference="inference-key", control="control-key")
OLD, NEW = ReplicaId("old"), ReplicaId("new")


@given(lag=st.integers(0, 20), low=st.none() | st.integers(0, 20), head=st.integers(0, 20), version=st.integers(0, 20))
def test_a_version_is_admitted_that_is_not_too_far_behind(lag: int, low: int | None, head: int, version: int) -> None:
    asked = PolicyConstraint(max_lag=lag, min_version=None if low is None else Version(low), any_kv=True)
    counted = asked.counted_from(Version(head))
    assert counted.admits(Version(version)) is (head - version <= lag and version >= (low or 0))
    assert (counted.any_kv, counted.max_lag) == (True, None)
    assert asked.counted_from(None) is asked
    assert not asked.admits(Version(version)), "an unknown head is not guessed"


@pytest.mark.parametrize("fields", [{"max_lag": -1}, {"max_lag": 1, "exact_version": 3}])
def test_what_has_no_meaning_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match=r"^policy is .*: max_lag"):
        policy_constraint(msgspec.convert(fields, PolicyField))


@pytest.mark.parametrize(
    ("looked_at", "now", "poll_s", "stale"),
    [
        (None, 0.0, 1.0, True),
        (5.0, 5.0 + GOOD_FOR_S, 1.0, False),
        (5.0, 5.1 + GOOD_FOR_S, 1.0, True),
        (5.0, 125.0, 60.0, False),
        (5.0, 126.0, 60.0, True),
    ],
)
def test_a_head_is_believed_for_a_while(looked_at: float | None, now: float, poll_s: float, *, stale: bool) -> None:
    assert is_stale(looked_at, now, poll_s) is stale


async def test_a_watcher_counts_from_the_last_look_that_was_answered() -> None:
    source, clock = Mock(), ManualClock()
    begun = clock.monotonic()
    source.look.return_value = HeadView(version=Version(3), receded=False)
    watcher = Watcher(source, clock, 2.0)
    assert watcher.looked_at is None
    heads = aiter(watcher)
    assert await anext(heads) == 3
    later = asyncio.ensure_future(anext(heads))
    await clock.parked()
    source.look.side_effect = UnavailableError("away")
    await clock.advance(2.0)
    await until(lambda: watcher.trouble is not None)
    assert watcher.looked_at == begun
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)


async def test_a_conductor_knows_the_head_once_the_bucket_has_told_it() -> None:
    fleet = Fleet(1, snapshots=9)
    await fleet.conductor.start()
    assert fleet.conductor.newest() is None
    await fleet.rounds(10)
    assert fleet.conductor.newest() == 8
    fleet.snapshots.find = Mock(side_effect=UnavailableError("away"))  # type: ignore[method-assign]
    fleet.targets[0].now = status("r0", version=12, target=12)
    await fleet.rounds(2)
    assert fleet.conductor.newest() == 12, "a replica has it, so it is committed"
    await fleet.rounds(int(GOOD_FOR_S))
    assert fleet.conductor.newest() is None, "there may be newer ones that nobody has"
    await fleet.conductor.close()


class LocalReplica(TableCompleter):
    """A table completer that answers probes."""

    def __init__(self, name: ReplicaId, version: int) -> None:
        rows = [[float(token % 7) for token in range(TINY_VOCAB)]]
        super().__init__(rows, versions=(version,), replica=name)

    async def probe(self) -> ProbeReport:
        return ProbeReport(status="serving", version=self.versions[-1], window=self.window())

    async def aclose(self) -> None:
        """Holds nothing."""


class Known:
    """A gateway's router over a replica at 3 and one at 7, and what it knows of the head."""

    def __init__(self) -> None:
        self.head: Version | None = None
        self.old, self.new = LocalReplica(OLD, 3), LocalReplica(NEW, 7)
        self.router = Router({OLD: self.old, NEW: self.new}, clock=ManualClock(), head=lambda: self.head)

    async def who(self, most: int) -> str:
        return (await answer(self.router, replace(REQUEST, policy=PolicyConstraint(max_lag=most)))).origin.replica


@pytest.fixture
async def known() -> AsyncIterator[Known]:
    made = Known()
    async with made.router:
        yield made


async def test_a_gateway_asks_only_replicas_that_are_near_enough(known: Known) -> None:
    known.head = Version(8)
    assert [await known.who(1) for _ in range(3)] == [NEW] * 3
    assert {await known.who(5) for _ in range(2)} == {OLD, NEW}
    with pytest.raises(PolicyUnmetError, match=r"min_version=8") as unmet:
        await known.who(0)
    assert unmet.value.versions == (3, 7)
    assert {each.policy.min_version for each in known.new.requests} <= {3, 7}, "replicas get a plain bound"


async def test_an_unknown_head_is_refused_with_what_is_held(known: Known) -> None:
    with pytest.raises(PolicyUnmetError, match=r"max_lag=9 .*isn't known") as unmet:
        await known.who(9)
    assert unmet.value.versions == (3, 7)
    assert not known.old.requests


async def test_a5_11_a_head_that_moves_before_the_first_token_makes_nobody_too_old(known: Known) -> None:
    known.head = Version(7)
    known.new.hold()
    asked = asyncio.ensure_future(known.who(0))
    await until(lambda: known.new.waiting == 1)
    known.head = Version(20)
    known.new.release()
    assert await asked == NEW


async def test_a_replica_that_goes_back_before_the_first_token_is_found_out(known: Known) -> None:
    known.head = Version(7)
    known.new.hold()
    asked = asyncio.ensure_future(known.who(0))
    await until(lambda: known.new.waiting == 1)
    known.new.versions = (Version(6),)
    known.new.release()
    with pytest.raises(PolicyUnmetError):
        await asked


async def test_over_http_it_is_a_409_that_may_be_asked_again(tmp_path: Path) -> None:
    known = Known()
    app = create_gateway(known.router, ChatTokenizer(write_tiny_tokenizer(tmp_path)), KEYS, model_name="m")
    headers = {"Authorization": f"Bearer {KEYS.inference}"}
    body = json.dumps({"prompt": [1, 2], "max_tokens": 2, "policy": {"max_lag": 0}})
    async with Loopback(app) as server, aiohttp.ClientSession(server.url, headers=headers) as session:
        for head, status_code in ((None, 409), (Version(9), 409), (Version(7), 200)):
            known.head = head
            async with session.post("/v1/completions", data=body) as reply:
                told = await reply.json()
            assert reply.status == status_code
            if reply.status == 409:
                assert (told["error"]["code"], told["error"]["versions"]) == ("policy_unmet", [3, 7])
                assert reply.headers["Retry-After"] == "1"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    await made.close()


async def first_version(rig: Rig, most: int) -> Version:
    begun = await rig.replica.complete(request(policy=PolicyConstraint(max_lag=most)))
    try:
        return (await anext(aiter(begun))).version
    finally:
        await begun.aclose()


async def test_a_lone_replica_counts_from_the_head_that_it_watches(rig: Rig) -> None:
    await rig.start(Version(0), versions=4)
    await until(lambda: rig.replica.status().head == 3)
    assert await first_version(rig, 3) == 0
    with pytest.raises(PolicyUnmetError) as unmet:
        await first_version(rig, 2)
    assert unmet.value.versions == (0,)
    rig.fetcher.look = Mock(side_effect=UnavailableError("away"))  # type: ignore[method-assign]
    end = rig.clock.monotonic() + GOOD_FOR_S + 1
    await rig.turn_until(lambda: rig.clock.monotonic() > end)
    with pytest.raises(PolicyUnmetError, match="isn't known") as unknown:
        await first_version(rig, 3)
    assert unknown.value.versions == (0,)
