"""The order of eviction: a heap of checkpoints by worth, with lazy re-evaluation, and what the policy is told of each.

An entry is stale when its checkpoint is gone or was placed anew. A popped checkpoint whose worth has risen since it
was pushed goes back with its new worth, so facts that change elsewhere (a neighbour evicted, a branch added) need no
bookkeeping here. A worth that changes by itself is looked at again when the policy says so: a second heap, by the
number of the prompt. O(log n) for each push and pop.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import count, islice

from reprise.cache.node import Checkpoint, Node, Segment, Walk
from reprise.cache.pins import Pins
from reprise.cache.policy import Facts, Policy
from reprise.cache.retention import evicted_from, is_tail, superseded_kinds
from reprise.cache.tree import RadixTree
from reprise.core.kinds import Full
from reprise.core.prompt import BoundaryKind


class EvictionOrder:
    """Gives the checkpoints of `tree`, least worth first."""

    def __init__(self, policy: Policy, tree: RadixTree, pins: Pins) -> None:
        self.policy = policy
        self._tree = tree
        self._pins = pins
        self._heap: list[tuple[float, int, Checkpoint]] = []
        self._reviews: list[tuple[int, int, Checkpoint]] = []
        self._placed: dict[Checkpoint, int] = {}
        """The number of each checkpoint's newest place: entries with another are stale."""
        self._numbers = count()

    def __len__(self) -> int:
        """How many checkpoints stand in the order."""
        return len(self._placed)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._placed

    @property
    def num_entries(self) -> int:
        """Entries of both heaps, stale ones among them."""
        return len(self._heap) + len(self._reviews)

    # Changes.

    def place(self, checkpoint: Checkpoint) -> None:
        """Place the checkpoint anew: it was made or used, or something about it changed."""
        self._placed[checkpoint] = next(self._numbers)
        facts = self.facts(checkpoint)
        self._push(self.policy.worth(facts), checkpoint)
        review_at = self.policy.review_at(facts)
        if review_at is not None:
            heapq.heappush(self._reviews, (review_at, self._placed[checkpoint], checkpoint))

    def remove(self, checkpoint: Checkpoint) -> None:
        """The checkpoint leaves the tree, or has left it."""
        self._placed.pop(checkpoint, None)

    def clear(self) -> None:
        self._placed.clear()
        self._heap.clear()
        self._reviews.clear()

    def advance(self, number: int) -> None:
        """Prompt `number` has come: look again at what was to be looked at by then."""
        while self._reviews and self._reviews[0][0] <= number:
            _, place, checkpoint = heapq.heappop(self._reviews)
            if self._placed.get(checkpoint) == place:
                self.place(checkpoint)

    def pop(self, *, may_evict: Callable[[Checkpoint], bool], new: Facts | None = None) -> Checkpoint | None:
        """The checkpoint of least worth that may be evicted, or None. It is no longer in the order.

        `new`: what is to take its place. None if the policy does not admit that.
        """
        put_back: list[tuple[float, Checkpoint]] = []
        found: Checkpoint | None = None
        while self._heap:
            worth, place, checkpoint = heapq.heappop(self._heap)
            if self._placed.get(checkpoint) != place:
                continue
            if not may_evict(checkpoint):
                put_back.append((worth, checkpoint))
                continue
            facts = self.facts(checkpoint)
            now_worth = self.policy.worth(facts)
            if now_worth > worth and self._heap and now_worth > self._heap[0][0]:
                self._push(now_worth, checkpoint)
                continue
            if new is not None and not self.policy.admits(new, now_worth):
                put_back.append((now_worth, checkpoint))
                break
            self.policy.evicted(facts, now_worth)
            self.remove(checkpoint)
            found = checkpoint
            break
        for worth, checkpoint in put_back:
            self._push(worth, checkpoint)
        return found

    def first(self, num: int, *, may_evict: Callable[[Checkpoint], bool]) -> list[tuple[Checkpoint, Facts]]:
        """The `num` checkpoints of least worth that may be evicted, least first. Changes nothing.

        O(num log num), with what is stale or may not be evicted among the first.
        """
        there = (c for _, place, c in self._ascending() if self._placed.get(c) == place and may_evict(c))
        # Some are worth more by now: twice as many are looked at again.
        facts = {checkpoint: self.facts(checkpoint) for checkpoint in islice(there, 2 * num)}
        order = sorted(facts, key=lambda checkpoint: self.policy.worth(facts[checkpoint]))
        return [(checkpoint, facts[checkpoint]) for checkpoint in order[:num]]

    def _ascending(self) -> Iterator[tuple[float, int, Checkpoint]]:
        """The entries of the heap in order, without touching it."""
        front = [(entry, 0) for entry in self._heap[:1]]
        while front:
            entry, at = heapq.heappop(front)
            yield entry
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(self._heap):
                    heapq.heappush(front, (self._heap[below], below))

    def sweep(self) -> None:
        """Drop stale entries when they outnumber the live ones, so that the heaps stay proportional to the tree."""
        most = 4 * len(self._placed) + 64
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if self._placed.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        if len(self._reviews) > most:
            self._reviews = [entry for entry in self._reviews if self._placed.get(entry[2]) == entry[1]]
            heapq.heapify(self._reviews)

    def _push(self, worth: float, checkpoint: Checkpoint) -> None:
        heapq.heappush(self._heap, (worth, self._placed[checkpoint], checkpoint))

    # What the policy is told.

    def facts(self, checkpoint: Checkpoint) -> Facts:
        """The facts of a checkpoint in the tree. O(depth) at worst."""
        node, layout = checkpoint.node, self._tree.layout
        is_end = not node.children and checkpoint.position == node.stop
        if is_end and layout.resumes_anywhere:
            lower = evicted_from(checkpoint, self._tree.sizes.tail, self._pins.holds)
        else:
            lower = _checkpoint_below(checkpoint)
        standing = lower
        if not layout.resumes_anywhere and not checkpoint.is_superseded:
            # What is superseded goes first, so it would not be there to resume from.
            standing = _standing_below(node, checkpoint.position - 1)
        return Facts(
            kind=checkpoint.kind,
            cost=checkpoint.position - standing,
            nbytes=_freed_nbytes(checkpoint, lower, is_end=is_end),
            last_use=max(checkpoint.last_use, node.last_use) if layout.resumes_anywhere else checkpoint.last_use,
            now=self._tree.clock,
            num_uses=checkpoint.num_uses,
            num_branches=len(node.children) if checkpoint.position == node.stop else 0,
            is_superseded=checkpoint.is_superseded,
            is_auxiliary=checkpoint.is_auxiliary,
            last_visit=node.last_visit,
            first_visit=node.first_visit,
            num_passes=node.num_uses,
            is_tail=is_end and layout.resumes_anywhere and is_tail(checkpoint),
        )

    def facts_of_new(
        self, walk: Walk, position: int, nbytes: int, *, kind: BoundaryKind, visit: int | None, is_auxiliary: bool
    ) -> Facts:
        """The facts of a checkpoint of `nbytes` that a commit would add at `position`, behind the walked path."""
        below = walk.length
        if not self._tree.layout.resumes_anywhere:
            below = _standing_below(walk.last, min(walk.length, position - 1), leaving=superseded_kinds(kind))
        now = self._tree.clock + 1
        return Facts(
            kind=kind,
            cost=position - below,
            nbytes=nbytes,
            last_use=now,
            now=now,
            last_visit=visit,
            first_visit=visit,
            is_auxiliary=is_auxiliary,
        )


