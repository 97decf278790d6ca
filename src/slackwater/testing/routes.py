"""Routers whose choices tests know: experts follow from token and layer alone, whatever the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.errors import InvalidInputError, UnsupportedError
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing

ROUTING = Routing(layers=(1, 2, 5), experts=12, per_token=2)
"""Of a small model: layers 0, 3 and 4 are dense."""
_STRIDES = (7, 3)
"""By which choices move with the token, and with the layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedRouter:
    """Chooses adjacent experts, the first of them by token and layer."""

    routing: Routing = ROUTING
    placement: tuple[int, ...] = ()
    """The logical expert that is at each physical place, as load balancers move them; empty: each at its own."""
    leaks: bool = False
    """A bug: it tells physical places."""

    def rows(self, tokens: Sequence[int], forced: bytes = b"", first: int = 0) -> bytes:
        """The rows that an engine tells of ``tokens``, which stand at positions from ``first`` on.

        Args:
            tokens: Any ids.
            forced: Rows that were forced from position 0 on.
            first: Position of the first token.
        """
        size = self.routing.row_bytes
        given = forced[first * size : (first + len(tokens)) * size]
        made = {token: self._row(token) for token in set(tokens)}
        return given + b"".join(made[token] for token in tokens[len(given) // size :])

    def told(self, request: CompletionRequest, tokens: Sequence[int]) -> bytes | None:
        """What the token after ``tokens``, the answer's so far, tells; None where nothing was asked for."""
        begin = request.routes_from
        if begin is None:
            return None
        ids = (*request.prompt_ids[begin:], *tokens)
        new = 1 if tokens else len(ids)
        first = begin + len(ids) - new
        return self.rows(ids[-new:], request.forced_routes, first)

    def _row(self, token: int) -> bytes:
        width = 1 if self.routing.dtype == "uint8" else 2
        ids = (expert for layer in self.routing.layers for expert in self._chosen(token, layer))
        return b"".join(expert.to_bytes(width, "little") for expert in ids)

    def _chosen(self, token: int, layer: int) -> list[int]:
        by_token, by_layer = _STRIDES
        first = token * by_token + layer * by_layer
        logical = [(first + rank) % self.routing.experts for rank in range(self.routing.per_token)]
        # The kernels of an engine see physical places; what it tells are the experts there.
        places = [self.placement.index(expert) for expert in logical] if self.placement else logical
        return places if self.leaks or not self.placement else [self.placement[place] for place in places]


def check_forced(request: CompletionRequest, router: ScriptedRouter | None) -> None:
    """Refuse routes that a request can't force, as engines do.

    Raises:
        InvalidInputError: They don't fit, or are of too many positions.
        UnsupportedError: There is no router.
    """
    if not request.forced_routes:
        return
    if router is None:
        raise UnsupportedError("this model has no router to force", hint="send no routes")
    if router.routing.check(request.forced_routes) > len(request.prompt_ids) + len(request.forced_ids):
        raise InvalidInputError("forced_routes are of more positions than prompt and forced tokens have")
