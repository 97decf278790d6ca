"""Random histories of one engine: answers under way, and exchanges in every mode, held against the offline checker.

``SLACKWATER_HISTORIES`` says how many, ``SLACKWATER_HISTORY_SEED`` where their seeds begin.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import pytest
from replica_rig import SPECS, weights_at

from depth import examples
from slackwater.checkpoint.tensor import TileWrite, tiles
from slackwater.config.in_flight import InFlight
from slackwater.errors import SlackwaterError, SwapError
from slackwater.ids import BootId, ReplicaId, RequestId, StateDigest, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Finish, kv_spans
from slackwater.rollout.request import ANY_POLICY, CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.history import Accepted, Ended, Event, Labelled, Published, Sampled, Steered, answers, check
from slackwater.testing.stamp import StampBugs, StampEngine, weights_mark

if TYPE_CHECKING:
    from slackwater.engine.base import Staged

HISTORIES: Final = int(os.environ.get("SLACKWATER_HISTORIES", examples(150)))
FIRST_SEED: Final = int(os.environ.get("SLACKWATER_HISTORY_SEED", "0"))
ACTS: Final = 40
PROMPTS: Final = ((1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 9), (7,))
REPLICA: Final = ReplicaId("replica-0")
BOOT: Final = BootId("boot-0")

PLANTED: Final = {
    "a recompute that is told of and not done": (StampBugs(skip_recompute=True), "I1"),
    "a label flipped a step early": (StampBugs(early_label=True), "I1"),
    "half of the tensors written before a step": (StampBugs(torn_step=True), "I1"),
    "KV kept over a swap": (StampBugs(keep_kv=True), "I8"),
    "KV kept over a swap in silence": (StampBugs(keep_kv=True, hide_reuse=True), "I1"),
    "a request lost": (StampBugs(lose_waiting=True), "I5"),
}


class Bench:
    """A stamp engine, what is done to it, and the log of what happened."""

    def __init__(self, bugs: StampBugs | None = None) -> None:
        self.log: list[Event] = []
        self.broken: list[str] = []
        """Promises broken that the checker doesn't know."""
        self.engine = StampEngine(weights_at(0), SPECS, slots=2, window=64, labelled=self._labelled)
        self.engine.bugs = bugs or StampBugs()
        self.engine.hold()
        self.drains = 0
        self.undone = 0
        self._last: tuple[Staged, Version] | None = None
        self._newest = Version(0)
        self._spoilt: set[Version] = set()
        self._begun: set[RequestId] | None = None
        """While it drains: who had a token as that began."""
        self._draining: asyncio.Task[None] | None = None
        self._asked = 0
        self._open: dict[RequestId, Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._publish(Version(0))
        self._labelled(Version(0))

    def _publish(self, version: Version) -> None:
        mark = weights_mark(weights_at(version))
        self.log.append(Published(version=version, state=StateDigest(f"state {version}"), mark=mark))

    def _labelled(self, version: Version, mended: bool = False) -> None:
        self.log.append(Labelled(replica=REPLICA, boot=BOOT, version=version, at=0.0, mended=mended))

    async def ask(self, chance: random.Random) -> None:
        self._asked += 1
        request = CompletionRequest(
            request_id=RequestId(f"r{self._asked}"),
            prompt_ids=chance.choice(PROMPTS),
            sampling=SamplingSpec(max_tokens=chance.randint(1, 12)),
            policy=self._policy(chance),
        )
        answer = await self.engine.generate(request, ahead=chance.random() < 0.2)
        self.log.append(Accepted(replica=REPLICA, boot=BOOT, request=request, state="serving"))
        self._open[request.request_id] = answer
        self._spawn(self._read(request.request_id, answer))

    def _policy(self, chance: random.Random) -> PolicyConstraint:
        held = self.engine.stats().version
        some = (PolicyConstraint(exact_version=held), PolicyConstraint(min_version=held))
        return chance.choice((ANY_POLICY, *some, *[PolicyConstraint(any_kv=True)] * 2))

    async def _read(self, name: RequestId, answer: Answer) -> None:
        try:
            async for step in answer:
                sampled = Sampled(request=name, origin=answer.origin, step=step)
                self._look(sampled)
                self.log.append(sampled)
            self.log.append(Ended(request=name, finish=answer.finish))
        except SlackwaterError as error:
            self.log.append(Ended(request=name, finish=None, error=error.kind))
        del self._open[name]

    def _look(self, one: Sampled) -> None:
        if self._begun is not None and one.request not in self._begun:
            self.broken.append(f"{one.request} got its first token in a drain")
        if {one.step.version, *(span.version for span in one.step.kv)} & self._spoilt:
            self.broken.append(f"{one.request} got what spoilt weights made")

    async def swap(self, chance: random.Random) -> None:
        """To a version that is new each time; one in five fails."""
        before = self.engine.stats().version
        self._newest = version = Version(self._newest + 1)
        self._publish(version)
        staged = await self.engine.stage(_writes(version))
        wrong = chance.choice((None, None, None, None, "a tile"))
        mode = chance.choice(tuple(InFlight))
        with suppress(SwapError):
            await self.engine.commit(staged, version, in_flight=mode, proof=lambda: wrong)
            self._last = staged, before
        self._begun = None  # whatever came of it

    async def undo(self, chance: random.Random) -> None:
        if self._last is None:
            return
        (staged, before), self._last = self._last, None
        self.engine.hold()
        await turns(40)  # what was made is read
        gone, spoilt = self.engine.stats().version, chance.random() < 0.6
        self.log.append(Steered(replica=REPLICA, goal=before))
        await self.engine.undo(staged, before, in_flight=chance.choice(tuple(InFlight)), spoilt=spoilt)
        self._begun = None
        self._spoilt |= {gone} if spoilt else set()
        self.undone += 1

    def drain(self) -> None:
        if self._draining is None or self._draining.done():
            self._draining = self._spawn(self._drain())

    async def _drain(self) -> None:
        self._begun = {run.request.request_id for run in self.engine._runs if run.made}
        await self.engine.drain()
        self.drains += 1

    def end_drain(self, chance: random.Random) -> None:
        self._begun = None
        if self._draining is not None and chance.random() < 0.5:
            self._draining.cancel()
        self.engine.proceed()

    async def close_one(self, chance: random.Random) -> None:
        if self._open:
            await chance.choice(list(self._open.values())).aclose()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def heal(self) -> None:
        """Let everything end that can."""
        await turns(1)  # a drain that was asked for just now has begun
        self._begun = None
        self.engine.proceed()
        self.engine.release()
        for _ in range(200):
            if not self._tasks:
                break
            await turns(10)
        for task in list(self._tasks):
            task.cancel()
        await self.engine.close()


def _writes(version: Version) -> list[TileWrite]:
    new = weights_at(version)
    return [
        TileWrite(name=name, tile=tile, positions=None, values=tile.take(new[name]))
        for name, spec in SPECS.items()
        for tile in tiles(spec)
    ]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def played(seed: int, bugs: StampBugs | None = None) -> Bench:
    """A random history; the same seed gives the same one."""
    chance, bench = random.Random(seed), Bench(bugs)
    for _ in range(ACTS):
        await _act(bench, chance)
    await bench.heal()
    return bench


_ODDS: Final = (8, 4, 2, 1.5, 1.5, 1, 0.3, 8, 5)
"""How often each act is chosen, relative to the others."""


async def _act(bench: Bench, chance: random.Random) -> None:
    match chance.choices(range(len(_ODDS)), _ODDS)[0]:
        case 0:
            await bench.ask(chance)
        case 1:
            await bench.swap(chance)
        case 2:
            await bench.undo(chance)
        case 3:
            bench.drain()
        case 4:
            bench.end_drain(chance)
        case 5:
            await bench.close_one(chance)
        case 6:
            await bench.engine.abort_all()
        case 7:
            bench.engine.release(chance.randint(1, 9))
        case _:
            await turns(chance.randint(1, 20))


@pytest.mark.timeout(max(120, HISTORIES))
async def test_no_random_history_breaks_a_promise() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
        bench = await played(seed)
        again = f"SLACKWATER_HISTORY_SEED={seed} SLACKWATER_HISTORIES=1 plays it again"
        assert [*check(bench.log), *bench.broken] == [], again


async def test_the_histories_are_of_what_they_are_to_be_of() -> None:
    """Every end, drains that return, undos, KV recomputed and KV of several versions: none of it is rare."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        bench = await played(seed)
        seen.update({"drained": bench.drains, "undone": bench.undone})
        for whole in answers(bench.log):
            seen[str(whole.ends[0].finish or whole.ends[0].error)] += 1
            if whole.steps and whole.sampled[0].origin.cached_tokens and whole.steps[0].kv:
                seen["reused over a swap"] += 1
            seen["recomputed"] += any(step.kv for step in whole.steps[1:])
            seen["mixed"] += len(kv_spans(len(whole.accepted.request.prompt_ids), whole.steps)) > 1
    ends = (*(finish for finish in Finish if finish is not Finish.STOP), "unavailable", "policy_unmet")
    wanted = (*ends, "drained", "undone", "reused over a swap", "recomputed", "mixed")
    assert [what for what in wanted if seen[what] < 5] == []


async def test_a_seed_plays_the_same_history_again() -> None:
    assert (await played(3)).log == (await played(3)).log


@pytest.mark.parametrize("bug", PLANTED)
async def test_a_planted_bug_is_found_by_its_check(bug: str) -> None:
    bugs, number = PLANTED[bug]
    for seed in range(200):
        if any(violation.check == number for violation in check((await played(seed, bugs)).log)):
            return
    pytest.fail(f"{number} never told of {bug}")
