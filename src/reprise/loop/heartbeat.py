"""Detects an engine that makes no progress, for `/health` and the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from reprise.core.backend import Counts, Status
from reprise.core.clock import Clock, monotonic, repeating

log = logging.getLogger("reprise.loop")

_EVERY_S = 1.0


class Heartbeat:
    """The time of the engine's last progress. Written only by its thread, read by any.

    With requests, only tokens and ended requests count as progress, not mere steps.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None
        """Time of the last progress; None if there is nothing to do."""
        self._counts: tuple[Counts, ...] = (Counts(),)
        """Of each model."""

    @property
    def stalled_s(self) -> float:
        """Seconds without progress; 0 while there is nothing to do."""
        since_s = self._since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)

    def rest(self) -> None:
        """There is nothing to do until `wake`."""
        self._since_s = None

    def wake(self) -> None:
        """There is something to do."""
        if self._since_s is None:
            self._since_s = self._clock()

    def note(self, *models: Status) -> None:
        """Record the status of every model after a command or step."""
        counts = tuple(status.counts for status in models)
        if self._since_s is not None and (all(status.is_idle for status in models) or counts != self._counts):
            self._since_s = self._clock()
        self._counts = counts


class Watched(Protocol):
    def status(self) -> Status: ...

    def stack(self) -> str: ...


def watchdog(
    engine: Watched, *, after_s: float, on_death: Callable[[], None], every_s: float = _EVERY_S
) -> AbstractContextManager[None]:
    """Log the engine's stack when it makes no progress for `after_s`; call `on_death` when its thread has ended.

    Runs on its own thread.
    """
    return repeating(_look(engine, after_s, on_death), every_s=every_s, name="reprise-watchdog")


def _look(engine: Watched, after_s: float, on_death: Callable[[], None]) -> Callable[[], bool]:
    """A check that logs a hang after `after_s` and each time its length doubles, and its end. False: it has died."""
    due_s = after_s

    def look() -> bool:
        nonlocal due_s
        status = engine.status()
        if status.has_died:
            log.critical("the engine thread has ended: restart the server")
            on_death()
            return False
        if status.stalled_s >= due_s:
            text = "the engine has made no progress for %.0f s (%d requests queued, %d in prefill, %d in decode)"
            facts = (status.stalled_s, status.num_waiting, status.num_prefilling, status.num_decoding)
            log.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, text, facts, None, sinfo=engine.stack()))
            due_s = 2 * status.stalled_s
        elif due_s > after_s and status.stalled_s < after_s:
            log.warning("the engine is making progress again")
            due_s = after_s
        return True

    return look
