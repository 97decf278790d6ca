"""The record of a run's answers, one JSON object a line: what `slackwater replay` re-scores."""

import msgspec

from slackwater.errors import CorruptError


class AnswerRecord(msgspec.Struct, frozen=True):
    """One answer in the run's record, a line of ``rollouts.jsonl``."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    policy: list[tuple[int, int, int]]
    """``[version, start, end)`` over the tokens."""
    replica: str
    finish: str
    reward: float
    text: str
    kv: list[tuple[int, int, int]] = []
    """``[version, start, end)`` over positions, as in `slackwater.trainer.samples.Sample.kv`; empty where not told."""
    prompt_version: int | None = None
    replicas: list[tuple[str, str, int, int]] = []
    """``[replica, boot, start, end)`` over the tokens; empty where not told."""
    top_p: float = 1.0
    """What the tokens were drawn with, at temperature 1."""
    raw_logprobs: list[float] = []
    """Of the raw logits; empty where not told."""
    masks: list[list[int]] = []
    """The ids that each token was drawn from, rising; empty where not told, as for a token that has too many."""
    routes: list[bytes] = []
    """Experts of the positions, one row each, as `slackwater.rollout.routes.Routing` lays them out; base64 in JSON.
    Empty where not told."""

    @property
    def rows(self) -> int:
        """Positions that went through the model: all but the last token's."""
        return len(self.prompt_ids) + len(self.token_ids) - 1 if self.token_ids else 0


def encode_record(record: AnswerRecord) -> str:
    """One line, without its end."""
    return msgspec.json.encode(record).decode()


def decode_record(line: str | bytes) -> AnswerRecord:
    """Read one line of a run's record.

    Raises:
        CorruptError: It is no record.
    """
    try:
        return msgspec.json.decode(line, type=AnswerRecord)
    except msgspec.DecodeError as error:
        raise CorruptError(f"a rollout record is damaged: {error}", hint="run the demo again") from error
