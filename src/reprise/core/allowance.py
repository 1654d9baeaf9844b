"""Limits how much one step of the engine thread decodes and restores, so that streams are not stalled."""

from reprise.core.clock import Clock, monotonic

_SHARE_OF_STALL = 0.25
"""The most time per step, as a share of the largest inter-token gap (`max_stall_s`)."""

_SHARE_OF_REST = 0.5
"""And as a share of what the step's decode leaves of the gap; the rest is a reserve."""

TAKEN_AT_ONCE = 32 << 20
"""About the most bytes copied per step."""

LEAST_NBYTES = 2 << 20
"""The smallest limit of a part in bytes: an evaluation costs as much as copying a megabyte or two.

So n bytes take at most n / `LEAST_NBYTES` steps, plus one per buffer, however long others decode.
"""

_RISE = 0.125
"""Weight of a part that was faster than the estimate; a slower one replaces it."""


class StepAllowance:
    """Checked before each part, which is some entries of a record or a restore. A step may always copy one part."""

    def __init__(self, max_stall_s: float, *, clock: Clock = monotonic) -> None:
        """`max_stall_s`: the largest inter-token gap of other streams."""
        self._max_stall_s = max_stall_s
        self._clock = clock
        self._room_s = 0.0
        self._begun_s = self._noted_s = 0.0
        self._num_taken = self._nbytes_taken = 0
        self._nbytes_per_s: float | None = None
        """Measured over the parts so far."""

    def renew(self, *, decode_s: float = 0.0, num_sharing: int = 1) -> None:
        """Start a step, whose decode takes about `decode_s`; `num_sharing` models run a step within one gap."""
        max_stall_s = self._max_stall_s / num_sharing
        rest_s = max(0.0, max_stall_s - decode_s)
        self._room_s = min(_SHARE_OF_STALL * max_stall_s, _SHARE_OF_REST * rest_s)
        self._begun_s = self._noted_s = self._clock()
        self._num_taken = self._nbytes_taken = 0

    @property
    def has_room(self) -> bool:
        """Whether another part fits into this step, if it takes as long as those before."""
        if self._num_taken == 0:
            return True
        fits = self.spent_s * (self._num_taken + 1) / self._num_taken < self._room_s
        return fits and self._nbytes_taken < TAKEN_AT_ONCE

    @property
    def part_nbytes(self) -> int:
        """The size limit of the next part: what can be copied in the time left."""
        if self._nbytes_per_s is None:
            return LEAST_NBYTES
        fitting = int((self._room_s - self.spent_s) * self._nbytes_per_s)
        return max(LEAST_NBYTES, min(fitting, TAKEN_AT_ONCE - self._nbytes_taken))

    @property
    def spent_s(self) -> float:
        """Seconds this step has spent on parts so far."""
        return self._noted_s - self._begun_s

    def take(self, nbytes: int) -> None:
        """Record that a part of `nbytes` was copied."""
        now_s = self._clock()
        passed_s, self._noted_s = now_s - self._noted_s, now_s
        self._num_taken += 1
        self._nbytes_taken += nbytes
        if passed_s > 0:
            # Smaller parts cost as much.
            seen = max(nbytes, LEAST_NBYTES) / passed_s
            before = self._nbytes_per_s if self._nbytes_per_s is not None else seen
            self._nbytes_per_s = min(seen, before + _RISE * (seen - before))
