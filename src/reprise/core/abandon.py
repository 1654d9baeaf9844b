"""Work on other threads that nobody waits for any more: it looks up now and then, and stops."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar


class Abandoned(Exception):
    """Nobody wants the outcome of this work any more. Never reaches a user."""


_given_up: ContextVar[threading.Event | None] = ContextVar("reprise_given_up", default=None)


@contextmanager
def abandonable(given_up: threading.Event) -> Generator[None]:
    """Within the block, on this thread: `stop_if_abandoned` raises once the event is set."""
    token = _given_up.set(given_up)
    try:
        yield
    finally:
        _given_up.reset(token)


def stop_if_abandoned() -> None:
    """Raise Abandoned if this thread's work is not wanted any more. Cheap; for every few milliseconds of work."""
    given_up = _given_up.get()
    if given_up is not None and given_up.is_set():
        raise Abandoned
