"""One answer's way through the core: what was asked for, how far it is, and what the core reports of it."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from slackwater.engine.torch.adjust import Tally
from slackwater.engine.torch.grammars import Matching
from slackwater.engine.torch.prefix import Seat
from slackwater.engine.torch.sampler import Ask, Drawn
from slackwater.errors import CorruptError, SlackwaterError
from slackwater.ids import Version
from slackwater.rollout.evidence import Finish, PolicySpan, TokenStep, grown
from slackwater.rollout.request import CompletionRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """An answer's prompt is in place; reported before its first token."""

    key: int
    cached_tokens: int
    """Prompt tokens whose KV another answer had built."""
    prompt_version: Version | None
    """None: several versions have built it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """An answer's next token; the last one if ``step.finish`` is set."""

    key: int
    step: TokenStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """An answer ended between two tokens."""

    key: int
    finish: Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An answer ended in an error."""

    key: int
    error: SlackwaterError


Event = Began | Made | Ended | Failed


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """The state of one answer."""

    key: int
    request: CompletionRequest
    seed: int
    limit: int
    """Most completion tokens: the request's, cut to the window."""
    ends: frozenset[int]
    """Tokens that end it where nothing is forced."""
    hold: bool = False
    """Keep the slot after the forced tokens, for more of them."""
    forced: list[int] = field(default_factory=list[int])
    slot: int = -1
    cached: int = 0
    kv: tuple[PolicySpan, ...] = ()
    """Which versions computed the rows in place."""
    told: tuple[PolicySpan, ...] = ()
    """What the answer's reader takes that to be, up to the newest token; see `slackwater.rollout.evidence.kv_spans`."""
    again: int = 0
    """Tokens whose rows prefill computes, after the prompt's. Those of later ones come one by one, as they did."""
    tokens: list[int] = field(default_factory=list[int])
    """The completion so far. The row of its newest token is written by the next step."""
    version: Version | None = None
    """Of the newest token."""
    tally: Tally | None = None
    """Of its tokens, once the sampler was first asked; None where nothing penalises them."""
    matching: Matching | None = None
    """Where it stands in its grammar, after all of its tokens; None: it has none."""

    @property
    def made(self) -> int:
        """Completion tokens so far."""
        return len(self.tokens)

    @property
    def filled(self) -> int:
        """Rows in place."""
        return self.kv[-1].end if self.kv else 0

    @property
    def due(self) -> int:
        """Rows that prefill has to put in place."""
        return len(self.request.prompt_ids) + self.again

    @property
    def behind(self) -> bool:
        """Whether rows have to be put in place before the step that draws its next token."""
        return self.filled < len(self.request.prompt_ids) + max(0, self.made - 1)

    @property
    def reach(self) -> int:
        """Rows that it needs for that token and the one after a first."""
        return len(self.request.prompt_ids) + max(1, self.made)

    @property
    def following(self) -> Items[int]:
        """The token whose row is the next after those of the prompt."""
        at = self.filled - len(self.request.prompt_ids)
        return self.tokens[at : at + 1]

    @property
    def position(self) -> int:
        """Of the token to draw next, counted from the start of the prompt."""
        return len(self.request.prompt_ids) + self.made

    @property
    def ready(self) -> bool:
        """Whether it may take a next token now: not so while it is held and has no forced one left."""
        return not self.hold or self.made < len(self.forced)

    def chunk(self, size: int) -> Items[int]:
        """The next tokens to prefill, at most ``size``."""
        begin, end = self.filled, min(self.filled + size, self.due)
        prompt = self.request.prompt_ids
        return [*prompt[begin:end], *self.tokens[max(0, begin - len(prompt)) : max(0, end - len(prompt))]]

    def sit(self, seat: Seat, version: Version, *, exact: bool) -> None:
        """Take a slot with what it starts with; ``version`` is in place.

        ``exact``: rows that are lost are computed again in the shapes that they had, as long as the version is theirs.
        """
        self.slot, self.kv = seat.slot, seat.kv
        if not self.made:
            self.cached = seat.shared
        if not exact or any(span.version != version for span in self.told):
            self.again = max(0, self.made - 1)

    def rise(self) -> None:
        """Give the slot back, and the rows with it."""
        self.slot, self.kv = -1, ()

    def restart(self) -> None:
        """Begin anew in the same slot: prefill computes the rows of all tokens but the newest."""
        self.kv, self.cached, self.again = (), 0, max(0, self.made - 1)

    def ask(self) -> Ask:
        """What the sampler needs for the next token."""
        spec = self.request.sampling
        if self.tally is None and spec.penalises:
            self.tally = self._tallied()
        return Ask(
            spec=spec,
            seed=self.seed,
            position=self.position,
            forced=self.forced[self.made] if self.made < len(self.forced) else None,
            banned=tuple(self._stops()) if self.made < spec.min_tokens else (),
            tally=self.tally,
            allowed=self.matching.allowed(self._stops()) if self.matching else None,
        )

    def accept(self, drawn: Drawn, version: Version, *, routes: bytes | None = None) -> TokenStep:
        """Take a token as the answer's next one; ``routes`` are told with it."""
        assumed, built = (grown(spans, version, self.position) for spans in (self.told, self.kv))
        self.told = built
        self.tokens.append(drawn.token_id)
        if self.tally is not None:
            self.tally.count(self.tokens[-1:])
        if self.matching is not None and drawn.token_id not in self._stops():
            self.matching.take(self.tokens[-1:])
        self.version = version
        return TokenStep(
            token_id=drawn.token_id,
            logprob=drawn.logprob,
            version=version,
            top_ids=drawn.top_ids,
            top_logprobs=drawn.top_logprobs,
            kv=() if built == assumed else built,
            raw_logprob=drawn.raw_logprob,
            raw_top_ids=drawn.raw_top_ids,
            raw_top_logprobs=drawn.raw_top_logprobs,
            mask=drawn.mask,
            routes=routes,
            finish=self._finish(),
        )

    def undrawable(self, version: Version) -> SlackwaterError:
        """Why there is no next token, where the sampler finds none."""
        if self.matching is not None and not self.matching.allowed(self._stops()).any():
            return self.matching.failure()
        where = f"version {version} made logits that are no numbers at position {self.position}"
        return CorruptError(where, hint="put the previous version back")

    def _stops(self) -> frozenset[int]:
        """Tokens that end it, as the request has it."""
        spec = self.request.sampling
        return frozenset(spec.stop_token_ids) if spec.ignore_eos else self.ends

    def _tallied(self) -> Tally:
        tally, prompt = Tally(), self.request.prompt_ids
        begin = len(prompt) - self.request.continued
        if self.request.sampling.repetition_penalty != 1.0:
            tally.see(prompt[:begin])
        tally.count(prompt[begin:])
        tally.count(self.tokens)
        return tally

    def _finish(self) -> Finish | None:
        if self.hold:
            return None
        ended = self.made == len(self.forced) if self.forced else self.tokens[-1] in self._stops()
        if ended:
            return Finish.STOP
        return Finish.LENGTH if self.made == self.limit else None
