"""How many examples a test tries: few in the quick stage, all of them where a change is proven.

``SLACKWATER_TEST_DEPTH=thorough`` asks for all.
"""

import os
from typing import Final

THOROUGH: Final = os.environ.get("SLACKWATER_TEST_DEPTH") == "thorough"
_SHARE: Final = 8
_FEWEST: Final = 8


def examples(thorough: int) -> int:
    """As many as ``thorough`` where all are asked for, else an eighth of them; 8 are never cut."""
    return thorough if THOROUGH else min(thorough, max(_FEWEST, thorough // _SHARE))
