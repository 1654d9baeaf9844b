"""Estimates how long reading records takes, from the reads so far."""

from collections.abc import Collection
from dataclasses import dataclass

_KEPT = 0.9
"""Decay of the weight of earlier reads with each further one."""

_LEAST_READS = 3


@dataclass(frozen=True, slots=True, eq=False)
class StartedRead:
    """A read that has begun, for `LinkSpeed.end`."""

    at_s: float
    occupancy_s: float
    """`LinkSpeed`'s sum, over all time until then, of the reads under way."""


class LinkSpeed:
    """Seconds per record and per byte, fitted to the reads so far, the latest weighing most. Guarded by its owner.

    Reads that overlap share the link but not the wait for an answer: a read of b bytes beside n - 1 others takes
    latency + n * b * (seconds per byte).
    """

    def __init__(self) -> None:
        self._num = 0
        # Weighted sums over reads: of 1, of bytes, of bytes squared, of seconds, and of bytes times seconds; a read's
        # bytes count as often as reads were under way.
        self._n: float = 0
        self._b: float = 0
        self._bb: float = 0
        self._t: float = 0
        self._bt: float = 0
        self._num_under_way = 0
        self._occupancy_s = 0.0
        self._changed_s = 0.0

    def begin(self, now_s: float) -> StartedRead:
        """Note that a read begins; `end` must follow."""
        self._advance(now_s)
        self._num_under_way += 1
        return StartedRead(now_s, self._occupancy_s)

    def end(self, read: StartedRead, now_s: float, *, nbytes: int | None) -> None:
        """Record that a read of `nbytes` has ended; None: it failed, which tells nothing."""
        self._advance(now_s)
        self._num_under_way -= 1
        took_s = now_s - read.at_s
        if nbytes is not None:
            at_once = (self._occupancy_s - read.occupancy_s) / took_s if took_s > 0 else 1.0
            self.note(nbytes, took_s, at_once=max(1.0, at_once))

    def _advance(self, now_s: float) -> None:
        self._occupancy_s += self._num_under_way * (now_s - self._changed_s)
        self._changed_s = now_s

    def note(self, nbytes: int, seconds: float, *, at_once: float = 1.0) -> None:
        """Record a read of `nbytes` that took `seconds` while, on average, `at_once` were under way."""
        shared = nbytes * at_once
        self._num += 1
        self._n = self._n * _KEPT + 1
        self._b = self._b * _KEPT + shared
        self._bb = self._bb * _KEPT + shared**2
        self._t = self._t * _KEPT + seconds
        self._bt = self._bt * _KEPT + shared * seconds

    def estimate_s(self, sizes: Collection[int], *, at_once: int = 1) -> float | None:
        """Seconds to read records of these sizes, all at once; None before enough was measured."""
        if self._num < _LEAST_READS:
            return None
        latency_s, byte_s = self._fitted()
        return -(-len(sizes) // at_once) * latency_s + sum(sizes) * byte_s

    def _fitted(self) -> tuple[float, float]:
        """Seconds per record and per byte, neither below 0."""
        spread = self._n * self._bb - self._b**2
        # With records of about one size the two cannot be separated: attribute everything to bytes.
        if spread <= 0.01 * self._b**2:
            return (0.0, self._t / self._b) if self._b > 0 else (self._t / self._n, 0.0)
        byte_s = (self._n * self._bt - self._b * self._t) / spread
        latency_s = (self._t - byte_s * self._b) / self._n
        if byte_s < 0:
            return self._t / self._n, 0.0
        return (latency_s, byte_s) if latency_s >= 0 else (0.0, self._t / self._b)
