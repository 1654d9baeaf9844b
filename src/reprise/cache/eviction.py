"""What is evicted first, and what an eviction may drop.

`EvictionOrder` is a heap of checkpoints by score, lazily re-evaluated. An entry is stale when its checkpoint was
dropped or placed again. A popped checkpoint whose score has risen since it was pushed is pushed back, so changes
elsewhere (a neighbour evicted, a branch added) need no bookkeeping here. A score that changes with time is re-evaluated
when the policy says so: a second heap, by prompt number. Push and pop are O(log n).

The functions after it are pure: which parts of a path are still needed, and which checkpoints a newer one supersedes.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, pairwise

from reprise.cache.lineage import Lineages
from reprise.cache.node import Checkpoint, Node, Walk, subtree
from reprise.cache.pins import Pins
from reprise.cache.policy import EvictionCandidate, Policy
from reprise.cache.tree import RadixTree
from reprise.core.kinds import Chunk, Full, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, subtract, union

_TIPS = frozenset(set(BoundaryKind) - {BoundaryKind.STABLE, BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT})
"""Kinds that a later checkpoint of the same conversation supersedes, if it is one of these or stable.

Only a stable one supersedes a stable one: if the next message strips a tool loop, the last stable one is where to
resume.
"""


class EvictionOrder:
    """The checkpoints of `tree`, lowest score first."""

    def __init__(self, policy: Policy, tree: RadixTree, pins: Pins) -> None:
        self.policy = policy
        self.lineages = Lineages()
        self._tree = tree
        self._pins = pins
        self._heap: list[tuple[float, int, Checkpoint]] = []
        self._reviews: list[tuple[int, int, Checkpoint]] = []
        self._placed: dict[Checkpoint, int] = {}
        """The number of each checkpoint's current entry; entries with another number are stale."""
        self._numbers = count()

    def __len__(self) -> int:
        """Number of checkpoints in the order."""
        return len(self._placed)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._placed

    @property
    def num_entries(self) -> int:
        """Entries of both heaps, including stale ones."""
        return len(self._heap) + len(self._reviews)

    # Changes.

    def place(self, checkpoint: Checkpoint) -> None:
        """Insert a checkpoint, or re-evaluate it after it was used or changed."""
        self._placed[checkpoint] = next(self._numbers)
        candidate = self.candidate(checkpoint)
        self._push(self.policy.score(candidate), checkpoint)
        review_at = self.policy.review_at(candidate)
        if review_at is not None:
            heapq.heappush(self._reviews, (review_at, self._placed[checkpoint], checkpoint))

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint that leaves the tree; ignored if it is not in the order."""
        self._placed.pop(checkpoint, None)

    def clear(self) -> None:
        self._placed.clear()
        self._heap.clear()
        self._reviews.clear()

    def advance(self, number: int) -> None:
        """Prompt `number` has arrived: re-evaluate the checkpoints due by then, once each."""
        due: list[Checkpoint] = []
        while self._reviews and self._reviews[0][0] <= number:
            _, place, checkpoint = heapq.heappop(self._reviews)
            if self._placed.get(checkpoint) == place:
                due.append(checkpoint)
        # Behind the loop: a policy that missed a prompt (its code raised) has them due again at once.
        for checkpoint in due:
            self.place(checkpoint)

    def pop(
        self, *, may_evict: Callable[[Checkpoint], bool], new: EvictionCandidate | None = None, needed: int = 0
    ) -> Checkpoint | None:
        """Remove and return the checkpoint with the lowest score that may be evicted, or None.

        `new`: the item to be stored instead, for which `needed` bytes are missing; returns None if the policy does not
        admit it.
        """
        put_back: list[tuple[float, Checkpoint]] = []
        found: Checkpoint | None = None
        while self._heap:
            score, place, checkpoint = heapq.heappop(self._heap)
            if self._placed.get(checkpoint) != place:
                continue
            if not may_evict(checkpoint):
                put_back.append((score, checkpoint))
                continue
            candidate = self.candidate(checkpoint)
            new_score = self.policy.score(candidate)
            if new_score > score and self._heap and new_score > self._heap[0][0]:
                self._push(new_score, checkpoint)
                continue
            # Where every position is resumable, only a short end of the path is lost.
            is_exact = self._tree.layout.resumes_anywhere or candidate.nbytes <= needed
            if new is not None and not self.policy.admits(new, candidate, is_exact=is_exact):
                put_back.append((new_score, checkpoint))
                break
            self.policy.evicted(candidate, new_score)
            self.remove(checkpoint)
            found = checkpoint
            break
        for score, checkpoint in put_back:
            self._push(score, checkpoint)
        return found

    def first(self, num: int, *, may_evict: Callable[[Checkpoint], bool]) -> list[tuple[Checkpoint, EvictionCandidate]]:
        """The `num` checkpoints with the lowest scores that may be evicted, lowest first. Changes nothing.

        O(n log n), where n includes the stale and protected entries that are skipped.
        """
        there = (c for _, place, c in self._ascending() if self._placed.get(c) == place and may_evict(c))
        # Some scores may have risen: re-evaluate twice as many.
        candidates = {checkpoint: self.candidate(checkpoint) for checkpoint in islice(there, 2 * num)}
        order = sorted(candidates, key=lambda checkpoint: self.policy.score(candidates[checkpoint]))
        return [(checkpoint, candidates[checkpoint]) for checkpoint in order[:num]]

    def _ascending(self) -> Iterator[tuple[float, int, Checkpoint]]:
        """The heap's entries in order, without changing it."""
        front = [(entry, 0) for entry in self._heap[:1]]
        while front:
            entry, at = heapq.heappop(front)
            yield entry
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(self._heap):
                    heapq.heappush(front, (self._heap[below], below))

    def sweep(self) -> None:
        """Drop stale entries once they outnumber the current ones, so the heaps stay proportional to the tree."""
        most = 4 * len(self._placed) + 64
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if self._placed.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        if len(self._reviews) > most:
            self._reviews = [entry for entry in self._reviews if self._placed.get(entry[2]) == entry[1]]
            heapq.heapify(self._reviews)

    def _push(self, score: float, checkpoint: Checkpoint) -> None:
        heapq.heappush(self._heap, (score, self._placed[checkpoint], checkpoint))

    # What the policy gets.

    def candidate(self, checkpoint: Checkpoint) -> EvictionCandidate:
        """What is known about a checkpoint in the tree. O(depth) at worst."""
        node, layout = checkpoint.node, self._tree.layout
        is_end = not node.children and checkpoint.position == node.stop
        lower = self.evicted_from(checkpoint) if is_end and layout.resumes_anywhere else _checkpoint_below(checkpoint)
        resume_at = lower
        if not layout.resumes_anywhere and checkpoint.is_useful:
            # Superseded checkpoints are evicted first, so they cannot be counted on.
            resume_at = _current_below(node, checkpoint.position - 1)
        trunk_at = self.lineages.trunk_of_ended(node.last_visit, node.first_visit)
        return EvictionCandidate(
            kind=checkpoint.kind,
            cost=checkpoint.position - resume_at,
            nbytes=_freed_nbytes(checkpoint, lower, is_end=is_end),
            last_use=max(checkpoint.last_use, node.last_use) if layout.resumes_anywhere else checkpoint.last_use,
            now=self._tree.clock,
            num_uses=checkpoint.num_uses,
            num_branches=len(node.children) if checkpoint.position == node.stop else 0,
            is_superseded=not checkpoint.is_useful,
            is_auxiliary=checkpoint.is_auxiliary,
            last_visit=node.last_visit,
            first_visit=node.first_visit,
            num_passes=node.num_uses,
            is_tail=is_end and layout.resumes_anywhere and is_tail(checkpoint),
            is_passed=not layout.resumes_anywhere and not checkpoint.is_fallback and _is_passed(checkpoint),
            has_ended=trunk_at is not None and checkpoint.position > trunk_at,
            alive_at=self.lineages.alive_at(node.last_visit),
        )

    def evicted_from(self, end: Checkpoint) -> int:
        """The position from which a path is dropped when its end is evicted, if every position is resumable.

        Never across its stable boundary, and of a chat that has ended never across the end of its trunk.
        """
        start = _tail_start(end.node, self._tree.sizes.tail, self._pins)
        if end.stable_at is not None and is_tail(end):
            start = max(start, end.stable_at)
        trunk_at = self.lineages.trunk_of_ended(end.node.last_visit, end.node.first_visit)
        return start if trunk_at is None or end.position <= trunk_at else max(start, trunk_at)

    @staticmethod
    def own_nbytes(checkpoint: Checkpoint) -> int:
        """At most what evicting the checkpoint frees if its path stays."""
        return _freed_nbytes(checkpoint, _checkpoint_below(checkpoint), is_end=False)

    def new_candidate(
        self,
        walk: Walk,
        position: int,
        nbytes: int,
        *,
        kind: BoundaryKind,
        stable_at: int | None,
        visit: int | None,
        is_auxiliary: bool,
    ) -> EvictionCandidate:
        """What is known about a checkpoint of `nbytes` that a commit would add at `position`, past the walked path.

        A snapshot saves what lies beyond the checkpoint that its chat has without it, even one that it would supersede.
        Entries are stored by a later commit if not by this one, so they are worth what the path without those saves.
        """
        below = walk.length
        if not self._tree.layout.resumes_anywhere:
            leaving = frozenset[BoundaryKind]()
            if not self._tree.layout.has_snapshots:
                leaving = superseded_kinds(position, kind, stable_at)
            below = _current_below(walk.last, min(walk.length, position - 1), leaving=leaving)
        now = self._tree.clock + 1
        return EvictionCandidate(
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
    """The bytes that evicting the checkpoint frees; `lower`: the position from which entries would be dropped."""
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
        for segment in segments[bisect_right(segments, start, key=lambda segment: segment.span.stop) :]:
            freed = segment.span.clip(start, max(start, checkpoint.position))
            if freed is None:
                break
            nbytes += segment.nbytes * len(freed) // len(segment.span)
    return nbytes


def _current_below(node: Node, limit: int, *, leaving: frozenset[BoundaryKind] = frozenset()) -> int:
    """The highest checkpoint ≤ `limit` that its chat may resume from, unless it is of a kind in `leaving`, or 0.

    O(checkpoints of the path between).
    """
    above: Node | None = node
    while above is not None:
        for checkpoint in above.checkpoints.down_from(limit):
            is_current = not checkpoint.is_superseded and checkpoint.kind not in leaving
            if is_current or checkpoint.is_fallback or _is_shared(checkpoint):
                return checkpoint.position
        above = above.parent
    return 0


def _is_passed(checkpoint: Checkpoint) -> bool:
    """Whether the chat that was last there resumes further on: where its next turn repeats everything before."""
    node = checkpoint.node
    while True:
        for beyond in node.checkpoints.down_from(node.stop):
            if beyond.position <= checkpoint.position:
                break
            is_stable = BoundaryKind.STABLE in superseded_kinds(beyond.position, beyond.kind, beyond.stable_at)
            if is_stable and not beyond.is_superseded:
                return True
        # The one that was used last is at the end.
        below = next(reversed(node.children.values()), None)
        if below is None or below.last_visit != checkpoint.node.last_visit:
            return False
        node = below


def _is_shared(checkpoint: Checkpoint) -> bool:
    """Whether several requests have resumed there, or several paths go on from there."""
    num_branches = len(checkpoint.node.children) if checkpoint.position == checkpoint.node.stop else 0
    return num_branches > 1 or checkpoint.num_uses > 1


def _checkpoint_below(checkpoint: Checkpoint) -> int:
    """The position of the next lower checkpoint on the path, or 0. O(depth)."""
    node: Node | None = checkpoint.node
    limit = checkpoint.position - 1
    while node is not None:
        lower = node.checkpoints.highest(limit)
        if lower is not None:
            return lower
        node = node.parent
    return 0


def superseded_kinds(position: int, kind: BoundaryKind, stable_at: int | None) -> frozenset[BoundaryKind]:
    """The kinds of earlier checkpoints on the path that one of this kind supersedes.

    `stable_at`: the next turn repeats the path up to there, so a checkpoint before it is as good as a stable one.
    """
    if kind is BoundaryKind.STABLE or (kind in _TIPS and stable_at is not None and position <= stable_at):
        return _TIPS | {BoundaryKind.STABLE}
    return _TIPS if kind in _TIPS else frozenset()


def superseded_on(
    nodes: Sequence[Node], position: int, kind: BoundaryKind, stable_at: int | None
) -> Iterator[Checkpoint]:
    """The checkpoints on this path (from the root) that a new one of this kind at `position` supersedes."""
    kinds = superseded_kinds(position, kind, stable_at)
    for node in nodes:
        for checkpoint in node.checkpoints.values():
            if checkpoint.position < position and checkpoint.kind in kinds and not checkpoint.is_superseded:
                yield checkpoint


def is_far_up(checkpoint: Checkpoint, distance: int) -> bool:
    """Whether the next lower position where its path resumes is at least so many tokens below."""
    return checkpoint.position - _current_below(checkpoint.node, checkpoint.position - 1) >= distance


def superseded_beside(nodes: Sequence[Node]) -> Iterator[Checkpoint]:
    """The checkpoints that the same prompt left beside the path: its chat continues here.

    They lie past the stable boundary of that prompt, and the path leaves it there or later. What has its stable
    boundary beside the path belongs to another chat, which shares the beginning: its next turn resumes there.
    """
    visit = nodes[-1].last_visit
    if visit is None:
        return  # The policy does not number prompts.
    for below, node in pairwise(reversed(nodes)):
        for beside in node.children.values():
            if beside is not below and beside.last_visit == visit:
                for checkpoint in [c for found in subtree(beside) for c in found.checkpoints.values()]:
                    is_left = checkpoint.stable_at is not None and checkpoint.stable_at <= node.stop
                    is_tip = checkpoint.kind in _TIPS and not checkpoint.is_superseded
                    if is_left and (is_tip or checkpoint.is_fallback):
                        yield checkpoint
        if node.first_visit is None or node.first_visit < visit:
            return  # Everything above is older than the prompt.


def end_of_use(node: Node) -> int:
    """The last checkpoint or lease of a leaf, up to which it is needed; its start if it has neither."""
    leased = (lease.position for lease in node.leases)
    return max([*node.checkpoints, *leased], default=node.start)


def unneeded(node: Node, kind: Window | Chunk, span: Span) -> tuple[Span, ...]:
    """The positions of this edge within `span` whose entries no checkpoint or lease needs.

    Reads only what lies within a window's or chunk's length of them: the cost does not grow with the edge.
    """
    inside = span.clip(node.start, node.stop)
    return () if inside is None else subtract((inside,), _needed(node, kind, inside))


def _needed(node: Node, kind: Window | Chunk, span: Span) -> tuple[Span, ...]:
    """The entries of `span`, which lies within this edge, that a checkpoint or lease in it or below needs."""
    # Whoever stands further on needs none of them.
    reach = span.stop + kind.size
    found: tuple[Span, ...] = ()
    if isinstance(kind, Window) and kind.keep > span.start:
        found = (Span(span.start, min(kind.keep, span.stop)),)
    stack = [node]
    while stack and found != (span,):
        below = stack.pop()
        if below.start > reach:
            continue
        leased = (lease.position for lease in below.leases if lease.position <= reach)
        positions = [*below.checkpoints.within(span.start + 1, reach), *leased]
        needs = (need.clip(span.start, span.stop) for at in positions for need in kind.needs(at))
        found = union([*found, *(need for need in needs if need is not None)])
        stack.extend(below.children.values())
    return found


def is_tail(end: Checkpoint) -> bool:
    """Whether the path ends past its stable boundary."""
    return end.stable_at is not None and end.stable_at < end.position


def _tail_start(node: Node, tail_tokens: int, pins: Pins) -> int:
    """Where to cut off the end of a leaf, about `tail_tokens` long: at the start of a nearby segment, to copy nothing.

    Never before a lease or a pinned checkpoint.
    """
    low, high = node.stop - 2 * tail_tokens, node.stop - tail_tokens // 2
    near: list[int] = []
    for segments in node.segments.values():
        for segment in reversed(segments):
            if segment.span.start < low:
                break
            if segment.span.start <= high:
                near.append(segment.span.start)
    pinned = (checkpoint.position for checkpoint in node.checkpoints.values() if pins.holds(checkpoint))
    leased = (lease.position for lease in node.leases)
    protected = [at for at in (*pinned, *leased) if at < node.stop]
    return max([node.start, max(near, default=node.stop - tail_tokens), *protected])
