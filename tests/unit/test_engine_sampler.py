"""The sampler: exact numbers, exact masks, draws by (seed, position) alone, rows that ignore each other."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depth import examples
from slackwater.engine.torch.sampler import Ask, Drawn, sample, uniform
from slackwater.rollout.evidence import pack_mask
from slackwater.rollout.request import SamplingSpec

LOGITS = torch.tensor([1.0, 0.0, -1.0, -2.0])


def ask(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    tops: int = 0,
    forced: int | None = None,
    seed: int = 1,
    position: int = 0,
    min_p: float = 0.0,
    bias: tuple[tuple[int, float], ...] = (),
    shown: bool = False,
) -> Ask:
    spec = SamplingSpec(
        max_tokens=1,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        top_logprobs=tops,
        min_p=min_p,
        logit_bias=bias,
        raw_logprobs=shown,
        sampling_mask=shown,
    )
    return Ask(spec=spec, seed=seed, position=position, forced=forced)


def one(logits: torch.Tensor, asked: Ask) -> Drawn:
    drawn = sample(logits[None], [asked])[0]
    assert drawn is not None
    return drawn


@pytest.mark.parametrize(
    ("temperature", "top_p", "support"),
    [
        (1.0, 1.0, [-0.440190, -1.440190, -2.440190, -3.440190]),
        (0.6, 1.0, [-0.208060, -1.874727, -3.541394, -5.208060]),
        (0.5, 1.0, [-0.145078, -2.145078, -4.145078, -6.145078]),
        (1.0, 0.9, [-0.407606, -1.407606, -2.407606]),
        (1.0, 0.8, [-0.313262, -1.313262]),
        (0.5, 0.9, [-0.126928, -2.126928]),
        (0.5, 0.8, [0.0]),
    ],
)
def test_a3_01_and_a3_02_processed_logprobs(temperature: float, top_p: float, support: list[float]) -> None:
    drawn = one(LOGITS, ask(temperature=temperature, top_p=top_p, tops=4))
    assert drawn.top_ids == tuple(range(len(support)))
    assert drawn.top_logprobs == pytest.approx(support, abs=1e-6)
    assert sum(math.exp(value) for value in drawn.top_logprobs) == pytest.approx(1.0)
    assert drawn.logprob == drawn.top_logprobs[drawn.token_id]


def test_a_temperature_of_zero_is_greedy_with_logprob_zero() -> None:
    drawn = one(LOGITS, ask(temperature=0.0, tops=4))
    assert drawn == Drawn(token_id=0, logprob=0.0, top_ids=(0,), top_logprobs=(0.0,))


def test_ties_go_to_the_lower_id() -> None:
    tied = torch.tensor([0.0, 3.0, 3.0, 3.0])
    assert one(tied, ask(temperature=0.0)).token_id == 1
    kept = {one(tied, ask(top_k=2, seed=seed)).token_id for seed in range(50)}
    assert kept == {1, 2}


def test_top_k_renormalises_before_top_p_cuts() -> None:
    drawn = one(LOGITS, ask(top_k=2, top_p=0.72, tops=4))
    assert drawn.top_ids == (0,)


def test_a_forced_token_gets_its_logprob_whatever_the_draw() -> None:
    assert one(LOGITS, ask(forced=3)).logprob == pytest.approx(-3.440190, abs=1e-6)
    assert one(LOGITS, ask(forced=3, top_k=1)).logprob == -math.inf


def test_tiny_temperatures_and_huge_logits_stay_finite() -> None:
    for temperature in (1e-4, 1e-5, 1e-9, 1e-320):
        assert one(torch.tensor([1e30, -1e30, 0.0]), ask(temperature=temperature)).logprob == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_f42_a_row_without_numbers_makes_no_token_and_harms_no_other(bad: float) -> None:
    rows = torch.stack([LOGITS, torch.tensor([0.0, bad, 0.0, 0.0]), LOGITS])
    for asked in (ask(tops=2), ask(top_p=0.5), ask(temperature=0.0), ask(forced=1), ask(shown=True)):
        first, broken, last = sample(rows, [asked] * 3)
        assert broken is None
        assert first == last == sample(LOGITS[None], [asked])[0]


def test_a_row_of_minus_infinity_makes_no_token() -> None:
    assert sample(torch.full((1, 4), -math.inf), [ask()]) == [None]


def test_draws_follow_the_distribution() -> None:
    draws = Counter(one(LOGITS, ask(seed=seed, position=seed % 7)).token_id for seed in range(4000))
    for token, share in enumerate(torch.softmax(LOGITS, 0).tolist()):
        assert draws[token] / 4000 == pytest.approx(share, abs=0.03)


def test_uniforms_are_spread_and_depend_on_both_arguments() -> None:
    values = {uniform(seed, position) for seed in range(40) for position in range(40)}
    assert len(values) == 1600
    assert min(values) >= 0.0
    assert max(values) < 1.0
    assert sum(values) / 1600 == pytest.approx(0.5, abs=0.03)


ASKS = st.builds(
    ask,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    top_k=st.sampled_from([0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    bias=st.sampled_from([(), ((3, 2.0), (0, -100.0))]),
    shown=st.booleans(),
    tops=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 10_000),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    asks=st.lists(ASKS, min_size=1, max_size=9),
    vocabulary=st.sampled_from([7, 512, 1003]),
    seed=st.integers(0, 99),
)
def test_rows_ignore_each_other_to_the_last_bit(asks: list[Ask], vocabulary: int, seed: int) -> None:
    logits = (torch.randn(len(asks), vocabulary, generator=torch.Generator().manual_seed(seed)) * 4).bfloat16()
    kept = logits.clone()
    together = sample(logits, asks)
    assert together == [sample(logits[row : row + 1], [asked])[0] for row, asked in enumerate(asks)]
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("rows", [3, 4])
def test_every_row_has_its_own_evidence_whatever_the_others_are(rows: int) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 3
    logits[3, 7] = math.nan
    asks = [ask(shown=True), ask(temperature=0.0, shown=True), ask(top_p=0.5, shown=True), ask(shown=True)]
    drawn = sample(logits[:rows], asks[:rows])
    assert drawn[3:] == [None] * (rows - 3)
    for row, made in enumerate(drawn[:3]):
        assert made is not None
        assert made.raw_logprob == pytest.approx(float(logits[row].log_softmax(0)[made.token_id]), abs=1e-5)


def test_rows_of_a_large_vocabulary_ignore_each_other_too() -> None:
    logits = (torch.randn(5, 100_003, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    asks = [ask(), ask(top_p=0.9), ask(top_k=3000, top_p=0.99), ask(min_p=0.01, shown=True), ask(temperature=0.7)]
    together = sample(logits, asks)
    assert together == [sample(logits[row : row + 1], [asked])[0] for row, asked in enumerate(asks)]


@settings(max_examples=examples(60), deadline=None)
@given(asked=ASKS, seed=st.integers(0, 99))
def test_what_is_drawn_is_scored_alike_when_forced(asked: Ask, seed: int) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 3
    drawn = one(logits, asked)
    assert drawn.logprob > -math.inf
    assert one(logits, replace(asked, forced=drawn.token_id, seed=5)) == drawn


def constrained(allowed: list[bool], asked: Ask) -> Ask:
    return replace(asked, allowed=np.array(allowed))


def test_a_grammars_mask_leaves_exactly_the_softmax_over_what_it_lets_come() -> None:
    drawn = one(LOGITS, constrained([False, True, False, True], ask(tops=4, shown=True)))
    total = math.exp(0.0) + math.exp(-2.0)
    assert drawn.top_ids == (1, 3)
    assert drawn.top_logprobs == pytest.approx([-math.log(total), -2.0 - math.log(total)], abs=1e-6)
    assert drawn.mask == pack_mask((1, 3))
    raw = torch.log_softmax(LOGITS.double(), dim=-1)
    assert drawn.raw_logprob == pytest.approx(float(raw[drawn.token_id]), abs=1e-6)


def test_a_grammar_comes_before_every_cut_and_bias() -> None:
    mask = [False, False, True, True]
    assert one(LOGITS, constrained(mask, ask(top_k=1))).token_id == 2
    assert one(LOGITS, constrained(mask, ask(temperature=0.0))).token_id == 2
    assert one(LOGITS, constrained(mask, ask(temperature=0.0, bias=((0, 100.0), (3, 50.0))))).token_id == 3
    banned = replace(constrained([False, False, False, True], ask()), banned=(3,))
    assert one(LOGITS, banned).token_id == 3


def test_a_row_whose_grammar_leaves_nothing_is_none_and_its_neighbours_are_drawn() -> None:
    asks = [
        ask(),
        constrained([False] * 4, ask()),
        constrained([False] * 4, ask(temperature=0.0)),
        ask(temperature=0.0),
    ]
    drawn = sample(LOGITS.repeat(4, 1), asks)
    assert [row is None for row in drawn] == [False, True, True, False]


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_each_draws_support_is_within_the_mask_and_its_mass_is_one(data: st.DataObject) -> None:
    allowed = data.draw(st.lists(st.booleans(), min_size=12, max_size=12).filter(any))
    logits = torch.tensor(data.draw(st.lists(st.floats(-8, 8, width=32), min_size=12, max_size=12)))
    top_k, top_p = data.draw(st.sampled_from((0, 1, 3))), data.draw(st.sampled_from((0.5, 0.9, 1.0)))
    drawn = one(
        logits, constrained(allowed, ask(top_k=top_k, top_p=top_p, tops=12, seed=data.draw(st.integers(0, 99))))
    )
    assert drawn.token_id in drawn.top_ids
    assert {token_id for token_id, lets in enumerate(allowed) if lets} >= set(drawn.top_ids)
    assert sum(map(math.exp, drawn.top_logprobs)) == pytest.approx(1.0, abs=1e-5)
