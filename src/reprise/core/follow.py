"""Adapts the memory budget to the machine's free memory and to a limit for the process. Pure.

When memory is short, free buffers are returned first, then the budget shrinks; it grows again after memory has been
free for a while. A limit for the process (`--memory`) is treated like a machine with that much memory.
"""

from dataclasses import dataclass, replace

_RESERVE = 20
"""This fraction (1/20) of the machine's memory is left to others, and at most:"""
_MOST_RESERVE = 2 * 2**30
_PATIENCE_S = 60.0
"""How long memory must be free before the budget grows by another step."""

_MOST_FREE_BUFFERS = 512 * 2**20
_LEAST_FREE_BUFFERS = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The system's memory: bytes available without swapping, total bytes, and whether it reports memory pressure."""

    available: int
    total: int
    is_pressed: bool = False

    @property
    def reserve(self) -> int:
        return min(_MOST_RESERVE, self.total // _RESERVE)


def tightest(*readings: MemoryReading) -> MemoryReading:
    """The reading of the machine that has least to give: each holds a share of the same state."""
    return min(readings, key=lambda reading: (not reading.is_pressed, reading.available - reading.reserve))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The current budget, between `least` and `most`; `changed_at_s`: when it last shrank, had to, or grew."""

    nbytes: int
    least: int
    most: int
    changed_at_s: float = 0.0
    returns_buffers: bool = False
    """Whether to return free buffers to the system now."""

    def __post_init__(self) -> None:
        assert self.least <= self.nbytes <= self.most, self

    @property
    def is_reduced(self) -> bool:
        return self.nbytes < self.most

    def after(self, reading: MemoryReading, *, now_s: float, held: int | None = None) -> "Budget":
        """The budget after a reading. `held`: the bytes in use; None: all of it."""
        missing = reading.reserve - reading.available
        if missing > 0 or reading.is_pressed:
            if not self.returns_buffers:
                return replace(self, returns_buffers=True, changed_at_s=now_s)
            # Pressure without a figure: a tenth at a time.
            less = max(missing, self.nbytes // 10 if reading.is_pressed else 0)
            # Reducing an unused part of the budget frees nothing.
            used = self.nbytes if held is None else min(self.nbytes, held)
            return replace(self, nbytes=max(self.least, used - less), changed_at_s=now_s)
        spare = reading.available - 2 * reading.reserve
        if spare <= 0 or now_s - self.changed_at_s < _PATIENCE_S:
            return replace(self, returns_buffers=self.returns_buffers and self.is_reduced)
        if not self.is_reduced:
            return replace(self, returns_buffers=False)
        return replace(self, nbytes=min(self.most, self.nbytes + spare // 2), changed_at_s=now_s, returns_buffers=False)


def free_buffers(budget: int) -> int:
    """Bytes of freed buffers that MLX may keep for reuse, besides a budget for layer state."""
    return min(_MOST_FREE_BUFFERS, max(_LEAST_FREE_BUFFERS, budget // 8))


def within_bound(bound: int, process: int) -> MemoryReading:
    """A limit for the process as a reading of a machine of that size, of which it uses `process` bytes."""
    return MemoryReading(available=bound - process, total=bound)


def budget_within(bound: int, process: int) -> int:
    """The most bytes of layer state within a limit for a process that uses `process` bytes without any; at least 0.

    Leaves room for freed buffers, and a reserve for intermediate results.
    """
    reading = within_bound(bound, process)
    left = reading.available - reading.reserve
    return max(0, left - _MOST_FREE_BUFFERS, min(left * 8 // 9, left - _LEAST_FREE_BUFFERS))


def bound_for(process: int, budget: int) -> int:
    """A limit for which `budget_within` returns at least `budget`."""
    # The reserve is at most this fraction of the limit.
    return (process + budget + free_buffers(budget)) * _RESERVE // (_RESERVE - 1) + 2**20
