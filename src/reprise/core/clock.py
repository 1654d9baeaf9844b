"""Time, handed in: whoever needs it is given a clock, so that tests can turn it."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since some fixed moment, never less than before."""


def monotonic() -> float:
    """The system's clock."""
    return time.monotonic()
