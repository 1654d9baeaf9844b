"""How the memory budget follows the machine: what is free, in; the next budget, out. Pure.

Idle buffers go back first, then a part of the budget; both come back when there has been room for a while.
"""

from dataclasses import dataclass, replace

_RESERVE = 20
"""A part of the machine's memory that is left to others, and at most:"""
_MOST_RESERVE = 2 * 2**30
_PATIENCE_S = 60.0
"""How long there has to be room before the budget grows again, and between two steps of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the system says: bytes that it can give without swapping, of how many, and whether it asks for some."""

    available: int
    total: int
    is_pressed: bool = False

    @property
    def reserve(self) -> int:
        return min(_MOST_RESERVE, self.total // _RESERVE)


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

    def after(self, reading: Reading, *, now_s: float) -> "Budget":
        """The budget after a reading."""
        missing = reading.reserve - reading.available
        if missing > 0 or reading.is_pressed:
            if not self.returns_buffers:
                return replace(self, returns_buffers=True, changed_at_s=now_s)
            # Pressure without a figure: a tenth at a time.
            less = max(missing, self.nbytes // 10 if reading.is_pressed else 0)
            return replace(self, nbytes=max(self.least, self.nbytes - less), changed_at_s=now_s)
        spare = reading.available - 2 * reading.reserve
        if spare <= 0 or now_s - self.changed_at_s < _PATIENCE_S:
            return replace(self, returns_buffers=self.returns_buffers and self.is_reduced)
        if not self.is_reduced:
            return replace(self, returns_buffers=False)
        return replace(self, nbytes=min(self.most, self.nbytes + spare // 2), changed_at_s=now_s, returns_buffers=False)
