"""The tap on routers of several makes: what it forces, and that none is believed which can't be forced."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slackwater.engine.torch.tap import Ids, RouterTap
from slackwater.errors import InternalError
from slackwater.rollout.routes import Routing


class Router(nn.Module):
    """Chooses in the way that it is made with."""

    def __init__(self, choose: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, scores: Tensor) -> Any:
        return self.choose(scores)


ROUTING = Routing(layers=(4,), experts=6, per_token=2)
TOLD = np.array([[[5, 0]], [[-1, -1]], [[2, 1]]])


def forced(choose: Callable[[Tensor], Any]) -> Ids:
    scores = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    router = Router(choose)
    with RouterTap({4: router}, ROUTING).watching(TOLD) as seen:
        router(scores)
    return seen.chosen(4)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_choices_of_groups_are_left_alone_or_agree(groups: int) -> None:
    def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
        best = scores.view(4, groups, -1).topk(1, dim=-1)[0].sum(dim=-1)
        kept = torch.topk(best, k=min(2, groups), dim=-1, sorted=False)[1]
        mask = torch.zeros_like(best).scatter_(1, kept, 1)
        inside = mask.unsqueeze(-1).expand(4, groups, 6 // groups).reshape(4, 6) > 0
        ids = torch.topk(scores.masked_fill(~inside, float("-inf")), k=2, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        assert weights.isfinite().all()
        return weights, ids

    chosen = forced(choose)
    assert chosen[[0, 2]].tolist() == TOLD[[0, 2]].tolist()
    assert (chosen[[1, 3]] >= 0).all()


@pytest.mark.parametrize(
    "choose",
    [
        lambda scores: (scores, scores.argsort(dim=-1, descending=True)[:, :2]),
        lambda scores: (scores, scores.topk(2).indices.flip(-1)),
        lambda scores: (scores, scores.T.topk(2, dim=0).indices.T),
    ],
    ids=["argsort", "turned", "transposed"],
)
def test_a_router_that_doesnt_do_what_it_is_told_fails_the_pass(choose: Callable[[Tensor], Any]) -> None:
    with pytest.raises(InternalError, match="layer 4 doesn't take forced experts"):
        forced(choose)


def test_a_router_that_tells_no_ids_fails_the_pass() -> None:
    with pytest.raises(InternalError, match="returns no int64 ids"):
        forced(lambda scores: scores)


def test_a_router_that_wasnt_asked_is_no_row() -> None:
    with RouterTap({4: Router(lambda scores: scores)}, ROUTING).watching() as seen:
        pass
    with pytest.raises(InternalError, match="0 of 1 routers"):
        seen.chosen(1)
