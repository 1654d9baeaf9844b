"""Half-open spans of positions, and sorted sets of them."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The positions ``[start, stop)``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, (self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def clip(self, start: int, stop: int) -> "Span | None":
        """What of this span lies in ``[start, stop)``, or None if nothing does."""
        low, high = max(self.start, start), min(self.stop, stop)
        return Span(low, high) if low < high else None


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions as sorted spans that neither touch nor overlap. Empty spans vanish. O(n log n)."""
    merged: list[Span] = []
    for span in sorted(s for s in spans if len(s) > 0):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def subtract(spans: Iterable[Span], holes: Iterable[Span]) -> tuple[Span, ...]:
    """The positions of `spans` that are not in `holes`, as sorted disjoint spans."""
    rest: list[Span] = []
    cut = union(holes)
    for span in union(spans):
        at = span.start
        for hole in cut:
            if hole.stop <= at:
                continue
            if hole.start >= span.stop:
                break
            if hole.start > at:
                rest.append(Span(at, hole.start))
            at = max(at, hole.stop)
        if at < span.stop:
            rest.append(Span(at, span.stop))
    return tuple(rest)


def covers(spans: Iterable[Span], needed: Iterable[Span]) -> bool:
    """Whether every position of `needed` is in `spans`."""
    return not subtract(needed, spans)
