"""What foreign modelling code raises for a config of wrong types or sizes, as one error of ours."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from huggingface_hub.errors import StrictDataclassError

from slackwater.errors import UnsupportedError

_MISFITS: Final = (
    StrictDataclassError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def fitting(folder: Path, library: str) -> Generator[None]:
    """A block in which ``library`` makes a model of the folder's config.

    Raises:
        UnsupportedError: It didn't.
    """
    try:
        yield
    except _MISFITS as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise UnsupportedError(
            f"{library} makes no model of {folder / 'config.json'}: {cause}",
            hint="check its fields' types, and its sizes against the tensors' shapes",
        ) from error
