"""What every engine owes whose model has routers: inherit `RouteTests`, give it ``open_engine`` and ``chosen``."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from slackwater.engine.base import Engine
from slackwater.errors import InvalidInputError
from slackwater.rollout.evidence import Completion
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing
from slackwater.testing.conformance_engine import SHORT, EngineFixtures, answered, first_token, request, swap

Chosen = Callable[[Sequence[int]], bytes]
"""The rows that the model's routers choose for all tokens of a sequence, by logical numbers: an oracle of its own."""

_PROMPT = (11, 12, 13, 14, 15)


def routing_of(engine: Engine) -> Routing:
    """What an engine with routers says that it has."""
    told = engine.describe().routing
    assert told is not None
    return told


def rows(made: Completion) -> bytes:
    """All rows of an answer, in order."""
    return b"".join(step.routes or b"" for step in made.steps)


def asking(start: int | None = 0, *, prompt: Sequence[int] = _PROMPT, forced: bytes = b"") -> CompletionRequest:
    """A request for routes."""
    return replace(request(prompt), routes_from=start, forced_routes=forced)


class RouteTests(EngineFixtures):
    """The contract of `TokenStep.routes` and of `CompletionRequest.forced_routes`."""

    @pytest.fixture
    def chosen(self) -> Chosen:
        """Adapters override this fixture."""
        raise NotImplementedError

    async def test_a4_01_every_token_tells_of_the_positions_before_it(self, engine: Engine) -> None:
        """The first one of the whole prompt, each later one of the token before it, the last token of none."""
        size = routing_of(engine).row_bytes
        made = await answered(engine, asking())
        assert len(made.steps) == SHORT
        assert [len(step.routes or b"") for step in made.steps] == [len(_PROMPT) * size, *[size] * (SHORT - 1)]

    async def test_a4_06_rows_name_logical_experts(self, engine: Engine, chosen: Chosen) -> None:
        """Wherever the engine has put them."""
        made = await answered(engine, asking())
        assert rows(made) == chosen((*_PROMPT, *made.token_ids[:-1]))

    async def test_nothing_is_told_where_nothing_is_asked_for(self, engine: Engine) -> None:
        """And the answer is the same."""
        plain, told = await answered(engine, asking(None)), await answered(engine, asking())
        assert {step.routes for step in plain.steps} == {None}
        assert (plain.token_ids, plain.logprobs) == (told.token_ids, told.logprobs)

    @pytest.mark.parametrize("start", [1, len(_PROMPT) - 1])
    async def test_rows_begin_where_they_are_asked_to(self, engine: Engine, start: int) -> None:
        """Earlier ones are left out."""
        whole, later = await answered(engine, asking()), await answered(engine, asking(start))
        assert rows(later) == rows(whole)[start * routing_of(engine).row_bytes :]

    async def test_a4_02_reused_kv_has_its_rows(self, engine: Engine) -> None:
        """A prompt that is asked for again, and one that goes on from an answer."""
        first, again = await answered(engine, asking()), await answered(engine, asking())
        assert rows(again) == rows(first)
        turn = (*_PROMPT, *first.token_ids, 21, 22)
        later = await answered(engine, asking(prompt=turn))
        assert rows(later)[: len(rows(first))] == rows(first)

    async def test_forced_routes_are_taken_and_later_positions_choose(self, engine: Engine, chosen: Chosen) -> None:
        """Nobody else gets what was computed so."""
        size = routing_of(engine).row_bytes
        forced = chosen((31, 32, 33))
        made = await answered(engine, asking(forced=forced))
        assert rows(made)[: 3 * size] == forced
        assert len(rows(made)) == (len(_PROMPT) + SHORT - 1) * size
        free = await answered(engine, asking())
        assert rows(free) == chosen((*_PROMPT, *free.token_ids[:-1]))

    async def test_routes_that_cannot_be_forced_are_refused(self, engine: Engine) -> None:
        """Before any token."""
        told = routing_of(engine)
        size, width = told.row_bytes, 1 if told.dtype == "uint8" else 2
        none_such = told.experts.to_bytes(3, "little")[:width] if told.experts < 256**width else None
        good = rows(await answered(engine, asking()))[:size]
        wrong = [good[:-1], good * (len(_PROMPT) + 1), good[:width] * (size // width)]
        wrong += [none_such + good[width:]] if none_such else []
        for forced in wrong if told.per_token > 1 else wrong[:2]:
            with pytest.raises(InvalidInputError):
                await answered(engine, asking(forced=forced))

    async def test_rows_go_on_across_an_exchange_of_weights(self, engine: Engine) -> None:
        """One for each position, whichever weights made it."""
        answer = await engine.generate(asking())
        await first_token(answer)
        await swap(engine)
        rest = [step async for step in answer]
        await answer.aclose()
        size = routing_of(engine).row_bytes
        assert {len(step.routes or b"") for step in rest} == {size}
