"""The one error tree, grouped by what a handler does.

::

    SlackwaterError
      InvalidInputError    the caller's fault: change the request                     (also ValueError)
        ContextLengthError   the prompt leaves no room in the model's window
      AuthError            no key, or a key without this right
      NotFoundError        no such bucket, snapshot, object, replica or model          (also LookupError)
      ConflictError        someone else moved first, or the states do not fit: read again, plan again
        LostRaceError      another publisher committed this version
        WrongBaseError     a delta was made on another state than the one held
        ForkError          the prior ids of an episode can't all be kept
        PolicyUnmetError   no replica holds a policy version that the request admits: retry later
      CorruptError         a digest, bound or format is wrong: discard, fetch elsewhere, never retry the bytes
      UnavailableError     transient: retry with back-off
        ReplicaLostError   the replica that served the request is gone
        OverloadedError    no capacity now: shed
      SwapError            a swap failed: the old version serves on
        CanaryError        a version's canary was answered otherwise than its manifest expects
      SpoiltError          an engine's memory isn't what it was given: restart it
      UnsupportedError     this engine, store or model cannot do that
      InternalError        ours: please report

Every error says what happened, where, and what to do. ``kind`` is a stable, append-only machine code.
"""

from typing import ClassVar


class SlackwaterError(Exception):
    """Base of every error that Slackwater raises.

    Args:
        message: One sentence: what happened and where.
        hint: What the reader can do about it; empty where the message says it already.
    """

    kind: ClassVar[str] = "error"
    """Stable machine code, on the wire and in logs."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(cls: type[SlackwaterError], message: str, hint: str) -> SlackwaterError:
    return cls(message, hint=hint)


class InvalidInputError(SlackwaterError, ValueError):
    """The caller's fault: change the request."""

    kind = "invalid_input"


class ContextLengthError(InvalidInputError):
    """The prompt leaves no room in the model's window: shorten it."""

    kind = "context_length_exceeded"


class AuthError(SlackwaterError):
    """No key, or a key without this right."""

    kind = "auth"


class NotFoundError(SlackwaterError, LookupError):
    """No such bucket, snapshot, object, replica or model."""

    kind = "not_found"


class ConflictError(SlackwaterError):
    """Someone else moved first, or the states do not fit: read again, plan again."""

    kind = "conflict"


class LostRaceError(ConflictError):
    """Another publisher committed this version: read the head again, publish on it."""

    kind = "lost_race"


class WrongBaseError(ConflictError):
    """A delta was made on another state than the one held: catch up from an anchor."""

    kind = "wrong_base"


class ForkError(ConflictError):
    """The prior ids of an episode can't all be kept: say that it may fork, or send others.

    Args:
        message: One sentence: what happened and where.
        hint: What the reader can do about it; empty where the message says it already.
        fork: How many of the prior ids can be kept.
    """

    kind = "fork"

    def __init__(self, message: str, *, hint: str = "", fork: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.fork = fork

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_fork, (self.message, self.hint, self.fork)


def _rebuild_fork(message: str, hint: str, fork: int) -> ForkError:
    return ForkError(message, hint=hint, fork=fork)


class PolicyUnmetError(ConflictError):
    """No replica holds a policy version that the request admits: retry later.

    Args:
        message: One sentence: what happened and where.
        hint: What the reader can do about it; empty where the message says it already.
        versions: The versions held where the request was turned away.
    """

    kind = "policy_unmet"

    def __init__(self, message: str, *, hint: str = "", versions: tuple[int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.versions = versions

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_unmet, (self.message, self.hint, self.versions)


def _rebuild_unmet(message: str, hint: str, versions: tuple[int, ...]) -> PolicyUnmetError:
    return PolicyUnmetError(message, hint=hint, versions=versions)


class CorruptError(SlackwaterError):
    """A digest, bound or format is wrong: discard, fetch elsewhere, never retry the same bytes."""

    kind = "corrupt"


class UnavailableError(SlackwaterError):
    """Transient: retry with back-off."""

    kind = "unavailable"


class ReplicaLostError(UnavailableError):
    """The replica that served the request is gone, and no other could go on with its answer."""

    kind = "replica_lost"


class OverloadedError(UnavailableError):
    """No capacity now: the request was shed before any work was done.

    Args:
        message: One sentence: what happened and where.
        hint: What the reader can do about it; empty where the message says it already.
        retry_after_s: Seconds after which asking again may help, at least 1.
    """

    kind = "overloaded"

    def __init__(self, message: str, *, hint: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_overloaded, (self.message, self.hint, self.retry_after_s)


def _rebuild_overloaded(message: str, hint: str, retry_after_s: int) -> OverloadedError:
    return OverloadedError(message, hint=hint, retry_after_s=retry_after_s)


class SwapError(SlackwaterError):
    """A swap failed: the old version serves on."""

    kind = "swap"


class CanaryError(SwapError):
    """The engine answered a version's canary otherwise than its manifest expects: the swap was undone."""

    kind = "canary"


class SpoiltError(SlackwaterError):
    """An engine holds other bits than it was given, and no swap wrote them: restart it. Answers may have been wrong."""

    kind = "spoilt"


class UnsupportedError(SlackwaterError):
    """This engine, store or model cannot do that."""

    kind = "unsupported"


class InternalError(SlackwaterError):
    """Ours: please report it."""

    kind = "internal"
