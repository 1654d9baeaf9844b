"""Lookups in the tree: how far a prompt matches, where it can resume, and what that reads. They change nothing."""

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

from reprise.cache.node import Checkpoint, GhostPath, Node, Segment, Walk
from reprise.cache.payload import Payload, SegmentPayload, SharedPayload
from reprise.core.images import outside
from reprise.core.kinds import Full, KvKind, Layout, best_position
from reprise.core.tokens import Span, Tokens, covers, subtract, union

_CONTINUATION = 32
"""How many tokens of the stored path a match has past the divergence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """The longest common prefix of a prompt and the tree. Valid until the cache changes.

    `continues`: the tokens (at most 32) with which the most recently used stored path continues there, None if none
    does.
    """

    namespace: str
    tokens: Tokens
    length: int
    walk: Walk
    continues: Tokens | None


class Found(NamedTuple):
    """Where a prompt can resume, and its match."""

    position: int
    match: Match


@dataclass(frozen=True, slots=True)
class SegmentSlice:
    """The entries ``[start, stop)`` of a payload, counted from its first; their positions are `span`."""

    payload: SegmentPayload
    start: int
    stop: int
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restore:
    """What all layers need to resume at `position`: slices by kind, in order of position, and the snapshot."""

    position: int
    slices: Mapping[KvKind, tuple[SegmentSlice, ...]]
    snapshot: Payload | None


def match_of(walked: Walk, tokens: Tokens, namespace: str) -> Match:
    """The match for a walk along `tokens`."""
    last, length = walked.last, walked.length
    continues: Tokens | None = None
    if length < last.stop:
        continues = last.tokens[length - last.start :][:_CONTINUATION]
    elif last.children:
        newest = next(reversed(last.children.values()))
        continues = newest.tokens[:_CONTINUATION]
    return Match(
        namespace=namespace,
        tokens=tokens,
        length=length,
        walk=walked,
        continues=continues,
    )


def resume_position(layout: Layout, match: Match, limit: int, *, spans: Sequence[Span] = ()) -> int:
    """The largest position ≤ `limit` at which every layer can resume, and that is not inside one of the `spans`.

    0 if there is none.
    """
    position = min(limit, match.length)
    while True:
        found = _stored_position(layout, match, outside(position, spans))
        if found == position:
            return position
        position = found


def _stored_position(layout: Layout, match: Match, limit: int) -> int:
    """The largest position ≤ `limit` at which every layer can resume; 0 if there is none."""
    if layout.has_snapshots:
        # Exactly the checkpoints are resumable: only they have snapshots (`check()` verifies the rest).
        below = (node.checkpoints.highest(limit) for node in reversed(match.walk.nodes))
        return next((at for at in below if at is not None), 0)
    runs = {kind: _runs_of(kind, match.walk, Span(0, match.walk.length)) for kind in layout.kinds}
    position = limit
    # Each kind can only lower the position: the fixed point is the largest one possible for all.
    while True:
        lowest = min(best_position(kind, runs[kind], position) for kind in layout.kinds)
        if lowest == position:
            return position
        position = lowest


def checkpoint_at(walked: Walk, position: int) -> Checkpoint | None:
    """The checkpoint at exactly `position` on the walked path, or None."""
    if position > walked.length:
        return None
    node = next(node for node in walked.nodes if position <= node.stop)
    return node.checkpoints.get(position)


def read(layout: Layout, match: Match, position: int) -> Restore:
    """What is needed to resume at `position`, a result of `resume_position` for the same match."""
    slices: dict[KvKind, tuple[SegmentSlice, ...]] = {}
    for kind in layout.kinds:
        needs = kind.needs(position)
        slices[kind] = tuple(
            piece for need in needs for node in _nodes_within(match.walk, need) for piece in _slices(node, kind, need)
        )
        assert covers((piece.span for piece in slices[kind]), needs), (kind, position)
    snapshot: Payload | None = None
    if layout.has_snapshots and position > 0:
        checkpoint = checkpoint_at(match.walk, position)
        assert checkpoint is not None and checkpoint.snapshot is not None, position
        snapshot = checkpoint.snapshot
    return Restore(position=position, slices=slices, snapshot=snapshot)


def evicted_to(match: Match, position: int) -> int | None:
    """How far this prompt could have resumed past `position` had nothing been evicted; None: no further."""
    path = _ghost_path(match)
    if path is not None and not path.is_cancelled:
        return path.stop
    lost = (at for node in match.walk.nodes if node.ghosts is not None for at in node.ghosts.checkpoints)
    return match.length if any(position < at <= match.length for at in lost) else None


def was_cancelled(match: Match) -> bool:
    """Whether a request with the same continuation was cancelled where the match ends."""
    path = _ghost_path(match)
    return path is not None and path.is_cancelled


def _ghost_path(match: Match) -> GhostPath | None:
    """The remembered, no longer stored path that this prompt continues along."""
    ghosts = match.walk.last.ghosts
    if ghosts is None:
        return None
    there = (path for path in reversed(ghosts.paths) if path.start == match.length)
    return next((path for path in there if path.is_on(match.tokens[match.length :])), None)


def missing(
    layout: Layout, walked: Walk, position: int, longest: int, seams: Mapping[KvKind, Sequence[int]] | None = None
) -> list[tuple[KvKind, Span]]:
    """The spans that a commit at `position` has to copy, cut at edges, the `seams` and every `longest` tokens."""
    found: list[tuple[KvKind, Span]] = []
    for kind in layout.kinds:
        cuts = seams.get(kind, ()) if seams is not None else ()
        holes = [hole for need in kind.needs(position) for hole in subtract((need,), _runs_of(kind, walked, need))]
        for hole in holes:
            stops = [min(node.stop, walked.length) for node in _nodes_within(walked, hole)]
            for edge in pairwise((hole.start, *stops, position)):
                span = hole.clip(*edge)
                while span is not None:
                    stop = min(span.stop, span.start + longest, _next_of(cuts, span.start))
                    found.append((kind, Span(span.start, stop)))
                    span = span.clip(stop, span.stop)
    return found


def _next_of(cuts: Sequence[int], position: int) -> int:
    """The first of these ascending positions past `position`, or `sys.maxsize`."""
    at = bisect_right(cuts, position)
    return cuts[at] if at < len(cuts) else sys.maxsize


def _runs_of(kind: KvKind, walked: Walk, span: Span) -> tuple[Span, ...]:
    """The positions of `span` on the walked path that have entries. Reads only the segments there."""
    if isinstance(kind, Full):  # Complete on every edge (`check()` verifies it).
        stored = span.clip(0, walked.length)
        return () if stored is None else (stored,)
    segments = (segment for node in _nodes_within(walked, span) for segment in _segments_within(node, kind, span))
    spans = (segment.span.clip(span.start, min(span.stop, walked.length)) for segment in segments)
    return union(each for each in spans if each is not None)


def _nodes_within(walked: Walk, span: Span) -> Iterator[Node]:
    """The nodes of the path that hold positions of `span`, which is not empty, from the root down."""
    first = bisect_right(walked.nodes, span.start, key=lambda node: node.stop)
    return takewhile(lambda node: node.start < span.stop, islice(walked.nodes, first, None))


def _segments_within(node: Node, kind: KvKind, span: Span) -> Iterator[Segment]:
    """The segments of this edge that hold positions of `span`, in order."""
    segments: list[Segment] = node.segments.get(kind, [])
    first = bisect_right(segments, span.start, key=lambda segment: segment.span.stop)
    return takewhile(lambda segment: segment.span.start < span.stop, islice(segments, first, None))


def _slices(node: Node, kind: KvKind, need: Span) -> list[SegmentSlice]:
    found: list[SegmentSlice] = []
    for segment in _segments_within(node, kind, need):
        span = segment.span.clip(need.start, need.stop)
        assert span is not None, (segment.span, need)
        offset = segment.span.start
        found.append(SegmentSlice(segment.payload, span.start - offset, span.stop - offset, span))
    return found


def sharing_sequence(restore: Restore) -> object | None:
    """The one sequence whose buffers hold all full-attention entries of `restore`, or None."""
    payloads = [piece.payload for kind, part in restore.slices.items() if isinstance(kind, Full) for piece in part]
    holders = {id(p.sequence): p.sequence for p in payloads if isinstance(p, SharedPayload)}
    is_all_shared = all(isinstance(payload, SharedPayload) for payload in payloads)
    return next(iter(holders.values())) if is_all_shared and len(holders) == 1 else None
