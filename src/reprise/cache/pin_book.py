"""Which landmarks are pinned: the one place where a pin is written down, so that nobody has to search the trees."""

from __future__ import annotations

from collections.abc import Iterator

from reprise.cache.tree import Landmark


class PinBook:
    """The landmarks that have a pin, oldest first, among them those whose time is over.

    `num_changes` grows with every change, so that whoever adds up what the pins keep knows when to do it again.
    """

    def __init__(self) -> None:
        self._marks: dict[Landmark, None] = {}
        self.num_changes = 0

    def __iter__(self) -> Iterator[Landmark]:
        return iter(self._marks)

    def __len__(self) -> int:
        return len(self._marks)

    def pin(self, mark: Landmark, until: float) -> None:
        """Keep the landmark until then, or longer if it is pinned longer."""
        if until > mark.pinned_until:
            mark.pinned_until = until
            self._note(mark)

    def retain(self, mark: Landmark, until: float) -> None:
        """The same for a landmark that a later one of its conversation will take over from."""
        if until > mark.retained_until:
            mark.retained_until = until
            self._note(mark)

    def retain_no_more(self, mark: Landmark) -> None:
        """A later landmark has taken over."""
        if mark.retained_until > 0:
            mark.retained_until = 0.0
            self._note(mark)

    def lift(self, mark: Landmark) -> None:
        """Let the landmark go."""
        mark.pinned_until = mark.retained_until = 0.0
        self._note(mark)

    def forget(self, mark: Landmark) -> None:
        """The landmark is leaving the tree."""
        if mark in self._marks:
            self.lift(mark)

    def _note(self, mark: Landmark) -> None:
        self.num_changes += 1
        if mark.stays_until > 0:
            self._marks.setdefault(mark)
        else:
            self._marks.pop(mark, None)
