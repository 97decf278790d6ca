"""What the trainer makes of masks and routes: exact log-probabilities over a mask, and the experts of the fleet."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from core_rig import run, steps

from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.model import LoadedModel, load
from slackwater.errors import InvalidInputError, UnsupportedError
from slackwater.ids import BootId, ReplicaId, RequestId, RunId, Version
from slackwater.rollout.evidence import Finish, PolicySpan, TokenStep, mask_ids
from slackwater.rollout.request import CompletionRequest, SamplingSpec
from slackwater.rollout.routes import Routing
from slackwater.testing.tiny_model import write_tiny_model
from slackwater.trainer.recipes import toy
from slackwater.trainer.recipes.grpo import GrpoConfig, Policy
from slackwater.trainer.recipes.packing import pack
from slackwater.trainer.recipes.replay import replaying
from slackwater.trainer.recipes.support import kept_logprobs, support_of
from slackwater.trainer.routes import Routes
from slackwater.trainer.samples import Sample, SamplingMask
from slackwater.weights.source import FolderSource
from slackwater.weights.state_dict import StateDictSource

PROMPT = (5, 9, 33, 2)
NOISE = 0.05
"""Nats between two ways to compute in bf16."""


def mask(*rows: tuple[int, ...]) -> SamplingMask:
    ends = np.cumsum([0, *map(len, rows)])
    return SamplingMask(indptr=ends, ids=np.array([token for row in rows for token in row], np.int32))


def sample(tokens: tuple[int, ...], prompt: tuple[int, ...] = PROMPT) -> Sample:
    return Sample(
        prompt_ids=prompt,
        token_ids=tokens,
        logprobs=np.full(len(tokens), -1.0, np.float32),
        policy=(PolicySpan(version=Version(0), start=0, end=len(tokens)),),
        text="",
        finish=Finish.LENGTH,
        run=RunId("r"),
        replica=ReplicaId("a"),
        boot=BootId("b"),
        seed=0,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("toy"), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """What an engine answered."""

    model: LoadedModel
    samples: tuple[Sample, ...]


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Fleet:
    model = load(folder)
    core = Core(model, Shaping(slots=4, invariant=True), window=32, version=Version(0))
    sampling = SamplingSpec(max_tokens=6, top_p=0.9, sampling_mask=True)
    for key in range(3):
        request = CompletionRequest(request_id=RequestId(str(key)), prompt_ids=PROMPT, sampling=sampling, routes_from=0)
        core.add(key, request, seed=key)
    events = run(core)
    assert model.routing is not None
    return Fleet(model=model, samples=tuple(as_sample(steps(events, key), model.routing) for key in range(3)))


def as_sample(made: list[TokenStep], routing: Routing) -> Sample:
    rows = b"".join(step.routes or b"" for step in made)
    experts = np.frombuffer(rows, np.uint8).reshape(-1, len(routing.layers), routing.per_token)
    return replace(
        sample(tuple(step.token_id for step in made)),
        logprobs=np.array([step.logprob for step in made], np.float32),
        sampling_mask=mask(*(mask_ids(step.mask or b"") for step in made)),
        routes=Routes(routing=routing, experts=experts, positions=np.arange(len(experts))),
    )


def test_the_softmax_is_over_the_mask_alone_and_only_its_ids_get_a_gradient() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    told = [replace(sample((1, 6)), sampling_mask=mask((1, 3), ())), sample((7,))]
    found = kept_logprobs(logits, torch.tensor([1, 6, 7]), support_of(told))
    whole = torch.log_softmax(logits, -1)
    part = torch.log_softmax(logits[0, [1, 3]], -1)
    torch.testing.assert_close(found, torch.stack([part[0], whole[1, 6], whole[2, 7]]))  # of two no mask was told
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].nonzero().flatten().tolist() == [1, 3]
    assert logits.grad.isfinite().all()


def test_a_token_outside_of_its_mask_has_no_probability() -> None:
    support = support_of([replace(sample((5,)), sampling_mask=mask((1, 3)))])
    assert kept_logprobs(torch.zeros(1, 8), torch.tensor([5]), support).tolist() == [-torch.inf]


def test_without_masks_the_whole_vocabulary_counts() -> None:
    assert support_of([sample((1,)), sample((2,))]) is None


def test_the_trainers_log_probabilities_are_the_fleets(folder: Path, fleet: Fleet) -> None:
    policy = Policy(folder, GrpoConfig())
    batch = pack([fleet.samples], [[1.0, 0.0, -1.0]])
    assert batch.input_ids.shape[0] == 1  # one prompt, one way: one row
    found = policy.logprobs(batch)
    torch.testing.assert_close(found, batch.behaviour, atol=NOISE, rtol=0)
    unmasked = policy.logprobs(replace(batch, support=None))
    assert float((unmasked - batch.behaviour).mean().detach()) < -NOISE  # the kept share is about top_p
    found.sum().backward()
    routers = [value.grad for name, value in policy._live.items() if name.endswith("gate.weight")]
    assert len(routers) == 3
    assert all(grad is not None and grad.abs().sum() > 0 for grad in routers)


def others(routes: Routes) -> Routes:
    """The experts that nobody chose."""
    return replace(routes, experts=(routes.experts + np.uint8(4)) % np.uint8(8))


def test_replayed_routes_decide_where_tokens_go(folder: Path, fleet: Fleet) -> None:
    policy = Policy(folder, GrpoConfig())
    moved = pack([[replace(one, routes=others(one.routes)) for one in fleet.samples if one.routes]], [[1.0, 0.0, -1.0]])
    with torch.no_grad():
        assert float((policy.logprobs(moved) - moved.behaviour).abs().max()) > 4 * NOISE


def test_a_router_weighs_what_it_is_told_as_if_it_had_chosen(folder: Path) -> None:
    policy = Policy(folder, GrpoConfig())
    router = policy._model.model.layers[1].mlp.gate
    states = torch.randn(5, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, weights, ids = router(states)
        told = torch.full((5, 3, 2), -1)
        told[:3, 1] = ids[:3]
        told[3, 1] = torch.tensor([7, 0])
        with replaying(policy._model, told):
            _, again, taken = router(states)
    kept = [0, 1, 2, 4]
    assert torch.equal(taken[kept], ids[kept])
    assert torch.equal(again[kept], weights[kept])
    assert taken[3].tolist() == [7, 0]
    torch.testing.assert_close(again[3].float(), torch.softmax(logits[3, [7, 0]].float(), 0), atol=4e-3, rtol=0)


def test_answers_whose_prompt_went_another_way_have_rows_of_their_own(fleet: Fleet) -> None:
    first, second, third = fleet.samples
    assert second.routes is not None
    batch = pack([[first, replace(second, routes=others(second.routes)), third]], [[1.0, 2.0, 3.0]])
    assert batch.input_ids.shape[0] == 2
    assert batch.advantages.tolist() == [1.0] * 6 + [3.0] * 6 + [2.0] * 6
    assert batch.targets.tolist() == [*first.token_ids, *third.token_ids, *second.token_ids]
    assert batch.routes is not None
    places = batch.routes.unflatten(0, (2, -1))
    assert second.routes.experts.shape[0] == len(PROMPT) + 5
    torch.testing.assert_close(places[1, :9], torch.tensor(others(second.routes).experts, dtype=torch.int64))
    assert (places[1, 9:] == -1).all()  # its last token, and padding
    assert third.routes is not None
    torch.testing.assert_close(places[0, 10:15], torch.tensor(third.routes.experts[4:], dtype=torch.int64))


def test_routes_that_fit_no_router_are_refused(folder: Path, fleet: Fleet, tmp_path: Path) -> None:
    batch = pack([fleet.samples], [[1.0, 0.0, -1.0]])
    assert batch.routes is not None
    with pytest.raises(InvalidInputError, match="2 layers, 3 have"):
        Policy(folder, GrpoConfig()).logprobs(replace(batch, routes=batch.routes[:, :2]))
    dense = Policy(write_tiny_model(tmp_path, tokenizer=False), GrpoConfig())
    with pytest.raises(UnsupportedError, match="no routers"):
        dense.logprobs(batch)


def test_an_error_in_a_replayed_pass_leaves_the_routers_free(folder: Path, fleet: Fleet) -> None:
    policy = Policy(folder, GrpoConfig())
    routes = pack([fleet.samples], [[1.0, 0.0, -1.0]]).routes
    with pytest.raises(KeyError), replaying(policy._model, routes):
        raise KeyError
    assert not any(part._forward_hooks for part in policy._model.modules() if type(part).__name__.endswith("Router"))


def test_fused_experts_are_published_under_the_folders_names(folder: Path, fleet: Fleet) -> None:
    policy = Policy(folder, GrpoConfig(lr=1e-2))
    stored, published = FolderSource(folder), StateDictSource(policy.state())
    assert published.specs() == stored.specs()
    assert all(np.array_equal(published.bits(name), stored.bits(name)) for name in stored.specs())
    policy.update([fleet.samples], [[0.0, 0.5, 1.0]])
    moved = StateDictSource(policy.state())
    name = next(name for name in stored.specs() if ".experts." in name and "up_proj" in name)
    changed = [name for name in stored.specs() if not np.array_equal(moved.bits(name), stored.bits(name))]
    assert name in changed
    assert all(".mlp.experts." in name or name in policy._live for name in changed)


def test_the_toys_task_is_to_name_the_prompts_class() -> None:
    assert toy.reward(sample((2, 6, 3, 62))) == 0.75
    assert toy.reward(sample(())) == 0.0
