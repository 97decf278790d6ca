"""The two keys of a deployment come from the environment alone."""

import os
from collections.abc import Mapping

from slackwater.api.auth import Keys
from slackwater.errors import InvalidInputError

INFERENCE_KEY = "SLACKWATER_INFERENCE_KEY"
"""Environment variable with the key for completions."""
CONTROL_KEY = "SLACKWATER_CONTROL_KEY"
"""Environment variable with the key for hot-loads and status."""


def keys_from(environment: Mapping[str, str] = os.environ) -> Keys:
    """Read both keys.

    Raises:
        InvalidInputError: One is missing, or they are equal.
    """
    try:
        return Keys(inference=environment.get(INFERENCE_KEY, ""), control=environment.get(CONTROL_KEY, ""))
    except InvalidInputError as error:
        raise InvalidInputError(error.message, hint=f"set {INFERENCE_KEY} and {CONTROL_KEY}") from error
