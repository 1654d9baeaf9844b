"""The prefix cache: what was computed once, for whoever comes next.

One radix tree per namespace, with segments and snapshots as payloads (`reprise.cache.tree`). Lookups change nothing;
a commit adds only what is not there yet; eviction never touches a leased path; `check()` recomputes the books.
Used by one thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reprise.cache import integrity
from reprise.cache.compaction import join, joinable, merge_with_child, mergeable
from reprise.cache.eviction import EvictionOrder
from reprise.cache.ledger import Ledger
from reprise.cache.payload import SegmentPayload, SnapshotPayload, Source
from reprise.cache.policy import CostAware, Facts, Policy
from reprise.cache.tree import (
    Landmark,
    Lease,
    Node,
    Piece,
    Walk,
    cut_pieces,
    new_root,
    path_to,
    split,
    subtree,
    walk,
)
from reprise.core.kinds import Chunk, Full, KvKind, Layout, Window, best_position
from reprise.core.prompt import BoundaryKind
from reprise.core.spans import Span, covers, subtract, union
from reprise.core.tokens import Tokens, own_tokens

_CONTINUATION = 32
"""How many tokens of the stored path a match shows behind the divergence."""

_TAIL_BLOCK = 1024
"""How many tokens of a path's end are evicted at a time where every position is resumable."""

_PIECE_TOKENS = 2048
"""Longest piece: bounds what a split or an eviction has to copy."""

_TIPS = frozenset({BoundaryKind.STABLE, BoundaryKind.PROMPT_END, BoundaryKind.GENERATION_END, BoundaryKind.INTERVAL})
"""Landmarks that a later tip of the same conversation supersedes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """How far the tree agrees with a prompt. Valid until the cache changes.

    `continues`: what the deepest stored path goes on with behind the match (at most 32 tokens), None if nothing does.
    """

    namespace: str
    length: int
    walk: Walk
    continues: Tokens | None


@dataclass(frozen=True, slots=True)
class Part:
    """The entries ``[start, stop)`` of a payload, counted from its own first entry; they stand at `span`."""

    payload: SegmentPayload
    start: int
    stop: int
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restore:
    """All that the layers need to resume at `position`: parts by kind, in order of position, and the snapshot."""

    position: int
    parts: Mapping[KvKind, tuple[Part, ...]]
    snapshot: SnapshotPayload | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit did. `tokens` and `nbytes` newly held; `is_resumable`: a request can resume at this position."""

    tokens: int
    nbytes: int
    is_resumable: bool


