"""The public surface is pinned: a leak or an omission fails."""

import pickle

import pytest

import slackwater
from slackwater import errors

TREE = {
    "AuthError": ("SlackwaterError", "auth"),
    "ConflictError": ("SlackwaterError", "conflict"),
    "CorruptError": ("SlackwaterError", "corrupt"),
    "InternalError": ("SlackwaterError", "internal"),
    "InvalidInputError": ("SlackwaterError", "invalid_input"),
    "LostRaceError": ("ConflictError", "lost_race"),
    "NotFoundError": ("SlackwaterError", "not_found"),
    "OverloadedError": ("UnavailableError", "overloaded"),
    "PolicyUnmetError": ("ConflictError", "policy_unmet"),
    "ReplicaLostError": ("UnavailableError", "replica_lost"),
    "ContextLengthError": ("InvalidInputError", "context_length_exceeded"),
    "SpoiltError": ("SlackwaterError", "spoilt"),
    "SwapError": ("SlackwaterError", "swap"),
    "CanaryError": ("SwapError", "canary"),
    "UnavailableError": ("SlackwaterError", "unavailable"),
    "UnsupportedError": ("SlackwaterError", "unsupported"),
    "WrongBaseError": ("ConflictError", "wrong_base"),
}


def test_the_root_exports_the_error_tree_and_the_version_alone() -> None:
    assert slackwater.__all__ == sorted([*TREE, "SlackwaterError", "__version__"])
    assert all(hasattr(slackwater, name) for name in slackwater.__all__)


@pytest.mark.parametrize("name", TREE)
def test_an_error_keeps_its_parent_and_its_kind(name: str) -> None:
    kind: type[errors.SlackwaterError] = getattr(errors, name)
    parent, code = TREE[name]
    assert kind.__bases__[0].__name__ == parent
    assert kind.kind == code
    assert kind.__doc__


@pytest.mark.parametrize("name", TREE)
def test_an_error_survives_pickling(name: str) -> None:
    kind: type[errors.SlackwaterError] = getattr(errors, name)
    error = pickle.loads(pickle.dumps(kind("it broke", hint="mend it")))
    assert type(error) is kind
    assert (error.message, error.hint, str(error)) == ("it broke", "mend it", "it broke (mend it)")


def test_builtin_bases_let_plain_handlers_work() -> None:
    assert issubclass(errors.InvalidInputError, ValueError)
    assert issubclass(errors.NotFoundError, LookupError)
