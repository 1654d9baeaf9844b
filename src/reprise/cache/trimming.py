"""What of an edge is still needed. Pure: entries of windows and chunks are kept for landmarks and leases alone."""

from reprise.cache.tree import Landmark, Node, Piece, cut_spans
from reprise.core.kinds import Chunk, Full, KvKind, Window
from reprise.core.spans import Span, covers, union


def end_of_use(node: Node) -> int:
    """Where a leaf may end: at its last landmark or lease, or at its start if it has neither."""
    leased = (lease.position for lease in node.leases)
    return max([*node.landmarks, *leased], default=node.start)


def trimmed(node: Node) -> dict[KvKind, list[Piece]] | None:
    """The pieces of this edge without the entries that no landmark or lease needs, or None if all are needed."""
    kept: dict[KvKind, list[Piece]] = {}
    is_less = False
    for kind, pieces in node.pieces.items():
        if isinstance(kind, Full):
            kept[kind] = pieces
            continue
        wanted = _needed(node, kind)
        if covers(wanted, (piece.span for piece in pieces)):
            kept[kind] = pieces
            continue
        is_less = True
        rest = [piece for span in wanted for piece in cut_spans(pieces, span)]
        if rest:
            kept[kind] = rest
    return kept if is_less else None


def _needed(node: Node, kind: Window | Chunk) -> tuple[Span, ...]:
    """The entries of this edge that some landmark or lease in it or below needs."""
    reach = node.stop + kind.size
    spans: list[Span] = []
    if isinstance(kind, Window) and kind.keep > node.start:
        spans.append(Span(node.start, min(kind.keep, node.stop)))
    stack = [node]
    while stack:
        below = stack.pop()
        if below.start > reach:
            continue
        positions = [*below.landmarks, *(lease.position for lease in below.leases)]
        spans.extend(span for at in positions if at <= reach for span in kind.needs(at))
        stack.extend(below.children.values())
    clipped = (span.clip(node.start, node.stop) for span in spans)
    return union(span for span in clipped if span is not None)


def evicted_from(end: Landmark, tail_tokens: int, now_s: float) -> int:
    """From where on a path is dropped if its end is evicted: not what the next turn has along with what it may not."""
    start = tail_start(end.node, tail_tokens, now_s)
    return max(start, end.stable_at) if end.stable_at is not None and is_tail(end) else start


def is_tail(end: Landmark) -> bool:
    """Whether a path ends here behind its stable boundary."""
    return end.stable_at is not None and end.stable_at < end.position


def tail_start(node: Node, tail_tokens: int, now_s: float) -> int:
    """Where the last block of a leaf begins: at a piece's start where one is near, so that nothing is copied.

    Never below a lease or a pinned landmark.
    """
    low, high = node.stop - 2 * tail_tokens, node.stop - tail_tokens // 2
    near: list[int] = []
    for pieces in node.pieces.values():
        for piece in reversed(pieces):
            if piece.span.start < low:
                break
            if piece.span.start <= high:
                near.append(piece.span.start)
    pinned = (mark.position for mark in node.landmarks.values() if mark.stays_until > now_s)
    leased = (lease.position for lease in node.leases)
    protected = [at for at in (*pinned, *leased) if at < node.stop]
    return max([node.start, max(near, default=node.stop - tail_tokens), *protected])
