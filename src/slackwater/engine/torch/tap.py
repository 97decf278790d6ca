"""Seeing which experts a model's routers choose, and telling them which to choose.

A forced choice keeps the router's own weighting: within the router's forward alone, its choice among experts is
answered with the ids that it was told, and their scores; everything before and after is its own code.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slackwater.errors import InternalError
from slackwater.rollout.routes import Routing

Ids = npt.NDArray[np.int64]
"""``[tokens, layers, per_token]``, logical expert ids; as what is forced, rows of -1 where routers choose."""

_CHOICES: Final[tuple[Callable[..., Any], ...]] = (torch.topk, Tensor.topk)


class RouterTap:
    """On a model's routers.

    Args:
        routers: By number of layer, rising; see `slackwater.engine.torch.model.LoadedModel.routers`.
        routing: What they choose from.
    """

    def __init__(self, routers: Mapping[int, nn.Module], routing: Routing) -> None:
        self._routers: Final = tuple(routers.values())
        self._routing: Final = routing

    @contextmanager
    def watching(self, forced: Ids | None = None) -> Generator["Seen"]:
        """See what routers choose in one run of the model, in this block.

        Args:
            forced: Of its first tokens; None: routers choose everywhere.

        Raises:
            InternalError: A router did otherwise than it was told, or returns no ids.
        """
        seen = Seen(self._routing, forced)
        for at, router in enumerate(self._routers):
            router.forward = partial(seen.through, at, router.forward)
        try:
            yield seen
        finally:
            for router in self._routers:
                del router.forward


class Seen:
    """What routers chose in one run of a model.

    Args:
        routing: What they choose from.
        forced: What they are told.
    """

    def __init__(self, routing: Routing, forced: Ids | None) -> None:
        self._routing: Final = routing
        self._forced: Final = None if forced is None else torch.from_numpy(forced)  # pyright: ignore[reportUnknownMemberType]
        self._chosen: Final[dict[int, Tensor]] = {}

    def chosen(self, count: int) -> Ids:
        """Of the run's first ``count`` tokens, padding left out.

        Raises:
            InternalError: A router wasn't asked.
        """
        asked = [self._chosen[at][:count] for at in sorted(self._chosen)]
        if len(asked) != len(self._routing.layers):
            raise InternalError(f"{len(asked)} of {len(self._routing.layers)} routers were asked")
        return torch.stack(asked, dim=1).numpy()

    def through(self, at: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the router that is number ``at`` of all."""
        told = None if self._forced is None else self._forced[:, at]
        if told is None:
            output = forward(*args, **kwargs)
        else:
            with _Forcing(told, self._routing):
                output = forward(*args, **kwargs)
        ids = _ids_of(output, self._routing)
        if told is not None and not torch.equal(ids[: len(told)], torch.where(told < 0, ids[: len(told)], told)):
            layer = self._routing.layers[at]
            raise InternalError(f"the router of layer {layer} doesn't take forced experts", hint="send no routes")
        self._chosen[at] = ids
        return output


class _Forcing(TorchFunctionMode):
    """Answers what chooses ``per_token`` of all experts for each token; choices of groups have other shapes.

    Where they have the same one, the same answer is right: the groups of the forced experts are then these themselves.
    """

    def __init__(self, told: Tensor, routing: Routing) -> None:
        super().__init__()
        self._told: Final = told
        self._routing: Final = routing

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        output = func(*args, **(kwargs or {}))
        if func not in _CHOICES:
            return output
        scores: Tensor = args[0] if args else kwargs["input"]
        natural: Tensor = output[1]
        tokens = len(scores)
        wanted = ((tokens, self._routing.experts), (tokens, self._routing.per_token))
        if (tuple(scores.shape), tuple(natural.shape)) != wanted:
            return output
        ids = natural.clone()
        ids[: len(self._told)] = torch.where(self._told < 0, natural[: len(self._told)], self._told)
        return torch.return_types.topk((scores.gather(1, ids), ids))  # pyright: ignore[reportAttributeAccessIssue]


def _ids_of(output: Any, routing: Routing) -> Tensor:
    """What a router returns of the experts that it chose."""
    for part in output if isinstance(output, tuple) else (output,):
        if isinstance(part, Tensor) and part.dtype == torch.int64 and part.shape[1:] == (routing.per_token,):
            return part
    raise InternalError(f"a router returns no int64 ids [tokens, {routing.per_token}]")
