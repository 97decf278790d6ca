"""A lineage in a memory bucket, and a replica over it on the table engine."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from slackwater.checkpoint.canary import Canary
from slackwater.checkpoint.codec import Level
from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.config.in_flight import InFlight
from slackwater.delivery.fetcher import Bodies, Fetcher
from slackwater.delivery.watcher import Watcher
from slackwater.engine.base import Engine
from slackwater.errors import SlackwaterError
from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.publish.publisher import Publisher
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.replica import Replica, ReplicaOptions
from slackwater.replica.status import ReplicaStatus
from slackwater.rollout.request import ANY_POLICY, CompletionRequest, PolicyConstraint, SamplingSpec
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.clock import ManualClock
from slackwater.testing.engine import TableEngine
from slackwater.weights.source import FolderSource

RUN = RunId("demo")
SPECS: Mapping[str, TensorSpec] = {
    spec.name: spec
    for spec in (
        TensorSpec(name="a.weight", dtype="BF16", shape=(64, 4)),
        TensorSpec(name="b.weight", dtype="BF16", shape=(128,)),
        TensorSpec(name="c.bias", dtype="F32", shape=(30,)),
    )
}


def weights_at(step: int, specs: Mapping[str, TensorSpec] = SPECS) -> dict[str, Bits]:
    """Every tensor differs from the step before in a few elements."""
    made: dict[str, Bits] = {}
    for name, spec in specs.items():
        bits = np.arange(spec.num_elements, dtype=spec.bits_dtype)
        bits[: 1 + step % 3] += np.asarray(7 * step, dtype=spec.bits_dtype)
        bits[-1] = step
        made[name] = bits
    return made


class BitsSource:
    """A tensor source over a dict."""

    def __init__(self, weights: Mapping[str, Bits], specs: Mapping[str, TensorSpec] = SPECS) -> None:
        self._weights = weights
        self._specs = specs

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def bits(self, name: str) -> Bits:
        return self._weights[name]


class GatedSource:
    """A fetcher whose bodies can be held back, and whose calls can fail."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.errors: dict[str, SlackwaterError] = {}
        """By the call's name, such as ``bodies``, or by call and version, such as ``bodies 3``."""
        self.fetched: list[Version] = []
        self.fetching = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self._fetcher = fetcher
        self._held: Version | None = None

    def hold(self, version: int | None = None) -> None:
        """Give no bodies, or none of one version, until `go` is set."""
        self._held = None if version is None else Version(version)
        self.fetching.clear()
        self.go.clear()

    def head(self, known: Version | None) -> Version | None:
        self._fail("head")
        return self._fetcher.head(known)

    def manifest(self, version: Version) -> Manifest:
        self._fail("manifest", version)
        return self._fetcher.manifest(version)

    def anchor(self, manifest: Manifest) -> Path:
        self._fail("anchor")
        return self._fetcher.anchor(manifest)

    def bodies(self, manifest: Manifest) -> Bodies:
        self._fail("bodies", manifest.version)
        if self._held in (None, manifest.version):
            self.fetching.set()
            self.go.wait(10)
        self.fetched.append(manifest.version)
        return self._fetcher.bodies(manifest)

    def _fail(self, call: str, version: Version | None = None) -> None:
        for known in (call, f"{call} {version}"):
            if known in self.errors:
                raise self.errors[known]


class Rig:
    """One lineage and, once `start` is called, one replica that follows it."""

    def __init__(
        self,
        folder: Path,
        replica: str = "replica-0",
        bucket: MemoryBucket | None = None,
        level: Level = "fast",
        limits: ExchangeLimits | None = None,
        in_flight: InFlight = InFlight.CONTINUE,
        scrub_s: float = 0.0,
    ) -> None:
        self.clock = ManualClock()
        self.bucket = bucket or MemoryBucket()
        self.fetcher = Fetcher(self.bucket, RUN, folder / f"cache-{replica}", threads=1)
        self.source = GatedSource(self.fetcher)
        self.engines: list[TableEngine] = []
        self.opened_at: list[Version] = []
        self.truth: list[dict[str, Bits]] = []
        self._model = folder / "model"
        self._model.mkdir(exist_ok=True)
        (self._model / "config.json").write_text("{}")
        self._publisher = Publisher(self.bucket, RUN, threads=1, clock=self.clock, level=level, anchor_share=100.0)
        options = ReplicaOptions(
            replica=ReplicaId(replica),
            boot=BootId("boot-1"),
            run=RUN,
            exchange=limits or ExchangeLimits(lease_s=30.0, threads=1),
            in_flight=in_flight,
            scrub_s=scrub_s,
        )
        watch = Watcher(self.fetcher, self.clock, 0.2)
        self.replica = Replica(options, self.source, watch, self.open_engine, self.clock)

    @property
    def engine(self) -> TableEngine:
        return self.engines[-1]

    async def open_engine(self, folder: Path, version: Version) -> Engine:
        source = FolderSource(folder)
        weights = {name: source.bits(name) for name in source.specs()}
        self.engines.append(TableEngine(weights, source.specs(), version))
        self.opened_at.append(version)
        return self.engines[-1]

    def publish(
        self,
        count: int = 1,
        *,
        anchor: bool = False,
        weights: dict[str, Bits] | None = None,
        canary: Canary | None = None,
    ) -> None:
        for _ in range(count):
            made = weights or weights_at(len(self.truth))
            self.truth.append(made)
            source, step = BitsSource(made), len(self.truth)
            self._publisher.publish(source, step=step, folder_files=self._model, anchor=anchor, canary=canary)

    async def start(self, goal: Version | Literal["head"] = "head", versions: int = 1) -> "Rig":
        self.publish(versions)
        await self.replica.start(goal)
        return self

    async def follow(self) -> ReplicaStatus:
        """Let the watcher see the head, and the replica settle."""
        head = len(self.truth) - 1
        await self.clock.parked()
        await self.clock.advance(0.2)
        await until(lambda: self.replica.status().target == head)
        return await self.replica.settled()

    async def turn_until(self, holds: Callable[[], bool]) -> None:
        """Let time pass until ``holds``, whatever waits for it when."""
        async with asyncio.timeout(20):
            while not holds():
                await self.clock.advance(0.5)

    def spoil(self, version: int) -> bytes:
        """Flip a bit of a delta's pack in the bucket; what was there."""
        key = self.fetcher.manifest(Version(version)).objects[0].key
        body = self.bucket.get(key, max_bytes=1 << 20)
        self.bucket.put(key, bytes([body[0] ^ 1]) + body[1:])
        return body

    def repair(self, version: int, body: bytes) -> None:
        self.bucket.put(self.fetcher.manifest(Version(version)).objects[0].key, body)

    def holds(self, version: int) -> bool:
        """Whether the engine's memory is that version, bit for bit."""
        held = self.engine.weights
        return all(np.array_equal(held[name], bits) for name, bits in self.truth[version].items())

    async def close(self) -> None:
        self.source.go.set()
        with suppress(SlackwaterError):
            await self.replica.close()


async def until(holds: Callable[[], bool]) -> None:
    """Let everything run until ``holds``; work in threads takes real time."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  # what is awaited has no event of its own
            await asyncio.sleep(0)


def request(
    max_tokens: int = 4,
    prompt: tuple[int, ...] = (1, 2, 3),
    policy: PolicyConstraint = ANY_POLICY,
    name: str = "r",
) -> CompletionRequest:
    sampling = SamplingSpec(max_tokens=max_tokens, seed=0)
    return CompletionRequest(request_id=RequestId(name), prompt_ids=prompt, sampling=sampling, policy=policy)
