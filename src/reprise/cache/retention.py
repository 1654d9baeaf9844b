"""Which parts of a path are still needed, and which checkpoints a newer one supersedes. Pure."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from reprise.cache.node import Checkpoint, Node, Segments, cut_segments, subtree
from reprise.core.kinds import Chunk, Full, Window
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, covers, union

IsPinned = Callable[[Checkpoint], bool]

_TIPS = frozenset(set(BoundaryKind) - {BoundaryKind.STABLE, BoundaryKind.SYSTEM, BoundaryKind.EXPLICIT})
"""Kinds that a later checkpoint of the same conversation supersedes, if it is one of these or stable.

Only a stable one supersedes a stable one: if the next message strips a tool loop, the last stable one is where to
resume.
"""


def superseded_kinds(kind: BoundaryKind) -> frozenset[BoundaryKind]:
    """The kinds of earlier checkpoints on the path that one of this kind supersedes."""
    if kind is BoundaryKind.STABLE:
        return _TIPS | {BoundaryKind.STABLE}
    return _TIPS if kind in _TIPS else frozenset()


def superseded_on(nodes: Sequence[Node], position: int, kind: BoundaryKind) -> Iterator[Checkpoint]:
    """The checkpoints on this path (from the root) that a new one of this kind at `position` supersedes."""
    kinds = superseded_kinds(kind)
    for node in nodes:
        for checkpoint in node.checkpoints.values():
            if checkpoint.position < position and checkpoint.kind in kinds and not checkpoint.is_superseded:
                yield checkpoint


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
                    if is_left and checkpoint.kind in _TIPS and not checkpoint.is_superseded:
                        yield checkpoint
        if node.first_visit is None or node.first_visit < visit:
            return  # Everything above is older than the prompt.


def end_of_use(node: Node) -> int:
    """The last checkpoint or lease of a leaf, up to which it is needed; its start if it has neither."""
    leased = (lease.position for lease in node.leases)
    return max([*node.checkpoints, *leased], default=node.start)


def trimmed(node: Node) -> Segments | None:
    """The segments of this edge without window and chunk entries that no checkpoint or lease needs.

    None if all are needed.
    """
    kept: Segments = {}
    is_less = False
    for kind, segments in node.segments.items():
        if isinstance(kind, Full):
            kept[kind] = segments
            continue
        wanted = _needed(node, kind)
        if covers(wanted, (segment.span for segment in segments)):
            kept[kind] = segments
            continue
        is_less = True
        rest = [segment for span in wanted for segment in cut_segments(segments, span)]
        if rest:
            kept[kind] = rest
    return kept if is_less else None


def _needed(node: Node, kind: Window | Chunk) -> tuple[Span, ...]:
    """The entries of this edge that a checkpoint or lease in it or below needs."""
    reach = node.stop + kind.size
    spans: list[Span] = []
    if isinstance(kind, Window) and kind.keep > node.start:
        spans.append(Span(node.start, min(kind.keep, node.stop)))
    stack = [node]
    while stack:
        below = stack.pop()
        if below.start > reach:
            continue
        positions = [*below.checkpoints, *(lease.position for lease in below.leases)]
        spans.extend(span for at in positions if at <= reach for span in kind.needs(at))
        stack.extend(below.children.values())
    clipped = (span.clip(node.start, node.stop) for span in spans)
    return union(span for span in clipped if span is not None)


def is_tail(end: Checkpoint) -> bool:
    """Whether the path ends past its stable boundary."""
    return end.stable_at is not None and end.stable_at < end.position


def evicted_from(end: Checkpoint, tail_tokens: int, is_pinned: IsPinned) -> int:
    """The position from which a path is dropped when its end is evicted; never across its stable boundary."""
    start = _tail_start(end.node, tail_tokens, is_pinned)
    return max(start, end.stable_at) if end.stable_at is not None and is_tail(end) else start


def _tail_start(node: Node, tail_tokens: int, is_pinned: IsPinned) -> int:
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
    pinned = (checkpoint.position for checkpoint in node.checkpoints.values() if is_pinned(checkpoint))
    leased = (lease.position for lease in node.leases)
    protected = [at for at in (*pinned, *leased) if at < node.stop]
    return max([node.start, max(near, default=node.stop - tail_tokens), *protected])
