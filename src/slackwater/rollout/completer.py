"""The Completer seam: a replica is one, the router is one, so the API is written once."""

from collections.abc import AsyncIterator
from typing import Protocol

from slackwater.rollout.evidence import Finish, Origin, TokenStep
from slackwater.rollout.request import CompletionRequest
from slackwater.rollout.routes import Routing


class Answer(Protocol):
    """One answer under way.

    Iterate to receive tokens; call ``aclose`` in a ``finally`` whatever happens: it aborts an answer that has
    not ended, frees its slot and its reservation, and may be called twice. Another task may call it while one reads.
    """

    @property
    def origin(self) -> Origin:
        """Who answers; final once the first token has been received."""
        ...

    @property
    def finish(self) -> Finish | None:
        """How it ended; None until then. Set even where no last token carries it, as after an abort.

        An answer that begins again elsewhere hasn't ended.
        """
        ...

    def __aiter__(self) -> AsyncIterator[TokenStep]:
        """Tokens in order, each once. Ends after the step with ``finish`` set, or after an abort.

        Raises:
            ReplicaLostError: The replica is gone, and no other can go on with the answer.
            CorruptError: The replica's answer broke the protocol.
        """
        ...

    async def aclose(self) -> None:
        """Abort if it hasn't ended; release everything it holds. Idempotent, never raises.

        An iteration under way in another task receives what had come by now, held back or not, and ends without an
        error, whatever it was waiting for; so does one that begins later.
        """
        ...


class Completer(Protocol):
    """Answers requests. Safe for any number of concurrent calls from one event loop."""

    async def complete(self, request: CompletionRequest) -> Answer:
        """Admit a request and begin its answer. Returns once it is admitted, before any token.

        Raises:
            InvalidInputError: The request can't be answered by this model (window, token id, bound).
            NotFoundError: The model is not served here.
            PolicyUnmetError: No replica holds an admitted policy version; retryable.
            OverloadedError: No capacity; retryable.
            UnavailableError: No replica answers; retryable.
        """
        ...

    def window(self) -> int:
        """The context window in tokens: prompt and completion together."""
        ...

    def routing(self) -> Routing | None:
        """What the model's routers choose from; None: it has none, or that isn't known."""
        ...
