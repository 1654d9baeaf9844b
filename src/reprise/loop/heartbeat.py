"""Whether the engine gets on with its work: what `/health` says, and what the log is told of when it does not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from reprise.core.backend import Counts, Status
from reprise.core.clock import Clock, monotonic

log = logging.getLogger("reprise.loop")

_EVERY_S = 1.0


class Heartbeat:
    """When the engine last got something done. Written by its thread alone, read from any.

    Steps that come and go are not progress: with requests there, tokens have to come or requests to end.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None
        """None: there is nothing to do."""
        self._counts: tuple[Counts, ...] = (Counts(),)

    @property
    def stalled_s(self) -> float:
        """Seconds without progress; 0 while there is nothing to do."""
        since_s = self._since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)

    def rest(self) -> None:
        """There is nothing to do until `wake`."""
        self._since_s = None

    def wake(self) -> None:
        """Something is to be done."""
        if self._since_s is None:
            self._since_s = self._clock()

    def note(self, *models: Status) -> None:
        """A command or a step is over; this is how every model stands."""
        counts = tuple(status.counts for status in models)
        if self._since_s is not None and (all(status.is_idle for status in models) or counts != self._counts):
            self._since_s = self._clock()
        self._counts = counts


class Watched(Protocol):
    """An engine, as far as its watchdog knows it."""

    def status(self) -> Status: ...
    def stack(self) -> str:
        """Where its thread is now."""
        ...


@contextmanager
def watchdog(engine: Watched, *, after_s: float, every_s: float = _EVERY_S) -> Generator[None]:
    """Log where the engine hangs when it makes no progress for `after_s`, from a thread of its own."""
    is_over = threading.Event()
    look = _look(engine, after_s)

    def watch() -> None:
        while not is_over.wait(every_s):
            look()

    thread = threading.Thread(target=watch, name="reprise-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _look(engine: Watched, after_s: float) -> Callable[[], None]:
    """One look. A hang is logged after `after_s`, and each time that it has doubled; then that it is over."""
    due_s = after_s
    has_told_death = False

    def look() -> None:
        nonlocal due_s, has_told_death
        status = engine.status()
        if status.has_died:
            if not has_told_death:
                log.critical("the engine thread has ended: restart the server")
            has_told_death = True
        elif status.stalled_s >= due_s:
            log.error(
                "the engine has made no progress for %.0f s (%d requests queued, %d in prefill, %d in decode). "
                "Its stack:\n%s",
                status.stalled_s, status.num_waiting, status.num_prefilling, status.num_decoding, engine.stack(),
            )  # fmt: skip
            due_s = 2 * status.stalled_s
        elif due_s > after_s and status.stalled_s < after_s:
            log.warning("the engine is making progress again")
            due_s = after_s

    return look
