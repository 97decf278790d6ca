"""Ask an engine for a version's canary: whether it computes with the weights that it holds as their trainer does."""

from slackwater.checkpoint.canary import Canary, first_off
from slackwater.clock import Clock
from slackwater.engine.base import Engine
from slackwater.errors import SlackwaterError
from slackwater.ids import RequestId, Version
from slackwater.replica.race import first
from slackwater.rollout.request import CompletionRequest, PolicyConstraint, SamplingSpec


async def canary_off(engine: Engine, canary: Canary, version: Version, clock: Clock, limit_s: float) -> str | None:
    """What is off with the answer of ``version``, which is in place; None: nothing. It goes before all that wait."""
    asked = CompletionRequest(
        request_id=RequestId(f"canary-{version}"),
        prompt_ids=canary.prompt,
        sampling=SamplingSpec(max_tokens=len(canary.tokens)),
        policy=PolicyConstraint(exact_version=version),
        forced_ids=canary.tokens,
    )
    try:
        found = await first(_logprobs(engine, asked), clock.sleep(limit_s))
    except SlackwaterError as error:
        return f"the canary can't be answered: {error}"
    return f"the canary got no answer within {limit_s:g} s" if found is None else first_off(canary, found)


async def _logprobs(engine: Engine, asked: CompletionRequest) -> list[float]:
    answer = await engine.generate(asked, ahead=True)
    try:
        return [step.logprob async for step in answer]
    finally:
        await answer.aclose()
