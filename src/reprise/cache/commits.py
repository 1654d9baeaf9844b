"""Commits: what a live sequence has computed and the tree does not have yet is copied into it."""

from bisect import bisect_left, insort
from dataclasses import dataclass

from reprise.cache.contents import Contents
from reprise.cache.leasing import protect, release
from reprise.cache.loans import lent_nbytes
from reprise.cache.lookup import landmark_at, missing
from reprise.cache.marking import add_landmark, drop_landmark, pass_by, supersede
from reprise.cache.payload import SnapshotPayload, Source
from reprise.cache.policy import Facts
from reprise.cache.removal import make_room
from reprise.cache.superseding import superseded_beside, superseded_by, superseded_on
from reprise.cache.tree import Node, Piece, Walk, kv_nbytes, new_root, path_to, split, walk
from reprise.cache.worth import facts_of_new, standing_below
from reprise.core.kinds import KvKind
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, own_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit did. `tokens` and `nbytes` newly held; `is_resumable`: a request can resume at this position."""

    tokens: int
    nbytes: int
    is_resumable: bool


def commit(
    contents: Contents,
    tokens: Tokens,
    source: Source,
    *,
    kind: BoundaryKind,
    namespace: str,
    is_side: bool,
    pinned_until: float,
    is_wanted: bool,
    stable_at: int | None,
) -> Committed:
    """Make the position ``len(tokens)`` resumable (`PrefixCache.commit`)."""
    position = len(tokens)
    if position == 0:
        return Committed(tokens=0, nbytes=0, is_resumable=True)
    known_root = contents.roots.get(namespace)
    root = known_root if known_root is not None else new_root()
    walked = walk(root, tokens)
    # Evicting must not take away the path that is about to be extended.
    guard = protect(walked, walked.length)
    try:
        wanted = missing(contents.layout, walked, position, contents.grain.piece)
        mark = landmark_at(walked, position)
        needs_snapshot = contents.layout.has_snapshots and mark is None
        nbytes = sum(source.segment_nbytes(k, len(span)) for k, span in wanted)
        nbytes += source.snapshot_nbytes() if needs_snapshot else 0
        visit = contents.order.policy.number_of(tokens, namespace=namespace)
        if stable_at is not None and stable_at < position:
            contents.order.policy.leave_tail(tokens, stable_at, number=visit, namespace=namespace)
        new = _facts_of_new(contents, walked, position, nbytes, kind=kind, visit=visit, is_side=is_side)
        is_wanted |= pinned_until > contents.now_s
        is_whole = nbytes == 0 or _fits(contents, nbytes, None if is_wanted else new)
        if not is_whole:
            position = _stop_that_fits(contents, walked, position, nbytes)
            if position == walked.length:
                return Committed(tokens=0, nbytes=0, is_resumable=False)
            tokens, kind, pinned_until = tokens[:position], BoundaryKind.INTERVAL, 0.0
            wanted = missing(contents.layout, walked, position, contents.grain.piece)
        payloads = [(k, Piece(span, source.segment(k, span))) for k, span in wanted]
        snapshot = source.snapshot() if needs_snapshot else None

        held_before = contents.ledger.held
        nodes = _grow(contents, walked, tokens)
        if known_root is None:
            contents.roots[namespace] = root
            contents.ledger.count_nodes(1)
        for segment_kind, piece in payloads:
            _attach(contents, nodes, segment_kind, piece)
        for node in nodes:
            pass_by(contents, node, visit)
            node.first_visit = node.first_visit if node.first_visit > 0 else visit
        _place_landmark(
            contents,
            nodes,
            position,
            kind,
            snapshot,
            is_side=is_side,
            pinned_until=pinned_until,
            stable_at=stable_at,
        )
        added = contents.ledger.held - held_before
    finally:
        release(contents, guard)
    contents.order.sweep(contents.num_landmarks)
    return Committed(tokens=position - walked.length, nbytes=added, is_resumable=is_whole)


def _fits(contents: Contents, nbytes: int, new: Facts | None) -> bool:
    """Make room for `nbytes` more, by evicting what is worth less than `new`; None: than anything.

    What is known to be hopeless evicts nothing.
    """
    free = contents.free()
    if free is None or free >= nbytes:
        return True
    most = free + contents.ledger.held - contents.protected_nbytes()
    return nbytes <= most and make_room(contents, nbytes, new=new)


def _stop_that_fits(contents: Contents, walked: Walk, position: int, nbytes: int) -> int:
    """How far a path of `nbytes` more fits what is free, where every position is resumable: its beginning saves as
    much a byte as the whole. Not less than what is evicted at a time, so that paths do not grow by crumbs.
    """
    free = contents.free()
    if free is None or free <= 0 or not contents.layout.resumes_anywhere:
        return walked.length
    num = (position - walked.length) * free // nbytes
    return walked.length + num if num >= contents.grain.tail else walked.length


def _facts_of_new(
    contents: Contents, walked: Walk, position: int, nbytes: int, *, kind: BoundaryKind, visit: int, is_side: bool
) -> Facts:
    below = walked.length
    if not contents.layout.resumes_anywhere:
        below = standing_below(walked.last, min(walked.length, position - 1), leaving=superseded_by(kind))
    return facts_of_new(
        kind,
        cost=position - below,
        nbytes=nbytes,
        clock=contents.clock,
        floor=contents.order.policy.floor,
        visit=visit,
        is_side=is_side,
    )


def _grow(contents: Contents, walked: Walk, tokens: Tokens) -> tuple[Node, ...]:
    """Add what the tree lacks of `tokens`; gives the nodes from the root to the one that holds the end."""
    last, ledger = walked.last, contents.ledger
    if walked.length == len(tokens):
        return walked.nodes
    if walked.length < last.stop:
        before = kv_nbytes(last)
        lower, last = last, split(last, walked.length)
        ledger.count_nodes(1)
        ledger.charge_kv(kv_nbytes(last) + kv_nbytes(lower) - before)
    child = Node(start=walked.length, tokens=own_tokens(tokens[walked.length :]), parent=last)
    child.visit = last.visit
    first = int(child.tokens[0])
    last.children[first] = child
    ledger.count_nodes(1)
    ledger.count_tokens(len(child.tokens))
    end = last.landmarks.get(last.stop)
    if contents.layout.resumes_anywhere and end is not None and end.stays_until <= contents.now_s:
        # Only path ends are evicted where every position is resumable, and this one no longer is one.
        drop_landmark(contents, end)
    return path_to(child)


def _attach(contents: Contents, nodes: tuple[Node, ...], kind: KvKind, piece: Piece) -> None:
    node = nodes[bisect_left(nodes, piece.span.stop, key=lambda n: n.stop)]
    assert node.start <= piece.span.start, (node.start, piece.span)
    insort(node.pieces.setdefault(kind, []), piece, key=lambda p: p.span.start)
    contents.ledger.charge_kv(piece.payload.nbytes)
    contents.reserved -= lent_nbytes([piece])


def _place_landmark(
    contents: Contents,
    nodes: tuple[Node, ...],
    position: int,
    kind: BoundaryKind,
    snapshot: SnapshotPayload | None,
    *,
    is_side: bool,
    pinned_until: float,
    stable_at: int | None,
) -> None:
    contents.clock += 1
    for node in nodes:
        node.last_use = contents.clock
    last = nodes[-1]
    landmark = last.landmarks.get(position)
    if landmark is None:
        is_inner = position < last.stop or len(last.children) > 0
        if contents.layout.resumes_anywhere and is_inner and pinned_until <= contents.now_s:
            return
        landmark = add_landmark(contents, last, position, kind, is_side=is_side)
    elif min(kind, landmark.kind, key=list(BoundaryKind).index) is kind:
        landmark.kind = kind
    if snapshot is not None:
        assert landmark.snapshot is None, landmark
        landmark.snapshot = snapshot
        contents.ledger.charge_snapshot(snapshot.nbytes)
    landmark.last_use = contents.clock
    landmark.is_superseded, landmark.stable_at = False, stable_at
    landmark.is_side = landmark.is_side and is_side
    contents.pins.pin(landmark, pinned_until)
    supersede(contents, superseded_on(nodes, position, kind))
    if kind is BoundaryKind.STABLE:
        supersede(contents, superseded_beside(nodes))
    contents.order.use(landmark)
