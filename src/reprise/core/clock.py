"""The clock as a parameter, so that tests can control it, and work that a thread repeats at intervals."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

Clock = Callable[[], float]
"""Seconds since a fixed moment; monotonic."""


monotonic: Clock = time.monotonic
"""The system's clock."""


@contextmanager
def repeating(work: Callable[[], bool | None], *, every_s: float, name: str) -> Generator[None]:
    """Call `work` every `every_s` seconds on a thread of this name, until the block ends or `work` returns False."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            if work() is False:
                return

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
