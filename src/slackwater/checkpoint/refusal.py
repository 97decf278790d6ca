"""How a broken body is refused: its place, the field, and what is wrong with it."""

from typing import NoReturn

from slackwater.errors import CorruptError


def refuse_body(where: str, field: str, why: str) -> NoReturn:
    """Refuse a body.

    Args:
        where: The tiles that it was to make.
        field: What is broken.
        why: How.

    Raises:
        CorruptError: Always.
    """
    raise CorruptError(f"{where}: {field}: {why}", hint="fetch the object again")
