"""The GRPO recipe: packing changes no value, the formulas hold, the trainer runs on what it publishes."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from slackwater.ids import BootId, ReplicaId, RunId, Version
from slackwater.rollout.evidence import Finish, PolicySpan
from slackwater.testing.tiny_model import write_tiny_model
from slackwater.trainer.recipes import digits
from slackwater.trainer.recipes.grpo import GrpoConfig, Policy, advantages, clipped_loss
from slackwater.trainer.recipes.packing import pack
from slackwater.trainer.recipes.smollm2 import hub_name, rope_halves
from slackwater.trainer.samples import Sample


def sample(prompt: tuple[int, ...], tokens: tuple[int, ...], logprob: float = -2.0) -> Sample:
    return Sample(
        prompt_ids=prompt,
        token_ids=tokens,
        logprobs=np.full(len(tokens), logprob, np.float32),
        policy=(PolicySpan(version=Version(0), start=0, end=len(tokens)),),
        text="",
        finish=Finish.STOP,
        run=RunId("r"),
        replica=ReplicaId("a"),
        boot=BootId("b"),
        seed=0,
    )


def groups_of(rng: random.Random, count: int) -> list[list[Sample]]:
    groups: list[list[Sample]] = []
    for _ in range(count):
        prompt = tuple(rng.randrange(1, 250) for _ in range(rng.randrange(1, 9)))
        groups.append(
            [sample(prompt, tuple(rng.randrange(1, 250) for _ in range(rng.randrange(1, 7)))) for _ in range(3)]
        )
    return groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=3, tokenizer=False)


def test_a_packed_group_has_the_log_probabilities_of_separate_rows(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    policy = Policy(folder, GrpoConfig())
    policy._model = model
    groups = groups_of(random.Random(1), 4)
    with torch.no_grad():
        packed = policy.logprobs(pack(groups, [[1.0] * 3] * 4))
        separate: list[torch.Tensor] = []
        for item in (item for group in groups for item in group):
            ids = torch.tensor([item.prompt_ids + item.token_ids])
            logits = model(input_ids=ids).logits[0, len(item.prompt_ids) - 1 : -1]
            rows = torch.log_softmax(logits, -1)
            separate.append(rows.gather(1, torch.tensor(item.token_ids)[:, None]).squeeze(1))
    torch.testing.assert_close(packed, torch.cat(separate), atol=1e-5, rtol=1e-5)


def test_a_batch_keeps_tokens_behaviour_and_advantages_aligned() -> None:
    groups = [[sample((5, 6), (7, 8), -1.0), sample((5, 6), (9,), -3.0)]]
    batch = pack(groups, [[0.5, -0.5]])
    assert batch.targets.tolist() == [7, 8, 9]
    assert batch.columns.tolist() == [1, 2, 1]
    assert batch.behaviour.tolist() == [-1.0, -1.0, -3.0]
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 2]
    assert not batch.mask[0, 0, 4, 2:4].any()  # an answer never sees its sibling


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantages_are_centred_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    found = advantages(rewards)
    assert math.isclose(sum(found), 0.0, abs_tol=1e-6)
    ranked = sorted(range(len(rewards)), key=lambda index: rewards[index])
    assert all(found[left] <= found[right] + 1e-9 for left, right in pairwise(ranked))


def test_the_loss_is_clipped_on_the_side_that_would_go_on() -> None:
    batch = pack([[sample((1,), (2,), 0.0), sample((1,), (3,), 0.0)]], [[1.0, -1.0]])
    config = GrpoConfig(clip_low=0.2, clip_high=0.2)
    far_up = torch.tensor([1.0, 1.0])
    assert float(clipped_loss(far_up, batch, config)) == pytest.approx((-1.2 + math.e) / 2)
    same = torch.tensor([0.0, 0.0])
    assert float(clipped_loss(same, batch, config)) == pytest.approx(0.0)


def test_an_update_moves_the_published_weights_and_the_forward_pass_runs_on_them(folder: Path) -> None:
    policy = Policy(folder, GrpoConfig(lr=1e-2))
    before = {name: value.clone() for name, value in policy.state().items()}
    groups = groups_of(random.Random(2), 2)
    report = policy.update(groups, [[0.0, 0.5, 1.0]] * 2)
    after = policy.state()
    assert report.num_tokens == sum(len(item.token_ids) for group in groups for item in group)
    assert report.grad_norm > 0
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(value.dtype is torch.bfloat16 for value in after.values())
    assert all(torch.equal(after[name], policy._masters[name].to(torch.bfloat16)) for name in after)


def test_groups_whose_answers_all_earned_the_same_change_nothing(folder: Path) -> None:
    policy = Policy(folder, GrpoConfig())
    before = {name: value.clone() for name, value in policy.state().items()}
    assert policy.update(groups_of(random.Random(3), 1), [[1.0, 1.0, 1.0]]).num_tokens == 0
    assert all(torch.equal(before[name], value) for name, value in policy.state().items())


@pytest.mark.parametrize(("text", "earned"), [("", 0.0), ("...", 0.0), ("42", 1.0), ("a1", 0.5), ("Year 2024!", 0.5)])
def test_the_reward_is_the_share_of_digits(text: str, earned: float) -> None:
    assert digits.reward(replace(sample((1,), (2,)), text=text)) == earned


def test_a_step_draws_different_questions_and_the_same_ones_again_for_its_seed() -> None:
    drawn = digits.draw(random.Random("0/1"), 4)
    assert drawn == digits.draw(random.Random("0/1"), 4)
    assert len({messages[-1]["content"] for messages in drawn}) == 4


def test_the_model_files_names_become_the_hubs() -> None:
    assert hub_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hub_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"


def test_rotary_rows_go_from_pairs_to_halves() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert rope_halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
