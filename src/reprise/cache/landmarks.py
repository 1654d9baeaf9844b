"""The landmarks of one edge by position, so that the next lower one is found without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, MutableMapping, ValuesView
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reprise.cache.tree import Landmark


class Landmarks(MutableMapping[int, "Landmark"]):
    """A mapping from position to landmark that iterates in order of position."""

    __slots__ = ("_by_position", "_positions")

    def __init__(self) -> None:
        self._by_position: dict[int, Landmark] = {}
        self._positions: list[int] = []

    def __getitem__(self, position: int) -> Landmark:
        return self._by_position[position]

    def __setitem__(self, position: int, landmark: Landmark) -> None:
        if position not in self._by_position:
            insort(self._positions, position)
        self._by_position[position] = landmark

    def __delitem__(self, position: int) -> None:
        del self._by_position[position]
        del self._positions[bisect_left(self._positions, position)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, position: object) -> bool:
        return position in self._by_position

    def values(self) -> ValuesView[Landmark]:
        """The landmarks, in no order."""
        return self._by_position.values()

    def highest(self, limit: int) -> int | None:
        """The highest position ≤ `limit` that has a landmark, or None. O(log n)."""
        number = bisect_right(self._positions, limit)
        return self._positions[number - 1] if number > 0 else None