def _freed_nbytes(checkpoint: Checkpoint, lower: int, *, is_end: bool) -> int:
    """The bytes that evicting the checkpoint gives back; `lower`: from where its path would be dropped at its end."""
    node = checkpoint.node
    nbytes = checkpoint.snapshot.nbytes if checkpoint.snapshot is not None else 0
    for kind, segments in node.segments.items():
        if is_end:
            start = max(node.start, lower)
        elif isinstance(kind, Full):
            continue
        else:
            needs = kind.needs(checkpoint.position)
            start = max(lower, needs[-1].start if needs else checkpoint.position)
        for segment in segments[bisect_right(segments, start, key=_stop_of) :]:
            freed = segment.span.clip(start, max(start, checkpoint.position))
            if freed is None:
                break
            nbytes += segment.nbytes * len(freed) // len(segment.span)
    return nbytes


def _standing_below(node: Node, limit: int, *, leaving: frozenset[BoundaryKind] = frozenset()) -> int:
    """The highest checkpoint ≤ `limit` on the path that is neither superseded nor of a kind in `leaving`, or 0.

    O(checkpoints of the path) at worst.
    """
    above: Node | None = node
    while above is not None:
        standing = [
            checkpoint.position
            for checkpoint in above.checkpoints.values()
            if checkpoint.position <= limit and not checkpoint.is_superseded and checkpoint.kind not in leaving
        ]
        if standing:
            return max(standing)
        above = above.parent
    return 0


def _checkpoint_below(checkpoint: Checkpoint) -> int:
    """The next lower checkpoint on the path, or 0. O(depth) where the edges have none."""
    node: Node | None = checkpoint.node
    limit = checkpoint.position - 1
    while node is not None:
        lower = node.checkpoints.highest(limit)
        if lower is not None:
            return lower
        node = node.parent
    return 0


def _stop_of(segment: Segment) -> int:
    return segment.span.stop
