"""How long calls to an object store wait before they give up."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a call waits before it gives up."""

    deadline_s: float = 120.0
    """Seconds from the first attempt after which none follows."""
    attempts: int = 10
    idle_s: float = 60.0
    """Seconds without a byte after which a connection counts as dead."""
    connect_s: float = 5.0
    request_s: float = 600.0
    """Seconds that one request may take, its body included."""
    first_wait_s: float = 0.1
    """Back-off doubles from here, with jitter."""
    longest_wait_s: float = 10.0
    renewal_s: float = 0.2
    """Wait before a call whose signature was out of date is made anew: obstore reads a role's credentials at most every
    0.1 seconds."""


PATIENT: Final = Patience()
"""For a fleet at work: outlasts a store's restart."""

BRISK: Final = Patience(deadline_s=20.0, attempts=5, idle_s=10.0, longest_wait_s=2.0)
"""For a person who waits for the answer."""
