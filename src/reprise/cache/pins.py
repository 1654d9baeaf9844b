"""Pins: checkpoints that stay whatever else would be worth more, until a time on the cache's clock.

A pin keeps its path and its snapshot. Some are set one by one (`cache_control`, an administrator's call) and hold until
their time is over; others follow a conversation (`prompt_cache_retention`), and a later turn's replaces an earlier
one's. Where there are too many (`keep_within`), or a running request has no room otherwise, those end first that
would end first; of those that end together, the newest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from reprise.cache.node import Checkpoint, Node, path_to
from reprise.core.clock import Clock


@dataclass(frozen=True, slots=True)
class _Until:
    """The times until which a checkpoint stays, and who asked for that."""

    pinned: float = 0.0
    retained: float = 0.0
    owners: frozenset[str] = frozenset()

    @property
    def last(self) -> float:
        return max(self.pinned, self.retained)


_NEVER = _Until()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedTotal:
    """How many checkpoints are pinned, how many bytes stay for them, and when the first of them ends."""

    num: int = 0
    nbytes: int = 0
    until: float = float("inf")


class Pins:
    """The pinned checkpoints, oldest pin first, among them those whose time is over. `num_changes` grows with each."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[Checkpoint, _Until] = {}
        self.num_changes = 0
        self._total = PinnedTotal()
        self._total_of = 0

    # Asking.

    def __iter__(self) -> Iterator[Checkpoint]:
        """The checkpoints whose pins hold now."""
        now = self._clock()
        return iter([checkpoint for checkpoint, until in self._until.items() if until.last > now])

    def noted(self) -> frozenset[Checkpoint]:
        """All that are written down, whether their time is over or not."""
        return frozenset(self._until)

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint may not be evicted now."""
        return self.until(checkpoint) > self._clock()

    def until(self, checkpoint: Checkpoint) -> float:
        """Until when the checkpoint stays; 0 if it never was pinned."""
        until = self._until.get(checkpoint)
        return until.last if until is not None else 0.0

    def is_owned_by(self, checkpoint: Checkpoint, owner: str) -> bool:
        """Whether it is pinned, perhaps among others, for this owner."""
        until = self._until.get(checkpoint)
        return until is not None and owner in until.owners

    def follows_chat(self, checkpoint: Checkpoint) -> bool:
        """Whether a later turn of the same conversation will replace this pin."""
        until = self._until.get(checkpoint)
        return until is not None and until.pinned <= self._clock()

    def total(self) -> PinnedTotal:
        """What all pins keep now. O(pins × depth) if that has changed since it was asked last."""
        if self._total_of != self.num_changes or self._total.until <= self._clock():
            self._total_of = self.num_changes
            self._total = self.total_of(list(self))
        return self._total

    def total_of(self, checkpoints: list[Checkpoint]) -> PinnedTotal:
        """What these keep: paths that they share count once. O(checkpoints × depth)."""
        return PinnedTotal(
            num=len(checkpoints),
            nbytes=_nbytes_of(checkpoints),
            until=min((self.until(checkpoint) for checkpoint in checkpoints), default=float("inf")),
        )

    # Changing.

    def pin(self, checkpoint: Checkpoint, until: float, *, owner: str = "") -> None:
        """Keep the checkpoint until then, or longer if it is pinned longer, for this owner and those that it has."""
        known = self._until.get(checkpoint, _NEVER)
        if until > known.pinned or owner not in known.owners:
            pinned = max(until, known.pinned)
            self._set(checkpoint, replace(known, pinned=pinned, owners=known.owners | {owner}))

    def retain(self, checkpoint: Checkpoint, until: float, *, owner: str = "") -> None:
        """The same for the tip of a conversation: what it retained further up is let go."""
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
        """One owner lets the checkpoint go; the last one unpins it. False if it was not pinned for this one."""
        if not self.is_owned_by(checkpoint, owner):
            return False
        rest = self._until[checkpoint].owners - {owner}
        if rest:
            self._set(checkpoint, replace(self._until[checkpoint], owners=rest))
            return True
        return self.unpin(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> bool:
        """Let the checkpoint go. False if it was not pinned."""
        if not self.holds(checkpoint):
            return False
        self.discard(checkpoint)
        return True

    def discard(self, checkpoint: Checkpoint) -> None:
        """Forget the checkpoint, pinned or not: it leaves the tree."""
        if self._until.pop(checkpoint, None) is not None:
            self.num_changes += 1

    def unpin_first(self) -> bool:
        """Let the pin go that would end first. False if there is none. O(pins)."""
        first = min(reversed(list(self)), key=self.until, default=None)
        return first is not None and self.unpin(first)

    def keep_within(self, nbytes: int) -> int:
        """Let pins go until the rest keep so many bytes at most. Gives how many went."""
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
    """The bytes that stay for these checkpoints."""
    stops: dict[int, tuple[Node, int]] = {}
    for checkpoint in checkpoints:
        for node in path_to(checkpoint.node):
            stop = min(node.stop, checkpoint.position)
            known = stops.get(id(node))
            stops[id(node)] = (node, stop if known is None else max(stop, known[1]))
    nbytes = sum(_nbytes_to(node, stop) for node, stop in stops.values())
    return nbytes + sum(c.snapshot.nbytes for c in checkpoints if c.snapshot is not None)


def _nbytes_to(node: Node, stop: int) -> int:
    """The bytes of an edge's entries up to `stop`; of a segment that goes on behind it, its share."""
    total = 0
    for segments in node.segments.values():
        for segment in segments:
            inside = segment.span.clip(0, stop)
            total += segment.nbytes * len(inside) // len(segment.span) if inside is not None else 0
    return total
