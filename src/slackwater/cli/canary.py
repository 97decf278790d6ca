"""``slackwater publish --canary FILE``: a canary as a JSON file, and how one is told of."""

from pathlib import Path
from typing import Final

import msgspec

from slackwater.checkpoint.canary import Canary
from slackwater.cli.text import counted
from slackwater.errors import InvalidInputError
from slackwater.publish.model_files import fitting_canary
from slackwater.publish.small_file import read_small

_MAX_BYTES: Final = 65_536
"""Of the file: several times what the longest canary takes."""


def read_canary(path: Path, model: Path | None = None) -> Canary:
    """Read a canary from a JSON file: one object with the members that a manifest's has.

    Args:
        path: The file. Without ``tolerance`` it has the usual one.
        model: A folder whose config tells which token ids there are; None takes all.

    Raises:
        InvalidInputError: There is no such file, or it is too large or no canary, or it has an id that the model
            doesn't; the message names the member.
        AuthError: It may not be read.
    """
    body = _read(path)
    try:
        canary = msgspec.json.decode(body, type=Canary)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidInputError(
            f"{path} is no canary: {error}",
            hint='write {"prompt": [ids], "tokens": [ids], "logprobs": [nats], "tolerance": nats}',
        ) from error
    try:
        fitting_canary(canary, model)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} isn't for this model: {error.message}", hint=error.hint) from error
    return canary


def canary_text(canary: Canary) -> str:
    """What a canary checks, in a few words."""
    prompt, tokens = counted(len(canary.prompt), "token"), counted(len(canary.tokens), "token")
    return f"{tokens} after a prompt of {prompt}, each within {canary.tolerance:g} nats"


def _read(path: Path) -> bytes:
    body = read_small(path, "the canary", _MAX_BYTES)
    if len(body) > _MAX_BYTES:
        raise InvalidInputError(
            f"the canary {path} has more than {_MAX_BYTES} bytes", hint="name a file that holds one"
        )
    return body
