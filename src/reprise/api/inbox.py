"""From the engine thread to the event loop: events in order, without blocking the one or flooding the other."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from reprise.core.events import Event, Sampled


class Clock:
    """Seconds that only go forward, and waiting by them."""

    def now_s(self) -> float:
        return time.monotonic()

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Return when the event is set; after so much time it is."""
        # A timeout of asyncio's own would cost as much again as all else that is done for a token here.
        timer = asyncio.get_running_loop().call_later(timeout_s, event.set)
        try:
            await event.wait()
        finally:
            timer.cancel()


class Inbox:
    """The events of one request's jobs, for one reader on the event loop.

    A reader that stands still does not hold memory without bound: when `limit` events wait, `on_overflow` is called
    once (on the engine thread) and further tokens are dropped; `has_overflowed` says so.
    """

    def __init__(self, *, limit: int, on_overflow: Callable[[], None], clock: Clock | None = None) -> None:
        self._clock = Clock() if clock is None else clock
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._limit = limit
        self._on_overflow = on_overflow
        self.has_overflowed = False

    def sink(self, choice: int) -> Callable[[Event], None]:
        """Where the job of this choice puts its events. Safe on any thread; never blocks."""
        return partial(self._put, choice)

    def _put(self, choice: int, event: Event) -> None:
        if isinstance(event, Sampled) and len(self._waiting) >= self._limit:
            if not self.has_overflowed:
                self.has_overflowed = True
                self._on_overflow()
            return
        self._waiting.append((choice, event))
        # The reader clears the flag before it looks at the queue, so a flag that is set means that it will look again.
        if not self._arrived.is_set():
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:
                # The loop is closed: nobody will read this any more.
                self._waiting.clear()

    async def get(self, timeout_s: float) -> tuple[int, Event] | None:
        """The next event and the choice it belongs to, or None if nothing came for `timeout_s` seconds."""
        due_s = self._clock.now_s() + timeout_s
        # The flag may stand for an event that was read already, so one look is not enough.
        while not self._waiting:
            self._arrived.clear()
            left_s = due_s - self._clock.now_s()
            if self._waiting or left_s <= 0:
                break
            await self._clock.wait(self._arrived, left_s)
        return self._waiting.popleft() if self._waiting else None
