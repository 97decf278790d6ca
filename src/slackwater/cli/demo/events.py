"""What the trainer process tells the demo, one JSON object a line on its standard output."""

import msgspec

from slackwater.errors import CorruptError


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """The trainer has begun something slow."""

    name: str
    """``model``: the model's folder is being made; ``ready``: it is there; ``training``; ``done``."""


class PublishedEvent(msgspec.Struct, frozen=True, tag="published"):
    """A version is committed."""

    version: int
    kind: str
    state: str
    """Digest of the published state, hex."""
    changed: int
    """Elements whose bits changed; of an anchor all."""
    total: int
    """Elements of the model."""
    uploaded_bytes: int
    full_bytes: int
    """Bytes of the whole model in its serving dtype."""


class StepEvent(msgspec.Struct, frozen=True, tag="step"):
    """A training step is done."""

    step: int
    reward: float
    """Mean over the step's answers, 0 to 1."""
    mismatch_kl: float
    num_tokens: int
    rollout_s: float
    update_s: float
    publish_s: float
    example: str
    """Text of one answer."""


Event = Phase | PublishedEvent | StepEvent


def encode(event: Event) -> str:
    """One line, without its end."""
    return msgspec.json.encode(event).decode()


def decode_event(line: str) -> Event:
    """Read one line.

    Raises:
        CorruptError: It is no event.
    """
    try:
        return msgspec.json.decode(line, type=Event)
    except msgspec.DecodeError as error:
        raise CorruptError(f"the trainer wrote {line[:120]!r}, which is no event: {error}") from error
