"""Recomputes the prefix cache's books from its trees, and raises where they differ."""

from reprise.cache.contents import Contents
from reprise.cache.tree import Node, path_to, subtree
from reprise.core.kinds import Full, Layout
from reprise.core.spans import Span, covers, union


def check(cache: Contents) -> None:
    """AssertionError on the first difference between the books and the trees. O(size of the trees)."""
    kv = snapshots = tokens = nodes = landmarks = 0
    for root in cache.roots.values():
        assert root.start == 0 and len(root.tokens) == 0 and root.parent is None
        assert not root.pieces and not root.landmarks
        for node in subtree(root):
            _check_node(node, cache.layout)
            kv += sum(p.payload.nbytes for pieces in node.pieces.values() for p in pieces)
            snapshots += sum(m.snapshot.nbytes for m in node.landmarks.values() if m.snapshot is not None)
            tokens += len(node.tokens)
            nodes += 1
            landmarks += len(node.landmarks)
    ledger = cache.ledger
    assert (kv, snapshots, tokens, nodes) == (ledger.kv, ledger.snapshots, ledger.tokens, ledger.num_nodes), (
        (kv, snapshots, tokens, nodes),
        ledger,
    )
    assert landmarks == cache.num_landmarks, (landmarks, cache.num_landmarks)
    pinned = {
        m for root in cache.roots.values() for n in subtree(root) for m in n.landmarks.values() if m.stays_until > 0
    }
    assert pinned == set(cache.pins), "the pins that are written down are those of the trees"
    assert cache.order.num_placed() == landmarks, "every landmark stands in the order of eviction exactly once"


def _check_node(node: Node, layout: Layout) -> None:
    assert not node.tokens.flags.writeable and node.tokens.base is None, "token runs own their bytes"
    for first, child in node.children.items():
        assert child.parent is node and child.start == node.stop and len(child.tokens) > 0
        assert int(child.tokens[0]) == first
    assert node.num_leases == len(node.leases) + sum(child.num_leases for child in node.children.values())
    for lease in node.leases:
        assert lease.node is node and not lease.is_released and node.start <= lease.position <= node.stop
    for kind, pieces in node.pieces.items():
        assert kind in layout.kinds and pieces, kind
        at = node.start
        for piece in pieces:
            assert at <= piece.span.start < piece.span.stop <= node.stop, (kind, piece.span)
            at = piece.span.stop
    for kind in layout.kinds:
        if isinstance(kind, Full):
            whole = (Span(node.start, node.stop),)
            assert covers(node.coverage(kind), whole), ("full attention entries are complete on every edge", node.start)
    for position, mark in node.landmarks.items():
        assert mark.node is node and mark.position == position and node.start < position <= node.stop
        assert (mark.snapshot is not None) == layout.has_snapshots, position
        _check_resumable(node, position, layout)
    if not node.children and node.parent is not None:
        # Where every position is resumable, only the landmark at a path's end can ever be evicted, leased or not.
        is_leased = any(lease.position == node.stop for lease in node.leases) and not layout.resumes_anywhere
        assert node.stop in node.landmarks or is_leased, (
            "a path ends at a landmark",
            node.start,
            node.stop,
        )


def _check_resumable(node: Node, position: int, layout: Layout) -> None:
    for kind in layout.kinds:
        if isinstance(kind, Full):
            continue  # Complete on every edge, which is checked there.
        have = union(span for above in path_to(node) for span in above.coverage(kind))
        assert covers(have, kind.needs(position)), (kind, position, have)
