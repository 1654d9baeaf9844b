"""What the eviction policy may know of a landmark: what it would cost to lose, and what it takes to keep."""

from bisect import bisect_right

from reprise.cache.policy import Facts
from reprise.cache.tree import Landmark, Node, Piece
from reprise.cache.trimming import evicted_from, is_tail
from reprise.core.kinds import Full, Layout
from reprise.core.prompt import BoundaryKind


def facts_of(landmark: Landmark, layout: Layout, *, tail: int, clock: int, now_s: float) -> Facts:
    """The facts of a landmark in the tree. `tail`: `Grain.tail`. O(depth) at worst."""
    node = landmark.node
    nbytes = landmark.snapshot.nbytes if landmark.snapshot is not None else 0
    is_end = not node.children and landmark.position == node.stop
    lower = evicted_from(landmark, tail, now_s) if is_end and layout.resumes_anywhere else _landmark_below(landmark)
    standing = lower
    if not layout.resumes_anywhere and not landmark.is_superseded:
        # What is superseded goes first, so it would not be there to resume from.
        standing = standing_below(node, landmark.position - 1)
    for kind, pieces in node.pieces.items():
        if is_end:
            start = max(node.start, lower)
        elif isinstance(kind, Full):
            continue
        else:
            needs = kind.needs(landmark.position)
            start = max(lower, needs[-1].start if needs else landmark.position)
        for piece in pieces[bisect_right(pieces, start, key=_stop_of) :]:
            freed = piece.span.clip(start, max(start, landmark.position))
            if freed is None:
                break
            nbytes += piece.payload.nbytes * len(freed) // len(piece.span)
    return Facts(
        kind=landmark.kind,
        cost=landmark.position - standing,
        nbytes=nbytes,
        last_use=max(landmark.last_use, node.last_use) if layout.resumes_anywhere else landmark.last_use,
        now=clock,
        floor=landmark.floor,
        num_uses=landmark.num_uses,
        num_branches=len(node.children) if landmark.position == node.stop else 0,
        is_superseded=landmark.is_superseded,
        is_side=landmark.is_side,
        visit=node.visit,
        first_visit=node.first_visit,
        num_passes=node.num_uses,
        is_tail=is_end and layout.resumes_anywhere and is_tail(landmark),
    )


def facts_of_new(
    kind: BoundaryKind, *, cost: int, nbytes: int, clock: int, floor: float, visit: int, is_side: bool
) -> Facts:
    """The facts of a landmark that a commit would add, `cost` tokens behind the next one."""
    return Facts(
        kind=kind,
        cost=cost,
        nbytes=nbytes,
        last_use=clock + 1,
        now=clock + 1,
        floor=floor,
        num_uses=0,
        num_branches=0,
        is_superseded=False,
        is_side=is_side,
        visit=visit,
        first_visit=visit,
    )


def standing_below(node: Node, limit: int, *, leaving: frozenset[BoundaryKind] = frozenset()) -> int:
    """The highest landmark ≤ `limit` on the path that is neither superseded nor of a kind in `leaving`, or 0.

    O(landmarks of the path) at worst.
    """
    above: Node | None = node
    while above is not None:
        standing = [
            mark.position
            for mark in above.landmarks.values()
            if mark.position <= limit and not mark.is_superseded and mark.kind not in leaving
        ]
        if standing:
            return max(standing)
        above = above.parent
    return 0


def _landmark_below(landmark: Landmark) -> int:
    """The next lower landmark on the path, or 0. O(depth) where the edges have none."""
    node: Node | None = landmark.node
    limit = landmark.position - 1
    while node is not None:
        lower = node.landmarks.highest(limit)
        if lower is not None:
            return lower
        node = node.parent
    return 0


def _stop_of(piece: Piece) -> int:
    return piece.span.stop
