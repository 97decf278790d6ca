"""The sampler against the definition in plain float64: supports, probabilities, ties, penalties, bans and masks."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.engine.torch.adjust import Tally
from slackwater.engine.torch.sampler import Ask, Drawn, sample
from slackwater.engine.torch.sequence import Sequence as Row
from slackwater.engine.torch.support import support
from slackwater.ids import RequestId, Version
from slackwater.rollout.evidence import MAX_MASK_IDS, Finish, TokenStep, mask_ids
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.testing.distribution import adjusted, processed, raw_logprob

LOGITS = (1.0, 0.0, -1.0, -2.0)


def spec(**fields: object) -> SamplingSpec:
    return SamplingSpec(**{"max_tokens": 9, "sampling_mask": True, "raw_logprobs": True, **fields})  # type: ignore[arg-type]


def drawn(
    logits: Sequence[float] | torch.Tensor,
    asked: SamplingSpec,
    *,
    prompt: Sequence[int] = (),
    tokens: Sequence[int] = (),
    banned: Sequence[int] = (),
    forced: int | None = None,
    seed: int = 1,
) -> Drawn:
    tally = Tally()
    tally.see(prompt)
    tally.count(tokens)
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    made = sample(row, [Ask(spec=asked, seed=seed, position=3, forced=forced, banned=tuple(banned), tally=tally)])[0]
    assert made is not None
    return made


def mask(made: Drawn) -> tuple[int, ...]:
    assert made.mask is not None
    return mask_ids(made.mask)


def raw(made: Drawn) -> float:
    assert made.raw_logprob is not None
    return made.raw_logprob


@pytest.mark.parametrize(
    ("fields", "kept", "logprobs"),
    [
        ({"temperature": 1.0}, 4, (-0.440190, -1.440190, -2.440190, -3.440190)),
        ({"temperature": 0.6}, 4, (-0.208060, -1.874727, -3.541394, -5.208060)),
        ({"temperature": 0.5}, 4, (-0.145078, -2.145078, -4.145078, -6.145078)),
        ({"top_p": 0.9}, 3, (-0.407606, -1.407606, -2.407606)),
        ({"top_p": 0.8}, 2, (-0.313262, -1.313262)),
        ({"temperature": 0.5, "top_p": 0.9}, 2, (-0.126928, -2.126928)),
        ({"temperature": 0.5, "top_p": 0.8}, 1, (0.0,)),
    ],
)
def test_a3_01_and_a3_02_masks_and_both_kinds_of_logprobs(
    fields: dict[str, object], kept: int, logprobs: tuple[float, ...]
) -> None:
    forced = [drawn(LOGITS, spec(**fields), forced=token) for token in range(4)]
    assert {mask(made) for made in forced} == {tuple(range(kept))}
    assert [made.logprob for made in forced] == pytest.approx([*logprobs, *[-math.inf] * (4 - kept)], abs=1e-6)
    assert [raw(made) for made in forced] == pytest.approx([-0.440190, -1.440190, -2.440190, -3.440190], abs=1e-6)
    assert drawn(LOGITS, spec(**fields)).token_id < kept


@pytest.mark.parametrize("fields", [{"top_p": 0.0001}, {"temperature": 0.0}, {"top_k": 1}, {"presence_penalty": 2.0}])
def test_a3_03_raw_logprobs_are_what_they_are_whatever_the_sampling(fields: dict[str, object]) -> None:
    made = drawn(LOGITS, spec(**{"temperature": 0.5, **fields}), tokens=(0, 0, 1), forced=2)
    assert raw(made) == pytest.approx(-2.440190, abs=1e-6)
    told = drawn(LOGITS, spec(**{"temperature": 0.5, "top_logprobs": 3, **fields}), tokens=(0, 0, 1))
    assert told.raw_top_ids == (0, 1, 2)
    assert told.raw_top_logprobs == pytest.approx((-0.440190, -1.440190, -2.440190), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({"top_k": 2}, (0, 1)), ({"top_k": 3}, (0, 1, 2)), ({"top_p": 0.59}, (0, 1)), ({"min_p": 0.3}, (0, 1, 2, 3))],
)
def test_a3_22_the_mask_is_the_support_that_was_drawn_from_ties_and_all(
    fields: dict[str, object], kept: tuple[int, ...]
) -> None:
    logits = (3.0, 2.0, 2.0, 2.0, 1.0, 0.0)
    made = [drawn(logits, spec(**fields), seed=seed) for seed in range(40)]
    assert {mask(one) for one in made} == {kept}
    assert {one.token_id for one in made} == set(kept)
    shares = [math.exp(drawn(logits, spec(**fields), forced=token).logprob) for token in kept]
    assert sum(shares) == pytest.approx(1.0, abs=1e-6)


def test_a_support_that_is_too_wide_is_told_to_be_that() -> None:
    wide = torch.zeros(MAX_MASK_IDS + 1)
    assert drawn(wide, spec()).mask == b""
    assert len(mask(drawn(wide, spec(top_k=MAX_MASK_IDS)))) == MAX_MASK_IDS
    assert mask(drawn(wide, spec(temperature=0.0))) == (0,)


def test_evidence_that_nobody_asked_for_is_absent() -> None:
    made = drawn(LOGITS, SamplingSpec(max_tokens=1, top_k=2))
    assert (made.raw_logprob, made.mask) == (None, None)


LOGIT = st.integers(-24, 24).map(lambda steps: steps / 4) | st.just(-math.inf)
ROWS = st.lists(LOGIT, min_size=2, max_size=40).filter(lambda row: max(row) > -math.inf)
SPECS = st.builds(
    spec,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 0.87, 0.31]),
    top_k=st.sampled_from([0, 1, 3, 30]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.25, 0.5]),
    logit_bias=st.sampled_from([(), ((0, 3.5),), ((1, -100.0), (0, 0.25))]),
    top_logprobs=st.sampled_from([0, 20]),
)
IDS = st.lists(st.integers(0, 1), max_size=4)


@settings(max_examples=examples(400), deadline=None)
@given(
    logits=ROWS,
    asked=SPECS,
    prompt=IDS,
    tokens=IDS,
    banned=st.sets(st.integers(0, 45), max_size=3),
    seed=st.integers(0, 2**63 - 1),
)
def test_what_is_drawn_is_of_the_distribution_that_the_definition_gives(
    logits: list[float], asked: SamplingSpec, prompt: list[int], tokens: list[int], banned: set[int], seed: int
) -> None:
    made = drawn(logits, asked, prompt=prompt, tokens=tokens, banned=tuple(banned), seed=seed)
    changed = adjusted(logits, asked, prompt_ids=prompt, token_ids=tokens, ends=banned)
    wanted = dict(processed(changed, asked))
    assert mask(made) == tuple(sorted(wanted))
    assert made.logprob == pytest.approx(wanted[made.token_id], abs=1e-5)
    assert raw(made) == pytest.approx(raw_logprob(logits, made.token_id), abs=1e-5)
    if asked.top_logprobs:
        assert made.top_ids == tuple(wanted)[:20]
        assert made.top_logprobs == pytest.approx(list(wanted.values())[:20], abs=1e-5)


@settings(max_examples=examples(60), deadline=None)
@given(vocabulary=st.sampled_from([5, 255, 256, 257, 700]), seed=st.integers(0, 99), share=st.floats(0, 1 - 2**-52))
def test_a_number_draws_the_token_in_whose_share_it_falls(vocabulary: int, seed: int, share: float) -> None:
    relative = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    relative -= relative.amax()
    relative[0, seed % vocabulary] = -math.inf if vocabulary > 5 and relative[0, seed % vocabulary] < 0 else 0.0
    token = int(support(relative, [SamplingSpec(max_tokens=1)]).draw([share])[0])
    reached = relative[0].exp().double().cumsum(0)
    before = reached[token - 1] if token else 0.0
    assert float(before / reached[-1]) <= share + 1e-12
    assert share < float(reached[token] / reached[-1]) + 1e-12
    assert relative[0, token] > -math.inf


@pytest.mark.parametrize("share", [0.0, 0.5, 1 - 2**-52])
def test_a_token_without_mass_is_never_drawn(share: float) -> None:
    relative = torch.full((1, 1000), -math.inf)
    relative[0, [300, 700]] = 0.0
    assert int(support(relative, [SamplingSpec(max_tokens=1)]).draw([share])[0]) == (300 if share < 0.5 else 700)


@pytest.mark.parametrize(("scale", "top_k"), [(0.01, 0), (3.0, 0), (0.01, 2500), (0.5, 7), (0.01, 10_000)])
def test_a_support_of_any_width_is_that_of_the_full_sort(scale: float, top_k: int) -> None:
    scaled = (torch.randn(5000, generator=torch.Generator().manual_seed(3)) * scale).bfloat16().float()
    values, ids = scaled.sort(descending=True, stable=True)
    weights = values[: top_k or None].double().exp()
    wanted = ids[: top_k or None][weights.cumsum(0) - weights < 0.9 * weights.sum()]
    kept = support((scaled - scaled.amax())[None], [SamplingSpec(max_tokens=1, top_p=0.9, top_k=top_k)])
    assert kept.ids(0).tolist() == sorted(wanted.tolist())


def test_min_p_that_keeps_more_than_the_first_look_still_bounds_top_p() -> None:
    logits = torch.zeros(5000)
    logits[4000:] = -5.0
    kept = support(logits[None], [SamplingSpec(max_tokens=1, top_p=0.5, min_p=0.9)])
    assert kept.ids(0).tolist() == list(range(2000))


def test_a_ban_is_lifted_where_nothing_else_could_be_drawn() -> None:
    only = (-math.inf, 2.0, -math.inf, 1.0)
    assert mask(drawn(only, spec(), banned=(1,))) == (3,)
    assert mask(drawn(only, spec(), banned=(1, 3, 2**40))) == (1, 3)


@pytest.mark.parametrize("factor", [1e-300, 100.0])
def test_penalties_make_no_infinities(factor: float) -> None:
    made = drawn((3e38, -3e38, 0.0), spec(repetition_penalty=factor), prompt=(0, 1, 2))
    assert math.isfinite(made.logprob)


def test_a_row_without_numbers_makes_no_token_whatever_is_asked() -> None:
    asked = spec(logit_bias=((1, 5.0),), top_p=0.5, repetition_penalty=2.0)
    asks = [Ask(spec=asked, seed=1, position=0, banned=(0,), tally=Tally()) for _ in range(2)]
    bad, good = sample(torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 2.0]]), asks)
    assert bad is None
    assert good is not None
    assert mask(good) == (1,)


def row(
    asked: SamplingSpec, *, prompt: tuple[int, ...] = (5, 6), continued: int = 0, forced: Sequence[int] = ()
) -> Row:
    request = CompletionRequest(request_id=RequestId("r"), prompt_ids=prompt, sampling=asked, continued=continued)
    return Row(key=0, request=request, seed=1, limit=asked.max_tokens, ends=frozenset((1, 2)), forced=list(forced))


def take(answer: Row, token: int) -> TokenStep:
    return answer.accept(Drawn(token_id=token, logprob=-1.0, raw_logprob=-2.0, mask=b"\1\0\0\0"), Version(7))


def test_end_tokens_are_banned_until_min_tokens_have_come() -> None:
    answer = row(spec(min_tokens=2, stop_token_ids=(2,)))
    for made in range(4):
        assert set(answer.ask().banned) == ({1, 2} if made < 2 else set())
        assert take(answer, 4).finish is None
    assert take(answer, 2).finish is Finish.STOP


def test_a_model_s_own_end_is_a_token_like_any_other_where_it_is_to_be_ignored() -> None:
    answer = row(spec(ignore_eos=True, min_tokens=1, stop_token_ids=(2,)))
    assert answer.ask().banned == (2,)
    assert take(answer, 1).finish is None
    assert take(answer, 2).finish is Finish.STOP


def test_a_step_carries_the_evidence_of_its_draw() -> None:
    step = take(row(spec()), 3)
    assert (step.raw_logprob, step.mask) == (-2.0, b"\1\0\0\0")


def counts(answer: Row) -> dict[int, float]:
    tally = answer.ask().tally
    assert tally is not None
    ids, times = tally.known()
    return dict(zip(ids.tolist(), times.tolist(), strict=True))


def test_a5_10_tokens_that_another_replica_sampled_are_penalised_as_the_answer_s() -> None:
    asked = spec(repetition_penalty=1.5, presence_penalty=0.5)
    whole = row(asked, prompt=(5, 6, 6))
    assert counts(whole) == {5: 0.0, 6: 0.0}
    for token in (6, 8, 8):
        take(whole, token)
    assert counts(whole) == counts(row(asked, prompt=(5, 6, 6, 6, 8, 8), continued=3)) == {5: 0.0, 6: 1.0, 8: 2.0}
    assert counts(row(spec(presence_penalty=0.5))) == {}
    assert row(spec()).ask().tally is None


def test_a_tally_of_many_tokens_keeps_each() -> None:
    tally = Tally()
    tally.see(range(100, 1000))
    tally.count([*range(500), *range(250)])
    ids, times = tally.known()
    found = dict(zip(ids.tolist(), times.tolist(), strict=True))
    assert found == {token: (token < 500) + (token < 250) for token in range(1000)}
