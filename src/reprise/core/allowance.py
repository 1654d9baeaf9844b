"""How much of what was read or is restored one step of the engine thread takes over: nobody waits for all of it."""

from reprise.core.clock import Clock, monotonic

_SHARE_OF_STALL = 0.25
"""A step takes over for this part of the longest gap between two tokens that is aimed at."""

TAKEN_AT_ONCE = 32 << 20
"""Bytes. More than about this is not taken over in one step."""


class StepAllowance:
    """Asked before each part, a record or a layer's share of a restore: the first of a step may always be taken."""

    def __init__(self, max_stall_s: float, *, clock: Clock = monotonic) -> None:
        """`max_stall_s`: the longest gap between two tokens of others."""
        self._seconds = max_stall_s * _SHARE_OF_STALL
        self._clock = clock
        self._begun_s = 0.0
        self._num_taken = self._nbytes_taken = 0

    def renew(self) -> None:
        """A step begins."""
        self._begun_s = self._clock()
        self._num_taken = self._nbytes_taken = 0

    @property
    def has_room(self) -> bool:
        """Whether this step may take another part: one that lasts as long as those before it."""
        if self._num_taken == 0:
            return True
        passed_s = self._clock() - self._begun_s
        fits = passed_s * (self._num_taken + 1) / self._num_taken < self._seconds
        return fits and self._nbytes_taken < TAKEN_AT_ONCE

    def take(self, nbytes: int) -> None:
        """A part of so many bytes was copied."""
        self._num_taken += 1
        self._nbytes_taken += nbytes
