"""A core, stepped by hand."""

from collections.abc import Iterable

from slackwater.engine.torch.core import Core
from slackwater.engine.torch.sequence import Event, Made
from slackwater.rollout.evidence import TokenStep


def run(core: Core) -> list[Event]:
    """Step it until nothing is left to do."""
    events: list[Event] = []
    while core.busy:
        events += core.step()
    return events


def steps(events: Iterable[Event], key: int) -> list[TokenStep]:
    """An answer's tokens."""
    return [event.step for event in events if isinstance(event, Made) and event.key == key]
