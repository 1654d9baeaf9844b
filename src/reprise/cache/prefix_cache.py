"""The prefix cache: what was computed once, for whoever comes next.

One radix tree per namespace (`reprise.cache.tree`), an order of eviction, pins, and a memory budget that all of it is
charged to. Lookups change nothing; a commit adds only what is not there yet; eviction takes nothing that a lease needs;
`check()` recomputes the books. Used by one thread.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reprise.cache.eviction import EvictionOrder
from reprise.cache.logits_rows import LogitsRows
from reprise.cache.lookup import (
    Match,
    Restore,
    checkpoint_at,
    match_of,
    missing,
    read,
    resume_position,
    sharing_sequence,
    was_lost,
)
from reprise.cache.node import Checkpoint, Lease, Node, Segment, SegmentRef, SegmentSizes, Walk, path_to, subtree
from reprise.cache.payload import LogitsRow, SegmentPayload, SnapshotPayload, Source
from reprise.cache.pins import Pins
from reprise.cache.policy import ExpectedSaving, Facts, Policy
from reprise.cache.retention import end_of_use, evicted_from, superseded_beside, superseded_on, trimmed
from reprise.cache.tree import RadixTree
from reprise.core.clock import Clock, monotonic
from reprise.core.inspection import LastUse
from reprise.core.kinds import Full, KvKind, Layout
from reprise.core.pin import Pin, PinList, pin_id
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Tokens, join_tokens
from reprise.memory import Account, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a commit did: `num_tokens` and `nbytes` newly held, and whether a request can resume at this position."""

    num_tokens: int
    nbytes: int
    is_resumable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a prefix cache holds, and how many items it has evicted so far, by reason."""

    kv_nbytes: int
    snapshot_nbytes: int
    num_tokens: int
    num_nodes: int
    num_checkpoints: int
    evictions: dict[str, int]

    @property
    def num_evictions(self) -> int:
        """Items dropped so far, for whatever reason."""
        return sum(self.evictions.values())


def _nobody_shares(sequence: object) -> None:
    raise AssertionError(f"entries stand in the buffers of {sequence}, and nobody can close it")


class PrefixCache:
    """Everything reusable of one model."""

    def __init__(
        self,
        layout: Layout,
        *,
        memory: Memory | None = None,
        policy: Policy | None = None,
        sizes: SegmentSizes | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """`memory`: what the payloads are charged to, without a bound by default. It reclaims from eviction."""
        self.layout = layout
        self.memory = memory if memory is not None else Memory()
        self.tree = RadixTree(layout, self.memory, sizes if sizes is not None else SegmentSizes(), time=clock)
        self.pins = Pins(clock)
        self.rows = LogitsRows(self.memory)
        self.order = EvictionOrder(policy if policy is not None else ExpectedSaving(), self.tree, self.pins)
        self._clock = clock
        self._close_idle: Callable[[object], None] = _nobody_shares
        self.memory.reclaim_from(self.evict_one)
        self._evictions: Counter[str] = Counter()
        self.is_compact = True
        """Whether nothing was stored since small segments were joined."""

    @property
    def nbytes(self) -> int:
        """All bytes of payloads."""
        return self.memory.nbytes(Account.KV) + self.memory.nbytes(Account.SNAPSHOTS)

    @property
    def stats(self) -> CacheStats:
        """What the cache holds now, and what it has dropped."""
        return CacheStats(
            kv_nbytes=self.memory.nbytes(Account.KV),
            snapshot_nbytes=self.memory.nbytes(Account.SNAPSHOTS),
            num_tokens=self.tree.totals.num_tokens,
            num_nodes=self.tree.totals.num_nodes,
            num_checkpoints=self.tree.totals.num_checkpoints,
            evictions=dict(self._evictions),
        )

    # Lookups. They change nothing.

    def match(self, tokens: Tokens, *, namespace: str = "") -> Match:
        """How far the tree agrees with `tokens`. O(length of the match)."""
        return match_of(self.tree.walk(tokens, namespace), tokens, namespace)

    def resume_at(self, match: Match, *, limit: int) -> int:
        """The largest position ≤ `limit` at which every layer can resume; 0 if there is none."""
        return resume_position(self.layout, match, limit)

    def read(self, match: Match, position: int) -> Restore:
        """What is needed to resume at `position`, which `resume_at` gave for the same match."""
        return read(self.layout, match, position)

    def was_lost(self, match: Match, position: int) -> bool:
        """Whether something was evicted that would have let this prompt resume behind `position`."""
        return was_lost(match, position)

    def row_at(self, match: Match) -> LogitsRow | None:
        """The logits behind the last of the matched prompt's tokens, where they are kept and all of it is resumable."""
        if match.length < len(match.tokens):
            return None
        return self.rows.at(checkpoint_at(match.walk, match.length))

    def would_evict(self, num: int) -> list[tuple[Checkpoint, Facts]]:
        """The first `num` items that `evict_one` would take, as things are now."""
        return self.order.first(num, may_evict=self._may_evict)

    def least_worth(self) -> float | None:
        """The worth of what `evict_one` would take, in the policy's terms; None if nothing may be evicted."""
        if len(self.rows) > 0:
            return 0.0
        first = self.would_evict(1)
        return self.order.policy.worth(first[0][1]) if first else None

    def protected_nbytes(self) -> int:
        """At least so many bytes stay whatever is evicted, pins aside: full entries and snapshots up to the leases."""
        return self.tree.leased_nbytes()

    # Leases.

    def lease(self, match: Match, position: int, *, is_request: bool = True) -> Lease:
        """Protect the matched path up to `position` until `release`, and note that it is used.

        `is_request`: somebody asked for it. Work that the server gives itself says nothing about who comes back when.
        """
        assert position <= match.length, (position, match.length)
        lease = self.tree.protect(match.walk, position)
        used = self.tree.use(match.walk, position, use=LastUse.RESUMED if is_request else LastUse.SETTLED)
        if used is not None:
            self.order.place(used)
            self.rows.use(used)
        if is_request:
            lease.number = self._arrive(match)
        return lease

    def note_answer(self, lease: Lease, num_tokens: float) -> None:
        """Let the policy know that the request of this lease has its answer, and how long that is.

        In tokens like the prompt's: a fraction where one of those stands for many.
        """
        if lease.number is not None:
            self.order.policy.answered(lease.number, num_tokens)

    def release(self, lease: Lease) -> None:
        """Give the lease back, and drop what was kept for it alone. Releasing twice is a bug."""
        self.tree.unprotect(lease)
        if not self.layout.resumes_anywhere:
            self._trim_path(lease.node, lease.position)
            self._prune(lease.node)

    def _arrive(self, match: Match) -> int:
        """Let the policy know of a request, and look again at everything whose worth that changes. Gives its number."""
        arrival = self.order.policy.arrive(match.tokens, known=match.length, namespace=match.namespace)
        nodes, last = match.walk.nodes, match.walk.last
        for node in nodes if match.length == last.stop else nodes[:-1]:
            self._visit(node, arrival.number)
        if arrival.continues is not None:
            # What the earlier prompt left beside this path has just been left behind.
            beside = last.children.values() if match.length == last.stop else (last,)
            for top in [node for node in beside if node.last_visit == arrival.continues]:
                for node in subtree(top):
                    for checkpoint in node.checkpoints.values():
                        self.order.place(checkpoint)
        self.order.advance(arrival.number)
        return arrival.number

    def _visit(self, node: Node, number: int) -> None:
        """The prompt of this number went through `node`: look again at everything there whose worth that changes."""
        if self.tree.visit(node, number):
            for checkpoint in node.checkpoints.values():
                # The superseded ones go first in any case, and are looked at again in time.
                if not checkpoint.is_superseded:
                    self.order.place(checkpoint)

    # Commits.

    def commit(
        self,
        tokens: Tokens,
        source: Source,
        *,
        kind: BoundaryKind,
        namespace: str = "",
        is_auxiliary: bool = False,
        overrides_admission: bool = False,
        stable_at: int | None = None,
        seams: Mapping[KvKind, Sequence[int]] | None = None,
    ) -> Committed:
        """Make the position ``len(tokens)`` resumable: copy from `source` what the tree does not have yet.

        What cannot fit the budget, even after eviction, is not stored, or only its beginning where every position is
        resumable: the result says so. If `source` raises, nothing was added; what was evicted to make room stays
        evicted. `overrides_admission`: a client asked to keep something of this path, so it may take the place of
        whatever may be evicted. `stable_at`: from there on the next turn may have something else (None: not known).
        `seams`: positions at which the entries of a kind are cut, since `source` has them in these parts.
        """
        position = len(tokens)
        if position == 0:
            return Committed(num_tokens=0, nbytes=0, is_resumable=True)
        walk = self.tree.walk(tokens, namespace)
        # Evicting must not take away the path that is about to be extended.
        guard = self.tree.protect(walk, walk.length)
        try:
            wanted = missing(self.layout, walk, position, self.tree.sizes.longest, seams)
            needs_snapshot = self.layout.has_snapshots and checkpoint_at(walk, position) is None
            nbytes = sum(source.segment_nbytes(k, len(span)) for k, span in wanted)
            nbytes += source.snapshot_nbytes() if needs_snapshot else 0
            visit = self.order.policy.number_of(tokens, namespace=namespace)
            if stable_at is not None and stable_at < position:
                self.order.policy.leave_tail(tokens, stable_at, number=visit, namespace=namespace)
            new = self.order.facts_of_new(walk, position, nbytes, kind=kind, visit=visit, is_auxiliary=is_auxiliary)
            is_whole = nbytes == 0 or self._admit(nbytes, None if overrides_admission else new)
            if not is_whole:
                position = self._stop_that_fits(walk, position, nbytes)
                if position == walk.length:
                    return Committed(num_tokens=0, nbytes=0, is_resumable=False)
                tokens, kind = tokens[:position], BoundaryKind.INTERVAL
                wanted = missing(self.layout, walk, position, self.tree.sizes.longest, seams)
            segments = [(k, Segment(span, source.segment(k, span))) for k, span in wanted]
            snapshot = source.snapshot() if needs_snapshot else None

            held_before = self.nbytes
            path = self._grow(walk, tokens, namespace)
            for segment_kind, segment in segments:
                self.tree.attach(path, segment_kind, segment)
            if visit is not None:
                for node in path:
                    self._visit(node, visit)
                    self.tree.note_first_visit(node, visit)
            self._place_checkpoint(path, position, kind, snapshot, is_auxiliary=is_auxiliary, stable_at=stable_at)
            added = self.nbytes - held_before
        finally:
            self.release(guard)
        self.order.sweep()
        self.is_compact = False
        return Committed(num_tokens=position - walk.length, nbytes=added, is_resumable=is_whole)

    def _admit(self, nbytes: int, new: Facts | None) -> bool:
        """Make room for `nbytes` more, by evicting what is worth less than `new`; None: than anything.

        What is known to be hopeless evicts nothing.
        """
        available = self.memory.available
        if available is None or available >= nbytes:
            return True
        most = available + self.nbytes + self.memory.nbytes(Account.LOGITS) - self.protected_nbytes()
        most += self.memory.evictable_from_others
        return nbytes <= most and self._evict_for(nbytes, new)

    def _stop_that_fits(self, walk: Walk, position: int, nbytes: int) -> int:
        """How far a path of `nbytes` more fits what is free, where every position is resumable.

        Its beginning saves as much a byte as the whole. Not less than what is evicted at a time, so that paths do not
        grow by crumbs.
        """
        available = self.memory.available
        if available is None or available <= 0 or not self.layout.resumes_anywhere:
            return walk.length
        num = (position - walk.length) * available // nbytes
        return walk.length + num if num >= self.tree.sizes.tail else walk.length

    def _grow(self, walk: Walk, tokens: Tokens, namespace: str) -> tuple[Node, ...]:
        """Add what the tree lacks of `tokens`; gives the nodes from the root to the one that holds the end."""
        path = self.tree.extend(walk, tokens, namespace)
        if self.layout.resumes_anywhere and len(path) > 1 and walk.length < len(tokens):
            end = path[-2].checkpoints.get(path[-2].stop)
            if end is not None and not self.pins.holds(end) and self.rows.at(end) is None:
                # Only path ends are evicted where every position is resumable, and this one no longer is one.
                self._drop(end)
        return path

    def _place_checkpoint(
        self,
        path: Sequence[Node],
        position: int,
        kind: BoundaryKind,
        snapshot: SnapshotPayload | None,
        *,
        is_auxiliary: bool,
        stable_at: int | None,
    ) -> None:
        self.tree.tick(path)
        last = path[-1]
        checkpoint = last.checkpoints.get(position)
        if checkpoint is None:
            is_inner = position < last.stop or len(last.children) > 0
            if self.layout.resumes_anywhere and is_inner:
                return
            checkpoint = self.tree.add_checkpoint(last, position, kind, is_auxiliary=is_auxiliary, stable_at=stable_at)
        else:
            self.tree.renew_checkpoint(checkpoint, kind, is_auxiliary=is_auxiliary, stable_at=stable_at)
        if snapshot is not None:
            self.tree.save(checkpoint, snapshot)
        superseded = [*superseded_on(path, position, kind)]
        if kind is BoundaryKind.STABLE:
            superseded += superseded_beside(path)
        for older in superseded:
            self.tree.supersede(older)
            self.order.place(older)
        self.order.place(checkpoint)

    # Exact repeats.

    def has_room_for_row(self, nbytes: int, *, snapshot: int) -> bool:
        """Whether a row of logits is worth computing apart: for it and its snapshot older rows alone give way."""
        if not self.rows.admits(nbytes + snapshot):
            return False
        while not self.memory.fits(nbytes):
            if not self._evict_row():
                return False
        return True

    def keep_row(self, tokens: Tokens, row: LogitsRow, *, namespace: str = "") -> bool:
        """Keep the logits behind ``len(tokens)``, which was committed. False if it is not resumable (any more).

        Others give way: see `reprise.cache.logits_rows`.
        """
        checkpoint = self._checkpoint(tokens, namespace, BoundaryKind.PROMPT_END)
        if checkpoint is None:
            return False
        self.rows.keep(checkpoint, row)
        while self.rows.exceed_share or not self.memory.fits(0):
            if not self._evict_row():
                break
        return self.rows.at(checkpoint) is not None

    def _evict_row(self) -> bool:
        """Give up the row that was used least recently, and the position if it was kept for it alone. False: none."""
        checkpoint = next(iter(self.rows.checkpoints()), None)
        if checkpoint is None:
            return False
        self.rows.discard(checkpoint)
        node, position = checkpoint.node, checkpoint.position
        is_end = not node.children and position == node.stop
        is_inner = checkpoint.kind is BoundaryKind.PROMPT_END or self.layout.resumes_anywhere
        if is_inner and not is_end and self._may_evict(checkpoint):
            self._drop(checkpoint)
            if not self.layout.resumes_anywhere:
                self._trim_path(node, position)
        return True

    # Pins.

    def pin(self, tokens: Tokens, *, namespace: str, until: float, owner: str = "") -> bool:
        """Keep the position ``len(tokens)`` until then, or longer if it is pinned longer. False if not resumable."""
        checkpoint = self._checkpoint(tokens, namespace, BoundaryKind.EXPLICIT)
        if checkpoint is not None:
            self.pins.pin(checkpoint, until, owner=owner)
        return checkpoint is not None

    def retain(self, tokens: Tokens, *, namespace: str, until: float, owner: str = "") -> bool:
        """The same for a conversation that has come to ``len(tokens)``: what it retained before is let go."""
        checkpoint = self._checkpoint(tokens, namespace, BoundaryKind.STABLE)
        if checkpoint is not None:
            self.pins.retain(checkpoint, until, owner=owner)
        return checkpoint is not None

    def pin_of(self, tokens: Tokens, *, namespace: str) -> Pin | None:
        """The pin of this prefix, though its time may be over; None if it is not pinned. O(tokens)."""
        checkpoint = checkpoint_at(self.match(tokens, namespace=namespace).walk, len(tokens))
        return self._pin(checkpoint) if checkpoint is not None and self.pins.until(checkpoint) > 0 else None

    def list_pins(self, namespace: str, *, owner: str = "") -> PinList:
        """The pins of an owner in a namespace, oldest first. O(tokens of them)."""
        pinned = [c for c in self.pinned(namespace) if self.pins.is_owned_by(c, owner)]
        return PinList(pins=tuple(map(self._pin, pinned)), nbytes=self.pins.total_of(pinned).nbytes)

    def unpin(self, name: str, *, namespace: str, owner: str = "") -> bool:
        """Let the pin of this id go, unless another owner has it too. False if this one has none."""
        checkpoint = self._pinned(name, namespace)
        return checkpoint is not None and self.pins.disown(checkpoint, owner)

    def pinned(self, namespace: str) -> list[Checkpoint]:
        """The pinned checkpoints of a namespace, oldest pin first. O(pins × depth)."""
        return [checkpoint for checkpoint in self.pins if self.tree.namespace_of(checkpoint) == namespace]

    def prefix_of(self, checkpoint: Checkpoint) -> Tokens:
        """The tokens that the checkpoint stands behind."""
        return join_tokens(*(node.tokens for node in path_to(checkpoint.node)))[: checkpoint.position]

    def _pinned(self, name: str, namespace: str) -> Checkpoint | None:
        return next((c for c in self.pinned(namespace) if pin_id(self.prefix_of(c)) == name), None)

    def _pin(self, checkpoint: Checkpoint) -> Pin:
        until = self.pins.until(checkpoint)
        return Pin(
            id=pin_id(self.prefix_of(checkpoint)),
            num_tokens=checkpoint.position,
            nbytes=self.pins.total_of([checkpoint]).nbytes,
            expires_in_s=None if until == float("inf") else max(0.0, until - self._clock()),
            follows_chat=self.pins.follows_chat(checkpoint),
        )

    def _checkpoint(self, tokens: Tokens, namespace: str, kind: BoundaryKind) -> Checkpoint | None:
        """The checkpoint at ``len(tokens)``, made now if the position is resumable without one; None if it is not."""
        match = self.match(tokens, namespace=namespace)
        position = len(tokens)
        if position == 0 or match.length < position:
            return None
        known = checkpoint_at(match.walk, position)
        if known is not None or self.resume_at(match, limit=position) < position:
            return known
        node = next(node for node in match.walk.nodes if position <= node.stop)
        made = self.tree.add_checkpoint(node, position, kind)
        self.order.place(made)
        return made

    # Removal. Nothing here touches what a lease or a pin protects, but for `reset` (both) and `clear` (pins). A lease
    # protects its path: all but the superseded checkpoints on the way to its position.

    def evict_one(self) -> bool:
        """Evict the item of least worth. False if nothing may be evicted."""
        return self._evict_least(None)

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> None:
        """Drop everything that no lease protects: of one namespace, or of all. O(size of the trees).

        Pins go, too; where an `owner` is named, only this one's, and what others have pinned stays.
        """
        for name in [name for name in self.tree.roots if namespace in (None, name)]:
            for checkpoint in list(self.tree.checkpoints(name)):
                if owner is None:
                    self.pins.discard(checkpoint)
                else:
                    self.pins.disown(checkpoint, owner)
            # What one round leaves, such as the new end of a path that was shortened, is for the next.
            while checkpoints := list(self.tree.checkpoints(name)):
                num_before = self._evictions.total()
                for checkpoint in checkpoints:
                    if checkpoint.is_in_tree and self._may_evict(checkpoint):
                        self._evict(checkpoint, "cleared")
                if self._evictions.total() == num_before:
                    break
            self.tree.remove_empty_root(name)
        self.order.sweep()

    def drop_path(self, tokens: Tokens, *, namespace: str) -> None:
        """Drop everything that shares a beginning with these tokens, pins included: what is stored there is wrong.

        What stands below a wrong state was computed from it. Leases protect nothing but the edges of their own path.
        """
        nodes = self.tree.walk(tokens, namespace).nodes[1:2]
        for top in nodes:
            while checkpoints := [c for node in subtree(top) for c in node.checkpoints.values()]:
                num_before = self._evictions.total()
                for checkpoint in checkpoints:
                    self.pins.discard(checkpoint)
                    if checkpoint.is_in_tree and self._may_evict(checkpoint):
                        self._evict(checkpoint, "audit")
                if self._evictions.total() == num_before:
                    break
        self.order.sweep()

    def reset(self) -> None:
        """Drop everything at once, leases included: for when what is stored is not to be trusted any more."""
        for checkpoint in self.tree.checkpoints():
            self.pins.discard(checkpoint)
            self.rows.discard(checkpoint)
        self.order.clear()
        self.tree.reset()

    def _evict_for(self, nbytes: int, new: Facts | None) -> bool:
        """Evict until `nbytes` more fit, but nothing that is worth more than `new`. False if they do not."""
        worth = None if new is None else self.order.policy.worth(new)
        while not self.memory.fits(nbytes):
            if not self.memory.evict_from_others(worth) and not self._evict_least(new):
                return False
        return True

    def _evict_least(self, new: Facts | None) -> bool:
        if self._evict_row():
            return True
        checkpoint = self.order.pop(may_evict=self._may_evict, new=new)
        if checkpoint is not None:
            self._evict(checkpoint, "budget")
        return checkpoint is not None

    def _may_evict(self, checkpoint: Checkpoint) -> bool:
        if self.pins.holds(checkpoint):
            return False
        node = checkpoint.node
        if checkpoint.is_superseded and not self.layout.resumes_anywhere:
            # Who runs on this path came from further on. If this stayed for the lease, one growing chat would fill the
            # budget with what it has left behind, and have no room for its next position ever after.
            return all(lease.position != checkpoint.position for lease in node.leases)
        below = node.num_leases - len(node.leases)
        return below == 0 and all(lease.position < checkpoint.position for lease in node.leases)

    def _evict(self, checkpoint: Checkpoint, reason: str) -> None:
        self._evictions[reason] += 1
        node, position = checkpoint.node, checkpoint.position
        for sequence in node.sequences():
            # Nothing is freed by dropping what stands in the buffers of a sequence.
            self._close_idle(sequence)
        is_end = not node.children and position == node.stop
        if not self.layout.resumes_anywhere:
            self._drop(checkpoint)
            self.tree.note_lost(checkpoint)
            self._trim_path(node, position)
            self._prune(node)
            return
        cut = evicted_from(checkpoint, self.tree.sizes.tail, self.pins.holds)
        self._drop(checkpoint)
        if is_end:
            # Pins that ran out are the only checkpoints inside an edge here.
            for behind in [c for c in node.checkpoints.values() if c.position > cut]:
                self._drop(behind)
            self._cut_tail(node, cut, stable_at=checkpoint.stable_at)

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out of the tree, the order and the pins."""
        self.rows.discard(checkpoint)
        self.tree.drop_checkpoint(checkpoint)
        self.pins.discard(checkpoint)
        self.order.remove(checkpoint)

    def _cut_tail(self, leaf: Node, stop: int, *, stable_at: int | None) -> None:
        """Drop ``[stop, leaf.stop)``, and make the path's new end evictable."""
        end = leaf
        if stop > leaf.start:
            self.tree.shorten(leaf, stop)
        else:
            end = self._remove(leaf)
        if end.parent is not None and not end.children and end.stop not in end.checkpoints:
            made = self.tree.add_checkpoint(end, end.stop, BoundaryKind.INTERVAL, stable_at=stable_at)
            self.tree.inherit_uses(made)
            self.order.place(made)

    def _trim_path(self, node: Node, position: int) -> None:
        """Drop the window and chunk entries that only a checkpoint or lease at `position` of this edge needed."""
        needs = [need for kind in self.layout.kinds if not isinstance(kind, Full) for need in kind.needs(position)]
        lowest = min((need.start for need in needs), default=position)
        above: Node | None = node
        while above is not None and above.stop > lowest:
            kept = trimmed(above)
            if kept is not None:
                self.tree.keep_segments(above, kept)
            above = above.parent

    def _prune(self, node: Node) -> None:
        """Shorten a path to its last checkpoint or lease, through as many edges as it takes."""
        while node.parent is not None and not node.children:
            stop = end_of_use(node)
            if stop > node.start:
                if stop < node.stop:
                    self.tree.shorten(node, stop)
                return
            node = self._remove(node)

    def _remove(self, leaf: Node) -> Node:
        """Take a leaf out of the tree; gives its parent."""
        parent = self.tree.remove(leaf)
        end = parent.checkpoints.get(parent.stop)
        if end is not None:
            self.order.place(end)  # Fewer paths go on from it.
        return parent

    # Sharing buffers with sequences.

    def close_idle_with(self, close_idle: Callable[[object], None]) -> None:
        """Who makes an idle sequence replace all that it shares by copies, before something of that is evicted.

        A sequence that still runs is left alone: what it shares is dropped, and it computes on in the same buffers.
        """
        self._close_idle = close_idle

    def sharing_sequence(self, match: Match, position: int) -> object | None:
        """The one sequence in whose buffers all full-attention entries ``[0, position)`` stand, or None."""
        return sharing_sequence(self.read(match, position))

    def shared_segments(self, sequence: object, tokens: Tokens, *, namespace: str, start: int = 0) -> list[SegmentRef]:
        """What of the entries ``[start, …)`` on this path stands in the buffers of `sequence`.

        No segment may go across `start` (`split_shared`).
        """
        refs = self.tree.shared_segments(sequence, tokens, namespace)
        behind = [ref for ref in refs if ref.segment.span.stop > start]
        assert all(ref.segment.span.start >= start for ref in behind), start
        return behind

    def split_shared(self, sequence: object, tokens: Tokens, *, namespace: str, position: int) -> None:
        """Have no segment that stands in the buffers of `sequence` go across `position`. Copies nothing."""
        self.tree.cut_shared(sequence, tokens, namespace, position)

    def owned_segments(self, tokens: Tokens, *, namespace: str) -> list[SegmentRef]:
        """The full-attention segments on this path that are the cache's own and that one lease at most passes."""
        return self.tree.owned_segments(tokens, namespace)

    def replace(self, refs: Sequence[SegmentRef], payloads: Sequence[SegmentPayload]) -> None:
        """Put other payloads of the same entries in these places: copies of what was shared, or the other way round."""
        self.tree.replace(refs, payloads)

    # Compaction.

    def compact(self, *, max_entries: int) -> int:
        """Join small edges and segments, copying about `max_entries` entries at most. Gives how much was done.

        0: there is nothing left to join. Meant for idle times, a step at a time. O(nodes) and what is copied.
        """
        # First, so that a compaction that raises is not tried for ever.
        self.is_compact = True
        copied = self.tree.compact(max_entries=max_entries)
        self.is_compact = copied == 0
        return copied

    def compact_path(self, tokens: Tokens, *, namespace: str = "", max_entries: int = sys.maxsize) -> int:
        """The same for the end of one path, which grows: for busy times.

        So a conversation that grows while the server is never idle is restored from few segments as well. Copies at
        most a segment of each layer kind at a time. O(edges of the path) if there is nothing to do.
        """
        return self.tree.compact_path(tokens, namespace, max_entries=max_entries)

    # Integrity.

    def check(self) -> None:
        """Recompute everything from the trees (bytes, leases, order, coverage); AssertionError on any difference."""
        self.tree.check()
        checkpoints = list(self.tree.checkpoints())
        assert len(self.order) == len(checkpoints), "every checkpoint stands in the order of eviction exactly once"
        assert all(checkpoint in self.order for checkpoint in checkpoints)
        assert all(checkpoint.is_in_tree for checkpoint in self.pins.noted()), "a pin is for a checkpoint of the tree"
        self.rows.check()
