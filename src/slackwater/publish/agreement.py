"""Ranks agree: each says something, rank 0 makes something of it, and all are told what, or why there is nothing."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from slackwater.errors import SlackwaterError
from slackwater.publish.exchange import Exchange
from slackwater.publish.turn import STOPPED, Failure, Offer, Outcome, Part, Plan, Turn

_Said = TypeVar("_Said", Offer, Part)
_Told = TypeVar("_Told", Turn, Plan, Outcome)


def tell(exchange: Exchange, kind: type[_Told], make: Callable[[], _Told] | None) -> _Told:
    """What rank 0 makes, on all ranks; where it fails there, whatever of, its failure.

    Args:
        exchange: How the ranks talk.
        kind: What is told.
        make: Makes it; None on the other ranks.

    Raises:
        UnavailableError: A rank is gone.
    """
    if make is None:
        return msgspec.json.decode(exchange.broadcast(None), type=kind)
    told = kind(failure=STOPPED)
    try:
        told = make()
    except SlackwaterError as error:
        told = kind(failure=Failure.of(error))
    finally:
        exchange.broadcast(msgspec.json.encode(told))
    return told


def agree(exchange: Exchange, said: _Said, kind: type[_Told], make: Callable[[Sequence[_Said]], _Told]) -> _Told:
    """What rank 0 makes of what each rank says: see `tell`."""
    gathered = exchange.gather(msgspec.json.encode(said))

    def made() -> _Told:
        return make([msgspec.json.decode(each, type=type(said)) for each in gathered or ()])

    return tell(exchange, kind, None if gathered is None else made)


def check_none_failed(said: Sequence[Offer | Part]) -> None:
    """Raise what a rank failed of.

    Raises:
        SlackwaterError: The first one's failure, which names the rank.
    """
    for rank, each in enumerate(said):
        if each.failure is not None:
            raise msgspec.structs.replace(each.failure, message=f"rank {rank} failed: {each.failure.message}").error()
