"""What is asked for: prompt, sampling and the policy versions that may answer."""

from dataclasses import dataclass, field

from slackwater.errors import InvalidInputError
from slackwater.ids import RequestId, Version

MAX_TOP_LOGPROBS = 20
"""Most alternatives per position, as OpenAI's API has it."""


MAX_TOKENS = 1_000_000
"""Most tokens of one answer, whatever the window."""
MAX_TOP_K = 1_000_000
MAX_TEMPERATURE = 100.0
MAX_STOP_IDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSpec:
    """How each next token is drawn.

    Processed logits are ``logits / temperature``, cut to the ``top_k`` largest, then to the smallest set whose
    probability reaches ``top_p``; the token is drawn from their softmax. The behaviour log-probability is the
    log of exactly that softmax at the drawn token.
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

    def __post_init__(self) -> None:
        checks = (
            (1 <= self.max_tokens <= MAX_TOKENS, "max_tokens", f"1 to {MAX_TOKENS}"),
            (0.0 <= self.temperature <= MAX_TEMPERATURE, "temperature", f"0 to {MAX_TEMPERATURE:.0f}"),
            (0.0 < self.top_p <= 1.0, "top_p", "above 0, up to 1"),
            (0 <= self.top_k <= MAX_TOP_K, "top_k", f"0 to {MAX_TOP_K}"),
            (self.seed is None or 0 <= self.seed < 2**63, "seed", "0 to 2^63 - 1"),
            (len(self.stop_token_ids) <= MAX_STOP_IDS, "stop_token_ids", f"at most {MAX_STOP_IDS}"),
            (0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"0 to {MAX_TOP_LOGPROBS}"),
        )
        for holds, name, bound in checks:
            if not holds:
                raise InvalidInputError(f"{name} is out of range", hint=f"allowed: {bound}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConstraint:
    """Which policy versions may answer. Both bounds may be absent; a replica checks again as it samples."""

    min_version: Version | None = None
    """The first token is sampled by this version or a later one."""
    exact_version: Version | None = None
    """Every token is sampled by this version; a swap ends the answer with `Finish.POLICY_CHANGED`."""
    any_kv: bool = False
    """KV that other versions built may be reused for the prompt; the answer's KV spans tell of it."""

    def __post_init__(self) -> None:
        lower, exact = self.min_version, self.exact_version
        if lower is not None and exact is not None and lower > exact:
            raise InvalidInputError(
                f"policy: min_version {lower} is above exact_version {exact}", hint="no version can meet both: drop one"
            )

    def admits(self, version: Version) -> bool:
        """Whether ``version`` may sample the first token."""
        if self.exact_version is not None and version != self.exact_version:
            return False
        return self.min_version is None or version >= self.min_version

    def __str__(self) -> str:
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

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise InvalidInputError("the prompt is empty", hint="send at least one token")
