"""Faults of a replica's process by their numbers: killed, frozen, full, poisoned, left alone; what it serves then."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from processes import INFERENCE, Reply, await_version, call, free_port, until
from replica_nursery import Child, Moment, Nursery
from replica_rig import Rig, request
from replica_site import MODEL, RUN, Lineage, Site, aim, complete, data_of, publishing, status_of, versions_of
from tap import Tap

from slackwater.errors import CorruptError, NotFoundError
from slackwater.ids import RequestId, Version
from slackwater.replica.status import State
from slackwater.replica.swap import Stage
from slackwater.rollout.evidence import Completion, Finish, collect
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.router.remote import RemoteReplica

pytestmark = pytest.mark.timeout(180)

SLOTS: Final = 16
"""Answers that a replica decodes at once unless told otherwise."""
OUT_WITHIN_S: Final = 15.0
"""In which a frozen replica is out of routing."""
SLACK_S: Final = 1.0
"""What the gap between two tokens may be above the pause."""

ANCHOR_MOMENTS: Final[tuple[Moment, ...]] = ("half_file", "unnamed_folder")
MOMENTS: Final[tuple[Moment, ...]] = (
    "begin", "half_pack", "unnamed_pack", "named_pack", "decode", "prepared", "commit", "written", "relabelled",
    "committed", "agreed",
)  # fmt: skip
CACHED_AFTER: Final = MOMENTS.index("named_pack")
"""From this moment on the version's pack is in the cache."""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Generator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nursery") / "children") as made:
        yield made


@pytest.fixture
def site(tmp_path: Path, nursery: Nursery) -> Generator[Site]:
    lineage = Lineage(tmp_path)
    before = list(nursery.children)
    yield Site(tmp_path, nursery, lineage)
    for child in nursery.children:
        if child not in before and child.lives:
            child.kill()
    lineage.close()


# --- F31, F30, P9: killed --------------------------------------------------------------------------------------------


def test_f31_a_replica_killed_while_its_first_anchor_comes_starts_again_from_what_is_verified(site: Site) -> None:
    anchors = site.cache("r0") / RUN / "anchors"
    verified = set[str]()
    for moment in ANCHOR_MOMENTS:
        child = site.start(moment=moment)
        assert child.dies() in {"SIGKILL", "SIGXFSZ"}, child.stderr
        assert not {Path(key).name for key in child.reads} & verified
        (unfinished,) = anchors.iterdir()
        verified = {path.name for path in unfinished.iterdir() if not path.name.startswith(".")}
    assert verified == site.lineage.manifest(0).files.keys()
    child = site.start()
    site.serves_the_head(child)
    assert child.reads == []
    (folder,) = anchors.iterdir()
    assert {path.name for path in folder.iterdir()} == verified


