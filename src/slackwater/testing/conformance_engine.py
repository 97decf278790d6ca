"""What every engine owes: inherit `EngineTests`, give it ``open_engine``, and run pytest.

Nothing here knows how an engine works. Weights are changed by flipping signs, which makes no NaN of a number.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import count
from typing import Final

import numpy as np
import pytest

from slackwater.checkpoint.tensor import WIDTHS, TensorSpec, Tile, TileWrite, tiles
from slackwater.engine.base import Engine
from slackwater.errors import InvalidInputError, PolicyUnmetError, SwapError, UnavailableError
from slackwater.ids import RequestId, Version
from slackwater.rollout.completer import Answer
from slackwater.rollout.evidence import Completion, Finish, PolicySpan, collect
from slackwater.rollout.request import ANY_POLICY, CompletionRequest, PolicyConstraint, SamplingSpec

OpenEngine = Callable[[], Awaitable[Engine]]
"""Opens an engine on the same weights each time, labelled `FIRST`, with a window of at least 512."""

FIRST: Final = Version(7)
"""Label of the weights that every test begins with."""
SECOND: Final = Version(8)
"""Label of the weights that tests swap to."""
SHORT: Final = 12
"""Tokens of an answer where nothing else is asked for."""
LONG: Final = 300
"""Tokens of an answer that a swap can be aimed into."""

_PROMPT: Final = tuple(range(1, 65))
_numbers: Final = count()


def request(
    prompt: Sequence[int] = _PROMPT,
    *,
    policy: PolicyConstraint = ANY_POLICY,
    forced: Sequence[int] = (),
    **sampling: object,
) -> CompletionRequest:
    """A request with a seed; a temperature of 0.5 keeps end tokens from coming up early."""
    settings: dict[str, object] = {"max_tokens": SHORT, "temperature": 0.5, "seed": 11, **sampling}
    return CompletionRequest(
        request_id=RequestId(f"r{next(_numbers)}"),
        prompt_ids=tuple(prompt),
        sampling=SamplingSpec(**settings),  # type: ignore[arg-type]
        policy=policy,
        forced_ids=tuple(forced),
    )


async def finished(answer: Answer) -> Completion:
    """Read an answer to its end."""
    steps = [step async for step in answer]
    await answer.aclose()
    return collect(answer.origin, steps, answer.finish)


async def answered(engine: Engine, asked: CompletionRequest) -> Completion:
    """Ask and read to the end."""
    return await finished(await engine.generate(asked))


def flips(engine: Engine, *, seed: int = 0, share: float = 0.3) -> list[TileWrite]:
    """Writes that flip the sign of a random ``share`` of every tensor's elements."""
    random = np.random.default_rng(seed)
    return [_flip(engine, spec, tile, random, share) for spec in engine.tensors().values() for tile in tiles(spec)]


def _flip(engine: Engine, spec: TensorSpec, tile: Tile, random: np.random.Generator, share: float) -> TileWrite:
    positions = np.flatnonzero(random.random(tile.count) < share).astype(np.uint32)
    sign = spec.bits_dtype.type(1 << (8 * WIDTHS[spec.dtype] - 1))
    return TileWrite(
        name=spec.name, tile=tile, positions=positions, values=engine.read(spec.name, tile)[positions] ^ sign
    )


def digest(engine: Engine) -> str:
    """SHA-256 over every bit that the engine holds."""
    hashed = hashlib.sha256()
    for name, spec in sorted(engine.tensors().items()):
        for tile in tiles(spec):
            hashed.update(engine.read(name, tile).tobytes())
    return hashed.hexdigest()


async def swap(engine: Engine, version: Version = SECOND) -> None:
    """Stage sign flips and commit them as ``version``."""
    await engine.commit(await engine.stage(flips(engine)), version)


async def first_token(answer: Answer) -> int:
    """Receive one token and leave the rest."""
    return (await anext(aiter(answer))).token_id


class EngineFixtures:
    """The engines of a suite."""

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        """Adapters override this fixture."""
        raise NotImplementedError

    @pytest.fixture
    async def engine(self, open_engine: OpenEngine) -> AsyncIterator[Engine]:
        """A fresh engine under `FIRST`."""
        engine = await open_engine()
        yield engine
        await engine.close()

    @pytest.fixture
    async def other(self, open_engine: OpenEngine) -> AsyncIterator[Engine]:
        """Another one."""
        engine = await open_engine()
        yield engine
        await engine.close()


