"""Two replicas behind the foreign fronts, and other services' clients: `make test-clients` installs those."""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from http_rig import gated
from replica_rig import RUN, Rig

from slackwater.clock import SystemClock
from slackwater.hotload.conductor import Conductor, ConductorLimits
from slackwater.hotload.coreweave import coreweave_routes
from slackwater.hotload.fireworks import AccountKey, fireworks_routes
from slackwater.hotload.groups import Group
from slackwater.hotload.remote import HttpTarget
from slackwater.hotload.snapshots import BucketSnapshots
from slackwater.ids import Version
from slackwater.replica.app import control_routes
from slackwater.testing.bucket import MemoryBucket
from slackwater.testing.loopback import Loopback

CLIENTS = Path(__file__).parents[2] / ".clients"
TOP = 3
"""The newest version of the run."""


@dataclass(frozen=True)
class Fronted:
    """The fleet and where its fronts listen."""

    url: str
    rigs: Sequence[Rig]

    def versions(self) -> list[Version | None]:
        return [rig.replica.status().version for rig in self.rigs]


@asynccontextmanager
async def fronted(folder: Path, groups: Sequence[Group] = ()) -> AsyncGenerator[Fronted]:
    """Replicas ``r0`` and ``r1`` on table engines, at version 0 of a run that has versions up to `TOP`."""
    bucket = MemoryBucket()
    rigs = [Rig(folder, f"r{number}", bucket) for number in range(2)]
    rigs[0].publish(TOP + 1)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        targets: list[HttpTarget] = []
        for rig in rigs:
            await rig.replica.start(Version(0))
            stack.push_async_callback(rig.close)
            server = await stack.enter_async_context(Loopback(gated(control_routes(rig.replica))))
            targets.append(HttpTarget(rig.replica.status().replica, server.url, "c", session))
        limits = ConductorLimits(deadline_s=30.0, poll_s=0.01)
        conductor = Conductor(targets, BucketSnapshots(bucket, RUN), SystemClock(), limits, groups=groups)
        await conductor.start()
        stack.push_async_callback(conductor.close)
        app = gated([*fireworks_routes(conductor), *coreweave_routes(conductor)])
        app.add_middleware(AccountKey)
        front = await stack.enter_async_context(Loopback(app))
        yield Fronted(front.url, rigs)


def client_python(name: str) -> Path:
    """The interpreter of a client's environment; skips the test where it isn't there."""
    found = CLIENTS / name / "bin" / "python"
    if not found.exists():
        pytest.skip(f"{name} isn't installed: `make test-clients` does that")
    return found


async def drive(python: Path, script: str, url: str) -> Any:
    """Run a script with the client: it gets the base URL, and prints one JSON value as its last line."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    child = await asyncio.create_subprocess_exec(
        python,
        "-c",
        script,
        url,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await child.communicate()
    assert child.returncode == 0, err.decode()
    return msgspec.json.decode(out.splitlines()[-1])
