"""Slackwater: rollouts for reinforcement learning, with every token labelled by the policy that made it.

Import what you need from its package: ``from slackwater.publish.publisher import Publisher``. The root holds the
error tree alone, so that importing it costs nothing.
"""

from slackwater.errors import (
    AuthError,
    CanaryError,
    ConflictError,
    ContextLengthError,
    CorruptError,
    InternalError,
    InvalidInputError,
    LostRaceError,
    NotFoundError,
    OverloadedError,
    PolicyUnmetError,
    ReplicaLostError,
    SlackwaterError,
    SpoiltError,
    SwapError,
    UnavailableError,
    UnsupportedError,
    WrongBaseError,
)

__version__ = "0.1.0"

__all__ = [
    "AuthError",
    "CanaryError",
    "ConflictError",
    "ContextLengthError",
    "CorruptError",
    "InternalError",
    "InvalidInputError",
    "LostRaceError",
    "NotFoundError",
    "OverloadedError",
    "PolicyUnmetError",
    "ReplicaLostError",
    "SlackwaterError",
    "SpoiltError",
    "SwapError",
    "UnavailableError",
    "UnsupportedError",
    "WrongBaseError",
    "__version__",
]
