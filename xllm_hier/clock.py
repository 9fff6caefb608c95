"""The one clock of limits and ages."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds that only grow; looked up at each call, so that a test can put another clock in the place of `time`'s."""
    return time.monotonic()
