"""What is asked for: prompt, sampling and the policy versions that may answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slackwater.errors import InvalidInputError
from slackwater.ids import RequestId, Version
from slackwater.rollout.grammar import Grammar

MAX_TOP_LOGPROBS = 20
"""Most alternatives per position, as OpenAI's API has it."""


MAX_TOKENS = 1_000_000
"""Most tokens of one answer, whatever the window."""
MAX_TOP_K = 1_000_000
MAX_TEMPERATURE = 100.0
MAX_STOP_IDS = 64
MAX_PENALTY = 2.0
"""Bound of presence and frequency penalties, as OpenAI's API has it."""
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_IDS = 1024
MAX_CACHE_SALT = 256
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSpec:
    """How each next token is drawn.

    *Raw* logits are the model's. *Processed* ones are made of them in this order, which is vLLM's:

    1. ``grammar`` bans what it doesn't let come next: minus infinity. Tokens that end the answer may come where it may
       end, and nowhere else, unless it takes them as text.
    2. While the answer has fewer than ``min_tokens`` tokens, those that would end it are banned too. This ban is lifted
       where nothing else could be drawn.
    3. ``logit_bias`` is added.
    4. ``repetition_penalty`` divides positive logits, and multiplies others, of tokens in prompt or answer.
    5. ``frequency_penalty`` is subtracted for each time that a token is in the answer, ``presence_penalty`` once.
    6. Division by ``temperature``; at 0 the largest logit is all that is left.
    7. ``min_p`` keeps tokens whose probability is at least that share of the largest one's.
    8. ``top_k`` keeps the largest of these.
    9. ``top_p`` keeps the shortest beginning, by falling probability, that reaches this share of what is left.

    Ties go to the lower id. What is kept is the *support*; the token is drawn from the softmax over it. The behaviour
    log-probability is the log of exactly that softmax at the drawn token, the raw one that of the raw logits' softmax.
    """

    max_tokens: int
    """Most tokens to sample; at least 1."""
    temperature: float = 1.0
    """0 is greedy: the largest logit, log-probability 0 by definition of its one-point distribution."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int = 0
    """0 keeps all."""
    seed: int | None = None
    """Draws depend on (seed, position) alone. None: the replica picks one and reports it."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the answer; the token is part of it."""
    top_logprobs: int = 0
    """Alternatives to report per position, 0 to `MAX_TOP_LOGPROBS`, of the processed distribution."""
    min_p: float = 0.0
    """In [0, 1]; 0 keeps all."""
    presence_penalty: float = 0.0
    """-2 to 2; 0 changes nothing."""
    frequency_penalty: float = 0.0
    """As ``presence_penalty``."""
    repetition_penalty: float = 1.0
    """Above 0, up to 100; 1 changes nothing."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, -100 to 100), each id once; at most `MAX_BIASED_IDS`."""
    min_tokens: int = 0
    """Tokens that come before one may end the answer; at most ``max_tokens``. Stop strings don't heed it."""
    ignore_eos: bool = False
    """The model's own end tokens don't end the answer; ``stop_token_ids`` do."""
    raw_logprobs: bool = False
    """Report raw log-probabilities of the drawn tokens too, and of as many alternatives as ``top_logprobs`` says."""
    sampling_mask: bool = False
    """Report the support of each draw."""
    grammar: Grammar | None = None
    """What the answer has to look like; not with ``ignore_eos``."""

    @property
    def named_ids(self) -> tuple[int, ...]:
        """Token ids that must be in the vocabulary for the request to have a meaning."""
        return tuple(token_id for token_id, _ in self.logit_bias)

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the distribution of the next one."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def __post_init__(self) -> None:
        checks = (
            (1 <= self.max_tokens <= MAX_TOKENS, "max_tokens", f"1 to {MAX_TOKENS}"),
            (0.0 <= self.temperature <= MAX_TEMPERATURE, "temperature", f"0 to {MAX_TEMPERATURE:.0f}"),
            (0.0 < self.top_p <= 1.0, "top_p", "above 0, up to 1"),
            (0 <= self.top_k <= MAX_TOP_K, "top_k", f"0 to {MAX_TOP_K}"),
            (self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", "0 to 2^63 - 1"),
            (_stops_hold(self.stop_token_ids), "stop_token_ids", f"at most {MAX_STOP_IDS} ids, each 0 to 2^31 - 1"),
            (0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"0 to {MAX_TOP_LOGPROBS}"),
            (0.0 <= self.min_p <= 1.0, "min_p", "0 to 1"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"0 to max_tokens, {self.max_tokens}"),
            (not (self.grammar and self.ignore_eos), "ignore_eos", "false with a grammar, which says where to end"),
            *_penalty_checks(self),
        )
        for holds, name, bound in checks:
            if not holds:
                raise InvalidInputError(f"{name} is out of range", hint=f"allowed: {bound}")


def _stops_hold(ids: tuple[int, ...]) -> bool:
    # Ids past the vocabulary never come and do no harm; negative ones would count from its end.
    return len(ids) <= MAX_STOP_IDS and all(0 <= token_id < 2**31 for token_id in ids)


def _penalty_checks(spec: SamplingSpec) -> tuple[tuple[bool, str, str], ...]:
    additive, most = f"-{MAX_PENALTY:.0f} to {MAX_PENALTY:.0f}", MAX_LOGIT_BIAS
    ids = spec.named_ids
    biased = len(ids) <= MAX_BIASED_IDS and len(set(ids)) == len(ids) and all(0 <= token_id < 2**31 for token_id in ids)
    return (
        (abs(spec.presence_penalty) <= MAX_PENALTY, "presence_penalty", additive),
        (abs(spec.frequency_penalty) <= MAX_PENALTY, "frequency_penalty", additive),
        (
            0.0 < spec.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            f"above 0, up to {MAX_REPETITION_PENALTY:.0f}",
        ),
        (
            biased and all(abs(bias) <= most for _, bias in spec.logit_bias),
            "logit_bias",
            f"up to {MAX_BIASED_IDS} different token ids, each -{most:.0f} to {most:.0f}",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConstraint:
    """Which policy versions may answer. Both bounds may be absent; a replica checks again as it samples."""

    min_version: Version | None = None
    """The first token is sampled by this version or a later one."""
    exact_version: Version | None = None
    """Every token is sampled by this version; a swap ends the answer with `Finish.POLICY_CHANGED`."""
    any_kv: bool = False
    """KV that other versions built may be reused for the prompt; the answer's KV spans tell of it."""
    max_lag: int | None = None
    """The first token is sampled by a version at most so many behind the newest committed one; at least 0, not with
    ``exact_version``. `counted_from` makes a bound of it: until then it admits no version."""

    def __post_init__(self) -> None:
        lower, exact = self.min_version, self.exact_version
        if self.max_lag is not None and self.max_lag < 0:
            raise InvalidInputError("policy is out of range: max_lag is negative", hint="it counts from 0")
        if self.max_lag is not None and exact is not None:
            raise InvalidInputError("policy is wrong: max_lag beside exact_version", hint="leave one of them out")
        if lower is not None and exact is not None and lower > exact:
            raise InvalidInputError(
                f"policy is wrong: min_version {lower} is above exact_version {exact}",
                hint="no version can meet both: drop one",
            )

    def counted_from(self, head: Version | None) -> "PolicyConstraint":
        """The same, with ``max_lag`` counted from the newest committed version; as it is where that isn't known."""
        if self.max_lag is None or head is None:
            return self
        bound = max(head - self.max_lag, self.min_version or 0)
        return replace(self, min_version=Version(bound), max_lag=None)

    def admits(self, version: Version) -> bool:
        """Whether ``version`` may sample the first token."""
        if self.max_lag is not None:
            return False
        if self.exact_version is not None and version != self.exact_version:
            return False
        return self.min_version is None or version >= self.min_version

    def way_out(self, held: Sequence[Version]) -> str:
        """What to do where none of the versions ``held`` is admitted; replicas go back only if they are told to."""
        if self.exact_version is not None and held and min(held) > self.exact_version:
            return f"hot-load version {self.exact_version}, or ask a group that serves it: replicas don't go back"
        return "retry once the fleet has swapped"

    def __str__(self) -> str:
        if self.max_lag is not None:
            return f"max_lag={self.max_lag} (the newest committed version isn't known)"
        if self.exact_version is not None:
            return f"exact_version={self.exact_version}"
        return "any" if self.min_version is None else f"min_version={self.min_version}"


ANY_POLICY = PolicyConstraint()
"""Admits every version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """One prompt, one answer. ``n`` answers are ``n`` of these."""

    request_id: RequestId
    """Unique; chosen by the gateway."""
    prompt_ids: tuple[int, ...]
    """The prompt as the engine sees it; at least one token."""
    sampling: SamplingSpec
    policy: PolicyConstraint = ANY_POLICY
    forced_ids: tuple[int, ...] = ()
    """Forced decoding: take these tokens instead of drawing, report their log-probabilities, then finish."""
    streamed: bool = False
    """The caller passes tokens on as they come, so an answer that has begun can't be begun again elsewhere."""
    model: str = field(default="")
    """Name of the model that the client asked for; the router's key to a replica group."""
    continued: int = 0
    """How many of the prompt's last ids are tokens of this very answer, which another replica sampled: penalties take
    them as such."""
    cache_salt: str = ""
    """KV is shared among requests with the same one alone; at most `MAX_CACHE_SALT` characters."""
    routes_from: int | None = None
    """Report the routes of positions from this one on; None: of none."""
    forced_routes: bytes = b""
    """Router replay: the experts of the first positions, rows as of `slackwater.rollout.routes.Routing`; routers weigh
    them, and choose for later positions as ever. KV made so is shared with nobody."""

    def __post_init__(self) -> None:
        if self.routes_from is not None and not 0 <= self.routes_from < len(self.prompt_ids):
            raise InvalidInputError(
                f"routes are asked for from position {self.routes_from}", hint="name a position of the prompt"
            )
        if len(self.cache_salt) > MAX_CACHE_SALT:
            raise InvalidInputError("cache_salt is out of range", hint=f"at most {MAX_CACHE_SALT} characters")
        if self.forced_ids and self.sampling.grammar:
            raise InvalidInputError("forced_token_ids don't go with a grammar", hint="send one of them")
        if not self.prompt_ids:
            raise InvalidInputError("prompt is empty", hint="send at least one token")
        if not 0 <= self.continued < len(self.prompt_ids):
            raise InvalidInputError("continued is out of range", hint="it counts ids of the prompt, but not all")
