"""The prefix cache: what was computed once, for whoever comes next.

One radix tree per namespace, with segments and snapshots as payloads (`reprise.cache.tree`). Lookups change nothing;
a commit adds only what is not there yet; eviction never touches a leased path; `check()` recomputes the books.
Used by one thread.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from reprise.cache import integrity
from reprise.cache.compaction import compaction_steps
from reprise.cache.eviction import EvictionOrder
from reprise.cache.ghosts import Ghosts
from reprise.cache.ledger import Ledger
from reprise.cache.loans import LoanPlace, lenders_of, loans_on, owned_on, put
from reprise.cache.lookup import (
    Match,
    Restore,
    landmark_at,
    match_in,
    missing,
    read,
    resume_position,
    was_lost,
)
from reprise.cache.payload import Lent, SegmentPayload, SnapshotPayload, Source
from reprise.cache.pin_book import PinBook
from reprise.cache.policy import ExpectedSaving, Facts, Policy
from reprise.cache.superseding import superseded_beside, superseded_by, superseded_on
from reprise.cache.tree import (
    Landmark,
    Lease,
    Node,
    Piece,
    Walk,
    cut_pieces,
    kv_nbytes,
    leased_nbytes,
    new_root,
    path_to,
    split,
    subtree,
    walk,
)
from reprise.cache.trimming import end_of_use, tail_start, trimmed
from reprise.cache.worth import facts_of, facts_of_new, standing_below
from reprise.core.kinds import Full, KvKind, Layout
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, own_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Grain:
    """How finely payloads are cut, in tokens.

    `piece`: the longest piece, which bounds what a split or an eviction has to copy. `tail`: how much of a path's end
    is evicted at a time where every position is resumable.
    """

    piece: int = 2048
    tail: int = 1024

    def __post_init__(self) -> None:
        assert self.piece > 0 and self.tail > 0, self


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

    def __init__(
        self,
        layout: Layout,
        *,
        budget: int | None = None,
        policy: Policy | None = None,
        grain: Grain | None = None,
    ) -> None:
        self.layout = layout
        self.budget = budget
        self.grain = grain if grain is not None else Grain()
        self.reserved = 0
        """What live sequences hold, less what they lend: that is counted as held by the tree."""
        self.ledger = Ledger()
        self.roots: dict[str, Node] = {}
        self.clock = 0
        self.now_s = 0.0
        self.order = EvictionOrder(policy if policy is not None else ExpectedSaving(), self.facts)
        self.num_landmarks = 0
        self.pins = PinBook()
        self.recall: Callable[[object], None] = _nobody_lends
        """Makes a lender that has ended replace everything that it lends by copies; set by the owner of the sequences.

        One that still runs is left alone: what it lent is dropped, and it computes on in the same buffers.
        """

    # Lookups. They change nothing.

    def match(self, tokens: Tokens, *, namespace: str = "") -> Match:
        """How far the tree agrees with `tokens`. O(length of the match)."""
        root = self.roots.get(namespace)
        return match_in(root if root is not None else new_root(), tokens, namespace)

    def resume_at(self, match: Match, *, limit: int) -> int:
        """The largest position ≤ `limit` at which every layer can resume; 0 if there is none."""
        return resume_position(self.layout, match, limit)

    def read(self, match: Match, position: int) -> Restore:
        """What is needed to resume at `position`, which `resume_at` gave for the same match."""
        return read(self.layout, match, position)

    def was_lost(self, match: Match, position: int) -> bool:
        """Whether something was evicted that would have let this prompt resume behind `position`."""
        return was_lost(match, position)

    # Leases.

    def lease(self, match: Match, position: int, *, is_request: bool = True) -> Lease:
        """Protect the matched path up to `position` until `release`, and note that it is used.

        `is_request`: somebody asked for it. Work that the server gives itself says nothing about who comes back when.
        """
        assert position <= match.length, (position, match.length)
        held = self._protect(match.walk, position)
        self._use(match, position)
        if is_request:
            self._note_arrival(match)
        return held

    def release(self, lease: Lease) -> None:
        """Give the lease back, and drop what was kept for it alone. Releasing twice is a bug."""
        assert not lease.is_released, lease
        lease.is_released = True
        lease.node.leases.remove(lease)
        for above in path_to(lease.node):
            above.num_leases -= 1
        if not self.layout.resumes_anywhere:
            self._trim_path(lease.node, lease.position)
            self._prune(lease.node)

    def _protect(self, walked: Walk, position: int) -> Lease:
        node = next(n for n in walked.nodes if position <= n.stop)
        held = Lease(node, position)
        node.leases.append(held)
        for above in path_to(node):
            above.num_leases += 1
        return held

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

    def _note_arrival(self, match: Match) -> None:
        """Let the policy know of a request, and look again at everything whose worth that changes."""
        arrival = self.order.policy.arrive(match.tokens, known=match.length, namespace=match.namespace)
        nodes, last = match.walk.nodes, match.walk.last
        passed = nodes if match.length == last.stop else nodes[:-1]
        for node in passed:
            self._pass_by(node, arrival.number)
        if arrival.continues is not None:
            # What the earlier prompt left beside this path has just been left behind.
            beside = last.children.values() if match.length == last.stop else (last,)
            for top in [node for node in beside if node.visit == arrival.continues]:
                for node in subtree(top):
                    for landmark in node.landmarks.values():
                        self.order.place(landmark)
        self.order.advance(arrival.number)

    def _pass_by(self, node: Node, visit: int) -> None:
        if visit > node.visit:
            node.visit = visit
            for landmark in node.landmarks.values():
                if not landmark.is_superseded:  # The others go first in any case, and are looked at again in time.
                    self.order.place(landmark)

    def landmark(self, tokens: Tokens, *, namespace: str, kind: BoundaryKind) -> Landmark | None:
        """The landmark at ``len(tokens)``, made now if the position is resumable without one; None if it is not."""
        match = self.match(tokens, namespace=namespace)
        position = len(tokens)
        if position == 0 or match.length < position:
            return None
        known = landmark_at(match.walk, position)
        if known is not None or self.resume_at(match, limit=position) < position:
            return known
        node = next(node for node in match.walk.nodes if position <= node.stop)
        made = self._make_landmark(node, position, kind, is_side=False)
        self.order.use(made)
        return made

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
        is_wanted: bool = False,
    ) -> Committed:
        """Make the position ``len(tokens)`` resumable: copy from `source` what the tree does not have yet.

        What cannot fit the budget, even after eviction, is not stored, or only its beginning where every position is
        resumable: the result says so. If `source` raises, nothing was added; what was evicted to make room stays
        evicted. `is_wanted`: a client asked to keep something of this path, so it may take the place of whatever may
        be evicted; what is pinned itself may, too.
        """
        position = len(tokens)
        if position == 0:
            return Committed(tokens=0, nbytes=0, is_resumable=True)
        known_root = self.roots.get(namespace)
        root = known_root if known_root is not None else new_root()
        walked = walk(root, tokens)
        # Evicting must not take away the path that is about to be extended.
        guard = self._protect(walked, walked.length)
        try:
            wanted = missing(self.layout, walked, position, self.grain.piece)
            mark = landmark_at(walked, position)
            needs_snapshot = self.layout.has_snapshots and mark is None
            nbytes = sum(source.segment_nbytes(k, len(span)) for k, span in wanted)
            nbytes += source.snapshot_nbytes() if needs_snapshot else 0
            visit = self.order.policy.number_of(tokens, namespace=namespace)
            new = self._facts_of_new(walked, position, nbytes, kind=kind, visit=visit, is_side=is_side)
            is_wanted |= pinned_until > self.now_s
            is_whole = nbytes == 0 or self._fits(nbytes, None if is_wanted else new)
            if not is_whole:
                position = self._stop_that_fits(walked, position, nbytes)
                if position == walked.length:
                    return Committed(tokens=0, nbytes=0, is_resumable=False)
                tokens, kind, pinned_until = tokens[:position], BoundaryKind.INTERVAL, 0.0
                wanted = missing(self.layout, walked, position, self.grain.piece)
            payloads = [(k, Piece(span, source.segment(k, span))) for k, span in wanted]
            snapshot = source.snapshot() if needs_snapshot else None

            held_before = self.ledger.held
            nodes = self._grow(walked, tokens)
            if known_root is None:
                self.roots[namespace] = root
                self.ledger.count_nodes(1)
            for segment_kind, piece in payloads:
                self._attach(nodes, segment_kind, piece)
            for node in nodes:
                self._pass_by(node, visit)
                node.first_visit = node.first_visit if node.first_visit > 0 else visit
            self._place_landmark(nodes, position, kind, snapshot, is_side=is_side, pinned_until=pinned_until)
            added = self.ledger.held - held_before
        finally:
            self.release(guard)
        self.order.sweep(self.num_landmarks)
        return Committed(tokens=position - walked.length, nbytes=added, is_resumable=is_whole)

    def _fits(self, nbytes: int, new: Facts | None) -> bool:
        """Make room for `nbytes` more, by evicting what is worth less than `new`; None: than anything.

        What is known to be hopeless evicts nothing.
        """
        free = self.free()
        if free is None or free >= nbytes:
            return True
        most = free + self.ledger.held - self.protected_nbytes()
        return nbytes <= most and self.make_room(nbytes, new=new)

    def _stop_that_fits(self, walked: Walk, position: int, nbytes: int) -> int:
        """How far a path of `nbytes` more fits what is free, where every position is resumable: its beginning saves as
        much a byte as the whole. Not less than what is evicted at a time, so that paths do not grow by crumbs.
        """
        free = self.free()
        if free is None or free <= 0 or not self.layout.resumes_anywhere:
            return walked.length
        num = (position - walked.length) * free // nbytes
        return walked.length + num if num >= self.grain.tail else walked.length

    def _facts_of_new(
        self, walked: Walk, position: int, nbytes: int, *, kind: BoundaryKind, visit: int, is_side: bool
    ) -> Facts:
        below = walked.length
        if not self.layout.resumes_anywhere:
            below = standing_below(walked.last, min(walked.length, position - 1), leaving=superseded_by(kind))
        return facts_of_new(
            kind,
            cost=position - below,
            nbytes=nbytes,
            clock=self.clock,
            floor=self.order.policy.floor,
            visit=visit,
            is_side=is_side,
        )

    def _grow(self, walked: Walk, tokens: Tokens) -> tuple[Node, ...]:
        """Add what the tree lacks of `tokens`; gives the nodes from the root to the one that holds the end."""
        last = walked.last
        if walked.length == len(tokens):
            return walked.nodes
        if walked.length < last.stop:
            before = kv_nbytes(last)
            lower, last = last, split(last, walked.length)
            self.ledger.count_nodes(1)
            self.ledger.charge_kv(kv_nbytes(last) + kv_nbytes(lower) - before)
        child = Node(start=walked.length, tokens=own_tokens(tokens[walked.length :]), parent=last)
        child.visit = last.visit
        first = int(child.tokens[0])
        last.children[first] = child
        self.ledger.count_nodes(1)
        self.ledger.count_tokens(len(child.tokens))
        end = last.landmarks.get(last.stop)
        if self.layout.resumes_anywhere and end is not None and end.stays_until <= self.now_s:
            # Only path ends are evicted where every position is resumable, and this one no longer is one.
            self._drop_landmark(end)
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
            is_inner = position < last.stop or len(last.children) > 0
            if self.layout.resumes_anywhere and is_inner and pinned_until <= self.now_s:
                return
            landmark = self._make_landmark(last, position, kind, is_side=is_side)
        elif min(kind, landmark.kind, key=list(BoundaryKind).index) is kind:
            landmark.kind = kind
        if snapshot is not None:
            assert landmark.snapshot is None, landmark
            landmark.snapshot = snapshot
            self.ledger.charge_snapshot(snapshot.nbytes)
        landmark.last_use = self.clock
        landmark.is_superseded = False
        landmark.is_side = landmark.is_side and is_side
        self.pins.pin(landmark, pinned_until)
        self._supersede(superseded_on(nodes, position, kind))
        if kind is BoundaryKind.STABLE:
            self._supersede(superseded_beside(nodes))
        self.order.use(landmark)

    def _make_landmark(self, node: Node, position: int, kind: BoundaryKind, *, is_side: bool) -> Landmark:
        landmark = Landmark(position=position, kind=kind, node=node, made_at=self.clock, is_side=is_side)
        node.landmarks[position] = landmark
        self.num_landmarks += 1
        if node.ghosts is not None:
            node.ghosts.forget_landmark(position)
        return landmark

    def _supersede(self, marks: Iterable[Landmark]) -> None:
        for mark in marks:
            mark.is_superseded = True
            self.order.place(mark)

    def _attach(self, nodes: tuple[Node, ...], kind: KvKind, piece: Piece) -> None:
        node = nodes[bisect_left(nodes, piece.span.stop, key=lambda n: n.stop)]
        assert node.start <= piece.span.start, (node.start, piece.span)
        insort(node.pieces.setdefault(kind, []), piece, key=lambda p: p.span.start)
        self.ledger.charge_kv(piece.payload.nbytes)
        self.reserved -= _lent_nbytes([piece])

    # Eviction.

    def facts(self, landmark: Landmark) -> Facts:
        """What the policy may know of this landmark. O(depth) at worst."""
        return facts_of(landmark, self.layout, tail=self.grain.tail, clock=self.clock, now_s=self.now_s)

    def protected_nbytes(self) -> int:
        """At least so many bytes stay whatever is evicted, pins aside: full entries and snapshots up to the leases."""
        return leased_nbytes(self.roots.values())

    def free(self) -> int | None:
        """Bytes left in the budget (negative when over it), or None without a budget."""
        return None if self.budget is None else self.budget - self.reserved - self.ledger.held

    def make_room(self, nbytes: int, *, new: Facts | None = None) -> bool:
        """Evict until `nbytes` more fit the budget. False if that cannot be: then nothing more can be evicted.

        `new`: what the room is for, if it may not take the place of what is worth more.
        """
        while True:
            free = self.free()
            if free is None or free >= nbytes:
                return True
            if not self.evict_one("budget", new=new):
                return False

    def evict_one(self, reason: str, *, new: Facts | None = None) -> bool:
        """Evict the item of least worth. False if nothing may be evicted (for `new`, if that is given)."""
        landmark = self.order.pop(may_evict=self._may_evict, new=new)
        if landmark is None:
            return False
        self._count_eviction(reason)
        self._evict(landmark)
        return True

    def _count_eviction(self, reason: str) -> None:
        self.ledger.evictions += 1
        self.ledger.evicted_by_reason[reason] += 1

    def clear(self, namespace: str | None = None) -> None:
        """Drop everything that no lease protects, pins included: of one namespace, or of all. O(size of the trees)."""
        for name in [name for name in self.roots if namespace in (None, name)]:
            root = self.roots[name]
            for mark in [mark for node in subtree(root) for mark in node.landmarks.values()]:
                self.pins.forget(mark)
            # What one round leaves, such as the new end of a path that was shortened, is for the next.
            while marks := [mark for node in subtree(root) for mark in node.landmarks.values()]:
                num_before = self.ledger.evictions
                for mark in marks:
                    if mark.node.landmarks.get(mark.position) is mark and self._may_evict(mark):
                        self._count_eviction("cleared")
                        self._evict(mark)
                if self.ledger.evictions == num_before:
                    break
            if not root.children and root.num_leases == 0:
                del self.roots[name]
                self.ledger.count_nodes(-1)
        self.order.sweep(self.num_landmarks)

    def forget(self) -> None:
        """Drop everything at once, leases included: for when what is stored is not to be trusted any more."""
        for root in self.roots.values():
            for node in subtree(root):
                # The nodes refer to each other, and the order to landmarks: their bytes are not to wait for that.
                for landmark in node.landmarks.values():
                    landmark.snapshot = None
                    self.pins.forget(landmark)
                node.landmarks.clear()
                node.pieces.clear()
        self.roots = {}
        self.num_landmarks = 0
        self.order.sweep(0)
        self.ledger = Ledger(evictions=self.ledger.evictions, evicted_by_reason=self.ledger.evicted_by_reason)

    def _may_evict(self, landmark: Landmark) -> bool:
        if landmark.stays_until > self.now_s:
            return False
        node = landmark.node
        below = node.num_leases - len(node.leases)
        return below == 0 and all(lease.position < landmark.position for lease in node.leases)

    def _evict(self, landmark: Landmark) -> None:
        node, position = landmark.node, landmark.position
        for lender in lenders_of(node):
            # Nothing is freed by dropping what a live sequence still holds.
            self.recall(lender)
        is_end = not node.children and position == node.stop
        if self.layout.resumes_anywhere:
            cut = tail_start(node, self.grain.tail, self.now_s)
            self._drop_landmark(landmark)
            if is_end:
                # Pins that ran out are the only landmarks inside an edge here.
                for mark in [mark for mark in node.landmarks.values() if mark.position > cut]:
                    self._drop_landmark(mark)
                self._cut_tail(node, cut)
            return
        self._drop_landmark(landmark)
        _ghosts(node).lose_landmark(position)
        self._trim_path(node, position)
        self._prune(node)

    def _drop_landmark(self, landmark: Landmark) -> None:
        del landmark.node.landmarks[landmark.position]
        self.pins.forget(landmark)
        self.num_landmarks -= 1
        if landmark.snapshot is not None:
            self.ledger.charge_snapshot(-landmark.snapshot.nbytes)
            # The order of eviction may still hold the landmark for a while; its bytes are given back now.
            landmark.snapshot = None

    def _cut_tail(self, leaf: Node, stop: int) -> None:
        """Drop ``[stop, leaf.stop)``, and make the path's new end evictable."""
        end = leaf
        if stop > leaf.start:
            self._shorten(leaf, stop)
        else:
            end = self._remove(leaf)
        if end.parent is not None and not end.children:
            self._mark_end(end)

    def _prune(self, node: Node) -> None:
        """Shorten a path to its last landmark or lease, through as many edges as it takes."""
        while node.parent is not None and not node.children:
            stop = end_of_use(node)
            if stop > node.start:
                if stop < node.stop:
                    self._shorten(node, stop)
                return
            node = self._remove(node)

    def _shorten(self, leaf: Node, stop: int) -> None:
        before, lent_before = kv_nbytes(leaf), _lent_on(leaf)
        leaf.pieces = cut_pieces(leaf, leaf.start, stop)
        self.ledger.charge_kv(kv_nbytes(leaf) - before)
        # What a running sequence lent and nobody keeps is its own again: that frees nothing.
        self.reserved += lent_before - _lent_on(leaf)
        self.ledger.count_tokens(stop - leaf.stop)
        ghosts = _ghosts(leaf).up_to(stop)
        ghosts.lose_path(stop, int(leaf.tokens[stop - leaf.start]))
        leaf.ghosts = ghosts
        leaf.tokens = own_tokens(leaf.tokens[: stop - leaf.start])

    def _remove(self, leaf: Node) -> Node:
        """Take a leaf out of the tree; gives its parent."""
        parent = leaf.parent
        assert parent is not None and leaf.num_leases == 0 and not leaf.landmarks and not leaf.children, leaf.start
        first = int(leaf.tokens[0])
        del parent.children[first]
        self.ledger.charge_kv(-kv_nbytes(leaf))
        self.reserved += _lent_on(leaf)
        self.ledger.count_tokens(-len(leaf.tokens))
        self.ledger.count_nodes(-1)
        leaf.parent, leaf.pieces = None, {}
        _ghosts(parent).lose_path(parent.stop, first)
        end = parent.landmarks.get(parent.stop)
        if end is not None:
            self.order.place(end)  # Fewer paths go on from it.
        return parent

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

    def _trim_path(self, node: Node, position: int) -> None:
        """Drop the window and chunk entries that only a landmark or lease at `position` of this edge needed."""
        needs = [need for kind in self.layout.kinds if not isinstance(kind, Full) for need in kind.needs(position)]
        lowest = min((need.start for need in needs), default=position)
        above: Node | None = node
        while above is not None and above.stop > lowest:
            rest = trimmed(above)
            if rest is not None:
                before = kv_nbytes(above)
                above.pieces = rest
                self.ledger.charge_kv(kv_nbytes(above) - before)
            above = above.parent

    # Loans.

    def lender_at(self, match: Match, position: int) -> object | None:
        """The one live sequence that lends all full-attention entries ``[0, position)``, or None."""
        lenders = {
            id(part.payload.lender) if isinstance(part.payload, Lent) else None: part.payload
            for kind, parts in self.read(match, position).parts.items()
            if isinstance(kind, Full)
            for part in parts
        }
        if len(lenders) != 1:
            return None
        (payload,) = lenders.values()
        return payload.lender if isinstance(payload, Lent) else None

    def loans(self, lender: object, tokens: Tokens, *, namespace: str, start: int = 0) -> tuple[LoanPlace, ...]:
        """What `lender`, whose sequence is `tokens`, lends of the entries ``[start, …)``."""
        root = self.roots.get(namespace)
        return () if root is None else loans_on(root, tokens, lender, start=start)

    def owned(self, tokens: Tokens, *, namespace: str) -> tuple[LoanPlace, ...]:
        """The full-attention pieces on the path of `tokens` that the tree owns, and that one lease at most needs."""
        root = self.roots.get(namespace)
        return () if root is None else owned_on(root, tokens)

    def replace(self, places: Sequence[LoanPlace], payloads: Sequence[SegmentPayload]) -> None:
        """Put other payloads of the same entries in these places: copies of what was lent, or loans of what was held.

        What is lent counts here, and what is not as its lender's own.
        """
        self.reserved += _lent_nbytes([place.piece for place in places])
        self.ledger.charge_kv(put(places, payloads))
        self.reserved -= sum(payload.nbytes for payload in payloads if isinstance(payload, Lent))

    # Compaction.

    def compact(self, *, max_entries: int) -> int:
        """Join small edges and pieces, copying about `max_entries` entries at most. Gives how much was done.

        0: there is nothing left to join. Meant for idle times, a step at a time. O(nodes) and what is copied.
        """
        done = 0
        for step in compaction_steps(self.roots.values(), longest=self.grain.piece, max_entries=max_entries):
            self.ledger.count_nodes(-step.num_nodes)
            self.ledger.charge_kv(step.nbytes)
            done += step.num_nodes + step.num_entries
        return done

    # Integrity.

    def check(self) -> None:
        """Recompute everything from the trees (bytes, leases, order, coverage); AssertionError on any difference."""
        integrity.check(self)


def _lent_nbytes(pieces: Iterable[Piece]) -> int:
    return sum(piece.payload.nbytes for piece in pieces if isinstance(piece.payload, Lent))


def _lent_on(node: Node) -> int:
    """The bytes of this edge that are lent."""
    return sum(_lent_nbytes(pieces) for pieces in node.pieces.values())


def _nobody_lends(lender: object) -> None:
    raise AssertionError(f"entries are lent by {lender}, and nobody can recall them")


def _ghosts(node: Node) -> Ghosts:
    if node.ghosts is None:
        node.ghosts = Ghosts()
    return node.ghosts
