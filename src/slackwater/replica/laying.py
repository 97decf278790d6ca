"""Prepare the versions of one swap, each on the bits that those before it make, while the engine serves."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from slackwater.checkpoint.manifest import Manifest
from slackwater.checkpoint.state import StateTable
from slackwater.clock import Clock
from slackwater.engine.base import Engine, TileReader
from slackwater.errors import ConflictError, SlackwaterError, SpoiltError, WrongBaseError
from slackwater.ids import ObjectDigest
from slackwater.replica.overlay import Overlay
from slackwater.replica.prepare import Prepared, memory_spoilt, prepare_anchor, prepare_delta, state_after
from slackwater.replica.race import Stop, first, joined
from slackwater.replica.source import VersionSource

Shortened = Callable[[Manifest, SlackwaterError], None]
"""Told that the way ends at a version, because the next one can't be prepared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Laid:
    """Versions prepared one on top of the other."""

    prepared: Prepared
    table: StateTable
    """The state of the last."""
    chain: Sequence[Manifest]
    """The versions on the way; the last is the one that is made."""
    fetch_s: float
    decode_s: float


class Laying:
    """Prepares for one engine.

    Args:
        engine: Whose bits the first version is made on.
        side_files: Digests of the config and tokenizer that it was opened with.
        source: Where bytes come from.
        clock: Measures.
        threads: That decode.
    """

    def __init__(
        self, engine: Engine, side_files: Mapping[str, ObjectDigest], source: VersionSource, clock: Clock, threads: int
    ) -> None:
        self._engine = engine
        self._side_files = side_files
        self._source = source
        self._clock = clock
        self._threads = threads

    async def lay(self, chain: Sequence[Manifest], table: StateTable, stop: Stop, shortened: Shortened) -> Laid | None:
        """Prepare one version after the other. None: ``stop`` was raised.

        Args:
            chain: One anchor, or deltas, each on the one before.
            table: The state that the engine holds.
            stop: Ends it early.
            shortened: Called where a version after the first fails.

        Raises:
            ConflictError: The first version doesn't fit the engine or, as WrongBaseError, the state in place.
            CorruptError: It doesn't verify.
            UnavailableError: The bucket doesn't answer.
            SpoiltError: The engine doesn't hold the state that it should.
        """
        overlay, fetch_s, decode_s, done = Overlay(self._engine, self._threads), 0.0, 0.0, 0
        for manifest in chain:
            began = self._clock.monotonic()
            try:
                after = self._state_after(table, manifest)
                fetch = partial(self._fetch, manifest, table, after, overlay, stop)
                decode = await first(asyncio.to_thread(fetch), stop.wait())
                fetched = self._clock.monotonic()
                prepared = None if decode is None else await _decoded(decode, stop)
            except SpoiltError:
                raise
            except SlackwaterError as error:
                if not done:
                    raise
                shortened(chain[done - 1], error)
                break
            if prepared is None:
                return None
            await joined(partial(overlay.add, prepared, last=manifest is chain[-1]), stop)
            del prepared  # the overlay has it: not held on while the next is fetched
            table, done = after, done + 1
            fetch_s, decode_s = fetch_s + fetched - began, decode_s + self._clock.monotonic() - fetched
        began = self._clock.monotonic()
        whole = await joined(overlay.prepared, stop)
        decode_s += self._clock.monotonic() - began
        return Laid(prepared=whole, table=table, chain=chain[:done], fetch_s=fetch_s, decode_s=decode_s)

    def _state_after(self, table: StateTable, manifest: Manifest) -> StateTable:
        if manifest.kind == "anchor" and manifest.side_files != self._side_files:
            raise ConflictError(
                f"version {manifest.version} comes with another config or tokenizer than the engine was opened with",
                hint="another model needs another run",
            )
        return state_after(self._engine, table, manifest)

    def _fetch(
        self, manifest: Manifest, before: StateTable, after: StateTable, held: TileReader, stop: Stop
    ) -> Callable[[], Prepared | None]:
        """Get a version's bytes; what it gives decodes them against ``held``, the state ``before``. In a thread."""
        threads = self._threads
        if manifest.kind == "anchor":
            folder = self._source.anchor(manifest)
            return lambda: prepare_anchor(held, before, after, folder, threads, stop)
        bodies = self._source.bodies(manifest)
        return lambda: prepare_delta(held, after.outline, manifest, bodies, threads, stop)


async def _decoded(decode: Callable[[], Prepared | None], stop: Stop) -> Prepared | None:
    """Decode. The manifests fit each other, so bits that don't fit them are not what the engine was given."""
    try:
        return await joined(decode, stop)
    except WrongBaseError as error:
        raise memory_spoilt(f"the engine's memory has changed by itself: {error.message}") from error
