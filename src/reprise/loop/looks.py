"""When the engine thread answers those who only look, and what that costs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from reprise.core.clock import Clock, monotonic

_SHARE = 0.01
"""Of the engine thread's time while it has work: what looks take of it at most."""


class LookQueue:
    """Looks that wait for the engine thread, which alone uses this.

    The next begins 100 t after one that took t seconds, unless there is nothing else to do: however many watch, and
    however often they ask, requests lose a hundredth of the thread's time to them.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._not_before_s = 0.0
        self.num_answered = 0
        self.spent_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, look: Callable[[], None]) -> None:
        self._waiting.append(look)

    def answer(self, *, has_work: bool) -> None:
        """Answer those that may be answered now: all, if there is no work that would wait for it."""
        while len(self._waiting) > 0:
            began_s = self._clock()
            if has_work and began_s < self._not_before_s:
                return
            self._waiting.popleft()()
            took_s = self._clock() - began_s
            self.num_answered += 1
            self.spent_s += took_s
            self._not_before_s = began_s + took_s / _SHARE
