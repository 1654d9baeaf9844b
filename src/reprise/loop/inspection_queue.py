"""The queue of inspections, which may take a small share of the engine thread's time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from reprise.core.clock import Clock, monotonic

_SHARE = 0.01
"""The largest share of the engine thread's time for inspections while it has work."""


class InspectionQueue:
    """Inspections waiting for the engine thread. Used only on that thread.

    While there is work, the next one starts no sooner than 100 t after one that took t seconds started. So requests
    lose at most a hundredth of the thread's time, however many clients watch.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._not_before_s = 0.0
        self.num_answered = 0
        self.spent_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, inspect: Callable[[], None]) -> None:
        self._waiting.append(inspect)

    def answer(self, *, has_work: bool) -> None:
        """Answer those that are due: all if there is no other work."""
        while len(self._waiting) > 0:
            began_s = self._clock()
            if has_work and began_s < self._not_before_s:
                return
            self._waiting.popleft()()
            took_s = self._clock() - began_s
            self.num_answered += 1
            self.spent_s += took_s
            self._not_before_s = began_s + took_s / _SHARE
