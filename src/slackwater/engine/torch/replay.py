"""Verification: score an answer's tokens again, exactly as they were made, swaps and all.

A `Replayer` holds answers between calls, so that other weights can be committed at the very token where the
engine got them: the KV is then built by the same versions, in the same shapes, and every bit agrees.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from slackwater.checkpoint.tensor import Bits, Tile, TileWrite
from slackwater.config.in_flight import InFlight
from slackwater.engine.torch.batch import Shaping
from slackwater.engine.torch.core import Core
from slackwater.engine.torch.model import load
from slackwater.engine.torch.sequence import Failed, Made
from slackwater.engine.torch.weights import WeightBits
from slackwater.errors import InvalidInputError, UnsupportedError
from slackwater.ids import RequestId, Version
from slackwater.rollout.evidence import TokenStep
from slackwater.rollout.request import CompletionRequest, SamplingSpec


class Replayer:
    """Forced decoding under a sequence of weights; single-threaded, no event loop.

    Example, for an answer with the spans ``[7, 0, 12)`` and ``[8, 12, 20)``::

        replayer.begin({"a": (prompt_ids, sampling)})      # version 7 is in place
        head = replayer.extend({"a": token_ids[:12]})["a"]
        replayer.commit(writes_of_8, Version(8))
        tail = replayer.extend({"a": token_ids[12:]})["a"]

    Args:
        folder: The checkpoint of ``version``.
        version: Its label.
        threads: As the engine had.
        slots: As the engine had: the shapes of its arithmetic depend on it.
        window: Most tokens of prompt and completion together; the model's by default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        version: Version,
        threads: int = 1,
        slots: int = 16,
        window: int | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        model = load(folder)
        self._weights: Final = WeightBits(model.parameters, model.specs)
        shaping = Shaping(slots=slots, invariant=True)
        self._core: Final = Core(model, shaping, window=window or model.window, version=version)
        self._slots: Final = slots
        self._begun: Final[dict[str, CompletionRequest]] = {}
        self._numbers: Final[dict[str, int]] = {}
        self._next = 0

    @property
    def version(self) -> Version:
        """Label of the weights in place."""
        return self._core.version

    @property
    def slots(self) -> int:
        """Answers that fit at once."""
        return self._slots

    def read(self, name: str, tile: Tile) -> Bits:
        """See `slackwater.engine.base.TileReader.read`."""
        return self._weights.read(name, tile)

    def commit(self, writes: Sequence[TileWrite], version: Version, *, in_flight: InFlight = InFlight.CONTINUE) -> None:
        """Put other weights in place; held answers keep their KV, or have it computed again.

        Raises:
            NotFoundError: A write names an unknown tensor.
            InvalidInputError: A write doesn't fit its tensor.
        """
        self._weights.commit(self._weights.stage(writes))
        self._core.relabel(version, in_flight=in_flight)

    def begin(self, answers: Mapping[str, tuple[tuple[int, ...], SamplingSpec]]) -> None:
        """Take up answers: by name, the prompt's ids and the sampling whose distribution is asked for.

        The prompt is computed at the first `extend`, under the weights that are in place then.

        Raises:
            InvalidInputError: A name is taken, a prompt can't be served, or slots are lacking.
            UnsupportedError: A distribution is one that a grammar constrains.
        """
        if len(self._begun) + len(answers) > self._slots:
            raise InvalidInputError(f"only {self._slots} answers fit at once", hint="drop some first")
        for name, (prompt, sampling) in answers.items():
            if name in self._begun:
                raise InvalidInputError(f"the answer {name!r} has begun already", hint="drop it first")
            if sampling.grammar is not None:
                raise UnsupportedError(f"the answer {name!r} has a grammar", hint="compare raw log-probabilities")
            request = CompletionRequest(request_id=RequestId(name), prompt_ids=prompt, sampling=sampling, routes_from=0)
            self._core.check(request)
            self._begun[name] = request

    def extend(self, answers: Mapping[str, Sequence[int]]) -> dict[str, list[float]]:
        """Force the next tokens of answers that have begun; their log-probabilities, by name. Raises as `force`."""
        return {name: [step.logprob for step in steps] for name, steps in self.force(answers).items()}

    def force(self, answers: Mapping[str, Sequence[int]]) -> dict[str, list[TokenStep]]:
        """As `extend`, with all that the engine tells of a token: routes, and what else the sampling asks for.

        Raises:
            InvalidInputError: An answer hasn't begun, or a token can't follow.
            CorruptError: The weights in place make logits that are no numbers.
        """
        found: dict[str, list[TokenStep]] = {name: [] for name in answers}
        for name, ids in answers.items():
            if ids:
                self._queue(name, ids)
        names = {number: name for name, number in self._numbers.items()}
        while self._core.busy:
            for event in self._core.step():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Made):
                    found[names[event.key]].append(event.step)
        return found

    def drop(self, name: str) -> None:
        """Forget an answer and free its slot; unknown names are ignored."""
        self._begun.pop(name, None)
        number = self._numbers.pop(name, None)
        if number is not None:
            self._core.abort(number)

    def _queue(self, name: str, ids: Sequence[int]) -> None:
        if name not in self._begun:
            raise InvalidInputError(f"the answer {name!r} hasn't begun", hint="call begin first")
        if name in self._numbers:
            self._core.extend(self._numbers[name], ids)
            return
        self._core.hold(self._next, self._begun[name], ids)
        self._numbers[name] = self._next
        self._next += 1
