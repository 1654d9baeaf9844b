"""Token runs: compact, read-only arrays of token ids. And half-open spans of their positions.

A run is a one-dimensional ``numpy.int32`` array of shape ``(length,)``: four bytes a token, sliced without a copy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def as_tokens(ids: Iterable[int] | Tokens) -> Tokens:
    """A read-only token run of these ids. A run that is read-only already is returned as it is."""
    if isinstance(ids, np.ndarray):
        given = cast(Tokens, ids)
        if given.dtype == np.int32 and not given.flags.writeable:
            return given
        run = given.astype(np.int32)
    else:
        run = np.fromiter(ids, dtype=np.int32)
    run.flags.writeable = False
    return run


def own_tokens(run: Tokens) -> Tokens:
    """A copy that owns its bytes, so that a short run does not keep a long prompt alive."""
    copy = run.copy()
    copy.flags.writeable = False
    return copy


def join_tokens(*runs: Tokens) -> Tokens:
    """The runs, one after the other, as one read-only run."""
    joined = np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)
    joined.flags.writeable = False
    return joined


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens the two runs share. O(length of the shared prefix), a few microseconds per 10,000."""
    n = min(len(a), len(b))
    # In steps, so that an early difference in two long prompts does not compare them to the end.
    start, step = 0, 1024
    while start < n:
        stop = min(n, start + step)
        differs = a[start:stop] != b[start:stop]
        if differs.any():
            return start + int(differs.argmax())
        start, step = stop, step * 4
    return n


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
