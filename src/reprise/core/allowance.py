"""How much of what was read or is restored one step of the engine thread takes over: nobody waits for all of it."""

from reprise.core.clock import Clock, monotonic

_SHARE_OF_STALL = 0.25
"""A step takes over for this part of the longest gap between two tokens that is aimed at."""

_SHARE_OF_REST = 0.5
"""And for this part of what the decode of the same step leaves of it: the rest is for what was not foreseen."""

TAKEN_AT_ONCE = 32 << 20
"""Bytes. More than about this is not taken over in one step."""

LEAST_NBYTES = 2 << 20
"""Bytes. A part may always have so many: evaluating costs as much as copying a megabyte or two.

So n bytes are there after n / `LEAST_NBYTES` steps, and one more for each buffer, however long the others decode.
"""

_RISE = 0.125
"""The weight of a part that was quicker than those before it. A slower one counts at once."""


class StepAllowance:
    """Asked before each part, some entries of a record or of a restore: the first of a step may always be taken."""

    def __init__(self, max_stall_s: float, *, clock: Clock = monotonic) -> None:
        """`max_stall_s`: the longest gap between two tokens of others."""
        self._max_stall_s = max_stall_s
        self._clock = clock
        self._room_s = 0.0
        self._begun_s = self._noted_s = 0.0
        self._num_taken = self._nbytes_taken = 0
        self._nbytes_per_s: float | None = None
        """Seen in the parts so far."""

    def renew(self, *, decode_s: float = 0.0, num_sharing: int = 1) -> None:
        """A step begins, in which others decode for about so long; so many models have a step in the gap."""
        max_stall_s = self._max_stall_s / num_sharing
        rest_s = max(0.0, max_stall_s - decode_s)
        self._room_s = min(_SHARE_OF_STALL * max_stall_s, _SHARE_OF_REST * rest_s)
        self._begun_s = self._noted_s = self._clock()
        self._num_taken = self._nbytes_taken = 0

    @property
    def has_room(self) -> bool:
        """Whether this step may take another part: one that lasts as long as those before it."""
        if self._num_taken == 0:
            return True
        fits = self.spent_s * (self._num_taken + 1) / self._num_taken < self._room_s
        return fits and self._nbytes_taken < TAKEN_AT_ONCE

    @property
    def part_nbytes(self) -> int:
        """How large the next part may be: what should be copied in the time that is left."""
        if self._nbytes_per_s is None:
            return LEAST_NBYTES
        fitting = int((self._room_s - self.spent_s) * self._nbytes_per_s)
        return max(LEAST_NBYTES, min(fitting, TAKEN_AT_ONCE - self._nbytes_taken))

    @property
    def spent_s(self) -> float:
        """How long this step has been taking over so far; 0 if it has taken nothing."""
        return self._noted_s - self._begun_s

    def take(self, nbytes: int) -> None:
        """A part of so many bytes was copied."""
        now_s = self._clock()
        passed_s, self._noted_s = now_s - self._noted_s, now_s
        self._num_taken += 1
        self._nbytes_taken += nbytes
        if passed_s > 0:
            # What is smaller costs as much.
            seen = max(nbytes, LEAST_NBYTES) / passed_s
            before = self._nbytes_per_s if self._nbytes_per_s is not None else seen
            self._nbytes_per_s = min(seen, before + _RISE * (seen - before))
