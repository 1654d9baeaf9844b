"""How the memory budget follows the machine and a bound for the process: what is free, in; the next budget, out. Pure.

Idle buffers go back first, then a part of the budget; both come back when there has been room for a while. A bound for
everything that the process holds (`--memory`) is followed in the same way, as a machine with that much memory.
"""

from dataclasses import dataclass, replace

_RESERVE = 20
"""A part of the machine's memory that is left to others, and at most:"""
_MOST_RESERVE = 2 * 2**30
_PATIENCE_S = 60.0
"""How long there has to be room before the budget grows again, and between two steps of that."""

_MOST_FREE_BUFFERS = 512 * 2**20
_LEAST_FREE_BUFFERS = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """What the system says: bytes that it can give without swapping, of how many, and whether it asks for some."""

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
    """The budget now, between `least` and `most`; `changed_at_s`: when it last had to be less, or became more."""

    nbytes: int
    least: int
    most: int
    changed_at_s: float = 0.0
    returns_buffers: bool = False
    """Whether idle buffers are to be given back now."""

    def __post_init__(self) -> None:
        assert self.least <= self.nbytes <= self.most, self

    @property
    def is_reduced(self) -> bool:
        return self.nbytes < self.most

    def after(self, reading: MemoryReading, *, now_s: float, held: int | None = None) -> "Budget":
        """The budget after a reading. `held`: what is held of it; None: all of it."""
        missing = reading.reserve - reading.available
        if missing > 0 or reading.is_pressed:
            if not self.returns_buffers:
                return replace(self, returns_buffers=True, changed_at_s=now_s)
            # Pressure without a figure: a tenth at a time.
            less = max(missing, self.nbytes // 10 if reading.is_pressed else 0)
            # What is not used of the budget gives nothing back.
            used = self.nbytes if held is None else min(self.nbytes, held)
            return replace(self, nbytes=max(self.least, used - less), changed_at_s=now_s)
        spare = reading.available - 2 * reading.reserve
        if spare <= 0 or now_s - self.changed_at_s < _PATIENCE_S:
            return replace(self, returns_buffers=self.returns_buffers and self.is_reduced)
        if not self.is_reduced:
            return replace(self, returns_buffers=False)
        return replace(self, nbytes=min(self.most, self.nbytes + spare // 2), changed_at_s=now_s, returns_buffers=False)


def free_buffers(budget: int) -> int:
    """Bytes of freed buffers that MLX may keep for the next ones, beside a budget of layer state."""
    return min(_MOST_FREE_BUFFERS, max(_LEAST_FREE_BUFFERS, budget // 8))


def within_bound(bound: int, process: int) -> MemoryReading:
    """A bound for the process as a machine of which it has `process` bytes."""
    return MemoryReading(available=bound - process, total=bound)


def budget_within(bound: int, process: int) -> int:
    """The most layer state that a process may have which holds `process` bytes without any; 0 where nothing is left.

    Beside it there is room for freed buffers, and a reserve for what a step computes with.
    """
    reading = within_bound(bound, process)
    left = reading.available - reading.reserve
    return max(0, left - _MOST_FREE_BUFFERS, min(left * 8 // 9, left - _LEAST_FREE_BUFFERS))


def bound_for(process: int, budget: int) -> int:
    """A bound within which `budget_within` gives `budget` at least."""
    # The reserve is a part of the bound, or what it is at most.
    return (process + budget + free_buffers(budget)) * _RESERVE // (_RESERVE - 1) + 2**20
