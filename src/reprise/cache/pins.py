"""Pins: checkpoints exempt from eviction until a time on the cache's clock.

A pin keeps its path and its snapshot. Explicit pins (`cache_control`, the administration API) hold until they expire;
others follow a conversation (`prompt_cache_retention`): a later turn's pin replaces the earlier one. If pins exceed
their limit (`keep_within`), or a running request has no room otherwise, those that expire first are removed first; of
those that expire together, the newest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from reprise.cache.node import Checkpoint, Node, path_to
from reprise.core.clock import Clock


@dataclass(frozen=True, slots=True)
class _Until:
    """When a checkpoint's pins expire, explicit (`pinned`) and of its conversation (`retained`), and their owners."""

    pinned: float = 0.0
    retained: float = 0.0
    owners: frozenset[str] = frozenset()

    @property
    def last(self) -> float:
        return max(self.pinned, self.retained)


_NEVER = _Until()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedTotal:
    """Number of pinned checkpoints, the bytes they keep, and when the first of them expires."""

    num: int = 0
    nbytes: int = 0
    until: float = float("inf")


class Pins:
    """The pinned checkpoints, oldest pin first, including expired ones. `num_changes` grows with every change."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[Checkpoint, _Until] = {}
        self.num_changes = 0
        self._total = PinnedTotal()
        self._total_of = 0

    # Queries.

    def __iter__(self) -> Iterator[Checkpoint]:
        """The checkpoints whose pins have not expired."""
        now = self._clock()
        return iter([checkpoint for checkpoint, until in self._until.items() if until.last > now])

    def noted(self) -> frozenset[Checkpoint]:
        """All pinned checkpoints, including expired ones."""
        return frozenset(self._until)

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint is pinned now."""
        return self.until(checkpoint) > self._clock()

    def until(self, checkpoint: Checkpoint) -> float:
        """When the checkpoint's pin expires; 0 if it is not pinned."""
        until = self._until.get(checkpoint)
        return until.last if until is not None else 0.0

    def is_owned_by(self, checkpoint: Checkpoint, owner: str) -> bool:
        """Whether `owner` has pinned it, perhaps among others."""
        until = self._until.get(checkpoint)
        return until is not None and owner in until.owners

    def follows_chat(self, checkpoint: Checkpoint) -> bool:
        """Whether a later turn of the same conversation will replace this pin."""
        until = self._until.get(checkpoint)
        return until is not None and until.pinned <= self._clock()

    def total(self) -> PinnedTotal:
        """The total of all pins now. Memoized; O(pins × depth) after a change."""
        if self._total_of != self.num_changes or self._total.until <= self._clock():
            self._total_of = self.num_changes
            self._total = self.total_of(list(self))
        return self._total

    def total_of(self, checkpoints: list[Checkpoint]) -> PinnedTotal:
        """The total of these checkpoints; shared paths count once. O(checkpoints × depth)."""
        return PinnedTotal(
            num=len(checkpoints),
            nbytes=_nbytes_of(checkpoints),
            until=min((self.until(checkpoint) for checkpoint in checkpoints), default=float("inf")),
        )

    # Changes.

    def pin(self, checkpoint: Checkpoint, until: float, *, owner: str = "") -> None:
        """Pin the checkpoint at least until `until`, and add `owner` to its owners."""
        known = self._until.get(checkpoint, _NEVER)
        if until > known.pinned or owner not in known.owners:
            pinned = max(until, known.pinned)
            self._set(checkpoint, replace(known, pinned=pinned, owners=known.owners | {owner}))

    def retain(self, checkpoint: Checkpoint, until: float, *, owner: str = "") -> None:
        """Like `pin`, for the tip of a conversation: releases what it retained earlier on the path."""
        for node in path_to(checkpoint.node):
            for earlier in node.checkpoints.values():
                known = self._until.get(earlier, _NEVER)
                if earlier.position < checkpoint.position and known.retained > 0:
                    self._set(earlier, replace(known, retained=0.0))
        known = self._until.get(checkpoint, _NEVER)
        if until > known.retained or owner not in known.owners:
            retained = max(until, known.retained)
            self._set(checkpoint, replace(known, retained=retained, owners=known.owners | {owner}))

    def disown(self, checkpoint: Checkpoint, owner: str) -> bool:
        """Remove one owner; removing the last one unpins the checkpoint. False if `owner` had not pinned it."""
        if not self.is_owned_by(checkpoint, owner):
            return False
        rest = self._until[checkpoint].owners - {owner}
        if rest:
            self._set(checkpoint, replace(self._until[checkpoint], owners=rest))
            return True
        return self.unpin(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> bool:
        """Unpin the checkpoint. False if it was not pinned."""
        if not self.holds(checkpoint):
            return False
        self.discard(checkpoint)
        return True

    def discard(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint that leaves the tree, pinned or not."""
        if self._until.pop(checkpoint, None) is not None:
            self.num_changes += 1

    def unpin_first(self) -> bool:
        """Unpin the checkpoint whose pin expires first. False if there is none. O(pins)."""
        first = min(reversed(list(self)), key=self.until, default=None)
        return first is not None and self.unpin(first)

    def keep_within(self, nbytes: int) -> int:
        """Unpin until the rest keep at most `nbytes`. Returns how many were unpinned."""
        num = 0
        while self.total().nbytes > nbytes:
            self.unpin_first()
            num += 1
        return num

    def _set(self, checkpoint: Checkpoint, until: _Until) -> None:
        self.num_changes += 1
        if until.last > 0:
            self._until[checkpoint] = until
        else:
            self._until.pop(checkpoint, None)


def _nbytes_of(checkpoints: list[Checkpoint]) -> int:
    """The bytes that these checkpoints keep."""
    stops: dict[int, tuple[Node, int]] = {}
    for checkpoint in checkpoints:
        for node in path_to(checkpoint.node):
            stop = min(node.stop, checkpoint.position)
            known = stops.get(id(node))
            stops[id(node)] = (node, stop if known is None else max(stop, known[1]))
    nbytes = sum(_nbytes_to(node, stop) for node, stop in stops.values())
    return nbytes + sum(c.snapshot.nbytes for c in checkpoints if c.snapshot is not None)


def _nbytes_to(node: Node, stop: int) -> int:
    """The bytes of an edge's entries up to `stop`; for a segment that extends past it, the proportional share."""
    total = 0
    for segments in node.segments.values():
        for segment in segments:
            inside = segment.span.clip(0, stop)
            total += segment.nbytes * len(inside) // len(segment.span) if inside is not None else 0
    return total
