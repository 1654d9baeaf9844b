"""The prefix cache.

A radix tree per namespace (`reprise.cache.tree`), what makes room in it (`reprise.cache.evictor`) and pins, all charged
to one memory budget. Lookups change nothing; a commit adds only what is missing; eviction never takes what a lease
protects; `check()` recomputes all accounts. Used by one thread.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from reprise.cache.eviction import (
    EvictionOrder,
    is_far_up,
    superseded_beside,
    superseded_on,
    unneeded,
)
from reprise.cache.evictor import Evictor
from reprise.cache.logits_rows import LogitsRows
from reprise.cache.lookup import (
    Found,
    Match,
    Restore,
    checkpoint_at,
    match_of,
    missing,
    read,
    resume_position,
)
from reprise.cache.node import Checkpoint, Lease, Node, Segment, SegmentSizes, Walk, path_to, subtree
from reprise.cache.payload import Payload, Source
from reprise.cache.pins import Pins
from reprise.cache.policy import SHARED_KINDS, EvictionCandidate, ExpectedSaving, Policy
from reprise.cache.tree import RadixTree
from reprise.core.clock import Clock, monotonic
from reprise.core.inspection import LastUse
from reprise.core.job import Lineage
from reprise.core.kinds import Full, KvKind, Layout
from reprise.core.pin import Pin, PinList, pin_id
from reprise.core.prompt import BoundaryKind
from reprise.core.tokens import Span, Tokens, join_tokens
from reprise.memory import Account, Memory

_LEAST_CHANCE = 0.1
"""A chat that continues more rarely than this is not expected to continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The result of a commit: `num_tokens` and `nbytes` added, and whether the position is now resumable."""

    num_tokens: int
    nbytes: int
    is_resumable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a prefix cache holds, and how many items it has dropped so far, by reason."""

    kv_nbytes: int
    snapshot_nbytes: int
    num_tokens: int
    num_nodes: int
    num_checkpoints: int
    evictions: dict[str, int]

    @property
    def num_evictions(self) -> int:
        """Items dropped so far, for any reason."""
        return sum(self.evictions.values())


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
        """`memory`: the budget that payloads are charged to (default: unlimited); it reclaims by evicting from here."""
        self.layout = layout
        self.memory = memory if memory is not None else Memory()
        self.tree = RadixTree(layout, self.memory, sizes if sizes is not None else SegmentSizes(), time=clock)
        self.pins = Pins(clock)
        self.rows = LogitsRows(self.memory)
        self.order = EvictionOrder(policy if policy is not None else ExpectedSaving(), self.tree, self.pins)
        self._evictor = Evictor(self.tree, self.order, self.rows, self.pins, self.memory)
        self._clock = clock
        self.memory.reclaim_from(self._evictor.evict_one)
        self.is_compact = True
        """Whether nothing was stored since the last complete compaction."""

    @property
    def nbytes(self) -> int:
        """Bytes of all segments and snapshots."""
        return self.memory.nbytes(Account.KV) + self.memory.nbytes(Account.SNAPSHOTS)

    @property
    def stats(self) -> CacheStats:
        """Sizes now, and counters."""
        return CacheStats(
            kv_nbytes=self.memory.nbytes(Account.KV),
            snapshot_nbytes=self.memory.nbytes(Account.SNAPSHOTS),
            num_tokens=self.tree.totals.num_tokens,
            num_nodes=self.tree.totals.num_nodes,
            num_checkpoints=self.tree.totals.num_checkpoints,
            evictions=dict(self._evictor.evictions),
        )

    # Lookups. They change nothing.

    def match(self, tokens: Tokens, *, namespace: str = "") -> Match:
        """How far the tree agrees with `tokens`. O(length of the match)."""
        return match_of(self.tree.walk(tokens, namespace), tokens, namespace)

    def resume_at(self, match: Match, *, limit: int, spans: Sequence[Span] = ()) -> int:
        """The largest position ≤ `limit` at which every layer can resume; 0 if there is none.

        `spans`: the prompt's images, which are reused whole or not at all.
        """
        return resume_position(self.layout, match, limit, spans=spans)

    def lookup(self, tokens: Tokens, limit: int, *, namespace: str = "", spans: Sequence[Span] = ()) -> Found:
        """The match of `tokens`, and `resume_at` for it."""
        match = self.match(tokens, namespace=namespace)
        return Found(self.resume_at(match, limit=limit, spans=spans), match)

    def read(self, match: Match, position: int) -> Restore:
        """What is needed to resume at `position`, a result of `resume_at` for the same match."""
        return read(self.layout, match, position)

    def row_at(self, match: Match) -> Payload | None:
        """The logits after the prompt's last token, if all of it matched and they are stored."""
        if match.length < len(match.tokens):
            return None
        return self.rows.at(checkpoint_at(match.walk, match.length))

    def would_evict(self, num: int) -> list[tuple[Checkpoint, EvictionCandidate]]:
        """The first `num` items that `evict_one` would evict now."""
        return self.order.first(num, may_evict=self._evictor.may_evict)

    def least_score(self) -> float | None:
        """The policy's score of what `evict_one` would evict; None if nothing may be evicted."""
        if len(self.rows) > 0:
            return 0.0
        first = self.would_evict(1)
        return self.order.policy.score(first[0][1]) if first else None

    def expects_return(self, tokens: Tokens, *, namespace: str) -> bool:
        """Whether a chat that is stored as these tokens is likely enough to go on, now or after a restart."""
        policy = self.order.policy
        number = policy.number_of(tokens, namespace=namespace)
        has_ended = self.order.lineages.has_ended(number)
        return not has_ended and (number is None or policy.returns(number) >= _LEAST_CHANCE)

    def protected_nbytes(self) -> int:
        """A lower bound of the bytes that cannot be evicted, pins aside: full entries, snapshots up to the leases."""
        return self.tree.leased_nbytes()

    # Leases.

    def lease(self, match: Match, position: int, *, is_request: bool = True) -> Lease:
        """Protect the matched path up to `position` until `release`, and mark it as used.

        `is_request`: a client asked for it. The policy does not learn from the server's own work.
        """
        assert position <= match.length, (position, match.length)
        lease = self.tree.protect(match.walk, position)
        try:
            used = self.tree.use(match.walk, position, use=LastUse.RESUMED if is_request else LastUse.SETTLED)
            if used is not None:
                self.order.place(used)
                self.rows.use(used)
            if is_request:
                lease.number = self._arrive(match)
        except BaseException:
            # Nobody has it: the path would be protected for ever.
            self.tree.unprotect(lease)
            raise
        return lease

    def note_answer(self, lease: Lease, num_tokens: float, *, calls_tool: bool | None = None) -> None:
        """Tell the policy the length of the answer to this lease's request, and whether it ends with a tool call.

        The length is in units of the prompt's tokens: a fraction if each of those represents many.
        """
        if lease.number is not None:
            self.order.policy.answered(lease.number, num_tokens, calls_tool=calls_tool, at_s=self._clock())

    def expect(self, match: Match, *, number: int, calls_tool: bool | None = None) -> None:
        """Record that the next turn of request `number` will begin with the matched prompt.

        What the request left beside that path is no longer where its chat goes on. `calls_tool`: whether the answer to
        the request ends with a tool call.
        """
        self.order.policy.expect(
            match.tokens, known=match.length, number=number, namespace=match.namespace, calls_tool=calls_tool
        )
        if match.length < len(match.tokens):
            for checkpoint in self._beside(match, number):
                if checkpoint.kind not in SHARED_KINDS:
                    self.tree.leave(checkpoint)
                    self.order.place(checkpoint)

    def note_lineage(self, job_id: str, lease: Lease, lineage: Lineage, *, trunk_at: int, namespace: str) -> None:
        """Record what this lease's request tells of other chats; `trunk_at`: its system prompt and tools end there.

        O(nodes used since the ended chats were).
        """
        self._review(self.order.lineages.arrive(job_id, lease, lineage, trunk_at=trunk_at, namespace=namespace))

    def release(self, lease: Lease) -> None:
        """Release the lease, and drop what was kept only for it. Releasing twice is a bug."""
        self.tree.unprotect(lease)
        self._evictor.drop_kept_for(lease)

    def _arrive(self, match: Match) -> int:
        """Tell the policy of a request, and re-evaluate everything whose score that changes. Returns its number."""
        number, continued = self.order.policy.arrive(match.tokens, known=match.length, namespace=match.namespace)
        nodes, last = match.walk.nodes, match.walk.last
        for node in nodes if match.length == last.stop else nodes[:-1]:
            self._visit(node, number)
        if continued is not None:
            # The chat has continued: what its earlier prompt left beside this path is scored lower.
            for checkpoint in self._beside(match, continued):
                self.order.place(checkpoint)
        self._review(self.order.policy.fall_silent(self._clock()))
        self.order.advance(number)
        return number

    def _review(self, numbers: Collection[int]) -> None:
        """Re-evaluate what these prompts were the last to pass. O(nodes used since the oldest, and children)."""
        if not numbers:
            return
        oldest, numbers = min(numbers), frozenset(numbers)
        # A path is used with everything above it, so below a node that was not used since there is nothing to find.
        stack = [node for root in self.tree.roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            if node.last_visit is None or node.last_visit < oldest:
                continue
            stack.extend(node.children.values())
            if node.last_visit in numbers:
                for checkpoint in node.checkpoints.values():
                    self.order.place(checkpoint)

    @staticmethod
    def _beside(match: Match, number: int) -> list[Checkpoint]:
        """The checkpoints that prompt `number` was the last to pass, past the end of the matched path."""
        last = match.walk.last
        beside = last.children.values() if match.length == last.stop else (last,)
        # Who passed a node passed what is above it, so below another's there is nothing of it.
        stack, found = [node for node in beside if node.last_visit == number], list[Checkpoint]()
        while stack:
            node = stack.pop()
            found += [checkpoint for checkpoint in node.checkpoints.values() if checkpoint.position > match.length]
            stack += [below for below in node.children.values() if below.last_visit == number]
        return found

    def _visit(self, node: Node, number: int) -> None:
        """Record that prompt `number` passed through `node`; re-evaluate the checkpoints whose score that changes."""
        if self.tree.visit(node, number):
            for checkpoint in node.checkpoints.values():
                # Superseded ones are evicted first, unless they stay to fall back on, and re-evaluated when popped.
                if checkpoint.is_useful:
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
        number: int | None = None,
        seams: Mapping[KvKind, Sequence[int]] | None = None,
    ) -> Committed:
        """Make position ``len(tokens)`` resumable: copy from `source` what the tree lacks.

        What does not fit the budget even after eviction is not stored, or only its beginning if every position is
        resumable; the result says so. If `source` raises, nothing is added; what was evicted for it stays evicted.
        `overrides_admission`: a client asked to keep this path, so anything evictable may be evicted for it.
        `stable_at`: the next turn may differ past this position (None: not known). `number`: the policy's number of the
        request that computed this (None: that of the prompt that these tokens continue). `seams`: positions at which to
        cut the entries of a kind, since `source` holds them in these parts.
        """
        position = len(tokens)
        if position == 0:
            return Committed(num_tokens=0, nbytes=0, is_resumable=True)
        walk = self.tree.walk(tokens, namespace)
        # Protect the path that is about to be extended from eviction.
        guard = self.tree.protect(walk, walk.length)
        guard.is_restored = True
        try:
            wanted = missing(self.layout, walk, position, self.tree.sizes.longest, seams)
            needs_snapshot = self.layout.has_snapshots and checkpoint_at(walk, position) is None
            nbytes = sum(source.segment_nbytes(k, len(span)) for k, span in wanted)
            nbytes += source.snapshot_nbytes() if needs_snapshot else 0
            visit = number
            if visit is None:
                visit = self.order.policy.number_of(tokens, namespace=namespace)
            if stable_at is not None and stable_at < position:
                self.order.policy.leave_tail(tokens, stable_at, number=visit, namespace=namespace)
            new = self.order.new_candidate(
                walk, position, nbytes, kind=kind, stable_at=stable_at, visit=visit, is_auxiliary=is_auxiliary
            )
            is_whole = self._evictor.make_room(
                nbytes,
                new,
                walk=walk,
                position=position,
                stable_at=stable_at,
                has_snapshot=needs_snapshot,
                overrides_admission=overrides_admission,
            )
            if not is_whole:
                position = self._evictor.stop_that_fits(walk, position, nbytes)
                if position == walk.length:
                    return Committed(num_tokens=0, nbytes=0, is_resumable=False)
                tokens, kind = tokens[:position], BoundaryKind.INTERVAL
                wanted = missing(self.layout, walk, position, self.tree.sizes.longest, seams)
            segments = [(k, Segment(span, source.segment(k, span))) for k, span in wanted]
            snapshot = source.snapshot() if needs_snapshot else None

            held_before = self.nbytes
            path = self._extend(walk, tokens, namespace)
            for segment_kind, segment in segments:
                self.tree.attach(path, segment_kind, segment)
            if visit is not None:
                for node in path if self._has_left(path[-1], tokens, namespace) else path[:-1]:
                    self._visit(node, visit)
                    self.tree.note_first_visit(node, visit)
            self._place_checkpoint(path, position, kind, snapshot, is_auxiliary=is_auxiliary, stable_at=stable_at)
            added = self.nbytes - held_before
        finally:
            self.release(guard)
        self.order.sweep()
        self.is_compact = False
        return Committed(num_tokens=position - walk.length, nbytes=added, is_resumable=is_whole)

    def _has_left(self, node: Node, tokens: Tokens, namespace: str) -> bool:
        """Whether what `node` has behind these tokens, which end in it, belongs to their own chat.

        Of a chat whose earlier prompt they continue, it is what was edited away. Otherwise it is another chat, which
        begins alike.
        """
        return len(tokens) == node.stop or self.order.policy.number_of(tokens, namespace=namespace) is not None

    def _extend(self, walk: Walk, tokens: Tokens, namespace: str) -> tuple[Node, ...]:
        """Add what the tree lacks of `tokens`; returns the nodes from the root to the one that holds the end."""
        path = self.tree.extend(walk, tokens, namespace)
        if self.layout.resumes_anywhere and len(path) > 1 and walk.length < len(tokens):
            end = path[-2].checkpoints.get(path[-2].stop)
            if end is not None and not self.pins.holds(end) and self.rows.at(end) is None:
                # Only path ends are evicted where every position is resumable, and this one no longer is one.
                self._evictor.drop(end)
        return path

    def _place_checkpoint(
        self,
        path: Sequence[Node],
        position: int,
        kind: BoundaryKind,
        snapshot: Payload | None,
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
        superseded = sorted(superseded_on(path, position, kind, stable_at), key=lambda older: older.position)
        # All of them before any is looked at, which is judged by those below.
        for older in superseded:
            self.tree.supersede(older, checkpoint)
        distance = self.tree.sizes.fallback
        if distance > 0 and not self.layout.resumes_anywhere and not self.layout.has_snapshots:
            for older in superseded:
                self.tree.keep(older, is_kept=is_far_up(older, distance))
        if kind is BoundaryKind.STABLE:
            for beside in [*superseded_beside(path)]:
                self.tree.supersede(beside, checkpoint)
                superseded.append(beside)
        for older in superseded:
            self.order.place(older)
        self.order.place(checkpoint)

    # Exact repeats.

    def has_room_for_row(self, nbytes: int, *, snapshot: int) -> bool:
        """Whether a row and its snapshot fit, evicting only older rows."""
        if not self.rows.admits(nbytes + snapshot):
            return False
        while not self.memory.fits(nbytes):
            if not self._evictor.evict_row():
                return False
        return True

    def keep_row(self, tokens: Tokens, row: Payload, *, namespace: str = "") -> bool:
        """Store the logits at ``len(tokens)``, evicting older rows. False if the position is not resumable."""
        checkpoint = self._checkpoint(tokens, namespace, BoundaryKind.PROMPT_END)
        if checkpoint is None:
            return False
        self.rows.keep(checkpoint, row)
        while self.rows.exceed_share or not self.memory.fits(0):
            if not self._evictor.evict_row():
                break
        return self.rows.at(checkpoint) is not None

    # Pins.

    def pin(self, tokens: Tokens, *, namespace: str, until: float, owner: str = "") -> bool:
        """Pin the position ``len(tokens)`` at least until `until`. False if it is not resumable."""
        checkpoint = self._checkpoint(tokens, namespace, BoundaryKind.EXPLICIT)
        if checkpoint is not None:
            self.pins.pin(checkpoint, until, owner=owner)
        return checkpoint is not None

    def retain(self, tokens: Tokens, *, namespace: str, until: float, owner: str = "") -> bool:
        """Like `pin`, for a conversation that has reached ``len(tokens)``: replaces what it retained before."""
        checkpoint = self._checkpoint(tokens, namespace, BoundaryKind.STABLE)
        if checkpoint is not None:
            self.pins.retain(checkpoint, until, owner=owner)
        return checkpoint is not None

    def pin_of(self, tokens: Tokens, *, namespace: str) -> Pin | None:
        """The pin of this prefix, even if expired, or None. O(tokens)."""
        checkpoint = checkpoint_at(self.match(tokens, namespace=namespace).walk, len(tokens))
        return self._pin(checkpoint) if checkpoint is not None and self.pins.until(checkpoint) > 0 else None

    def list_pins(self, namespace: str, *, owner: str = "") -> PinList:
        """The pins of an owner in a namespace, oldest first. O(their tokens)."""
        pinned = [c for c in self.pinned(namespace) if self.pins.is_owned_by(c, owner)]
        return PinList(pins=tuple(map(self._pin, pinned)), nbytes=self.pins.total_of(pinned).nbytes)

    def unpin(self, name: str, *, namespace: str, owner: str = "") -> bool:
        """Remove this owner from the pin with this id. False if the owner has no such pin."""
        checkpoint = next((c for c in self.pinned(namespace) if pin_id(self.prefix_of(c)) == name), None)
        return checkpoint is not None and self.pins.disown(checkpoint, owner)

    def pinned(self, namespace: str) -> list[Checkpoint]:
        """The pinned checkpoints of a namespace, oldest pin first. O(pins × depth)."""
        return [checkpoint for checkpoint in self.pins if self.tree.namespace_of(checkpoint.node) == namespace]

    def prefix_of(self, checkpoint: Checkpoint) -> Tokens:
        """The tokens before the checkpoint."""
        return join_tokens(*(node.tokens for node in path_to(checkpoint.node)))[: checkpoint.position]

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
        """The checkpoint at ``len(tokens)``, added if the position is resumable without one; None if it is not."""
        position = len(tokens)
        resume_at, match = self.lookup(tokens, position, namespace=namespace)
        if position == 0 or match.length < position:
            return None
        known = checkpoint_at(match.walk, position)
        if known is not None or resume_at < position:
            return known
        node = next(node for node in match.walk.nodes if position <= node.stop)
        made = self.tree.add_checkpoint(node, position, kind)
        self.order.place(made)
        return made

    # Removal. Only `reset` touches what a lease protects; only `reset`, `clear` and `drop_path` touch pins.

    def evict_one(self) -> bool:
        """Evict the item with the lowest score. False if nothing may be evicted."""
        return self._evictor.evict_one()

    def clear(self, namespace: str | None = None, *, owner: str | None = None) -> None:
        """Drop everything that no lease protects, of one namespace or all, pins included. O(size of the trees).

        With an `owner`, only this owner's pins are dropped, and what others pinned stays.
        """
        for name in [name for name in self.tree.roots if namespace in (None, name)]:
            for checkpoint in list(self.tree.checkpoints(name)):
                if owner is None:
                    self.pins.discard(checkpoint)
                else:
                    self.pins.disown(checkpoint, owner)
            self._evictor.evict_all(self.tree.roots[name], "cleared")
            self.tree.forget_lost(subtree(self.tree.roots[name]))
            self.tree.remove_empty_root(name)
        self.order.sweep()

    def note_cancelled(self, tokens: Tokens, *, namespace: str) -> None:
        """Remember that a request with this prompt was cancelled before it had computed what is not stored of it."""
        match = self.match(tokens, namespace=namespace)
        if match.length < len(tokens):
            self.tree.note_cancelled(match.walk, tokens[match.length :])

    def drop_path(self, tokens: Tokens, *, namespace: str) -> None:
        """Drop every path that begins like these tokens, pins included, since a state on it was found to be wrong.

        States below a wrong one were computed from it. Leased paths stay.
        """
        nodes = self.tree.walk(tokens, namespace).nodes
        for top in nodes[1:2]:
            for checkpoint in [c for node in subtree(top) for c in node.checkpoints.values()]:
                self.pins.discard(checkpoint)
            self._evictor.evict_all(top, "audit")
            self.tree.forget_lost((nodes[0], *subtree(top)))
        self.order.sweep()

    def reset(self) -> None:
        """Drop everything, leases included, when stored state can no longer be trusted."""
        for checkpoint in self.tree.checkpoints():
            self.pins.discard(checkpoint)
            self.rows.discard(checkpoint)
        self.order.clear()
        self.tree.reset()

    # Sharing buffers with sequences: who has these asks the tree for segments, and replaces their payloads there.

    def close_idle_with(self, close_idle: Callable[[object], None]) -> None:
        """Set what closes an idle sequence, replacing what it shares by copies, before any of that is evicted.

        It must ignore running sequences: what they share is dropped, and they keep their buffers.
        """
        self._evictor.close_idle = close_idle

    # Compaction.

    def compact(self, *, max_entries: int) -> int:
        """Join small edges and segments, copying at most about `max_entries` entries. Returns the work done.

        0: nothing is left to join. For idle times, a step at a time. O(nodes + entries copied).
        """
        # Set first, so that a compaction that raises is not retried forever.
        self.is_compact = True
        copied = self.tree.compact(max_entries=max_entries)
        self.is_compact = copied == 0
        return copied

    def compact_path(self, tokens: Tokens, *, namespace: str = "", max_entries: int = sys.maxsize) -> int:
        """Like `compact`, for the end of one growing path, so it has few segments even on a server that is never idle.

        Copies at most one segment per layer kind at a time. O(edges of the path) if there is nothing to do.
        """
        return self.tree.compact_path(tokens, namespace, max_entries=max_entries)

    # Integrity.

    def check(self) -> None:
        """Recompute bytes, leases, order and coverage from the trees; AssertionError on any difference."""
        self.tree.check()
        for node in self.tree.nodes():
            for kind in self.layout.kinds:
                if not isinstance(kind, Full):
                    spare = [span for have in node.coverage(kind) for span in unneeded(node, kind, have)]
                    assert not spare, ("window and chunk entries are kept for somebody", kind, spare)
        checkpoints = list(self.tree.checkpoints())
        assert len(self.order) == len(checkpoints), "every checkpoint is in the eviction order exactly once"
        assert all(checkpoint in self.order for checkpoint in checkpoints)
        assert all(checkpoint.is_in_tree for checkpoint in self.pins.noted()), "pinned checkpoints are in the tree"
        self.rows.check()
