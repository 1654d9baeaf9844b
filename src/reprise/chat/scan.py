"""Comparing texts, and finding strings in text that arrives in pieces, with the same result however it is cut."""

from collections.abc import Sequence
from dataclasses import dataclass


def common_length(one: str, other: str) -> int:
    """How many leading characters two texts share. O(n), by comparing O(log n) slices."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleMatch:
    """The needle number `index` stands at ``[start, stop)`` of the text."""

    index: int
    start: int
    stop: int


def first_match(text: str, needles: Sequence[str]) -> NeedleMatch | None:
    """The needle that is complete first; of those that end together, the longest.

    A reader that got the text one character at a time would decide the same, since it cannot wait for a needle that
    began earlier and is not complete. O(len(text) * number of needles).
    """
    best: NeedleMatch | None = None
    for index, needle in enumerate(needles):
        start = text.find(needle)
        if start < 0:
            continue
        stop = start + len(needle)
        if best is None or (stop, start) < (best.stop, best.start):
            best = NeedleMatch(index=index, start=start, stop=stop)
    return best


def num_held(text: str, needles: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a needle, and so have to wait."""
    longest = max((len(needle) for needle in needles), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(needle) > length and needle.startswith(end) for needle in needles):
            return length
    return 0
