"""Cancellation of work on other threads: it checks periodically whether anyone still waits for it."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar


class Abandoned(Exception):
    """Nobody waits for the result of this work any more. Never shown to users."""


_given_up: ContextVar[threading.Event | None] = ContextVar("reprise_given_up", default=None)


@contextmanager
def abandonable(given_up: threading.Event) -> Generator[None]:
    """In this block, on this thread, `stop_if_abandoned` raises once the event is set."""
    token = _given_up.set(given_up)
    try:
        yield
    finally:
        _given_up.reset(token)


def stop_if_abandoned() -> None:
    """Raise Abandoned if nobody waits for this thread's work any more. Cheap; call it every few milliseconds."""
    given_up = _given_up.get()
    if given_up is not None and given_up.is_set():
        raise Abandoned
