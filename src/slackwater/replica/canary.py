"""Ask an engine for a version's canary: whether it computes with the weights that it holds as their trainer does."""

import asyncio
import logging
from typing import Final

from slackwater.checkpoint.canary import first_off
from slackwater.checkpoint.manifest import Manifest
from slackwater.clock import Clock
from slackwater.engine.base import Engine
from slackwater.errors import SlackwaterError
from slackwater.ids import RequestId
from slackwater.replica.race import first
from slackwater.rollout.request import CompletionRequest, PolicyConstraint, SamplingSpec

HINT: Final = "the one before serves on: publish a newer version, or make a good one newest: `slackwater rollback`"
"""What to do about a canary that is off."""

_log = logging.getLogger(__name__)


async def canary_off(
    engine: Engine, manifest: Manifest, clock: Clock, patience_s: float, recalled: asyncio.Event | None = None
) -> str | None:
    """What is off with an engine's answer to the canary of the version in place; None: nothing, or it has none.

    It goes before all requests that wait, and waits for a slot as they do, however long: that the engine is busy says
    nothing of its weights. After each ``patience_s`` without an answer a warning is logged. Once ``recalled`` nobody
    wants to know any more: nothing is off.
    """
    canary = manifest.canary
    if canary is None:
        return None
    asked = CompletionRequest(
        request_id=RequestId(f"canary-{manifest.version}"),
        prompt_ids=canary.prompt,
        sampling=SamplingSpec(max_tokens=len(canary.tokens)),
        policy=PolicyConstraint(exact_version=manifest.version),
        forced_ids=canary.tokens,
    )
    recalled = recalled or asyncio.Event()
    answer = asyncio.ensure_future(_logprobs(engine, asked))
    try:
        while await first(asyncio.wait((answer,)), first(recalled.wait(), clock.sleep(patience_s))) is None:
            if recalled.is_set():
                return None
            _log.warning("the canary of version %d still waits for a slot: it is provisional", manifest.version)
        return first_off(canary, await answer)
    except SlackwaterError as error:
        return f"the canary can't be answered: {error}"
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def _logprobs(engine: Engine, asked: CompletionRequest) -> list[float]:
    answer = await engine.generate(asked, ahead=True)
    try:
        return [step.logprob async for step in answer]
    finally:
        await answer.aclose()
