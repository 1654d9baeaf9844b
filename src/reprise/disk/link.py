"""Estimates how long reading records takes, from the reads so far."""

from collections.abc import Collection

_KEPT = 0.9
"""Decay of the weight of earlier reads with each further one."""

_LEAST_READS = 3


class LinkSpeed:
    """Seconds per record and per byte, fitted to the reads so far, the latest weighing most. Guarded by its owner."""

    def __init__(self) -> None:
        self._num = 0
        # Weighted sums over reads: of 1, of bytes, of bytes squared, of seconds, and of bytes times seconds.
        self._n: float = 0
        self._b: float = 0
        self._bb: float = 0
        self._t: float = 0
        self._bt: float = 0

    def note(self, nbytes: int, seconds: float) -> None:
        """Record a read of `nbytes` that took `seconds`."""
        self._num += 1
        self._n = self._n * _KEPT + 1
        self._b = self._b * _KEPT + nbytes
        self._bb = self._bb * _KEPT + nbytes**2
        self._t = self._t * _KEPT + seconds
        self._bt = self._bt * _KEPT + nbytes * seconds

    def estimate_s(self, sizes: Collection[int]) -> float | None:
        """Seconds to read records of these sizes one after the other; None before enough was measured."""
        if self._num < _LEAST_READS:
            return None
        latency_s, byte_s = self._fitted()
        return len(sizes) * latency_s + sum(sizes) * byte_s

    def _fitted(self) -> tuple[float, float]:
        """Seconds per record and per byte, neither below 0."""
        spread = self._n * self._bb - self._b**2
        # With records of about one size the two cannot be told apart: attribute everything to bytes.
        if spread <= 0.01 * self._b**2:
            return (0.0, self._t / self._b) if self._b > 0 else (self._t / self._n, 0.0)
        byte_s = (self._n * self._bt - self._b * self._t) / spread
        latency_s = (self._t - byte_s * self._b) / self._n
        if byte_s < 0:
            return self._t / self._n, 0.0
        return (latency_s, byte_s) if latency_s >= 0 else (0.0, self._t / self._b)