def test_f31_a_replica_killed_at_any_moment_of_a_swap_comes_back_on_the_head_and_reads_nothing_twice(
    site: Site,
) -> None:
    lineage = site.lineage
    missing = sorted(lineage.keys(0))
    for moment in MOMENTS:
        child = site.start(moment=moment, version=lineage.head + 1)
        site.serves_the_head(child)
        assert sorted(child.reads) == missing, moment
        lineage.publish()
        (pack,) = lineage.keys(lineage.head)
        assert child.dies() in {"SIGKILL", "SIGXFSZ"}, f"{moment}: {child.stderr}"
        is_cached = MOMENTS.index(moment) >= CACHED_AFTER
        assert (Path(pack).name in site.cached("r0")) is is_cached, moment
        missing = [] if is_cached else [pack]
    child = site.start()
    site.serves_the_head(child)
    assert child.reads == []
    held = site.cache("r0") / RUN / "blobs"
    assert [path.name for path in held.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("moment", ["decode", "committed"])
def test_f31_a_replica_killed_again_while_it_catches_up_still_comes_back(site: Site, moment: Moment) -> None:
    for _ in range(3):
        site.lineage.publish()
    for attempt in range(2):
        child = site.start(moment=moment, version=site.lineage.head)
        assert child.dies() == "SIGKILL", child.stderr
        assert bool(child.reads) is (attempt == 0)
    child = site.start()
    site.serves_the_head(child)
    assert child.reads == []


def test_f31_a_replica_killed_in_the_middle_of_a_fast_trainers_swaps_serves_one_committed_version(site: Site) -> None:
    child = site.start()
    site.serves_the_head(child)
    for commits in (1, 6):
        enough = site.lineage.head + commits

        def amid_a_swap(url: str = child.url, enough: int = enough) -> bool:
            now = status_of(url)
            return now["version"] >= enough and now["stage"] != "idle"

        with publishing(site.lineage):
            until(amid_a_swap, "it is in the middle of a later swap")
            child.kill()
        cached = site.cached("r0")
        child = site.start()
        site.serves_the_head(child)
        assert not {Path(key).name for key in child.reads} & cached


def test_f30_a_replica_killed_while_it_prepares_serves_the_old_version_until_then_and_the_new_one_after(
    site: Site,
) -> None:
    lineage = site.lineage
    child = site.start()
    site.serves_the_head(child)
    aim(child.url, 0)
    lineage.publish()
    pack = lineage.bucket / lineage.keys(1)[0]
    body = pack.read_bytes()
    pack.unlink()
    os.mkfifo(pack)  # its reader waits until it is killed
    aim(child.url, "head")
    until(lambda: status_of(child.url)["stage"] == "preparing" and lineage.keys(1)[0] in child.reads, "it fetches")
    assert versions_of(complete(child.url)) == [0]
    child.kill()
    pack.unlink()
    pack.write_bytes(body)
    child = site.start()
    site.serves_the_head(child)
    assert child.reads == lineage.keys(1)


# --- F41: frozen -----------------------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Two replicas behind a gateway; what it says to the first one is listened to."""

    site: Site
    tap: Tap
    urls: dict[str, str]
    replicas: dict[str, Child] = field(default_factory=dict[str, Child])
    url: str = ""

    def row(self, name: str) -> Any:
        rows = call(f"{self.url}/v1/replicas", key=INFERENCE).json["replicas"]
        return next(row for row in rows if row["replica"] == name)

    def routes(self, name: str) -> bool:
        row = self.row(name)
        return row["health"] == "good" and row["status"] == "serving"

    def ask(self, count: int, **more: object) -> list[Reply]:
        """Ask at once; every answer must be a good one."""
        with ThreadPoolExecutor(count) as pool:
            asked = [pool.submit(complete, self.url, **more) for _ in range(count)]
        return [future.result() for future in asked]


@pytest.fixture
def fleet(site: Site) -> Generator[Fleet]:
    ports = {name: free_port() for name in ("r0", "r1")}
    with Tap(ports["r0"]) as tap:
        made = Fleet(site, tap, {"r0": tap.url, "r1": f"http://127.0.0.1:{ports['r1']}"})
        made.replicas = {name: site.start(name, port=port) for name, port in ports.items()}
        for child in made.replicas.values():
            await_version(child.url, 0)
        gateway = site.gateway(made.urls)
        made.url = gateway.url
        until(lambda: made.routes("r0") and made.routes("r1"), "the gateway sees both")
        yield made
        gateway.kill()


def test_f41_a_frozen_replica_is_out_of_routing_in_time_and_shows_its_version_twice_before_it_is_back(
    fleet: Fleet,
) -> None:
    assert {data_of(reply)["replica"] for reply in fleet.ask(8)} == {"r0", "r1"}
    frozen = time.monotonic()
    fleet.replicas["r0"].signal(signal.SIGSTOP)
    answers = fleet.ask(8)
    assert {data_of(reply)["replica"] for reply in answers} == {"r1"}
    until(lambda: fleet.row("r0")["health"] == "ejected", "it is out", OUT_WITHIN_S)
    assert time.monotonic() - frozen < OUT_WITHIN_S

    fleet.site.lineage.publish()
    await_version(fleet.urls["r1"], 1)
    until(lambda: fleet.row("r1")["version"] == 1, "the gateway sees the new version")
    for reply in fleet.ask(8):
        assert (data_of(reply)["replica"], versions_of(reply)) == ("r1", [1])

    thawed = fleet.tap.mark()
    fleet.replicas["r0"].signal(signal.SIGCONT)
    answers = until(partial(answers_of, fleet, "r0"), "it answers again")
    probes = fleet.tap.replies("GET /health", before="POST /v1/", after=thawed)
    shown = [json.loads(body)["version"] for body in probes]
    assert len(shown) >= 2
    for reply in answers:
        (version,) = versions_of(reply)
        assert shown[-1] <= version <= 1
    await_version(fleet.replicas["r0"].url, 1)


def answers_of(fleet: Fleet, name: str) -> list[Reply]:
    """Ask, for the new version and for any; what one replica answered."""
    answers = fleet.ask(6)
    for reply in fleet.ask(2, policy={"min_version": 1}):
        assert versions_of(reply) == [1]
    return [reply for reply in answers if data_of(reply)["replica"] == name]


# --- F37: a hot-load at full load ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """An answer, and when each of its tokens came."""

    answer: Completion
    times: Sequence[float]

    @property
    def longest_gap_s(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


async def read_timed(replica: RemoteReplica, number: int, tokens: int, all_begun: asyncio.Barrier) -> Timed:
    ask = CompletionRequest(
        request_id=RequestId(f"r{number}"),
        prompt_ids=tuple(range(1, 20)),
        sampling=SamplingSpec(max_tokens=tokens, temperature=0.5, seed=number),
        streamed=True,
        model=MODEL,
    )
    answer = await replica.complete(ask)
    steps, times, begun = list[Any](), list[float](), None
    async for step in answer:
        steps.append(step)
        times.append(time.monotonic())
        if begun is None and len(steps) == 20:
            begun = asyncio.create_task(all_begun.wait())
    assert begun is not None
    await begun
    return Timed(collect(answer.origin, steps, answer.finish), times)


async def test_f37_a_hot_load_under_full_slots_aborts_nobody_and_no_answer_waits_longer_than_the_pause(
    site: Site,
) -> None:
    child = site.start()
    await asyncio.to_thread(site.serves_the_head, child)
    await asyncio.to_thread(aim, child.url, 0)
    await asyncio.to_thread(site.lineage.publish)
    all_begun = asyncio.Barrier(SLOTS + 1)
    replica = RemoteReplica(child.url, INFERENCE)
    readers = [asyncio.create_task(read_timed(replica, number, 600, all_begun)) for number in range(SLOTS)]
    await all_begun.wait()
    await asyncio.to_thread(aim, child.url, "head")
    found = await asyncio.gather(*readers)
    await replica.aclose()
    (report,) = [swap for swap in (await asyncio.to_thread(status_of, child.url))["swaps"] if swap["version"] == 1]
    assert report["in_flight"] == SLOTS
    for timed in found:
        assert timed.answer.finish in {Finish.LENGTH, Finish.STOP}
        assert [span.version for span in timed.answer.policy] == [0, 1]
        assert timed.longest_gap_s <= report["pause_s"] + SLACK_S


# --- F42: weights that are no numbers --------------------------------------------------------------------------------


async def last_error_of_a_stream(url: str, poisoned: asyncio.Event) -> Exception:
    """Read an answer that is under way when the weights turn bad; its error."""
    replica = RemoteReplica(url, INFERENCE)
    ask = CompletionRequest(
        request_id=RequestId("s"),
        prompt_ids=(1, 2, 3),
        sampling=SamplingSpec(max_tokens=1000, temperature=0.5, seed=3),
        streamed=True,
        model=MODEL,
    )
    try:
        answer = await replica.complete(ask)
        async for _ in answer:
            poisoned.set()
    except CorruptError as error:
        return error
    finally:
        await replica.aclose()
    raise AssertionError("the answer ended well")


async def test_f42_weights_that_are_no_numbers_end_answers_with_an_error_and_a_roll_back_heals(site: Site) -> None:
    child = site.start()
    await asyncio.to_thread(site.serves_the_head, child)
    before = await asyncio.to_thread(complete, child.url, max_tokens=40)
    begun = asyncio.Event()
    reader = asyncio.create_task(last_error_of_a_stream(child.url, begun))
    await begun.wait()
    await asyncio.to_thread(site.lineage.poison)
    assert "version 1 made logits that are no numbers" in str(await reader)
    await asyncio.to_thread(check_poisoned_and_healed, site.lineage, child.url, before)


def check_poisoned_and_healed(lineage: Lineage, url: str, before: Reply) -> None:
    await_version(url, 1)
    for number in range(SLOTS + 1):  # none of them keeps its slot
        reply = complete(url, seed=number)
        assert (reply.status, reply.json["error"]["code"]) == (500, "corrupt")
    now = status_of(url)
    assert (now["state"], now["in_flight"], now["state_digest"]) == ("serving", 0, lineage.manifest(1).state)

    assert call(f"{url}/control/v1/rollback", body={}).status == 200
    healed = complete(url, max_tokens=40)
    assert data_of(healed)["token_ids"] == data_of(before)["token_ids"]
    assert data_of(healed)["logprobs"] == data_of(before)["logprobs"]

    lineage.publish(lineage.first)  # the good weights again, two deltas away
    aim(url, "head")
    await_version(url, 2)
    again = complete(url, max_tokens=40)
    assert versions_of(again) == [2]
    assert data_of(again)["logprobs"] == data_of(before)["logprobs"]


# --- F28: the disk is full -------------------------------------------------------------------------------------------


class NarrowDisk:
    """A file system of one MiB of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        room = os.statvfs(self.folder)
        self._filler.write_bytes(bytes(room.f_bavail * room.f_frsize))

    def free(self) -> None:
        self._filler.unlink()


class RefusingDisk:
    """A disk that takes no byte of a flushed or a whole file while it is full."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._full = False
        flush, write = os.fsync, Path.write_bytes

        def fsync(number: int) -> None:
            self._check()
            flush(number)

        def write_bytes(path: Path, data: bytes) -> int:
            self._check()
            return write(path, data)

        patch.setattr(os, "fsync", fsync)
        patch.setattr(Path, "write_bytes", write_bytes)

    def fill(self) -> None:
        self._full = True

    def free(self) -> None:
        self._full = False

    def _check(self) -> None:
        if self._full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(params=["refusing", pytest.param("narrow", marks=pytest.mark.system)])
def disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[NarrowDisk | RefusingDisk]:
    if request.param == "refusing":
        yield RefusingDisk(tmp_path, monkeypatch)
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    yield NarrowDisk(tmp_path)
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)  # its files are mapped for as long as engines live


async def test_f28_a_full_disk_fails_an_anchor_cleanly_and_room_lets_it_through(
    disk: NarrowDisk | RefusingDisk,
) -> None:
    rig = await Rig(disk.folder).start()
    try:
        rig.publish(anchor=True)
        disk.fill()
        status = await rig.follow()
        assert (status.state, status.version, status.waiting) == (State.SERVING, 0, True)
        error = status.last_error
        assert error is not None
        assert (error.kind, error.version) == ("unavailable", 1)
        assert os.strerror(errno.ENOSPC) in error.message
        assert str(disk.folder / "cache-replica-0" / "anchors") in error.message
        assert "free space on the cache's disk" in error.message
        assert rig.holds(0)
        assert {step.version async for step in await rig.replica.complete(request())} == {0}

        disk.free()
        await rig.turn_until(lambda: rig.replica.status().version == 1)
        status = await rig.replica.settled()
        assert (status.state, status.last_error, status.boot_id) == (State.SERVING, None, "boot-1")
        assert rig.holds(1)
    finally:
        await rig.close()


async def test_f28_a_delta_needs_no_room_and_is_only_not_kept(disk: NarrowDisk | RefusingDisk) -> None:
    rig = await Rig(disk.folder).start()
    try:
        rig.publish()
        disk.fill()
        status = await rig.follow()
        assert (status.version, status.last_error) == (1, None)
        assert rig.holds(1)
        assert list((disk.folder / "cache-replica-0" / "blobs").iterdir()) == []
    finally:
        await rig.close()


# --- F17: the head does not move -------------------------------------------------------------------------------------


async def test_f17_a2_19_a_version_that_was_announced_and_never_comes_changes_nothing(tmp_path: Path) -> None:
    rig = await Rig(tmp_path).start(versions=3)
    try:
        before = await rig.replica.settled()
        assert (before.version, before.stage, before.last_error) == (2, Stage.IDLE, None)
        for _ in range(20):
            await rig.clock.parked()
            await rig.clock.advance(30.0)
            assert {step.version async for step in await rig.replica.complete(request())} == {2}
        with pytest.raises(NotFoundError, match="the newest one is 2"):
            await rig.replica.set_target(Version(10))
        assert rig.replica.status() == before
        assert rig.source.fetched == [1, 2]
        rig.publish()
        assert (await rig.follow()).version == 3
    finally:
        await rig.close()