class PrefixCache:
    """Everything reusable of one model, under one byte budget.

    `budget` counts the bytes of payloads; None is no bound. `reserved` (what live caches hold, set by the owner) is
    taken from it.
    """

    def __init__(self, layout: Layout, *, budget: int | None = None, policy: Policy | None = None) -> None:
        self.layout = layout
        self.budget = budget
        self.reserved = 0
        self.ledger = Ledger()
        self.roots: dict[str, Node] = {}
        self.clock = 0
        self.now_s = 0.0
        self.order = EvictionOrder(policy if policy is not None else CostAware(), self.facts)
        self.num_landmarks = 0

    # Lookups. They change nothing.

    def match(self, tokens: Tokens, *, namespace: str = "") -> Match:
        """How far the tree agrees with `tokens`. O(length of the match)."""
        walked = walk(self.roots.get(namespace) or new_root(), tokens)
        last = walked.last
        continues: Tokens | None = None
        if walked.length < last.stop:
            offset = walked.length - last.start
            continues = last.tokens[offset : offset + _CONTINUATION]
        elif last.children:
            newest = max(last.children.values(), key=lambda child: child.last_use)
            continues = newest.tokens[:_CONTINUATION]
        return Match(namespace=namespace, length=walked.length, walk=walked, continues=continues)

    def resume_at(self, match: Match, *, limit: int) -> int:
        """The largest position ≤ `limit` at which every layer can resume; 0 if there is none."""
        runs = self._runs(match.walk)
        if not self.layout.has_snapshots:
            return self._best(runs, min(limit, match.length))
        for landmark in self._landmarks_up(match.walk, min(limit, match.length)):
            if landmark.snapshot is not None and self._best(runs, landmark.position) == landmark.position:
                return landmark.position
        return 0

    def read(self, match: Match, position: int) -> Restore:
        """What is needed to resume at `position`, which `resume_at` gave for the same match."""
        parts: dict[KvKind, tuple[Part, ...]] = {}
        for kind in self.layout.kinds:
            found: list[Part] = []
            for need in kind.needs(position):
                for node in match.walk.nodes:
                    for piece in node.pieces.get(kind, ()):
                        span = piece.span.clip(need.start, need.stop)
                        if span is not None:
                            offset = piece.span.start
                            found.append(Part(piece.payload, span.start - offset, span.stop - offset, span))
            found.sort(key=lambda part: part.span)
            assert covers((part.span for part in found), kind.needs(position)), (kind, position)
            parts[kind] = tuple(found)
        snapshot: SnapshotPayload | None = None
        if self.layout.has_snapshots and position > 0:
            snapshot = next(
                mark.snapshot for mark in self._landmarks_up(match.walk, position) if mark.position == position
            )
            assert snapshot is not None, position
        return Restore(position=position, parts=parts, snapshot=snapshot)

    def was_lost(self, match: Match, position: int) -> bool:
        """Whether a landmark behind `position` on the matched path was evicted."""
        return any(position < node.lost_at <= match.length for node in match.walk.nodes)

    def _runs(self, walked: Walk) -> dict[KvKind, tuple[Span, ...]]:
        spans: dict[KvKind, list[Span]] = {kind: [] for kind in self.layout.kinds}
        for node in walked.nodes:
            for kind, found in spans.items():
                for piece in node.pieces.get(kind, ()):
                    span = piece.span.clip(0, walked.length)
                    if span is not None:
                        found.append(span)
        return {kind: union(found) for kind, found in spans.items()}

    def _best(self, runs: Mapping[KvKind, tuple[Span, ...]], limit: int) -> int:
        # Each kind alone only lowers the position, so the largest common one is where none lowers it any more.
        position = limit
        while True:
            lowest = min((best_position(kind, runs[kind], position) for kind in self.layout.kinds), default=position)
            if lowest == position:
                return position
            position = lowest

    def _landmarks_up(self, walked: Walk, limit: int) -> list[Landmark]:
        return [
            node.landmarks[position]
            for node in reversed(walked.nodes)
            for position in sorted(node.landmarks, reverse=True)
            if position <= limit
        ]

    # Leases.

    def lease(self, match: Match, position: int) -> Lease:
        """Protect the matched path up to `position` until `release`, and note that it is used."""
        node = next(n for n in match.walk.nodes if position <= n.stop)
        held = Lease(node, position)
        node.leases.add(held)
        for above in path_to(node):
            above.num_leases += 1
        self._use(match, position)
        return held

    def release(self, lease: Lease) -> None:
        """Give the lease back. Releasing twice is a bug."""
        assert not lease.is_released, lease
        lease.is_released = True
        lease.node.leases.remove(lease)
        for above in path_to(lease.node):
            above.num_leases -= 1
        if not self.layout.resumes_anywhere and not lease.node.children:
            # The lease may have kept a path's end that no landmark makes resumable.
            self._truncate_to_landmark(lease.node)

    def _use(self, match: Match, position: int) -> None:
        self.clock += 1
        for node in match.walk.nodes:
            if node.start < position:
                node.last_use = self.clock
                node.num_uses += 1
                landmark = node.landmarks.get(position)
                if landmark is not None:
                    landmark.last_use = self.clock
                    landmark.num_uses += 1
                    self.order.use(landmark)

    # Commits.

    def commit(
        self,
        tokens: Tokens,
        source: Source,
        *,
        kind: BoundaryKind,
        namespace: str = "",
        is_side: bool = False,
        pinned_until: float = 0.0,
    ) -> Committed:
        """Make the position ``len(tokens)`` resumable: copy from `source` what the tree does not have yet.

        What does not fit the budget, even after eviction, is not stored: the result says so. If `source` raises,
        nothing has changed.
        """
        position = len(tokens)
        if position == 0:
            return Committed(tokens=0, nbytes=0, is_resumable=True)
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = new_root()
            self.ledger.count_nodes(1)
        walked = walk(root, tokens)
        if not self._make_room_for_commit(namespace, walked, source, position):
            return Committed(tokens=0, nbytes=0, is_resumable=False)
        walked = walk(root, tokens)
        payloads = [(k, span, source.segment(k, span)) for k, span in self._missing(walked, position)]
        mark = self._landmark_at(walked, position)
        needs_snapshot = self.layout.has_snapshots and (mark is None or mark.snapshot is None)
        snapshot = source.snapshot() if needs_snapshot else None

        held_before, known = self.ledger.held, walked.length
        nodes = self._grow(walked, tokens)
        for segment_kind, span, payload in payloads:
            owner = next(n for n in nodes if n.start <= span.start and span.stop <= n.stop)
            self._attach(owner, segment_kind, Piece(span, payload))
        self._place_landmark(nodes, position, kind, snapshot, is_side=is_side, pinned_until=pinned_until)
        self.order.sweep(self.num_landmarks)
        return Committed(tokens=position - known, nbytes=self.ledger.held - held_before, is_resumable=True)

    def _missing(self, walked: Walk, position: int) -> list[tuple[KvKind, Span]]:
        """The spans that a commit at `position` has to copy, cut at the edges and at the longest piece."""
        runs = self._runs(walked)
        edges = [*(Span(n.start, min(n.stop, walked.length)) for n in walked.nodes), Span(walked.length, position)]
        missing: list[tuple[KvKind, Span]] = []
        for kind in self.layout.kinds:
            for hole in subtract(kind.needs(position), runs[kind]):
                for edge in edges:
                    span = hole.clip(edge.start, edge.stop)
                    while span is not None:
                        stop = min(span.stop, span.start + _PIECE_TOKENS)
                        missing.append((kind, Span(span.start, stop)))
                        span = span.clip(stop, span.stop)
        return missing

    def _make_room_for_commit(self, namespace: str, walked: Walk, source: Source, position: int) -> bool:
        nbytes = sum(source.segment_nbytes(kind, len(span)) for kind, span in self._missing(walked, position))
        mark = self._landmark_at(walked, position)
        if self.layout.has_snapshots and (mark is None or mark.snapshot is None):
            nbytes += source.snapshot_nbytes()
        if self.free() is None or nbytes <= (self.free() or 0):
            return True
        # Evicting must not take away the path that is about to be extended.
        guard = Lease(walked.last, min(position, walked.length))
        walked.last.leases.add(guard)
        for above in path_to(walked.last):
            above.num_leases += 1
        try:
            return self.make_room(nbytes)
        finally:
            self.release(guard)

    def _landmark_at(self, walked: Walk, position: int) -> Landmark | None:
        if walked.length < position:
            return None
        return next((n.landmarks[position] for n in walked.nodes if position in n.landmarks), None)

    def _grow(self, walked: Walk, tokens: Tokens) -> tuple[Node, ...]:
        """Add what the tree lacks of `tokens`; gives the nodes from the root to the one that holds the end."""
        last = walked.last
        if walked.length == len(tokens):
            return walked.nodes
        if walked.length < last.stop:
            before = self._node_kv(last)
            last = split(last, walked.length)
            self.ledger.count_nodes(1)
            self.ledger.charge_kv(self._node_kv(last) + sum(map(self._node_kv, last.children.values())) - before)
        child = Node(start=walked.length, tokens=own_tokens(tokens[walked.length :]), parent=last)
        last.children[int(child.tokens[0])] = child
        self.ledger.count_nodes(1)
        self.ledger.count_tokens(len(child.tokens))
        if self.layout.resumes_anywhere and last.landmarks:
            # Only path ends are evicted where every position is resumable, and this one no longer is one.
            self._drop_landmark(last.landmarks[last.stop])
        return path_to(child)

    def _place_landmark(
        self,
        nodes: tuple[Node, ...],
        position: int,
        kind: BoundaryKind,
        snapshot: SnapshotPayload | None,
        *,
        is_side: bool,
        pinned_until: float,
    ) -> None:
        self.clock += 1
        for node in nodes:
            node.last_use = self.clock
        last = nodes[-1]
        landmark = last.landmarks.get(position)
        if landmark is None:
            if self.layout.resumes_anywhere and (position < last.stop or last.children):
                return
            landmark = Landmark(position=position, kind=kind, node=last, made_at=self.clock, is_side=is_side)
            last.landmarks[position] = landmark
            self.num_landmarks += 1
        elif min(kind, landmark.kind, key=list(BoundaryKind).index) is kind:
            landmark.kind = kind
        if snapshot is not None:
            assert landmark.snapshot is None, landmark
            landmark.snapshot = snapshot
            self.ledger.charge_snapshot(snapshot.nbytes)
        landmark.last_use = self.clock
        landmark.is_superseded = False
        landmark.is_side = landmark.is_side and is_side
        landmark.pinned_until = max(landmark.pinned_until, pinned_until)
        if kind in _TIPS:
            self._supersede(nodes, position)
        self.order.use(landmark)

    def _supersede(self, nodes: tuple[Node, ...], position: int) -> None:
        for node in nodes:
            for mark in node.landmarks.values():
                if mark.position < position and mark.kind in _TIPS and not mark.is_superseded:
                    mark.is_superseded = True
                    self.order.place(mark)

    def _attach(self, node: Node, kind: KvKind, piece: Piece) -> None:
        pieces = node.pieces.setdefault(kind, [])
        pieces.append(piece)
        pieces.sort(key=lambda p: p.span)
        self.ledger.charge_kv(piece.payload.nbytes)

    # Eviction.

    def free(self) -> int | None:
        """Bytes left in the budget (negative when over it), or None without a budget."""
        return None if self.budget is None else self.budget - self.reserved - self.ledger.held

    def make_room(self, nbytes: int) -> bool:
        """Evict until `nbytes` more fit the budget. False if that cannot be: then nothing more can be evicted."""
        while True:
            free = self.free()
            if free is None or free >= nbytes:
                return True
            if not self.evict_one("budget"):
                return False

    def evict_one(self, reason: str) -> bool:
        """Evict the item of least worth. False if nothing may be evicted."""
        landmark = self.order.pop(may_evict=self._may_evict)
        if landmark is None:
            return False
        self.ledger.evictions += 1
        self.ledger.evicted_by_reason[reason] += 1
        self._evict(landmark)
        return True

    def clear(self) -> None:
        """Drop everything that no lease protects, pins included."""
        for root in self.roots.values():
            for node in list(subtree(root)):
                for landmark in node.landmarks.values():
                    landmark.pinned_until = 0.0
        while self.evict_one("cleared"):
            pass
        for namespace in [name for name, root in self.roots.items() if not root.children and root.num_leases == 0]:
            del self.roots[namespace]
            self.ledger.count_nodes(-1)

    def _may_evict(self, landmark: Landmark) -> bool:
        if landmark.pinned_until > self.now_s:
            return False
        node = landmark.node
        below = node.num_leases - len(node.leases)
        return below == 0 and all(lease.position < landmark.position for lease in node.leases)

    def facts(self, landmark: Landmark) -> Facts:
        """What the policy may know of this landmark. O(depth) at worst."""
        node = landmark.node
        nbytes = landmark.snapshot.nbytes if landmark.snapshot is not None else 0
        lower = self._floor_below(landmark)
        is_end = not node.children and landmark.position == node.stop
        if is_end and self.layout.resumes_anywhere:
            lower = max(lower, self._tail_cut(node))
        for kind, pieces in node.pieces.items():
            if is_end:
                start = max(node.start, lower)
            elif isinstance(kind, Full):
                continue
            else:
                needs = kind.needs(landmark.position)
                start = max(lower, needs[-1].start if needs else landmark.position)
            for piece in pieces:
                freed = piece.span.clip(start, max(start, landmark.position))
                if freed is not None:
                    nbytes += piece.payload.nbytes * len(freed) // len(piece.span)
        return Facts(
            kind=landmark.kind,
            cost=landmark.position - lower,
            nbytes=nbytes,
            last_use=max(landmark.last_use, node.last_use) if self.layout.resumes_anywhere else landmark.last_use,
            now=self.clock,
            floor=landmark.floor,
            num_uses=landmark.num_uses,
            num_branches=len(node.children) if landmark.position == node.stop else 0,
            is_superseded=landmark.is_superseded,
            is_side=landmark.is_side,
        )

    def _floor_below(self, landmark: Landmark) -> int:
        """The next lower landmark on the path, or 0."""
        node: Node | None = landmark.node
        while node is not None:
            lower = [p for p in node.landmarks if p < landmark.position]
            if lower:
                return max(lower)
            node = node.parent
        return 0

    def _tail_cut(self, node: Node) -> int:
        """Where the last block of a leaf begins: at a piece's start where one is near, so that nothing is copied."""
        starts = [p.span.start for pieces in node.pieces.values() for p in pieces]
        near = [s for s in starts if node.stop - 2 * _TAIL_BLOCK <= s <= node.stop - _TAIL_BLOCK // 2]
        protected = max((lease.position for lease in node.leases), default=node.start)
        return max(node.start, protected, max(near, default=node.stop - _TAIL_BLOCK))

    def _evict(self, landmark: Landmark) -> None:
        node, position = landmark.node, landmark.position
        node.lost_at = max(node.lost_at, position)
        if self.layout.resumes_anywhere:
            cut = self._tail_cut(node)
            self._drop_landmark(landmark)
            self._truncate(node, cut)
            return
        path = path_to(node)
        self._drop_landmark(landmark)
        if not node.children:
            self._truncate_to_landmark(node)
        for above in path:
            self._trim(above)

    def _drop_landmark(self, landmark: Landmark) -> None:
        del landmark.node.landmarks[landmark.position]
        self.num_landmarks -= 1
        if landmark.snapshot is not None:
            self.ledger.charge_snapshot(-landmark.snapshot.nbytes)

    def _truncate_to_landmark(self, node: Node) -> None:
        leased = [lease.position for lease in node.leases]
        self._truncate(node, max([*node.landmarks, *leased], default=node.start))

    def _truncate(self, node: Node, stop: int) -> None:
        """Drop ``[stop, node.stop)`` of a leaf, and the node if nothing is left, and what then is of no use above."""
        parent = node.parent
        if parent is None or stop == node.stop:
            if parent is not None and self.layout.resumes_anywhere:
                self._mark_end(node)
            return
        before = self._node_kv(node)
        if stop > node.start:
            node.pieces = cut_pieces(node, node.start, stop)
            self.ledger.count_tokens(stop - node.stop)
            node.tokens = own_tokens(node.tokens[: stop - node.start])
            self.ledger.charge_kv(self._node_kv(node) - before)
            if self.layout.resumes_anywhere:
                self._mark_end(node)
            return
        assert node.num_leases == 0 and not node.landmarks and not node.children, node.start
        self.ledger.charge_kv(-before)
        self.ledger.count_tokens(-len(node.tokens))
        self.ledger.count_nodes(-1)
        del parent.children[int(node.tokens[0])]
        node.parent, node.pieces = None, {}
        parent.lost_at = max(parent.lost_at, parent.stop)
        if not parent.children and parent.parent is not None:
            if self.layout.resumes_anywhere:
                self._mark_end(parent)
            else:
                self._truncate_to_landmark(parent)

    def _mark_end(self, node: Node) -> None:
        """Make the end of a leaf evictable again (layouts where every position is resumable)."""
        if node.stop in node.landmarks:
            return
        end = Landmark(
            position=node.stop,
            kind=BoundaryKind.INTERVAL,
            node=node,
            made_at=self.clock,
            last_use=node.last_use,
            num_uses=node.num_uses,
        )
        node.landmarks[node.stop] = end
        self.num_landmarks += 1
        self.order.use(end)

    def _trim(self, node: Node) -> None:
        """Drop the window and chunk entries of this edge that no landmark or lease below needs any more."""
        for kind, pieces in list(node.pieces.items()):
            if isinstance(kind, Full):
                continue
            needed = self._needed(node, kind)
            if covers(needed, (p.span for p in pieces)):
                continue
            before = sum(p.payload.nbytes for p in pieces)
            kept: list[Piece] = []
            for span in needed:
                only = Node(start=node.start, tokens=node.tokens, parent=None, pieces={kind: pieces})
                kept.extend(cut_pieces(only, span.start, span.stop).get(kind, ()))
            if kept:
                node.pieces[kind] = kept
            else:
                del node.pieces[kind]
            self.ledger.charge_kv(sum(p.payload.nbytes for p in kept) - before)

    def _needed(self, node: Node, kind: Window | Chunk) -> tuple[Span, ...]:
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
            spans.extend(s for p in positions for s in kind.needs(p))
            stack.extend(below.children.values())
        clipped = (span.clip(node.start, node.stop) for span in spans)
        return union(span for span in clipped if span is not None)

    @staticmethod
    def _node_kv(node: Node) -> int:
        return sum(p.payload.nbytes for pieces in node.pieces.values() for p in pieces)

    # Compaction.

    def compact(self, *, max_entries: int) -> int:
        """Join small edges and pieces, copying about `max_entries` entries at most. Gives how many were copied.

        0: there is nothing left to join.
        """
        copied = 0
        for root in self.roots.values():
            for node in list(mergeable(root)):
                self.ledger.count_nodes(-1)
                child, moved = merge_with_child(node)
                copied += len(child.tokens) if not child.pieces else 1
                for landmark in moved:
                    self.order.place(landmark)
            for node in subtree(root):
                while (found := joinable(node, _PIECE_TOKENS)) is not None:
                    if copied >= max_entries:
                        return copied
                    kind, first, stop = found
                    before = self._node_kv(node)
                    copied += join(node, kind, first, stop)
                    self.ledger.charge_kv(self._node_kv(node) - before)
        return copied

    # Integrity.

    def check(self) -> None:
        """Recompute everything from the trees (bytes, leases, order, coverage); AssertionError on any difference."""
        integrity.check(self)
