"""A grammar's trial: compiled first in a process of its own, which may be ended where it takes too much.

Some short sources take the library minutes and gigabytes, whatever its own limits: a large ``multipleOf``, patterns
that hold together. Nothing ends a thread; a process has limits that the system keeps.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from slackwater.engine.torch.grammar import compiled, refused, way_out
from slackwater.errors import InternalError, InvalidInputError, UnavailableError
from slackwater.rollout.grammar import Grammar

TRIAL_CPU_S: Final = 2
"""Seconds of a processor that compiling may take."""
TRIAL_WALL_S: Final = 10.0
"""Seconds after which a trial is ended, however little of a processor it had."""
TRIAL_BYTES: Final = 96 * 1024 * 1024
"""Memory that a trial may take for its grammar: each answer's own matcher takes as much."""
STEP_CPU_S: Final = 0.05
"""Seconds of a processor that a step may take: an engine's other answers wait for it."""
_STEPS: Final = 64
"""Steps of a trial."""
_UNTOLD: Final = 512 * 1024 * 1024
_NICE: Final = 10
_BYTES: Final = 256
_SHOWN: Final = 500
_TOO_MUCH: Final = "it is too complex"


def tried(grammar: Grammar) -> InvalidInputError | None:
    """Compile it apart. Blocks for `TRIAL_WALL_S` at most.

    Returns:
        Why it is refused; None: it may be compiled here.

    Raises:
        UnavailableError: The machine had no time for it.
        InternalError: The process failed of itself.
    """
    command = [sys.executable, "-P", "-m", __spec__.name]
    try:
        done = subprocess.run(  # noqa: S603 - our own module; the source is its input
            command, input=msgspec.json.encode(grammar), capture_output=True, timeout=TRIAL_WALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"a grammar's trial had no end in {TRIAL_WALL_S:.0f} s", hint="ask again") from error
    if done.returncode > 0:
        raise InternalError(f"a grammar's trial failed: {done.stderr.decode(errors='replace')[-_SHOWN:]}")
    if done.returncode:  # a limit ended it
        return refused(grammar, _TOO_MUCH)
    return InvalidInputError(told, hint=way_out(grammar)) if (told := done.stdout.decode()) else None


def main() -> None:
    """Compile what the standard input has, and write what is wrong with it."""
    _limit()
    grammar = msgspec.json.decode(sys.stdin.buffer.read(), type=Grammar)
    try:
        _begin(grammar)
    except InvalidInputError as error:
        sys.stdout.buffer.write(error.message.encode())
    except MemoryError:
        sys.stdout.buffer.write(refused(grammar, _TOO_MUCH).message.encode())


def _limit() -> None:
    if sys.platform == "win32":
        return  # it has no such limits: time alone ends a trial there
    import resource  # noqa: PLC0415 - not there on every system

    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
    most = _mapped() + TRIAL_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _mapped() -> int:
    """Address space of this process, as far as the system tells."""
    told = Path("/proc/self/statm")
    return int(told.read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE") if told.is_file() else _UNTOLD


def _begin(grammar: Grammar) -> None:
    """Compile, and take the first steps of some answer."""
    matcher = compiled(grammar, LLTokenizer(TokenizerWrapper(_Bytes())))
    for step in range(_STEPS):
        begun = time.process_time()
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:_BYTES]
        if time.process_time() - begun > STEP_CPU_S:
            raise refused(grammar, _TOO_MUCH)
        if not allowed.any():
            if not (step or matcher.is_accepting()):
                raise refused(grammar, "it admits no answer")
            return
        matcher.consume_token(int(np.flatnonzero(allowed)[-1]))


class _Bytes:
    """A vocabulary of all bytes and an end."""

    eos_token_id = _BYTES
    bos_token_id = None
    tokens: Final = [*(bytes([byte]) for byte in range(_BYTES)), b"<end>"]
    special_token_ids: Final = [_BYTES]

    def __call__(self, text: bytes) -> Sequence[int]:
        return list(text)


if __name__ == "__main__":
    main()
