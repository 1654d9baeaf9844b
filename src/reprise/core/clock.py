"""The clock as a parameter, so that tests can control it."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since a fixed moment; monotonic."""


def monotonic() -> float:
    """The system's clock."""
    return time.monotonic()
