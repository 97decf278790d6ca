"""The first version of a replica: wait for an anchor, load it, and prove what was loaded."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.state import StateTable
from slackwater.checkpoint.warm import warm_kernels
from slackwater.clock import Clock
from slackwater.engine.base import Engine
from slackwater.errors import CanaryError, CorruptError, NotFoundError
from slackwater.ids import ObjectDigest, Version
from slackwater.replica.canary import HINT, canary_off
from slackwater.replica.limits import ExchangeLimits
from slackwater.replica.prepare import all_tiles, check_tensors, first_difference
from slackwater.replica.race import Stop, joined
from slackwater.replica.route import Route
from slackwater.replica.source import VersionSource

OpenEngine = Callable[[Path, Version], Awaitable[Engine]]
"""Loads a Hugging Face folder as the weights of a version, and begins to serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Booted:
    """An engine that holds an anchor, byte for byte."""

    engine: Engine
    version: Version
    table: StateTable
    side_files: Mapping[str, ObjectDigest]
    """Digests of the config, tokenizer and template that the engine was opened with."""


async def await_head(
    source: VersionSource, clock: Clock, poll_s: float, on_empty: Callable[[], Awaitable[None]]
) -> Version:
    """The newest version, once there is one.

    Args:
        source: Of the lineage.
        clock: What waits.
        poll_s: Seconds between two looks.
        on_empty: Called where the first look finds none.

    Raises:
        NotFoundError: There is no such bucket.
        AuthError: The store refused the credentials.
        UnavailableError: The store doesn't answer.
    """
    head = await asyncio.to_thread(source.head, None)
    if head is None:
        await on_empty()
    while head is None:
        await clock.sleep(poll_s)
        head = await asyncio.to_thread(source.head, None)
    return head


def check_committed(target: Version, head: Version) -> Version:
    """``target``, which must not be newer than the head.

    Raises:
        NotFoundError: It isn't committed.
    """
    if target > head:
        raise NotFoundError(
            f"there is no version {target} yet: the newest one is {head}", hint="wait for it, or take 'head'"
        )
    return target


async def boot(
    source: VersionSource,
    route: Route,
    manifest: Manifest,
    open_engine: OpenEngine,
    clock: Clock,
    limits: ExchangeLimits,
) -> Booted:
    """Open an engine on an anchor, to which ``route`` leads.

    Raises:
        ConflictError: The engine doesn't hold the anchor's tensors.
        CorruptError: The anchor doesn't verify, or the engine doesn't hold its bits.
        CanaryError: The engine doesn't compute with it as its trainer does.
    """
    try:
        folder = await asyncio.to_thread(source.anchor, manifest)
    except CorruptError as error:
        route.detour(manifest.version, error)
        raise
    # Compiling stops every thread for seconds: here nobody is served yet.
    await asyncio.to_thread(warm_kernels, {spec.dtype for spec in manifest.outline.specs})
    async with AsyncExitStack() as undo:
        engine = await open_engine(folder, manifest.version)
        undo.push_async_callback(engine.close)
        check_tensors(engine.tensors(), manifest)
        table = StateTable.of_anchor(manifest)
        await _prove(engine, table, manifest, limits.threads)
        off = await canary_off(engine, manifest, clock, limits.canary_s)
        if off is not None:
            raise CanaryError(f"anchor {manifest.version}: {off}", hint=HINT)
        undo.pop_all()
    return Booted(
        engine=engine,
        version=manifest.version,
        table=table,
        side_files=manifest.side_files,
    )


async def _prove(engine: Engine, table: StateTable, manifest: Manifest, threads: int) -> None:
    stop = Stop()
    wrong = await joined(partial(first_difference, engine, all_tiles(table), threads, stop), stop)
    if wrong is not None:
        raise CorruptError(
            f"the engine does not hold {wrong.place} of anchor {manifest.version}",
            hint="load the checkpoint's own dtype; else delete the replica's cache folder and start again",
        )