class EngineTests(EngineFixtures):
    """The contract of `slackwater.engine.base.Engine`, one test per promise."""

    async def test_a_seed_reproduces_an_answer(self, engine: Engine, other: Engine) -> None:
        """Same seed: same tokens and bits, also on another engine; another seed: other tokens."""
        here, there = await answered(engine, request()), await answered(other, request())
        assert here.steps == there.steps
        assert here.token_ids != (await answered(engine, request(seed=12))).token_ids

    async def test_a_picked_seed_is_reported(self, engine: Engine) -> None:
        """Without a seed the engine picks one; asking with it gives the same answer."""
        drawn = await answered(engine, request(seed=None))
        assert (await answered(engine, request(seed=drawn.origin.seed))).steps == drawn.steps

    async def test_company_changes_no_bit(self, engine: Engine) -> None:
        """Batch invariance: log-probabilities are equal alone and among others, to the last bit."""
        alone = await answered(engine, request(top_logprobs=5))
        crowd = [request(range(start, start + 20 + start), seed=start) for start in range(1, 12)]
        answers = await asyncio.gather(*(answered(engine, one) for one in (*crowd, request(top_logprobs=5), *crowd)))
        assert answers[len(crowd)].steps == alone.steps

    async def test_forced_decoding_reports_what_sampling_did(self, engine: Engine) -> None:
        """Log-probabilities of a forced answer equal those of the drawn one, exactly."""
        drawn = await answered(engine, request())
        forced = await answered(engine, request(forced=drawn.token_ids, seed=99))
        assert (forced.token_ids, forced.logprobs) == (drawn.token_ids, drawn.logprobs)
        assert forced.finish is Finish.STOP

    async def test_a_stop_token_ends_the_answer_and_is_part_of_it(self, engine: Engine) -> None:
        """The end comes with the stop token, not after it."""
        stop = (await answered(engine, request())).token_ids[5]
        ended = await answered(engine, request(stop_token_ids=(stop,)))
        assert ended.token_ids[-1] == stop
        assert ended.token_ids.count(stop) == 1
        assert ended.finish is Finish.STOP

    async def test_a5_09_the_window_cuts_max_tokens(self, engine: Engine) -> None:
        """Prompt plus answer fill the window exactly; a prompt that fills it alone is refused."""
        window = engine.describe().window
        prompt = [5] * (window - 12)
        cut = await answered(engine, request(prompt, max_tokens=400))
        assert (len(cut.steps), cut.finish) == (12, Finish.LENGTH)
        with pytest.raises(InvalidInputError):
            await engine.generate(request([5] * window))

    async def test_token_ids_outside_of_the_vocabulary_are_refused(self, engine: Engine) -> None:
        """Neither prompt nor forced tokens may name what the embedding lacks."""
        for bad in (-1, engine.describe().vocab_size):
            with pytest.raises(InvalidInputError):
                await engine.generate(request([bad]))
            with pytest.raises(InvalidInputError):
                await engine.generate(request(forced=[bad]))

    async def test_a2_20_tokens_carry_the_version_that_sampled_them(self, engine: Engine) -> None:
        """A swap cuts an answer into two spans; up to the cut it is the old version's answer."""
        old = await answered(engine, request(max_tokens=LONG))
        answer = await engine.generate(request(max_tokens=LONG))
        head = await first_token(answer)
        await swap(engine)
        mixed = await finished(answer)
        cut = mixed.policy[0].end + 1
        assert (head, *mixed.token_ids)[:cut] == old.token_ids[:cut]
        assert mixed.policy == (
            PolicySpan(version=FIRST, start=0, end=cut - 1),
            PolicySpan(version=SECOND, start=cut - 1, end=LONG - 1),
        )
        assert mixed.logprobs[cut - 1 :] != old.logprobs[cut:]

    async def test_a2_08_a_swap_aborts_nobody(self, engine: Engine) -> None:
        """16 long answers over a swap: all complete. The first token, read before it, is old."""
        answers = [await engine.generate(request(max_tokens=LONG, seed=seed)) for seed in range(16)]
        for answer in answers:
            await first_token(answer)
        await swap(engine)
        for answer in answers:
            whole = await finished(answer)
            assert (whole.finish, len(whole.steps) + 1) == (Finish.LENGTH, LONG)
            assert [span.version for span in whole.policy] in ([FIRST, SECOND], [SECOND])

    async def test_a2_01_no_kv_of_old_weights_is_reused(self, engine: Engine, other: Engine) -> None:
        """After a swap the same prompt answers as on an engine that never saw it under the old weights."""
        await answered(engine, request())
        assert (await answered(engine, request())).origin.cached_tokens > 0
        await swap(engine)
        await swap(other)
        warm, cold = await answered(engine, request()), await answered(other, request())
        assert warm.steps == cold.steps
        assert warm.origin.cached_tokens == 0
        assert warm.origin.prompt_version == SECOND

    async def test_a2_04_new_kv_is_shared_again_after_a_swap(self, engine: Engine) -> None:
        """The namespace flips; inside of the new one sharing goes on and changes no bit."""
        await swap(engine)
        cold, warm = await answered(engine, request()), await answered(engine, request())
        assert (cold.origin.cached_tokens, cold.steps) == (0, warm.steps)
        assert warm.origin.cached_tokens > 0

    async def test_staging_changes_nothing(self, engine: Engine) -> None:
        """Bits and answers stay until the commit."""
        before, answer = digest(engine), await answered(engine, request())
        staged = await engine.stage(flips(engine))
        assert staged.num_bytes > 0
        assert digest(engine) == before
        assert (await answered(engine, request())).steps == answer.steps

    async def test_a_commit_puts_exactly_the_staged_bits(self, engine: Engine) -> None:
        """What was written can be read; the report counts it."""
        before, writes = digest(engine), flips(engine)
        report = await engine.commit(await engine.stage(writes), SECOND)
        assert report.bytes_written == sum(write.values.nbytes for write in writes)
        assert digest(engine) != before
        for write in writes:
            bits = engine.read(write.name, write.tile)
            assert np.array_equal(bits if write.positions is None else bits[write.positions], write.values)

    async def test_undo_is_bit_exact(self, engine: Engine) -> None:
        """Commit and undo: the old bits, the old label, the old answers."""
        before, answer = digest(engine), await answered(engine, request())
        staged = await engine.stage(flips(engine))
        await engine.commit(staged, SECOND)
        await engine.undo(staged, FIRST)
        assert (digest(engine), engine.stats().version) == (before, FIRST)
        assert (await answered(engine, request())).steps == answer.steps

    @pytest.mark.parametrize("every", [1, 5])
    async def test_a_tile_of_several_rows_is_read_written_and_put_back(self, engine: Engine, every: int) -> None:
        """Every row of it and nothing beside it: tiles of weights that ranks hold by column are rectangles."""
        spec = next(spec for spec in engine.tensors().values() if len(spec.shape) == 2 and spec.shape[1] > 3)
        rows, stride = spec.shape
        whole = Tile(index=0, start=0, cols=rows * stride)
        tile = Tile(index=0, start=1, rows=rows, cols=2, stride=stride)
        before = engine.read(spec.name, whole).copy()
        wanted = before.copy().reshape(rows, stride)
        values = wanted[:, 1:3].reshape(-1)
        values[::every] ^= 1
        wanted[:, 1:3] = values.reshape(rows, 2)
        positions = None if every == 1 else np.arange(0, tile.count, every, dtype=np.uint32)
        staged = await engine.stage([TileWrite(name=spec.name, tile=tile, positions=positions, values=values[::every])])
        await engine.commit(staged, SECOND)
        assert np.array_equal(engine.read(spec.name, tile), values)
        assert np.array_equal(engine.read(spec.name, whole), wanted.reshape(-1))
        await engine.undo(staged, FIRST)
        assert np.array_equal(engine.read(spec.name, whole), before)

    async def test_only_the_last_commit_can_be_undone(self, engine: Engine) -> None:
        """Neither an older one nor one twice."""
        older = await engine.stage(flips(engine))
        await engine.commit(older, SECOND)
        newer = await engine.stage(flips(engine, seed=1))
        await engine.commit(newer, Version(9))
        with pytest.raises(SwapError):
            await engine.undo(older, FIRST)
        await engine.undo(newer, SECOND)
        with pytest.raises(SwapError):
            await engine.undo(newer, SECOND)

    async def test_a_failing_commit_leaves_old_bits_and_label(self, engine: Engine) -> None:
        """Writes staged on other weights are refused, and serving goes on."""
        stale = await engine.stage(flips(engine, seed=1))
        await swap(engine)
        before = digest(engine)
        with pytest.raises(SwapError):
            await engine.commit(stale, Version(9))
        assert (digest(engine), engine.stats().version) == (before, SECOND)
        assert (await answered(engine, request())).finish is Finish.LENGTH

    async def test_writes_that_do_not_fit_are_refused(self, engine: Engine) -> None:
        """An unknown name, a tile past the end or the last row, too few values, positions out of order."""
        spec = next(iter(engine.tensors().values()))
        tile = Tile(index=0, start=0, cols=2)
        two = np.zeros(2, dtype=spec.bits_dtype)
        past = Tile(index=0, start=spec.num_elements, cols=2)
        below = Tile(index=0, start=0, rows=2, cols=1, stride=spec.num_elements)
        backwards = np.array([1, 0], dtype=np.uint32)
        for write in (
            TileWrite(name=spec.name, tile=past, positions=None, values=two),
            TileWrite(name=spec.name, tile=below, positions=None, values=two),
            TileWrite(name=spec.name, tile=tile, positions=None, values=two[:1]),
            TileWrite(name=spec.name, tile=tile, positions=backwards, values=two),
            TileWrite(name=spec.name, tile=tile, positions=None, values=two.astype(np.float64)),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidInputError):
                await engine.stage([write])
        with pytest.raises(LookupError):
            await engine.stage([TileWrite(name="nobody", tile=tile, positions=None, values=two)])

    async def test_exact_version_ends_at_a_swap(self, engine: Engine) -> None:
        """Its tokens so far stand, all of the version asked for; a new one for the old version is refused."""
        exact = PolicyConstraint(exact_version=FIRST)
        answer = await engine.generate(request(policy=exact, max_tokens=LONG))
        await first_token(answer)
        await swap(engine)
        whole = await finished(answer)
        assert whole.finish is Finish.POLICY_CHANGED
        assert {step.version for step in whole.steps} <= {FIRST}
        with pytest.raises(PolicyUnmetError):
            await answered(engine, request(policy=exact))

    async def test_min_version_is_checked_before_the_first_token(self, engine: Engine) -> None:
        """Unmet, no token is made; met after a swap, it answers; it may go on over later swaps."""
        wants = PolicyConstraint(min_version=SECOND)
        answer = await engine.generate(request(policy=wants))
        with pytest.raises(PolicyUnmetError):
            await first_token(answer)
        await swap(engine)
        assert (await answered(engine, request(policy=wants))).finish is Finish.LENGTH

    async def test_a5_01_an_abort_keeps_the_tokens_so_far(self, engine: Engine) -> None:
        """What was received equals the whole answer's beginning."""
        whole = await answered(engine, request(max_tokens=LONG))
        answer = await engine.generate(request(max_tokens=LONG))
        kept = [await anext(aiter(answer)) for _ in range(100)]
        await answer.aclose()
        await answer.aclose()
        assert answer.finish is Finish.ABORT
        assert kept == list(whole.steps[:100])

    async def test_a5_05_closed_answers_free_their_slots(self, engine: Engine) -> None:
        """Readers that leave, before a token or after, leave nothing behind."""
        answers = [await engine.generate(request(max_tokens=LONG, seed=seed)) for seed in range(40)]
        for answer in answers[:8]:
            await first_token(answer)
        for answer in answers:
            await answer.aclose()
        assert await engine.abort_all() == 0
        stats = engine.stats()
        assert (stats.active, stats.waiting) == (0, 0)

    async def test_a5_07_closing_one_answer_leaves_the_others(self, engine: Engine) -> None:
        """Whatever their names have in common."""
        first, second = await engine.generate(request()), await engine.generate(request())
        await first.aclose()
        assert len((await finished(second)).steps) == SHORT

    async def test_more_answers_than_slots_wait_in_order(self, engine: Engine) -> None:
        """Later requests begin later, and all are answered."""
        slots = engine.describe().slots
        begun: list[int] = []

        async def follow(number: int, answer: Answer) -> Completion:
            head = await anext(aiter(answer))
            begun.append(number)
            rest = await finished(answer)
            return collect(rest.origin, (head, *rest.steps), rest.finish)

        answers = [await engine.generate(request(seed=seed)) for seed in range(2 * slots)]
        whole = await asyncio.gather(*(follow(number, answer) for number, answer in enumerate(answers)))
        assert begun == sorted(begun)
        assert {len(one.steps) for one in whole} == {SHORT}

    async def test_abort_all_ends_every_answer(self, engine: Engine) -> None:
        """In a slot or waiting: all end with what they have."""
        answers = [await engine.generate(request(max_tokens=LONG, seed=seed)) for seed in range(20)]
        await first_token(answers[0])
        assert await engine.abort_all() == len(answers)
        for answer in answers:
            async with aclosing(answer):
                assert (await finished(answer)).finish is Finish.ABORT

    async def test_a_closed_engine_says_so(self, engine: Engine) -> None:
        """Open answers end, new ones are refused, what never changes can still be asked."""
        answer = await engine.generate(request(max_tokens=LONG))
        await engine.close()
        await engine.close()
        assert (await finished(answer)).finish is Finish.ABORT
        with pytest.raises(UnavailableError):
            await engine.generate(request())
        assert engine.describe().slots > 0
        assert engine.stats().failure
