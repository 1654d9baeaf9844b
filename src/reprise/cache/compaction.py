"""Joins what a long conversation leaves in small parts, so that its 200th turn restores as fast as its second.

Runs while the server is idle, a step at a time. The tree's meaning does not change: the same tokens, entries,
landmarks and leases, in fewer nodes and pieces.
"""

from collections.abc import Iterator

from reprise.cache.tree import Landmark, Node, Piece, subtree
from reprise.core.kinds import KvKind
from reprise.core.spans import Span
from reprise.core.tokens import join_tokens


def mergeable(root: Node) -> Iterator[Node]:
    """Nodes that have one child and no reason to stay apart from it."""
    for node in subtree(root):
        if node.parent is not None and len(node.children) == 1:
            yield node


def merge_with_child(node: Node) -> tuple[Node, list[Landmark]]:
    """Make one edge of `node` and its only child. The child object stays; gives it and the landmarks that moved."""
    (child,) = node.children.values()
    parent = node.parent
    assert parent is not None
    moved = list(node.landmarks.values())
    for landmark in moved:
        landmark.node = child
        child.landmarks[landmark.position] = landmark
    for lease in node.leases:
        lease.node = child
        child.leases.add(lease)
        child.num_leases += 1
    for kind, pieces in node.pieces.items():
        child.pieces[kind] = [*pieces, *child.pieces.get(kind, ())]
    child.tokens = join_tokens(node.tokens, child.tokens)
    child.start = node.start
    child.parent = parent
    child.lost_at = max(child.lost_at, node.lost_at)
    child.last_use = max(child.last_use, node.last_use)
    parent.children[int(child.tokens[0])] = child
    return child, moved


def joinable(node: Node, longest: int) -> tuple[KvKind, int, int] | None:
    """The first run of adjacent pieces that fit into one of `longest` tokens: (kind, first, stop), or None."""
    for kind, pieces in node.pieces.items():
        for first in range(len(pieces) - 1):
            stop = first + 1
            while (
                stop < len(pieces)
                and pieces[stop].span.start == pieces[stop - 1].span.stop
                and pieces[stop].span.stop - pieces[first].span.start <= longest
            ):
                stop += 1
            if stop - first > 1:
                return kind, first, stop
    return None


def join(node: Node, kind: KvKind, first: int, stop: int) -> int:
    """Make one piece of the pieces ``[first, stop)``. Gives the entries copied."""
    pieces = node.pieces[kind]
    head, *rest = pieces[first:stop]
    joined = head.payload.join([piece.payload for piece in rest])
    span = Span(head.span.start, pieces[stop - 1].span.stop)
    node.pieces[kind] = [*pieces[:first], Piece(span, joined), *pieces[stop:]]
    return len(span)
